"""The interface of a task: model, batches, loss and evaluation.

A `TrainTask` holds the data and their metadata; a run and its reference share it, so nothing in it changes. A `Feed` yields the
batches of one run and keeps the position. The trainer uses these two and does not depend on the task.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from narrowgauge import data
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import NO_CACHE, Batch, Objective

SPLIT_SEED = 0  # not the run's: runs of different seeds are compared on the same held-out documents or rows
Compute = Callable[[Batch, torch.device], tuple[Tensor, Tensor | None]]  # a loss, and what is read beside it
Read = Callable[[Batch, Tensor | None], Any]  # what a task wants to know of a batch and its logits, on the host


class Score(Protocol):
    """`compute` of a batch in the run's precision, inside a forward pass of the model; without one `Objective.scored`."""

    def __call__(self, batch: Batch, compute: Compute = ...) -> tuple[Tensor, Tensor | None]: ...


class Readings(Protocol):
    """The loss of each batch and what was read of it."""

    def __call__(
        self, batches: Iterator[Batch], read: Read, compute: Compute | None = None
    ) -> list[tuple[float, Any]]: ...


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step, or what a rank has of them."""

    batches: list[Batch]  # labels are aligned with the logits, as `objective` has them
    inputs: int  # tokens that the model reads in the step, padding not counted; of a pair of texts the longer one's
    # Further keys of the step's event; of `batches` the positions alone.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # Numbers, from 0, of the training examples of the whole step, whatever a rank has of it; of a text, of its windows.
    examples: Sequence[int] = ()


class Feed(ABC):
    """Batches in the order of training. Deterministic: a restored feed goes on as if it had never stopped.

    share  (rank, ranks): of the micro-batches of a step, every ranks-th from number rank on is drawn; all of one process
    """

    share: tuple[int, int] = (0, 1)

    def mine(self, parts: int) -> range:
        """The numbers of this rank's micro-batches, of `parts` in a step; of some step's it may have more than there are."""
        rank, ranks = self.share
        return range(rank, -(-parts // ranks) * ranks, ranks)

    @abstractmethod
    def draw(self, step: int) -> StepBatch:
        """The batch of the next step, after `step` finished ones; called once for each step, in order."""

    @abstractmethod
    def probe(self) -> Batch:
        """A micro-batch of the first step, which has the largest shape. Does not move the position."""

    def state(self) -> dict[str, Any]:
        """What the position needs besides the step number, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (a position that is the step number has no state)
        """Goes to the position of `state`."""


@dataclass
class TrainTask(ABC):
    """Examples to learn from, and how."""

    config: TrainConfig
    tokenizer: Any  # the export saves it beside the model
    notes: list[str]  # what a user should know about the data, in sentences

    name: ClassVar[str]  # as the configuration has it
    options: ClassVar[Mapping[str, Any]] = NO_CACHE  # what the model is called with besides a batch
    default_metric: ClassVar[str] = ""  # chooses the best weights unless the configuration names one; '' keeps none

    @classmethod
    @abstractmethod
    def prepare(cls, config: TrainConfig) -> Self:
        """Reads the data and encodes them, or finds them in the cache. Raises DataError and ConfigError for what is wrong."""

    @property
    def best(self) -> str:
        """Metric by which the best weights are chosen; '' keeps none."""
        return {"": self.default_metric, "none": ""}.get(self.config.best, self.config.best)

    @cached_property
    def identity(self) -> dict[str, str]:
        """Name -> fingerprint of what must not change between a checkpoint and a resumed run."""
        return {"tokenizer": data.fingerprint(self.tokenizer), "content_hash": self.facts()["data"]["content_hash"]}

    @abstractmethod
    def steps(self, epochs: int) -> int:
        """Optimizer steps of so many passes over the data."""

    @abstractmethod
    def tokens_at_once(self) -> int:
        """Rows of the matrices in a forward pass; of a table the mean of the first epoch's micro-batches."""

    @abstractmethod
    def summary(self) -> str:
        """The data, for the first line of the console."""

    def preview(self) -> list[Any]:
        """An example as the model sees it, and what batching does, for the console: text or rich's Text."""
        return []

    @abstractmethod
    def model(self) -> Any:
        """A float32 model on the CPU, before its Linears are converted. Random weights come from the generators as they are."""

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        return Objective.of(model, computes_in, self.config)

    def align(self, batch: Batch, model: Any) -> Batch:
        """The collator's batch with labels where the logits are that they are compared with, as the model takes it."""
        return batch

    @abstractmethod
    def feed(self, model: Any) -> Feed:
        """The batches from the first on. Raises if this model cannot be trained on them."""

    @abstractmethod
    def evaluation(self, model: Any) -> Iterator[Batch]:
        """The validation data, always the same batches."""

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        """Metrics on the validation data, streamed: `loss` first, and `tokens`, the targets that it is a mean of."""
        found = readings(self.evaluation(model), lambda batch, _: data.valid_targets(batch))
        tokens = sum(count for _, count in found)
        return {"loss": total_of(found) / tokens, "tokens": tokens}

    def sample(self, model: Any) -> dict[str, str] | None:
        """`prompt` and the `text` of the model, which evaluates; None if it writes nothing. Leaves generators alone."""
        return None

    def trivial(self) -> dict[str, Any]:
        """Metrics of the best answer that ignores the input (`trivial`), and its name as `predictor`; {} if none is known."""
        return {}

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """`data`, `tokens_per_step` and additions to `model`, for run.json."""


def total_of(found: list[tuple[float, Any]]) -> float:
    """The sum of the losses, one after the other."""
    total = 0.0
    for loss, _ in found:  # sum() compensates since Python 3.12
        total += loss
    return total
