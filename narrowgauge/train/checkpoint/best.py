"""The best weights of a run by one metric, in a folder of their own that the rotation of checkpoints does not touch.

    RUN/best/step-00000120/      the group `weights` of a checkpoint, alone (see `checkpoint`)

The checkpoints of the run record which step is best. Older best weights are removed only after the next checkpoint is saved: a run
that is killed in between resumes from the older checkpoint, which still needs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.train.checkpoint import manifest, store

LOWER_IS_BETTER = frozenset({"loss"})


class Best:
    """metric: by which evaluations are compared, '' for none. step: of the best one so far, 0 before the first."""

    def __init__(self, folder: Path, metric: str) -> None:
        self.folder, self.metric = folder, metric
        self.step, self.value, self.loss = 0, math.nan, math.nan

    def take(self, step: int, found: Mapping[str, Any], weights: Mapping[str, Tensor]) -> bool:
        """Saves the weights if this evaluation is the best so far. Ties go to the lower loss, then to the earlier step."""
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
        """For a checkpoint, as JSON: a loss that is not finite is None. None before the first evaluation."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"step": self.step, "value": self.value, "loss": loss} if self.step else None

    def restore(self, facts: Mapping[str, Any] | None) -> str:
        """Restores the best step from a checkpoint's facts. Returns why its weights are lost, or ''."""
        if not facts or not self.metric:
            return ""
        step, loss = facts["step"], facts.get("loss")
        try:
            manifest.verify(self.path(step))
        except CheckpointError as error:
            return f"the best weights, of step {step}, are lost: {error} The best of the steps to come is kept."
        self.step, self.value, self.loss = step, facts["value"], math.nan if loss is None else loss
        return ""

    def clear(self) -> None:
        """Removes all but the best."""
        if self.step:
            manifest.prune(self.folder, keep=self.path(self.step))

    def weights(self) -> dict[str, Tensor] | None:
        """The best ones, from the disk; None if there are none."""
        return store.load(self.path(self.step)).tensors.get("weights", {}) if self.step else None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"
