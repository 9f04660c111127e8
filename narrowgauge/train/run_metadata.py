"""Description of a run: console lines before its first step, and the contents of run.json.

The keys of run.json are in docs/architecture.md.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import narrowgauge
from narrowgauge.conversion import auto
from narrowgauge.conversion.description import describe
from narrowgauge.conversion.description_text import not_fused
from narrowgauge.diagnose.format_text import elsewhere
from narrowgauge.diagnose.runs import read_run
from narrowgauge.fuse import fusions
from narrowgauge.nn.converted_model import quantized_embeddings
from narrowgauge.nn.float32_modules import SOFTMAX, kept_modules, summary
from narrowgauge.ops.mm.spec import OTHER_GPUS, gpu_without_kernels
from narrowgauge.optim import state_bytes
from narrowgauge.train.attention import softmax_words
from narrowgauge.train.device import device_name
from narrowgauge.train.optimizer import cast_summary

if TYPE_CHECKING:
    from narrowgauge.train.console import Console
    from narrowgauge.train.trainer import Trainer

DRIVER = Path("/proc/driver/nvidia/version")


def announce(trainer: Trainer, show: Console, preview: bool = True) -> None:
    """Prints the description of a run before its first step.

    preview  also print an example of the data
    """
    config, model, device = trainer.config, trainer.model, trainer.passes.device
    resumed, parent = (
        f"; resumed from {trainer.checkpoints.resumed_from}"
        if trainer.checkpoints.resumed_from
        else "",
        trainer.checkpoints.carried.get("parent", {}),
    )
    if parent.get("step") == trainer.step:
        resumed = f"; branch of {parent['from']}, from step {trainer.step}"
    others = elsewhere(config.layers_recipe, config.embedding_codes, config.attention)
    show.say(
        f"{config.recipe}{others} ({config.precision}) on {device_name(device)}: "
        f"{trainer.setup.parameters:,} parameters, {trainer.task.summary()}{resumed}"
    )
    show.say(f"{trainer.setup.coverage['sentence'].removesuffix('.')}.")
    if attention := trainer.setup.coverage.get("attention"):
        show.say(f"{attention}.")
    for words in describe(model).attention:
        if "16 bits: " in words:  # and the reason, where the others are in FP8
            show.say(f"{words}.")
    if words := trainer.parallel.words():
        show.say(words)
    slow = [*emulated_on_gpu(model, device), *stepped_in_torch(trainer.optimizer)]
    for line in filter(None, (unused_gpu(device), *auto.summary(model), *slow)):
        show.say(line)
    if config.compile:
        show.say("Compiling during the first step and the first evaluation: minutes of silence.")
    for switch in trainer.switches:
        if switch.step > trainer.step:
            show.say(f"To come at {switch}")
    if words := looked_up(model):
        show.say(words)
    show.say(
        "\n".join(
            [
                f"Loss: {trainer.passes.objective.description}.",
                *in_float32(trainer),
                *trainer.setup.memory_notes,
            ]
        )
    )
    for part in trainer.task.preview() if preview else ():
        show.say(part)
    for setting, what in (("compile", "Compiled code"), ("cuda_graph", "What CUDA graphs replay")):
        if getattr(config, setting) and config.tensor_every:
            show.say(f"{what} cannot be observed: no tensor statistics in this run.")
    casts = cast_summary(trainer.optimizer, trainer.passes.no_cast_reason)
    if casts and device.type == "cuda":
        show.say(f"Weights cast by the optimizer's step: {'; '.join(casts)}.")
    if not trainer.setup.has_own_peak:
        show.say(
            "This system knows the peak memory of a whole process alone, so that of this second run is not recorded."
        )
    for words in not_fused(fusions(model)):
        show.say(words)


def looked_up(model: nn.Module) -> str:
    """A sentence on quantized embeddings, or ''."""
    found = dict(quantized_embeddings(model))
    if not found:
        return ""
    names, codes = ", ".join(found), next(iter(found.values())).format
    return f"Embeddings looked up as {codes}, with a learned step each: {names}. The tables themselves keep their numbers, and their bytes."


def in_float32(trainer: Trainer) -> list[str]:
    """A sentence for each part that stays in float32 in a model with 16-bit weights."""
    names = kept_modules(trainer.model)
    said = [f"Weights and arithmetic in float32: {summary(names)}."] if names else []
    if SOFTMAX in trainer.passes.precision.keep_list(trainer.config.keep_float32):
        said.append(softmax_words(trainer.model))
    return said


def unused_gpu(device: torch.device) -> str:
    """A sentence if the run is on the CPU although a GPU or an NVIDIA driver is present; else ''."""
    if device.type == "cpu" and (other := gpu_without_kernels()) in OTHER_GPUS:
        return f"This runs on the CPU although torch sees a device {other!r}: {OTHER_GPUS[other]}."
    if device.type != "cpu" or torch.cuda.is_available() or not DRIVER.exists():
        return ""
    words = (
        DRIVER.read_text(encoding="utf-8", errors="replace")
        .partition("\n")[0]
        .partition(":")[2]
        .strip()
    )
    build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return (
        f"This runs on the CPU although there is an NVIDIA driver ({words}): torch {torch.__version__} is built {build} "
        "and sees no device. Install a torch for the driver's CUDA, or a newer driver."
    )


def emulated_on_gpu(model: nn.Module, device: torch.device) -> list[str]:
    """One sentence per reason for low-precision matmuls to run in 16 bits on a GPU; [] on a CPU."""
    if device.type != "cuda":
        return []
    layers = Counter(f"{row.recipe}: {row.backend}" for row in describe(model) if row.emulated)
    return [
        f"Not on narrow units, so no faster than bfloat16 ({count} layer{'s' if count > 1 else ''}): {words}."
        for words, count in layers.items()
    ]


def stepped_in_torch(optimizer: torch.optim.Optimizer) -> list[str]:
    """One sentence per reason for the optimizer to update tensors without its kernel."""
    tensors: Counter[str] = Counter()
    for row in state_bytes(optimizer).rows:
        tensors[row.slow_because] += row.tensors
    return [
        f"The optimizer steps {count} tensors in plain torch, several times slower than its kernel: {why}."
        for why, count in tensors.items()
        if why
    ]


def of_run(trainer: Trainer) -> dict[str, Any]:
    """Contents of run.json at the start of a run.

    A resumed run keeps its first start time and command.
    """
    config, model, folder = trainer.config, trainer.model, trainer.folder
    command = ["narrowgauge", *sys.argv[1:]]
    started = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "resumed": [],
    }
    if trainer.step and folder.run.exists():
        first = read_run(folder.run)
        # A branch at its first step has no command yet
        resumed = [*first.get("resumed", []), command] if "command" in first else []
        started |= {key: first[key] for key in ("started_at", "command") if key in first} | {
            "resumed": resumed
        }
    known = trainer.task.facts()
    return {
        "narrowgauge": narrowgauge.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(trainer.passes.device),
        "device_type": trainer.passes.device.type,
        "threads": torch.get_num_threads(),
        "ranks": trainer.ranks.world,
        "parallel": str(trainer.parallel.layout),
        **started,
        **trainer.checkpoints.carried,
        "seed": config.seed,
        "recipe": config.recipe,
        "recipes": dict(config.layers_recipe),
        "embedding_codes": config.embedding_codes,
        "attention": config.attention,
        "auto": trainer.setup.auto,
        "coverage": trainer.setup.coverage,
        "precision": config.precision,
        "float32": in_float32(trainer),
        "switches": [{"step": switch.step, **switch.event} for switch in trainer.switches],
        "loss": trainer.passes.objective.description,
        "memory": trainer.setup.memory_notes,
        "parameters": trainer.setup.parameters,
        "model": _of_model(model) | known["model"],
        "task": trainer.task.name,
        "loss_unit": trainer.task.entry.loss_unit,
        "f1_over": trainer.task.entry.f1_over,
        "best": trainer.checkpoints.best.metric,
        "data": known["data"],
        "trivial": trainer.task.trivial(),
        "tokens_per_step": known["tokens_per_step"],
        "steps": config.steps,
        **of_layers(trainer),
    }


def _of_model(model: Any) -> dict[str, Any]:
    """Class name and sizes of the model."""
    sizes = model.config
    keys = {
        "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_hidden_layers": "layers",
        "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    }  # fmt: skip
    known = {
        name: getattr(sizes, key)
        for key, name in keys.items()
        if getattr(sizes, key, None) is not None
    }
    return {"name": type(model).__name__, "vocab_size": getattr(sizes, "vocab_size", None)} | known


def of_layers(trainer: Trainer) -> dict[str, Any]:
    """Contents of run.json that change during training.

    These are skipped batches, weight casts, fused modules, and recipes of layers. All ranks call
    this function together. With pipeline stages, only the weight casts of the first stage are
    listed.
    """
    model, of_all = trainer.model, trainer.parallel.of_all
    return {
        "left_out": list(trainer.feed.left_out),
        "weight_casts": cast_summary(trainer.optimizer, trainer.passes.no_cast_reason),
        "fused": [*of_all({(fusion.name, ""): str(fusion) for fusion in fusions(model)}).values()],
        "describe": [*of_all({row.name: row.columns() for row in describe(model)}).values()],
    }
