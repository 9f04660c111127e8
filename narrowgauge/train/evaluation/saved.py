"""Saved weights of a run, loaded into its converted model.

newest, all, 100,200    RUN/checkpoints: weights and everything that the recipes have learned
best                    RUN/best: weights alone
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge import manifest
from narrowgauge.diagnose.runs import read_run
from narrowgauge.errors import ConfigError
from narrowgauge.nn.converted_model import suspended
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.structure import is_weight
from narrowgauge.train import guard_state
from narrowgauge.train.checkpoint import state, store
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.console import tell
from narrowgauge.train.model import build
from narrowgauge.train.preparation import prepare
from narrowgauge.train.recipe_schedule import recipe_switches
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.validation import narrow_forward

if TYPE_CHECKING:
    from narrowgauge.train.tasks import TrainTask

BEST, NEWEST, ALL = "best", "newest", "all"


@dataclass
class SavedRun:
    """Folder of a run, with its data and the settings that rebuild its model.

    Writes nothing into the folder.
    """

    folder: RunFolder
    config: TrainConfig
    task: TrainTask
    device: torch.device

    @classmethod
    def open(cls, path: Path, device: torch.device) -> SavedRun:
        """Reads the configuration and prepares the data, usually from the cache.

        Raises ConfigError if there is no run.
        """
        folder = RunFolder(path)
        if not os.path.lexists(folder.config):
            raise ConfigError(
                f"'{path}': holds no run (no config.toml). Name a folder that narrowgauge train wrote.",
                code="run.none",
            )
        own = replace(
            toml.load_stored(folder.config), output=str(path), device=str(device), resume=False
        )
        tell(f"Reading {own.data} ...")
        config, task = prepare(resolved(own))
        return cls(folder, config, task, device)

    def paths(self, which: str) -> list[Path]:
        """The checkpoints that `which` names, oldest first.

        Raises ConfigError with the existing names otherwise.
        """
        there = {
            int(path.name.removeprefix("step-")): path
            for path in manifest.newest_first(self.folder.checkpoints)
        }
        best = manifest.newest_first(self.folder.best)[:1]
        if which == BEST and best:
            return best
        if there and which in (NEWEST, ALL):
            return (
                [there[max(there)]] if which == NEWEST else [there[step] for step in sorted(there)]
            )
        words = [each.strip() for each in which.split(",")]
        if there and all(each.isdecimal() and int(each) in there for each in words):
            return [there[step] for step in sorted({int(each) for each in words})]
        if not there and not best and (self.folder.path / "study.json").is_file():
            runs = sorted(each.parent for each in self.folder.path.glob("*/config.toml"))
            example = f", as {runs[0]}" if runs else ""
            raise ConfigError(
                f"{self.folder.path}: is the folder of a study, whose runs are folders of their own. Name one{example}.",
                code="evaluate.study",
            )
        known = [*map(str, sorted(there)), *([BEST] if best else [])]
        have = (
            f"There are {', '.join(known)}"
            if known
            else "There are none: the run has saved nothing yet"
        )
        raise ConfigError(
            f"checkpoints = {which!r}: not all of them are in {self.folder.path}. {have}; {NEWEST} and {ALL} name some of these.",
            code="evaluate.checkpoints",
        )

    def others(self, than: Collection[Path]) -> Iterator[tuple[str, Path]]:
        """Yields (name for `paths`, path) of other checkpoints.

        The newest comes first, the best weights last.
        """
        for path in manifest.newest_first(self.folder.checkpoints):
            if path not in than:
                yield str(int(path.name.removeprefix("step-"))), path
        for path in manifest.newest_first(self.folder.best)[:1]:
            if path not in than:
                yield BEST, path

    def model(self, path: Path) -> tuple[Any, int, str]:
        """Loads a checkpoint into the converted model.

        Returns (model in evaluation mode, its step, reason against a score in its recipe or '').

        The model is on the device, with weights in float32 or in the dtype of the run's precision.

        Raises CheckpointError if the checkpoint is damaged or belongs to another model.
        """
        found = store.load(path)
        facts: Mapping[str, Any] = found.facts
        if found.path.parent == self.folder.best:  # best weights have none about a guard or a base
            facts = newest_facts(self.folder, self.config) or facts
        model = converted_model(
            self.folder, self.config, self.task.model, self.device, self.task.tokens_per_forward(), found.step, facts
        )  # fmt: skip
        saved = found.tensors.get("weights", {}) | found.tensors.get("scaling", {})
        state.refuse_other_base(model, facts, str(path))
        own = state.saved_state(model)
        learnt = [name for name in own if name not in saved and not is_weight(name)]
        why = ""
        if learnt:  # best weights lack recipe states; the forward pass misses only learned steps
            layers = [
                name.rpartition(".")[0]
                for name, each in model.named_modules()
                if isinstance(each, LearnedSteps)
            ]
            why = (
                f"{path.name} of {path.parent.name}/ holds weights alone, and {layers[0]} computes with steps that it learnt"
                if layers
                else ""
            )
            saved |= {name: own[name] for name in learnt}
        state.refuse_other_model(own, saved, str(path))
        state.load_state(model, saved)
        return model.eval(), found.step, why


def converted_model(
    folder: RunFolder,
    config: TrainConfig,
    make: Callable[[], Any],
    device: torch.device,
    tokens: int,
    step: int,
    facts: Mapping[str, Any],
) -> Any:
    """The model of a run with the recipes that it has after `step`.

    make    returns the float32 model
    tokens  rows of the matmuls of a forward pass, for recipe "auto" without recorded choices
    facts   of a checkpoint: they hold a guard's switch
    """
    choices = read_run(folder.run).get("auto") if folder.run.exists() else None
    model = build(config, make, device, tokens, choices or None)
    # Include a guard's switch: without it, a widened run was scored in its old recipe (loss 5.6745
    # instead of 5.6721).
    for switch in guard_state.with_given(recipe_switches(config, model), model, config, facts):
        if switch.step <= step:
            switch.apply(model)
    return model


def newest_facts(folder: RunFolder, config: TrainConfig) -> Mapping[str, Any]:
    """Facts of the newest checkpoint of a run with a guard or adapters; {} for others."""
    has_facts = bool(config.guard or config.lora)
    newest = manifest.newest_first(folder.checkpoints)[:1] if has_facts else []
    return store.load(newest[0]).facts if newest else {}


def versions(model: Any, why: str) -> Iterator[tuple[str, Any]]:
    """Yields ("narrow", model), then ("16 bits", model) with its recipes suspended.

    why  reason against the first; then only the second is yielded
    """
    if narrow_forward(model) and not why:
        yield "narrow", model
    with suspended(model):
        yield "16 bits", model
