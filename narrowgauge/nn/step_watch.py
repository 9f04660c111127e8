"""Detect training loops in which no optimizer step ends for a layer.

Its amax histories, learned steps or samplers then stay as they began. `step_end` covers
`narrowgauge.advance`, and torch's optimizers that hold a parameter of the layer. It does not cover
an optimizer that holds flat float32 masters and copies them into the weights (ZeRO, Megatron,
apex). Some such copies leave `_version` as it is.

Only layers whose recipe adds state are watched: `fp8-delayed`, `int4-lsq-luq`, `int4-hq-lss`. The
end of a step drops the watch; a watch warns once (`advance.not-called`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import identity, wrapper
from narrowgauge.ops.fingerprint import Readback, Sampled

PATIENCE = 16  # optimizer steps without `advance` before a warning


class StepWatch:
    """The writes to one weight since the last step that ended.

    version  `_version` of the weight in the last pass
    writes   number of passes in which `_version` had changed
    passes   number of forward passes in training
    sample   elements of the weight, to detect a write that leaves `_version` unchanged
    answer   comparison on its way from the device
    warned   the warning was given

    The sample is taken in the second pass and compared in the 15th, 31st and so on, without waiting
    for a GPU. Loops with one pass per step, and an end of each step, take no sample.
    """

    def __init__(self) -> None:
        self.version = self.writes = self.passes = 0
        self.sampled_version = -1
        self.sample: Sampled | None = None
        self.answer: Readback | None = None
        self.warned = False

    def look(self, layer: Any, weight: Tensor) -> None:
        """Check the weight in a forward pass of training; warn if steps never end."""
        if self.misses_steps(weight) and not self.warned:
            self.warned = True
            from narrowgauge.nn.step_warnings import warn_of_no_advance

            warn_of_no_advance(layer, PATIENCE)

    def misses_steps(self, weight: Tensor) -> bool:
        """True if the weight was trained on for PATIENCE steps and no step has ended."""
        self.passes += 1
        version = weight._version
        if version != self.version:
            self.version, self.writes = version, self.writes + 1
            # The first pass counts as a write, since no version was known before.
            if self.writes == PATIENCE + 1:
                return True
        if self.passes == 1:
            return False
        if self.answer is not None and self.answer.is_here:
            answer, self.answer = self.answer, None
            if answer.value:
                self.sample = None
                return True
        if self.passes == 2 or self.passes % PATIENCE == PATIENCE - 1:
            self._compare(weight, version)
        return False

    def _compare(self, weight: Tensor, version: int) -> None:
        if weight.is_meta or wrapper(weight) or not weight.is_contiguous():
            return
        # A captured comparison would run in every replay.
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        sample = self.sample
        if (
            sample is None
            or self.sampled_version != version
            or identity(sample.tensor) != identity(weight)
        ):
            self.sample, self.sampled_version = Sampled(weight), version
        elif sample.is_same() and sample.changed is not None:
            self.answer = Readback(sample.changed)
