"""Steps skipped on the device because of non-finite gradients, without a host sync.

    optimizer.found_inf   0-d float, as in torch's fused optimizers: a value other than 0 skips the
                          next step. Step counters, bias corrections and noise then continue as if
                          the step had not been called. The next step compares its learning rate
                          with the skipped one's (`rules.fall`): the host may not know of the skip
    optimizer.halted      0-d float: from the first step with a value other than 0, no tensor
                          changes any more. Step counters are not corrected for these steps

On a CPU the host reads the flags. On a GPU that would be a sync, so the host counts the step as
taken. Beside the constants of the step it sends those for one, two, ... skipped steps since the
host last read the count (`ParamStep.if_skipped`). The kernel selects by a count on the device:

    skipped   int64 [2]   1 if this step is skipped, else 0; number of skipped steps before it,
               since `settle`

`settle` reads the count and corrects the step counters; `state_dict` calls it. The optimizer itself
settles, with a sync, after MOST steps, and if other parameters have gradients than before. It also
settles if gradients are held in FP8, or if plain torch steps on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from narrowgauge.addresses import holds_numbers

# Steps with uncertain counters. Each adds 16 numbers to every later step, so the optimizer settles.
MOST = 64


class SkippedSteps:
    """Skipped-step bookkeeping of one optimizer since it last settled.

    uncertain  number of counted steps that the device may have skipped
    members    parameters that stepped in each such step
    """

    def __init__(self) -> None:
        self.uncertain = 0
        self.members: frozenset[Tensor] = frozenset()
        self._flags: Tensor | None = None
        self._counts = False

    def seen_by_host(self, flag: Tensor) -> bool:
        """Return True if the host can read the flag without a sync."""
        return flag.device.type == "cpu" and holds_numbers(flag)

    def begin(
        self, found_inf: Tensor | None, halted: Tensor | None, members: frozenset[Tensor]
    ) -> None:
        """Prepare the flags of the next step; `members` are its parameters."""
        flags = [flag != 0 for flag in (found_inf, halted) if flag is not None]
        self._counts = found_inf is not None
        if not flags:
            self._flags = None
            return
        now = flags[0] if len(flags) == 1 else flags[0] | flags[1].to(flags[0].device)
        # The count stays on the device: [this, before].sum() is the number of skips before the next
        # step.
        before = (
            torch.zeros_like(now, dtype=torch.int64) if self._flags is None else self._flags.sum()
        )
        self._flags, self.members = torch.stack((now.to(torch.int64), before)), members

    def end(self) -> None:
        """Record that the step has been launched."""
        self.uncertain += self._counts

    @property
    def is_possible(self) -> bool:
        """True if the device may skip the current step."""
        return self._flags is not None

    def on(self, device: torch.device) -> Tensor:
        """Tensor `skipped_steps` on `device`; see the module."""
        assert self._flags is not None
        return self._flags.to(device)

    def count(self) -> int:
        """Number of uncertain steps that were skipped. Host sync."""
        return int(self._flags.sum()) if self.uncertain and self._flags is not None else 0

    def must_settle(self, members: Iterable[Tensor], counts: bool) -> bool:
        """Return True if a step of `members` needs exact step counters.

        counts  True if the kernels handle a skip of this step by themselves
        """
        return self.uncertain > 0 and (
            not counts or self.uncertain >= MOST or self.members != members
        )
