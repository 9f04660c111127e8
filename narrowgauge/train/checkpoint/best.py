"""The best weights of a run by one metric, in a folder of their own that the rotation of checkpoints does not touch.

    RUN/best/step-00000120/      the group `weights` of a checkpoint, alone (see `checkpoint`)

Which step is best is a fact of the run's checkpoints. Weights that are no longer the best are removed once a checkpoint says
so, not before: a run that is killed in between goes on from the older checkpoint, and finds what that one calls best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.train.checkpoint import store

LOWER_IS_BETTER = frozenset({"loss"})


class Best:
    """metric: by which evaluations are compared, '' for none. step: of the best one so far, 0 before the first."""

    def __init__(self, folder: Path, metric: str) -> None:
        self.folder, self.metric = folder, metric
        self.step, self.value, self.loss = 0, math.nan, math.nan

    def take(self, step: int, found: Mapping[str, Any], weights: Mapping[str, Tensor]) -> bool:
        """Keeps the weights if this evaluation is better than all before; of equal ones that with the least loss, the first of them."""
        if not self.metric:
            return False
        if self.metric not in found:
            raise ConfigError(
                f"best = {self.metric!r}: this evaluation measures {', '.join(map(repr, found))}. Choose one of them, or 'none'."
            )
        value = float(found[self.metric])
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        loss = float(found.get("loss", math.nan))
        is_better = sign * value > sign * self.value or (value == self.value and loss < self.loss)
        if not math.isfinite(value) or (self.step and not is_better):
            return False
        store.save(self.folder, step, {"weights": dict(weights)}, {"metric": self.metric, "value": value})
        self.step, self.value, self.loss = step, value, loss
        return True

    def facts(self) -> dict[str, Any] | None:
        """For a checkpoint; None before the first evaluation."""
        return {"step": self.step, "value": self.value, "loss": self.loss} if self.step else None

    def restore(self, facts: Mapping[str, Any] | None) -> str:
        """Takes up what a checkpoint says. Returns why its best weights are lost, or ''."""
        if not facts or not self.metric:
            return ""
        try:
            store.verify(self.path(facts["step"]))
        except CheckpointError as error:
            return (
                f"the best weights, of step {facts['step']}, are lost: {error} The best of the steps to come is kept."
            )
        self.step, self.value, self.loss = facts["step"], facts["value"], facts.get("loss", math.nan)
        return ""

    def clear(self) -> None:
        """Removes all but the best."""
        if self.step:
            store.remove(self.folder, keep=self.path(self.step))

    def weights(self) -> dict[str, Tensor] | None:
        """The best ones, from the disk; None if there are none."""
        return store.load(self.path(self.step)).tensors["weights"] if self.step else None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"
