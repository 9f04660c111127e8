"""Export: a trained model as a folder that other software loads, in the codes of its training.

    import narrowgauge as ng
    report = ng.export.save(model, "out", format="fp8-channel", tokenizer=tokenizer)
    print(report)

The codes go out as the forward pass multiplies by them; nothing is quantized after training. A
format that cannot hold them is refused, with the distance of its own cast, unless the caller asks
for `requantize`. `file_formats` lists the formats, `layers` says what stays wide, and `checks` what is
verified before the folder gets its name.

    OUTPUT/
      model.safetensors        or shards and an index: codes, scales, and the weights that stay wide
      config.json              with `quantization_config`; generation_config.json, tokenizer files
      README.md                model card
      export.json              format, recipe, each layer, results of the checks, size and SHA-256
                               of every other file

    OUTPUT/model.gguf, README.md, export.json    with format="gguf"

The folder is written under another name, synced, and renamed: after a kill or a power cut it is
absent or whole, and an older export that `overwrite` replaces is there until then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge import storage
from narrowgauge.errors import BusyError, CheckpointError, ConfigError
from narrowgauge.export import card, checks, file_formats, gguf_file, layers, writing
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from narrowgauge.export.file_formats import ExportFormat
    from narrowgauge.export.layers import WeightChoice

__all__ = ["ExportReport", "format_of", "save", "verify"]

format_of = file_formats.get

REPORT, CARD, KIND = "export.json", "README.md", "narrowgauge export"
OF_REPORTS = reading.Kind(
    most_bytes=64 * reading.MIB,
    error=CheckpointError,
    step="Export the model again, to another folder.",
)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Result of `save`; `print` it. facts: the content of export.json."""

    path: Path
    facts: Mapping[str, Any]

    @property
    def narrow(self) -> list[str]:
        return list(self.facts["narrow"])

    @property
    def wide(self) -> dict[str, str]:
        """Name -> why it stays wide."""
        return dict(self.facts["wide"])

    def __str__(self) -> str:
        facts = self.facts
        size = sum(entry["bytes"] for entry in facts["files"].values())
        lines = [
            f"{self.path}: {facts['format']}, {len(facts['narrow'])} Linears as codes, {len(facts['wide'])} weights in {facts['dtype']}, "
            f"{size / 2**20:.1f} MiB."
        ]
        bits, loaded = facts["bits"], facts["loading"]
        if bits["layers"]:
            own = bits["layers"] - len(bits["requantized"])
            lines.append(
                f"Read back: {bits['equal']} of {own} weights equal the forward's operands to the bit"
                + (
                    f", the others to {bits['largest_difference']:.1e}."
                    if bits["equal"] < own
                    else "."
                )
                if own
                else "Read back: as written. No weight is the forward's operand, since all were cast anew."
            )
        if bits["requantized"]:
            lines.append(
                f"Cast anew: {len(bits['requantized'])} weights, by {min(bits['requantized'].values()):.2g} to "
                f"{max(bits['requantized'].values()):.2g} of their norm from the forward's."
            )
        if seen := facts["calibration"]:
            lines.append(f"Static scales of x: {card.calibrated_by(seen)}.")
        if not loaded["checked"]:
            lines.append(loaded["why"][0].upper() + loaded["why"][1:])
        elif facts["narrow"]:
            lines.append(
                f"transformers loads it: {loaded['equal']} of {loaded['weights']} weights to the bit, "
                f"{loaded['equal_elements']:.2%} of the elements."
            )
        if logits := loaded.get("logits"):
            lines.append(
                f"Outputs: {100 * logits['loaded']:.2g} % of their norm from the training forward's; the same weights without the recipe: "
                f"{100 * logits['wide']:.2g} %."
            )
        reasons: dict[str, list[str]] = {}
        for name, why in facts["wide"].items():
            reasons.setdefault(why, []).append(name)
        if facts["narrow"]:
            lines += [
                f"In {facts['dtype']}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}, {why}"
                for why, names in reasons.items()
            ]
        return "\n".join(lines)


