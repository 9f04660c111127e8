"""Batches that a run leaves out: those named are drawn and dropped, and the next ones take their steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from narrowgauge.diagnose.left_out import batch_of
from narrowgauge.train.loss import Batch
from narrowgauge.train.tasks.task import Feed, StepBatch

KEY = "left_out"  # in the position; absent where nothing was


class LeavingOut(Feed):
    """The feed of a task without some batches. left_out: their numbers, ascending; batch n is that of step n where none is left out."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self.left_out = feed, list[int]()

    @property
    def share(self) -> tuple[int, int]:
        return self._feed.share

    @share.setter
    def share(self, share: tuple[int, int]) -> None:
        self._feed.share = share

    def number(self, step: int) -> int:
        """Of the batch that is drawn after so many finished steps."""
        return batch_of(step + 1, self.left_out)

    def leave_out(self, numbers: Iterable[int]) -> None:
        """These as well; of those that were drawn before the present step none."""
        self.left_out = sorted({*self.left_out, *numbers})

    def draw(self, step: int) -> StepBatch:
        number = self.number(step)
        first = number
        while first - 1 in self.left_out:
            first -= 1
        for dropped in range(first, number):
            self._feed.draw(dropped - 1)  # a position may move with each
        return self._feed.draw(number - 1)

    def probe(self) -> Batch:
        return self._feed.probe()

    def state(self) -> dict[str, Any]:
        return {**self._feed.state(), KEY: list(self.left_out)} if self.left_out else self._feed.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.left_out = list(state.get(KEY, ()))
        self._feed.restore({key: value for key, value in state.items() if key != KEY})
