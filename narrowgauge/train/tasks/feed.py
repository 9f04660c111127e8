"""Training feeds that draw examples through a sampler and cut each step into micro-batches.

A step's examples do not depend on the number of micro-batches, which changes peak memory but not
the gradient. `SkippingFeed` skips batches after a loss spike (`on_spike = skip`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge import data
from narrowgauge.data.epochs import runs
from narrowgauge.diagnose.left_out import batch_of
from narrowgauge.errors import DataError
from narrowgauge.train.tasks.task import Feed, StepBatch

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.train.loss import Batch

KEY = "left_out"  # key in the feed's state; absent if no batch is skipped


@dataclass
class SampledFeed(Feed):
    """Batches of a sampler, epoch after epoch, each cut into at most `parts` micro-batches.

    sampler  LengthBatchSampler; holds the position (epoch, step)
    parts    micro-batches of a step
    tokens   [examples] int64: tokens that the model reads of each example
    """

    sampler: data.LengthBatchSampler
    parts: int
    tokens: Indices

    def __post_init__(self) -> None:
        self._epoch: Iterator[list[Any]] = iter(())
        if not len(self.sampler.plan):
            raise DataError(
                "no example is left to train on: all are above the token budget. Raise token_budget or packing.",
                code="feed.none-left",
            )

    def draw(self, step: int) -> StepBatch:
        while (items := next(self._epoch, None)) is None:
            self._epoch = iter(self.sampler)  # the sampler's next pass is the next epoch
        # A short last step can give fewer than `parts` runs. Ranks beyond that number get a batch
        # without targets.
        parts = runs(items, self.parts)
        # parts can be fewer than self.parts in a short step, so the share is computed from its
        # length.
        mine = list(self.own_parts(len(parts)))
        batches = [
            self._batch(parts[part]) if part < len(parts) else self._without_targets(parts[0])
            for part in mine
        ]
        # A packed item is a tuple of example indices, an unpacked one a single index.
        drawn = [
            index for item in items for index in (item if isinstance(item, tuple) else (item,))
        ]
        inputs = int(self.tokens[drawn].sum())
        facts = {
            "epoch": self.sampler.epoch + self.sampler.state_dict()["step"] / len(self.sampler),
            "examples": len(drawn),
            # Padding is counted for this rank's real micro-batches alone; a spare batch would be
            # counted twice.
            "inputs": inputs,
            "positions": sum(
                self.positions(batch)
                for part, batch in zip(mine, batches, strict=True)
                if part < len(parts)
            ),
        }
        return StepBatch(batches, inputs, facts, drawn)

    @abstractmethod
    def _batch(self, items: Sequence[Any]) -> Batch:
        """Collates examples into a micro-batch; augmentation depends on the sampler's epoch."""

    @abstractmethod
    def positions(self, batch: Batch) -> int:
        """Token positions that the model computes for `batch`, padding included."""

    def _without_targets(self, items: Sequence[Any]) -> Batch:
        """Another rank's micro-batch with all labels ignored, for a rank without examples.

        It adds zeros to every gradient sum, and its amax values occur on another rank already.
        """
        return data.without_targets(self._batch(items))

    def probe(self) -> Batch:
        return self._batch(runs(self.sampler.plan.steps[0][0], self.parts)[0])

    def state(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        # The next draw starts an iterator at the restored position.
        self._epoch = iter(())


@dataclass
class TableFeed(SampledFeed):
    """Padded or packed batches of token ids."""

    examples: data.Examples
    collate: data.Collator
    align: Callable[[Batch], Batch]

    def _batch(self, items: Sequence[Any]) -> Batch:
        return self.align(self.collate([self.examples[item] for item in items]))

    def positions(self, batch: Batch) -> int:
        """Size of the larger of input_ids and labels, which differ for encoder-decoders."""
        return max(batch["input_ids"].numel(), batch["labels"].numel())


class SkippingFeed(Feed):
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