def save(
    model: nn.Module,
    output: str | os.PathLike[str],
    *,
    format: str,
    tokenizer: Any = None,
    requantize: bool = False,
    fused: bool = True,
    overwrite: bool = False,
    load: bool = True,
    dtype: torch.dtype | None = None,
    shard_bytes: int = writing.WeightFiles.shard_bytes,
    facts: Mapping[str, Any] | None = None,
    calibration: Tensor | None = None,
) -> ExportReport:
    """Write the model to the folder `output` for other software, and verify what was written.

    model       a model of transformers, converted (`convert`), frozen as codes, or neither
    format      a name in `file_formats.FORMATS`
    tokenizer   an object with `save_pretrained`, a folder with its files, or None
    requantize  let the format cast weights anew where it cannot hold the forward's codes
    fused       keep q, k, v and gate, up in one scheme, as servers need; False is for transformers
    overwrite   replace an older export in `output`; anything else there is never replaced
    load        also load the folder by transformers: memory of the whole model
    dtype       of the weights that stay wide; None: bfloat16, of a float16 model float16
    shard_bytes a file is closed before it would have more; one tensor may have more by itself. GGUF
                is one file
    facts       on the training, for the card and export.json (`card`); `calibration`: where the
                ids of a calibration come from
    calibration (nvfp4-modelopt) token ids [rows, positions] of real text, from which x gets the
                static scale that 4-bit products ask for; export.json counts and hashes them. None:
                weights alone, x in 16 bits

    Memory besides the model: one shard (512 MiB), and with `load` the model. Time: two casts
    of every weight, and one forward pass of a row for each layer.

    Raises ConfigError before anything is written if the format is unknown, if no layer's numbers
    are the format's, or if `output` holds something else; StorageError if the disk refuses.
    """
    form, path = format_of(format), Path(output)
    model = getattr(model, "_orig_mod", model)  # the module that torch.compile has wrapped
    _refuse_model(model)
    dtype = dtype or (torch.float16 if _dtype(model) == torch.float16 else torch.bfloat16)
    _refuse_arguments(tokenizer, dtype)
    if calibration is not None:
        refuse_calibration(form)
    _refuse_place(path, overwrite)
    if form.is_gguf:
        gguf_file.refuse(model, tokenizer)
    choices = layers.chosen(model, form, requantize, fused)
    if form.cast is not None and not any(each.is_narrow for each in choices.values()):
        layers.refuse(model, form, choices)
    facts = dict(facts or {})
    seen = None
    if calibration is not None:
        choices = layers.calibrated(model, choices, calibration)
        seen = _seen(calibration, facts.pop("calibration", ""))
    with _claimed(path) as draft:
        # Again under the lock: another process may have exported into it meanwhile.
        _refuse_place(path, overwrite)
        with storage.refusals("export to", path), storage.new_folder(path, draft):
            draft.mkdir()
            kind = gguf_file.GgufFile if form.is_gguf else writing.WeightFiles
            files = kind(folder=draft, shard_bytes=shard_bytes)
            report = _written(model, form, choices, dtype, files, tokenizer, load, facts, seen)
            storage.flush_tree(draft)
    return ExportReport(path=path, facts=report)


