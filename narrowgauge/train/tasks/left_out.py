"""Feed that skips batches after a loss spike (`on_spike = skip`).

A skipped batch is drawn and dropped, and its step trains on the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from narrowgauge.diagnose.left_out import batch_of
from narrowgauge.train.loss import Batch
from narrowgauge.train.tasks.task import Feed, StepBatch

KEY = "left_out"  # key in the feed's state; absent if no batch is skipped


class LeavingOut(Feed):
    """Wraps the feed of a task and skips the batches in `left_out`.

    left_out  batch numbers, from 1, ascending; without skipped batches, batch n trains step n
    """

    def __init__(self, feed: Feed) -> None:
        self._feed, self.left_out = feed, list[int]()

    @property
    def share(self) -> tuple[int, int]:
        return self._feed.share

    @share.setter
    def share(self, share: tuple[int, int]) -> None:
        self._feed.share = share

    def number(self, step: int) -> int:
        """Number of the batch that is drawn after `step` finished steps."""
        return batch_of(step + 1, self.left_out)

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Adds batches to skip. Batches of finished steps cannot be skipped any more."""
        self.left_out = sorted({*self.left_out, *numbers})

    def draw(self, step: int) -> StepBatch:
        """Returns the next batch that is not skipped."""
        number = self.number(step)
        first = number
        while first - 1 in self.left_out:
            first -= 1
        # Drawn although dropped: a sampler's position advances with each draw.
        for dropped in range(first, number):
            self._feed.draw(dropped - 1)
        return self._feed.draw(number - 1)

    def probe(self) -> Batch:
        return self._feed.probe()

    def state(self) -> dict[str, Any]:
        return (
            {**self._feed.state(), KEY: list(self.left_out)}
            if self.left_out
            else self._feed.state()
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        self.left_out = list(state.get(KEY, ()))
        self._feed.restore({key: value for key, value in state.items() if key != KEY})
