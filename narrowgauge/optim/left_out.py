"""Steps that the device leaves out: gradients that are not finite change nothing, and the host need not know which they were.

    optimizer.found_inf   0-d float, as torch's fused optimizers have it: not 0 leaves the next step out. It is as if it was never called:
                          counters, and with them corrections and noise, are those of the steps that were taken
    optimizer.halted      0-d float: from the first step on in which it is not 0, nothing changes any more. Nobody counts on from there

On a CPU the host looks. On a GPU it would wait: there it counts a step as taken, and sends the kernel beside its numbers those that it has
if one, two, ... of the steps since the host last knew were left out (`ParamStep.if_left_out`). The device knows how many:

    left_out   int64 [2]   whether this step is left out; how many were before it, since `settle`

`settle` reads that, and sets the counters right; `state_dict` calls it. By itself the optimizer settles, which waits, after MOST steps,
where other parameters have gradients than before, where gradients are held in FP8, and where plain torch steps on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from narrowgauge.addresses import holds_numbers

MOST = 64  # steps whose counters are not known: so many more numbers travel with a step


class LeftOut:
    """What an optimizer knows of its steps since it last settled.

    uncertain  how many steps were counted that the device may have left out
    members    the parameters that have stepped in each of them
    """

    def __init__(self) -> None:
        self.uncertain = 0
        self.members: frozenset[Tensor] = frozenset()
        self._flags: Tensor | None = None
        self._counts = False

    def seen_by_host(self, flag: Tensor) -> bool:
        """Whether to look at a flag waits for nothing."""
        return flag.device.type == "cpu" and holds_numbers(flag)

    def begin(self, found_inf: Tensor | None, halted: Tensor | None, members: frozenset[Tensor]) -> None:
        """The next step, of these parameters, is left out if one of the flags on the device says so."""
        flags = [flag != 0 for flag in (found_inf, halted) if flag is not None]
        self._counts = found_inf is not None
        if not flags:
            self._flags = None
            return
        now = flags[0] if len(flags) == 1 else flags[0] | flags[1].to(flags[0].device)
        before = torch.zeros_like(now, dtype=torch.int64) if self._flags is None else self._flags.sum()
        self._flags, self.members = torch.stack((now.to(torch.int64), before)), members

    def end(self) -> None:
        """The step has been launched."""
        self.uncertain += self._counts

    @property
    def is_possible(self) -> bool:
        """Whether the device may leave out the step at hand."""
        return self._flags is not None

    def on(self, device: torch.device) -> Tensor:
        """left_out, see the module."""
        assert self._flags is not None
        return self._flags.to(device)

    def count(self) -> int:
        """How many of the uncertain steps were left out. Waits for the device."""
        return int(self._flags.sum()) if self.uncertain and self._flags is not None else 0

    def must_settle(self, members: Iterable[Tensor], counts: bool) -> bool:
        """Whether a step of these parameters needs counters that are right. counts: whether it may be left out, and is not counted then."""
        return self.uncertain > 0 and (not counts or self.uncertain >= MOST or self.members != members)