def _written(
    model: Any,
    form: ExportFormat,
    choices: Mapping[str, WeightChoice],
    dtype: torch.dtype,
    files: writing.WeightFiles,
    tokenizer: Any,
    load: bool,
    facts: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write and check all files. Returns the content of export.json, which is written last."""
    if isinstance(files, gguf_file.GgufFile):
        gguf_file.write(model, form, choices, dtype, files, tokenizer)
    else:
        writing.write_weights(model, form, choices, dtype, files)
        writing.write_config(model, form, choices, dtype, files)
        writing.write_tokenizer(tokenizer, files)
    report: dict[str, Any] = {
        "kind": KIND,
        "narrowgauge": version("narrowgauge"),
        "model": type(model).__name__,
        "format": form.name,
        "dtype": str(dtype).removeprefix("torch."),
        "narrow": {name: model.get_submodule(name).recipe.name for name in files.layers},
        "wide": {name: each.reason for name, each in choices.items() if not each.is_narrow},
        "bits": checks.bits(model, form, choices, files),
        "loading": checks.loading(model, form, files, dtype)
        if load
        else {"checked": False, "why": "transformers was not asked to load it."},
        "training": dict(facts),
        "calibration": calibration,
    }
    writing.add_file(files, CARD, card.text(form, report, facts))
    # Last, since it lists all others: a folder without it is no export.
    report["files"] = files.entries
    storage.write_synced(files.folder / REPORT, json.dumps(report, indent=1).encode())
    return report


def _seen(ids: Tensor, source: str) -> dict[str, Any]:
    """Source, size and hash of a calibration, for export.json. The ids are hashed as int64."""
    data = ids.detach().to("cpu", torch.int64).contiguous().numpy().tobytes()
    rows, positions = ids.shape
    return {
        "source": source, "rows": rows, "positions": positions, "tokens": rows * positions,
        "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip


def verify(folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The content of an export's export.json, after every file was compared with size and hash.

    Reads the whole folder once. Raises CheckpointError if it is no whole export.
    """
    path = Path(folder)
    facts = reading.json_of(path / REPORT, OF_REPORTS)
    if not (listed := _listed(path)):
        raise CheckpointError(
            f"{path}: its {REPORT} is none of narrowgauge. Name a folder that narrowgauge export wrote.",
            code="export.not-one",
        )
    for name, entry in listed.items():
        if not writing.is_unchanged(path / name, entry):
            raise CheckpointError(
                f"{path / name}: was changed since it was exported. Export the model again, to another folder.",
                code="export.damaged",
            )
    return facts


# --- refusals ------------------------------------------------------------------------------------


def _dtype(model: nn.Module) -> torch.dtype:
    return next(
        (each.dtype for each in model.parameters() if each.is_floating_point()), torch.bfloat16
    )


def _refuse_model(model: Any) -> None:
    # A wrapper (DDP, PEFT) has the configuration on the model inside, or another class's names.
    has_config = callable(getattr(getattr(model, "config", None), "to_json_string", None))
    if not isinstance(model, nn.Module) or not has_config:
        raise ConfigError(
            f"export: {type(model).__name__} has no configuration of transformers, which every reader needs. Pass a model of "
            "transformers, and of a wrapped one the model inside (DDP: model.module).",
            code="export.no-config",
        )
    for name, each in model.named_parameters():
        if each.is_meta or type(each).__name__ == "DTensor":
            why = (
                "on the meta device, without numbers" if each.is_meta else "shared by several ranks"
            )
            raise ConfigError(
                f"export: {name!r} is {why}. Load the weights in one process first, as from a checkpoint or from final/.",
                code="export.no-numbers",
            )
    adapted = next((name for name, _ in model.named_parameters() if ".lora_" in name), "")
    if adapted:
        raise ConfigError(
            f"export: {adapted!r} belongs to an adapter, which no format holds. Merge it first: model = model.merge_and_unload(), then "
            "convert the result, and export it.",
            code="export.adapter",
        )


def _refuse_arguments(tokenizer: Any, dtype: Any) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(
            f"dtype = {dtype!r}: is none of torch.bfloat16, torch.float16 and torch.float32. Pass one, or leave it out.",
            code="export.dtype",
        )
    is_folder = isinstance(tokenizer, str | Path)
    if (is_folder and not Path(tokenizer).is_dir()) or not (
        tokenizer is None or is_folder or hasattr(tokenizer, "save_pretrained")
    ):
        raise ConfigError(
            f"tokenizer = {tokenizer!r}: is neither a tokenizer with save_pretrained nor a folder. Pass one, or None.",
            code="export.tokenizer",
        )


def refuse_calibration(form: ExportFormat) -> None:
    """Raises ConfigError for a format without static scales of x."""
    if form.calibrated is None:
        raise ConfigError(
            f"calibration: {form.name} has no static scale of x that a pass could give. Leave it out, or export nvfp4-modelopt.",
            code="export.calibration",
        )


def _refuse_place(path: Path, overwrite: bool) -> None:
    """Raise ConfigError unless `path` is free, empty, or an older export that may be replaced."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise ConfigError(
            f"output = '{path}': is a file or a link. Name a new folder.", code="export.output"
        )
    # An empty folder that the caller has made is as good as none.
    if not any(path.iterdir()):
        return
    # A file that the user has added would go with the older export.
    listed = _listed(path)
    foreign = sorted({each.name for each in path.iterdir()} - {*listed, REPORT})
    if listed and overwrite and not foreign:
        return
    what = f"holds {foreign[0]!r}, which no export wrote" if foreign else "holds an older export"
    more = "" if foreign else ", or pass --overwrite to replace it"
    raise ConfigError(f"output = '{path}': {what}. Name a new folder{more}.", code="export.output")


def _listed(path: Path) -> dict[str, Any]:
    """The files of an older export, with size and hash; {} if export.json is not of one."""
    try:
        facts = reading.json_of(path / REPORT, OF_REPORTS)
    except CheckpointError:
        return {}
    is_ours = isinstance(facts, dict) and facts.get("kind") == KIND
    files = facts.get("files") if is_ours else None
    return files if isinstance(files, dict) else {}


@contextmanager
def _claimed(path: Path) -> Iterator[Path]:
    """The draft of `path`, for one process at a time; leftovers of a killed export are gone.

    Raises BusyError if another process exports into the same parent folder.
    """
    parent = path.resolve().parent
    with storage.refusals("export to", path):
        storage.make_folder(parent)
    try:
        # The parent, since the folder itself may not be there. The kernel releases it after a kill.
        with storage.locked(parent):
            storage.recover(parent, re.escape(path.name))
            yield parent / f".tmp-{path.name}"
    except BlockingIOError:
        raise BusyError(
            f"output = '{path}': another process exports to {parent}. Wait for it, or name a folder elsewhere.",
            code="export.busy",
        ) from None
