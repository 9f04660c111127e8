"""What a run is, as run.json says it (docs/architecture.md): versions, device, recipe, sizes, data, and its layers."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from typing import Any

import torch

import narrowgauge
from narrowgauge.conversion.auto import chosen
from narrowgauge.conversion.description import describe
from narrowgauge.fuse import fusions
from narrowgauge.train.device import device_name
from narrowgauge.train.model import describe_model
from narrowgauge.train.optimizer import cast_summary
from narrowgauge.train.trainer import Trainer


def of_run(trainer: Trainer) -> dict[str, Any]:
    """At the beginning of a run. A resumed one keeps the time at which it was started, and the command."""
    config, model, folder = trainer.config, trainer.model, trainer.folder
    command = ["narrowgauge", *sys.argv[1:]]
    started_at, first_command, resumed = datetime.now(UTC).isoformat(timespec="seconds"), command, []
    if trainer.step and folder.run.exists():
        first = folder.read_run()
        resumed = [*first.get("resumed", []), command]
        started_at, first_command = first.get("started_at", started_at), first.get("command", command)
    known = trainer.task.facts()
    return {
        "narrowgauge": narrowgauge.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(trainer.device),
        "threads": torch.get_num_threads(),
        "started_at": started_at,
        "command": first_command,
        "resumed": resumed,
        "seed": config.seed,
        "recipe": config.recipe,
        "recipes": dict(config.layers_recipe),
        "auto": chosen(model),
        "precision": config.precision,
        "switches": [{"step": stage.step, **stage.event} for stage in trainer.schedule.stages],
        "loss": trainer.objective.description,
        "memory": trainer.memory_notes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model": describe_model(model) | known["model"],
        "task": trainer.task.name,
        "best": trainer.best.metric,
        "data": known["data"],
        "tokens_per_step": known["tokens_per_step"],
        "steps": config.steps,
        **of_layers(trainer),
    }


def of_layers(trainer: Trainer) -> dict[str, Any]:
    """Of the layers as they are now: what each samples, and who took the casts of fused modules, shows on the way."""
    model = trainer.model
    return {
        "weight_casts": cast_summary(trainer.optimizer, trainer.no_cast_reason),
        "fused": [str(fusion) for fusion in fusions(model)],
        "describe": [row.columns() for row in describe(model)],
    }
