"""Adapters of low rank over a frozen model: what a run trains, saves, loads and merges.

    y = base(x) + scale B A x      A [r, K], B [N, r]; scale = alpha / r, of rsLoRA alpha / sqrt(r)

The package peft makes the adapters (LoRA, rsLoRA, DoRA, PiSSA) and puts them around the Linears of
the model, which stays a model of transformers. The base keeps its recipe; the two thin products of
an adapter are computed in the dtype of the precision.

    adapt         adds adapters to a model and freezes the rest
    write, load   the folder of an adapter in peft's format, with base.json: the hash of its base
    merge         adds the adapters to the base, casts anew, and measures what survives

Trainable parameters have the dtype of the precision's weights, as every parameter that trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.conversion.checkpoint_names import expert_names
from narrowgauge.diagnose import forms
from narrowgauge.errors import CheckpointError, ConfigError, NumericsError
from narrowgauge.memory.freezing import code_refusal, store_as_codes
from narrowgauge.nn.experts import is_known
from narrowgauge.storage import reading
from narrowgauge.train.adapter_state import KEY, Adapters, FrozenBase, adapters_of, trained
from narrowgauge.train.coded_base import digest, fill, hold
from narrowgauge.train.config import lora_syntax

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

NAME = "default"  # peft's name of a single adapter
KEPT_AT_LEAST = (
    0.5  # share of the adapters' change below which a merge into codes is advised against
)
WEIGHTS, BASE = "adapter_model.safetensors", "base.json"
BASE_FILE = reading.Kind(
    most_bytes=reading.MIB,
    step="Restore it, or train the adapter anew.",
    form=forms.record({"model": forms.text, "sha256": forms.text}, {"codes": forms.text}),
)
OF_ADAPTERS = reading.Kind(
    most_bytes=64 * reading.GIB,
    error=CheckpointError,
    step="Restore the folder, or train the adapter anew.",
)
PREFIX = "base_model.model."  # of the names in peft's files
TASKS = {"seq2seq": "SEQ_2_SEQ_LM"}


def adapt(model: Any, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> Adapters:
    """Adds the adapters of `config.lora` to a model, in place, and freezes everything else.

    device  of a base that is read here; another base is on its device already
    dtype   of the trainable parameters

    With config.base the weights below become codes first: those of an empty model
    (`coded_base.empty`) are read from its folder.

    The first factors are drawn from torch's global generator. Raises ConfigError if no Linear has
    one of the names, ModuleNotFoundError without peft.
    """
    lora, notes = lora_syntax.parse(config.lora), []
    if config.base:
        is_empty = any(each.is_meta for each in model.parameters())
        notes.append(str(fill(model, config.model, device) if is_empty else hold(model)))
    found = inject(model, lora, config.model, TASKS.get(config.task, "CAUSAL_LM"))
    for parameter in trained(model).values():
        parameter.data = parameter.data.to(dtype)
    # A plan has fake tensors, and perhaps no files of weights.
    is_real = all(type(each.data) is Tensor for each in trained(model).values())
    base = FrozenBase(config.model, digest(config.model) if is_real else "", config.base)
    number = sum(each.numel() for each in trained(model).values())
    layers = sum(hasattr(each, "base_layer") for each in model.modules())
    notes.append(f"{layers} Linears have adapters ({lora}), with {number:,} parameters that train.")
    if mixtures := sum(is_known(each) for each in model.modules()):
        notes.append(f"The experts of {mixtures} layers are frozen and have no adapters.")
    made = model.__dict__[KEY] = Adapters(lora, base, found, notes)
    return made


def inject(model: Any, lora: lora_syntax.Lora, name: str, task: str) -> Any:
    """Puts peft's adapters around the Linears of a model; returns peft's LoraConfig.

    name  of the base, for adapter_config.json
    task  peft's type of the task
    """
    import peft

    targets: Any = list(lora.targets)
    if targets == [lora_syntax.ALL_LINEAR]:
        targets = lora_syntax.ALL_LINEAR
    if any(is_known(each) for each in model.modules()):
        targets = _beside_experts(model, lora.targets)
    config = peft.LoraConfig(
        r=lora.r, lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=targets,
        lora_dropout=lora.dropout, use_dora=lora.dora, use_rslora=lora.rslora,
        init_lora_weights={"kaiming": True}.get(lora.init, lora.init), task_type=task, base_model_name_or_path=name,
    )  # fmt: skip
    try:
        peft.inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        words = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"lora.targets = {'+'.join(lora.targets)!r}: peft finds nothing to adapt in {type(model).__name__}: {words}. Name Linears of "
            "the model, or all-linear.",
            code="lora.targets",
        ) from error
    return config


def _beside_experts(model: Any, targets: tuple[str, ...]) -> list[str]:
    """Names of the Linears of a mixture that get an adapter: none of an expert.

    peft would adapt the parameter of all experts, by a change [E, N, K] in 16 bits at every pass.
    It takes a Linear by a name of the experts' matrices in checkpoints (`up_proj` of a shared
    expert) for these matrices, so such Linears have none either.
    """
    of_experts = {
        name.removesuffix(".weight").rpartition(".")[2]
        for stack, each in model.named_parameters() if each.ndim == 3
        for name in expert_names(model, stack)
    }  # fmt: skip
    head = model.get_output_embeddings()
    found = [
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
        and not getattr(each, "is_expert", False)
        and each is not head
        and name.rpartition(".")[2] not in of_experts
    ]
    if targets != (lora_syntax.ALL_LINEAR,):
        found = [name for name in found if any(f".{name}".endswith(f".{each}") for each in targets)]
    if not found:
        raise ConfigError(
            f"lora.targets = {'+'.join(targets)!r}: names no Linear beside the experts of {type(model).__name__}, which have no adapters "
            "here. Name Linears of its attention, or all-linear.",
            code="lora.targets",
        )
    return found


# Files of peft


def write(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes adapter_model.safetensors, adapter_config.json and base.json into a folder.

    weights  of `saved_state`, the best or the last
    """
    import peft
    from safetensors.torch import save_file

    found = adapters_of(model)
    assert found is not None
    # save_embedding_layers: "auto" would look for the base on the Hub.
    named = peft.get_peft_model_state_dict(
        model, dict(weights), adapter_name=NAME, save_embedding_layers=False
    )
    save_file(
        {PREFIX + name: each.detach().cpu().contiguous() for name, each in named.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    kept, found.config.inference_mode = found.config.inference_mode, True
    try:
        found.config.save_pretrained(str(folder))
    finally:
        found.config.inference_mode = kept
    (folder / BASE).write_text(json.dumps(asdict(found.base), indent=1) + "\n", encoding="utf-8")


def read_base(folder: Path) -> FrozenBase:
    """The base that an exported adapter names."""
    known = reading.json_of(folder / BASE, BASE_FILE)
    return FrozenBase(known["model"], known["sha256"], known.get("codes", ""))


def load(model: Any, folder: Path) -> None:
    """Adds the adapters of a folder that `write` wrote to its base, in place.

    Raises CheckpointError if the weights below are those of another base.
    """
    import peft

    base = read_base(folder)
    here = digest(base.model)
    if here != base.sha256:
        raise CheckpointError(
            f"{folder}: its adapters were trained over weights with the SHA-256 {base.sha256[:12]}, and those of {base.model!r} have "
            f"{here[:12]}. Restore the base, or train the adapters anew.",
            code="adapter.other-base",
        )
    config = peft.LoraConfig.from_pretrained(str(folder))
    peft.inject_adapter_in_model(config, model, NAME)
    with reading.opened_tensors(folder / WEIGHTS, OF_ADAPTERS) as file:
        weights = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    result = peft.set_peft_model_state_dict(model, weights, adapter_name=NAME)
    if strange := result.unexpected_keys:
        raise CheckpointError(
            f"{folder / WEIGHTS}: holds {strange[0]!r}, which the adapters of {base.model!r} do not have. Restore the folder.",
            code="adapter.other-model",
        )


# Merging


@dataclass(frozen=True)
class MergeReport:
    """What of the adapters' change survived the cast of the merged weights.

    layers    number of merged layers
    survives  sum of <e, d> / sum of <d, d> over all layers: d is the adapter's change of a weight,
              e the change that the cast weight has. 1: all of it on average; 0: none
    error     root of sum of |e - d|^2 / sum of |d|^2
    moved     share of the weights whose value changed
    lowest    (layer with the least that survives, its share)
    is_coded  the merged weights are codes; if not, they are wide and everything survives
    """

    layers: int
    survives: float
    error: float
    moved: float
    lowest: tuple[str, float]
    is_coded: bool

    def __str__(self) -> str:
        if not self.is_coded:
            return f"Merged: {self.layers} adapters are added to wide weights; nothing was rounded to codes."
        return (
            f"Merged and cast anew: {self.layers} layers. {100 * self.survives:.1f} % of the adapters' change survives the rounding, with "
            f"an error of {self.error:.2f} times the change; {100 * self.moved:.1f} % of the weights moved. Least survives in "
            f"{self.lowest[0]} ({100 * self.lowest[1]:.1f} %)."
            + (
                ""
                if self.survives >= KEPT_AT_LEAST
                else " Most of what was learned is below a step of these codes: keep the adapter beside its base, without --merge, or "
                "take a base of more bits, as --base int8, or a wide one without --base."
            )
        )


@torch.no_grad()
def merge(model: Any) -> MergeReport:
    """Adds the adapters to the base, in place, one layer at a time, and removes them.

    A layer whose weight was codes is decoded, gets the adapter's change, and is cast anew by its own
    recipe. The values of codes lie on the format's grid, so a change below half of a step moves none
    of them: the report says how much of the change is left. peft computes the change (of DoRA the
    magnitudes too).

    Raises NumericsError, before the layer changes, if its adapter is not finite.
    """
    layers = [(name, each) for name, each in model.named_modules() if hasattr(each, "base_layer")]
    kept, wanted, missed, moved, elements, coded = 0.0, 0.0, 0.0, 0, 0, 0
    lowest = ("", float("inf"))
    for name, layer in layers:
        base = layer.get_base_layer()
        before = base.weight.detach().float().clone()
        has_codes = getattr(base, "frozen", None) is not None
        _merge_one(name, layer)
        wide = base.weight.detach().float().clone()
        if has_codes:
            reason = code_refusal(model, base, name)
            assert not reason, reason  # it was held as codes a moment ago
            store_as_codes(base)
            coded += 1
        after = base.weight.detach().float()
        change, made = wide - before, after - before
        dot, square = float((change * made).sum()), float(change.square().sum())
        kept, wanted = kept + dot, wanted + square
        missed += float((made - change).square().sum())
        moved, elements = moved + int((made != 0).sum()), elements + made.numel()
        if square and dot / square < lowest[1]:
            lowest = (name, dot / square)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, base)
    model.__dict__.pop(KEY, None)
    if not wanted:  # nothing was learnt: every part of it survives
        return MergeReport(len(layers), 1.0, 0.0, 0.0, lowest, bool(coded))
    return MergeReport(
        len(layers), kept / wanted, (missed / wanted) ** 0.5, moved / max(1, elements), lowest, bool(coded)
    )  # fmt: skip


def _merge_one(name: str, layer: Any) -> None:
    try:
        layer.merge(safe_merge=True, adapter_names=[NAME])
    except ValueError as error:
        raise NumericsError(
            f"merge: the adapter of {name} holds values that are not finite. Name an earlier checkpoint, or train with a lower "
            "learning rate.",
            code="adapter.not-finite",
        ) from error
