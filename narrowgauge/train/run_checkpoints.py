"""Checkpoints of one run: written, found and loaded.

A run that resumes from the checkpoint of step k continues with batch k + 1 of the same sequence. The
checkpoint holds tensors (`checkpoint.state`) and facts: counters, settings that change arithmetic,
identity of the data, position in the data, best weights, state of rank agreements and of plugins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge import manifest
from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.errors import CheckpointError, Reason
from narrowgauge.train import same_run
from narrowgauge.train.checkpoint import state, store
from narrowgauge.train.console import tell
from narrowgauge.train.parallel import checkpoints

if TYPE_CHECKING:
    from narrowgauge.train.callback import Callback
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.metrics import MetricsLog
    from narrowgauge.train.parallel.stage_state import WholeNumbers
    from narrowgauge.train.passes import Passes
    from narrowgauge.train.recipe_schedule import RecipeSchedule
    from narrowgauge.train.run_folder import RunFolder
    from narrowgauge.train.tasks import TrainTask
    from narrowgauge.train.tasks.feed import SkippingFeed


@dataclass
class Counters:
    """Counters of one run. A snapshot restores every field.

    step           finished optimizer steps
    saved_step     step of the newest checkpoint
    skipped_steps  consecutive float16 overflows up to now
    trained_s      seconds of training, summed over all resumptions
    """

    step: int = 0
    saved_step: int = 0
    skipped_steps: int = 0
    trained_s: float = 0.0


class RunCheckpoints:
    """Writes and loads the checkpoints of one run.

    best          best weights by the task's metric
    resumed_from  path of the checkpoint that the run resumed from, or ''
    carried       {"parent": facts} in the checkpoints of a branch, else {}
    numbers       maps one pipeline stage's parameters to the indices of an optimizer of the whole
                  model; None without stages
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, task: TrainTask, passes: Passes, feed: SkippingFeed,
        switches: RecipeSchedule, auto: dict[str, str], numbers: WholeNumbers | None,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.task, self.passes = config, folder, task, passes
        self.feed, self.switches, self.auto, self.numbers = feed, switches, auto, numbers
        self.best = checkpoints.best_of(folder.best, task.best, passes.ranks)
        self.resumed_from = ""
        self.carried: dict[str, Any] = {}

    @property
    def _model(self) -> nn.Module:
        return self.passes.model

    # --- loading

    def resume(self, counters: Counters, plugins: Callback, log: MetricsLog) -> None:
        """Loads the newest valid checkpoint, if there is one, and logs it."""
        ranks = self.passes.ranks

        def prepare(found: store.Checkpoint) -> None:
            # Before the tensors are loaded: a layer's buffers depend on its recipe.
            plugins.before_load(found.facts)
            past = self.switches.names_until(found.step)
            state.refuse_other_base(self._model, found.facts, str(found.path))
            same_run.refuse(found, self.config, self._numeric_settings(), self.task.identity, past)
            self.switches.apply_until(found.step, self._model)

        found, skipped = checkpoints.newest_valid(
            self.folder.checkpoints, prepare, self._model, self.passes.optimizer, ranks, self.numbers, self.folder.at,
        )  # fmt: skip
        for path, why in skipped:
            tell(
                Reason(
                    "checkpoint.passed-over",
                    f"WARNING: passed over the damaged checkpoint {path}: {why}",
                )
            )
        if found is None:
            if ranks.is_first and log.path.stat().st_size:
                # The earlier attempt ended before its first checkpoint, or the checkpoint was
                # deleted. The resume event at step 0 makes readers of the log ignore its old step
                # events.
                tell(
                    f"WARNING: {self.folder.checkpoints} holds no checkpoint to resume from: the run begins at its first step."
                )
                log.write("resume", 0, path="", skipped=[])
            return
        self.load(found, counters)
        if lost := self.best.restore(found.facts.get("best")):
            tell(Reason("checkpoint.best-lost", f"WARNING: {lost}"))
        counters.saved_step, counters.trained_s = found.step, found.facts["trained_s"]
        # Spike rule and guard continue from the state that the checkpoint holds.
        plugins.on_load(found.facts)
        self.resumed_from = str(found.path)
        self.carried = {"parent": found.facts["parent"]} if "parent" in found.facts else {}
        if ranks.is_first:
            self._log_resumption(found, [path.name for path, _ in skipped], log)

    def _log_resumption(self, found: store.Checkpoint, skipped: list[str], log: MetricsLog) -> None:
        place, step = str(found.path.relative_to(self.folder.path)), found.step
        events = read_metrics(log.path)
        parent = self.carried.get("parent", {})
        # A branch resumes from the checkpoint that its creation wrote: the first start logs
        # `branch`, later ones `resume`.
        if parent.get("step") == step and not any(event["event"] == "branch" for event in events):
            log.write("branch", **parent)
        else:
            left_out = {"left_out": list(self.feed.left_out)} if self.feed.left_out else {}
            log.write("resume", step, path=place, skipped=skipped, **left_out)
        logged = (
            event["path"]
            for event in events
            if event["event"] == "checkpoint" and event["step"] <= step
        )
        # A kill came after the checkpoint was renamed into place and before its event was written
        if place not in logged:
            log.write("checkpoint", step, path=place)

    def newest(self, folder: Path | None = None) -> store.Checkpoint | None:
        """The newest valid checkpoint of this run. folder: another one than RUN/checkpoints."""
        found, _ = checkpoints.newest_valid(
            folder or self.folder.checkpoints, lambda found: None, self._model, self.passes.optimizer,
            self.passes.ranks, self.numbers,
        )  # fmt: skip
        return found

    def load(self, found: store.Checkpoint, counters: Counters) -> None:
        """Loads a checkpoint of this run into model, optimizer, scaler, data feed and counters."""
        tensors, rest, optimizer = found.tensors, found.facts["state"], self.passes.optimizer
        if self.numbers is not None:
            with state.unusable(str(found.path)):
                tensors, rest = self.numbers.own_part(tensors, rest, self._model, optimizer)
        state.restore(self._model, optimizer, self.passes.scaler, tensors, rest, str(found.path))
        # Older checkpoints have no agreement state: start from the seed and the step
        for agreement in self.passes.parallel.agreements:
            agreement.load_state_dict(
                found.facts.get("agreement") or {"seed": self.config.seed, "step": found.step}
            )
        with state.unusable(f"{found.path / manifest.FACTS}: position"):
            self.feed.restore(found.facts.get("position", {}))
        counters.step, counters.skipped_steps = found.step, found.facts["skipped_steps"]

    def load_best(self, step: int) -> None:
        """Loads the best weights alone and moves the data feed and recipe switches to their step."""
        weights = store.load(self.folder.best / f"step-{step:08}").tensors["weights"]
        own = self._model.state_dict()
        if wrong := [
            name
            for name, tensor in weights.items()
            if name not in own or own[name].shape != tensor.shape
        ]:
            raise CheckpointError(
                f"{self.folder.best}: the best weights are of another model: {wrong[0]!r} does not fit. Name a checkpoint by its step.",
                code="model.best-weights",
            )
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self.switches.apply_until(step, self._model)
        for done in range(step):  # the feed has no seek: draw and discard
            self.feed.draw(done)

    def take_best_of(self, parent: RunCheckpoints) -> None:
        """Copies the best weights of a branch's parent, if both choose by the same metric."""
        own, best = self.best, parent.best
        if own.metric and own.metric == best.metric and (weights := best.weights()):
            own.save(best.step, weights, {"metric": best.metric, "value": best.value})
            own.step, own.value, own.loss = best.step, best.value, best.loss

    def _numeric_settings(self) -> dict[str, Any]:
        """Settings that change the arithmetic and leave the names and shapes of tensors alone."""
        own = {
            key: getattr(self.config, key)
            for key in (
                "recipe",
                "embedding_codes",
                "attention",
                "precision",
                "optimizer",
                "states",
                "master",
                "loss",
            )
        }
        kept = ",".join(self.passes.precision.keep_list(self.config.keep_float32)) or "none"
        return own | {
            "keep_float32": kept,
            "recipes": dict(self.config.layers_recipe),
            "auto": self.auto,
        }

    # --- writing

    def collected(
        self, counters: Counters, plugins: Callback
    ) -> tuple[store.Tensors, dict[str, Any]]:
        """Returns (tensors, facts) of a checkpoint of the current step."""
        tensors, rest = (self.numbers or state).collect(
            self._model, self.passes.optimizer, self.passes.scaler
        )
        facts = {
            "state": rest,
            "trained_s": counters.trained_s,
            "skipped_steps": counters.skipped_steps,
            **self._numeric_settings(),
            "switched": self.switches.names_until(counters.step),
            **self.task.identity,
            **state.base_facts(self._model),
            "position": self.feed.state(),
            "best": self.best.facts(),
            **self.carried,
            **plugins.state(),
        }
        for agreement in self.passes.parallel.agreements[:1]:  # pipeline stages count identically
            facts["agreement"] = agreement.state_dict()
        return tensors, facts

    def save(self, counters: Counters, plugins: Callback, log: MetricsLog) -> None:
        """Writes a checkpoint of the current step and logs it."""
        started_at_s = time.monotonic()
        tensors, facts = self.collected(counters, plugins)
        # Sync the log first: a run that resumes here must find the events of all earlier steps
        log.sync()
        path = self.write(self.folder.checkpoints, counters.step, tensors, facts, self.config.keep)
        counters.saved_step = counters.step
        # Only now: until the checkpoint is on disk, a resumed run needs the best weights that the
        # older checkpoint names.
        self.best.clear()
        plugins.on_saved()
        save_s = time.monotonic() - started_at_s
        log.write(
            "checkpoint", counters.step, path=str(path.relative_to(self.folder.path)), save_s=save_s
        )

    def write(
        self, folder: Path, step: int, tensors: store.Tensors, facts: dict[str, Any], keep: int
    ) -> Path:
        """Writes collected tensors and facts as a checkpoint in a folder, and keeps the `keep` newest."""
        return checkpoints.save(folder, step, tensors, facts, keep, self.passes.ranks)
