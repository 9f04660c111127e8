"""The weights that a run has saved, and its model with them.

newest, all, 100,200    of RUN/checkpoints: with everything that a recipe has learnt
best                    of RUN/best: weights alone
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge import manifest
from narrowgauge.conversion import suspended
from narrowgauge.diagnose.runs import read_run
from narrowgauge.errors import ConfigError
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.structure import is_weight
from narrowgauge.train import guard_before
from narrowgauge.train.checkpoint import state, store
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.console import tell
from narrowgauge.train.loop import prepare
from narrowgauge.train.model import build, stages
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.scoring import narrow_forward
from narrowgauge.train.tasks import TrainTask

BEST, NEWEST, ALL = "best", "newest", "all"


@dataclass
class SavedRun:
    """A run's folder, with its data and what its model is built from. Nothing is written into it."""

    folder: RunFolder
    config: TrainConfig
    task: TrainTask
    device: torch.device

    @classmethod
    def open(cls, path: Path, device: torch.device) -> SavedRun:
        """Reads the configuration and prepares the data, which the cache still has. ConfigError if there is no run."""
        folder = RunFolder(path)
        if not os.path.lexists(folder.config):
            raise ConfigError(f"'{path}': holds no run (no config.toml). Name a folder that narrowgauge train wrote.")
        own = replace(toml.load_stored(folder.config), output=str(path), device=str(device), resume=False)
        tell(f"Reading {own.data} ...")
        config, task = prepare(resolved(own))
        return cls(folder, config, task, device)

    def paths(self, which: str) -> list[Path]:
        """The checkpoints that `which` names, oldest first. ConfigError names those that there are."""
        there = {int(path.name.removeprefix("step-")): path for path in manifest.newest_first(self.folder.checkpoints)}
        best = manifest.newest_first(self.folder.best)[:1]
        if which == BEST and best:
            return best
        if there and which in (NEWEST, ALL):
            return [there[max(there)]] if which == NEWEST else [there[step] for step in sorted(there)]
        words = [each.strip() for each in which.split(",")]
        if there and all(each.isdecimal() and int(each) in there for each in words):
            return [there[step] for step in sorted({int(each) for each in words})]
        known = [*map(str, sorted(there)), *([BEST] if best else [])]
        have = f"There are {', '.join(known)}" if known else "There are none: the run has saved nothing yet"
        raise ConfigError(
            f"checkpoints = {which!r}: not all of them are in {self.folder.path}. {have}; {NEWEST} and {ALL} name some of these."
        )

    def others(self, than: Collection[Path]) -> Iterator[tuple[str, Path]]:
        """What else is there, as `paths` names it: checkpoints, the newest first, then the best weights."""
        for path in manifest.newest_first(self.folder.checkpoints):
            if path not in than:
                yield str(int(path.name.removeprefix("step-"))), path
        for path in manifest.newest_first(self.folder.best)[:1]:
            if path not in than:
                yield BEST, path

    def model(self, path: Path) -> tuple[Any, int, str]:
        """The converted model with the weights of a checkpoint, in evaluation mode; its step; why it has no narrow score, or ''.

        float32 weights on the device, or what the precision of the run keeps. CheckpointError if the checkpoint is damaged or another
        model's.
        """
        found = store.load(path)
        choices = read_run(self.folder.run).get("auto") if self.folder.run.exists() else None
        model = build(self.config, self.task.model, self.device, self.task.tokens_at_once(), choices or None)
        for stage in guard_before.with_given(stages(self.config, model), model, self.config, self._facts(found)):
            if stage.step <= found.step:
                stage.apply(model)
        saved = found.tensors.get("weights", {}) | found.tensors.get("scaling", {})
        own = model.state_dict()
        learnt = [name for name in own if name not in saved and not is_weight(name)]
        why = ""
        if learnt:  # weights alone: of the recipes, only what a forward pass reads is missed
            layers = [name.rpartition(".")[0] for name, each in model.named_modules() if isinstance(each, LearnedSteps)]
            why = (
                f"{path.name} of {path.parent.name}/ holds weights alone, and {layers[0]} computes with steps that it learnt"
                if layers
                else ""
            )
            saved |= {name: own[name] for name in learnt}
        state.refuse_other_model(own, saved, str(path))
        model.load_state_dict(saved)
        return model.eval(), found.step, why

    def _facts(self, found: store.Checkpoint) -> Mapping[str, Any]:
        """Of a checkpoint; beside best weights nothing is kept of a guard, so those of the newest checkpoint."""
        newest = manifest.newest_first(self.folder.checkpoints)[:1] if found.path.parent == self.folder.best else []
        return store.load(newest[0]).facts if newest and self.config.guard else found.facts


def versions(model: Any, why: str) -> Iterator[tuple[str, Any]]:
    """("narrow", model) unless there is a reason against it, then ("16 bits", model) with its recipes suspended."""
    if narrow_forward(model) and not why:
        yield "narrow", model
    with suspended(model):
        yield "16 bits", model
