"""The batches of training of a table, by length or shuffled, each cut into micro-batches. Other examples share `SampledFeed`.

Micro-batches are parts of the step's batch, so their number changes memory and nothing else.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge import data
from narrowgauge.data.batches import Indices
from narrowgauge.data.plan import runs
from narrowgauge.errors import DataError
from narrowgauge.train.loss import Batch
from narrowgauge.train.tasks.task import Feed, StepBatch


@dataclass
class SampledFeed(Feed):
    """Batches of a sampler, epoch after epoch, each in at most `parts` micro-batches. The position is the sampler's: (epoch, step).

    tokens  that a model reads of each example, int64
    """

    sampler: data.LengthBatchSampler
    parts: int
    tokens: Indices

    def __post_init__(self) -> None:
        self._epoch: Iterator[list[Any]] = iter(())
        if not len(self.sampler.plan):
            raise DataError(
                "no example is left to train on: all are above the token budget. Raise token_budget or packing."
            )

    def draw(self, step: int) -> StepBatch:
        while (items := next(self._epoch, None)) is None:
            self._epoch = iter(self.sampler)  # the sampler's next pass is the next epoch
        parts = runs(items, self.parts)
        mine = list(self.mine(len(parts)))
        batches = [self._batch(parts[part]) if part < len(parts) else self._spare(parts[0]) for part in mine]
        drawn = [index for item in items for index in (item if isinstance(item, tuple) else (item,))]
        inputs = int(self.tokens[drawn].sum())
        facts = {
            "epoch": self.sampler.epoch + self.sampler.state_dict()["step"] / len(self.sampler),
            "examples": len(drawn),
            "inputs": inputs,
            "positions": sum(
                self.positions(batch) for part, batch in zip(mine, batches, strict=True) if part < len(parts)
            ),
        }
        return StepBatch(batches, inputs, facts, drawn)

    @abstractmethod
    def _batch(self, items: Sequence[Any]) -> Batch:
        """A micro-batch of these examples, in the sampler's epoch."""

    @abstractmethod
    def positions(self, batch: Batch) -> int:
        """Tokens that are computed, with padding."""

    def _spare(self, items: Sequence[Any]) -> Batch:
        """For a rank without examples in its turn: those of another, and nothing to learn. It changes no sum and no largest amax."""
        return data.without_targets(self._batch(items))

    def probe(self) -> Batch:
        return self._batch(runs(self.sampler.plan.steps[0][0], self.parts)[0])

    def state(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self._epoch = iter(())


@dataclass
class TableFeed(SampledFeed):
    """Batches of tokens, padded."""

    examples: data.Examples
    collate: data.Collator
    align: Callable[[Batch], Batch]

    def _batch(self, items: Sequence[Any]) -> Batch:
        return self.align(self.collate([self.examples[item] for item in items]))

    def positions(self, batch: Batch) -> int:
        return max(batch["input_ids"].numel(), batch["labels"].numel())
