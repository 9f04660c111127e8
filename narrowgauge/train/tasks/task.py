"""The interface of a task: model, batches, loss and evaluation.

A `TrainTask` holds the data and their metadata. A run and its reference share it, so nothing in it
changes. A `Feed` yields the batches of one run and keeps the position. The trainer uses both and
does not depend on the task. `task_class` finds a task by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from narrowgauge import data
from narrowgauge.errors import ConfigError, closest
from narrowgauge.train.config.task_entries import TASKS, TaskEntry
from narrowgauge.train.loss import NO_CACHE, Batch, Objective, aligned_loss, whole_logits

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.pretrained import ModelClass

# A constant, not the run's seed: runs of different seeds must share their held-out rows, or
# their validation losses cannot be compared.
SPLIT_SEED = 0
CLASSES: dict[str, type[TrainTask]] = {}  # name -> class, of all task files imported so far
# batch, device -> (loss, logits or another output that a metric reads)
Compute = Callable[[Batch, torch.device], tuple[Tensor, Tensor | None]]
# batch, output of Compute -> the values that a metric needs, copied to the host
Read = Callable[[Batch, Tensor | None], Any]


class Score(Protocol):
    """Computes `compute` on a batch in the run's precision, inside a forward pass of the model.

    The default of `compute` is `Objective.scored`.
    """

    def __call__(self, batch: Batch, compute: Compute = ...) -> tuple[Tensor, Tensor | None]: ...


class Readings(Protocol):
    """Runs the model over batches and returns (loss, result of `read`) for each batch.

    batches  evaluation batches, in order
    read     extracts the values that a metric needs from a batch and its logits
    compute  replaces the forward pass and loss, for example by text generation
    """

    def __call__(
        self, batches: Iterator[Batch], read: Read, compute: Compute | None = None
    ) -> list[tuple[float, Any]]: ...


@dataclass(frozen=True)
class StepBatch:
    """Micro-batches of one optimizer step, or the part that this rank computes.

    batches   micro-batches; labels are aligned with the logits, as `Objective` expects
    inputs    tokens that the model reads in the whole step, without padding; of a text pair the
              longer text's
    facts     further keys of the step's event in metrics.jsonl; `positions` counts `batches` alone
    examples  numbers, from 0, of the training examples (or text windows) of the whole step,
              on all ranks
    """

    batches: list[Batch]
    inputs: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    examples: Sequence[int] = ()


@dataclass(frozen=True)
class Shape:
    """Shape of a micro-batch, and a note if real batches may be smaller."""

    rows: int
    width: int
    note: str = ""

    @property
    def tokens(self) -> int:
        return self.rows * self.width


class Feed(ABC):
    """Training batches in order, for one run.

    Batches are a pure function of data, configuration and position, so a restored feed continues as
    if it had never stopped.

    share  (rank, ranks): the feed yields micro-batches rank, rank + ranks, ... of each step;
           (0, 1) yields all
    """

    share: tuple[int, int] = (0, 1)

    def own_parts(self, parts: int) -> range:
        """Indices of this rank's micro-batches in a step of `parts` micro-batches.

        Every rank gets ceil(parts / ranks) indices. An index may be >= parts; the feed then yields
        a batch without targets.
        """
        rank, ranks = self.share
        # Equal counts on all ranks: each forward pass contains collectives (FSDP, TP), so a rank
        # with one micro-batch fewer would deadlock the others.
        return range(rank, -(-parts // ranks) * ranks, ranks)

    @abstractmethod
    def draw(self, step: int) -> StepBatch:
        """Returns the micro-batches of the next step.

        step  number of finished steps; each step is drawn once, in order
        """

    @abstractmethod
    def probe(self) -> Batch:
        """Returns a micro-batch of the first step without moving the position.

        The first step has the largest shape of the run.
        """

    def state(self) -> dict[str, Any]:
        """JSON state that restores the position, besides the step number."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (a position that is the step number has no state)
        """Moves the feed to the position stored in `state`."""


@dataclass
class TrainTask(ABC):
    """Data of a training run, and the model, loss and metrics that fit them.

    config          settings of the run
    tokenizer       tokenizer that the export saves beside the model
    notes           sentences about the data for the user
    name            value of `task` in the configuration; its entry in `TASKS` has further facts
    options         keyword arguments of the model's forward besides the batch
    loss_words      description of the loss; '' for language models, whose loss `Objective.of` finds
    """

    config: TrainConfig
    tokenizer: Any
    notes: list[str]

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = NO_CACHE
    loss_words: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if name := vars(cls).get("name"):
            CLASSES[name] = cls

    @property
    def entry(self) -> TaskEntry:
        """Facts about the task in the catalog."""
        return TASKS[self.name]

    @classmethod
    @abstractmethod
    def prepare(cls, config: TrainConfig) -> Self:
        """Reads and encodes the data, or loads them from the cache.

        Raises DataError for faulty data and ConfigError for settings that do not fit them.
        """

    @classmethod
    @abstractmethod
    def without_data(cls, config: TrainConfig, tokenizer: Any) -> tuple[Self, ModelClass]:
        """(task without data, its model class), for `narrowgauge plan`.

        Such a task builds models, objectives and dummy batches only.
        """

    @abstractmethod
    def largest_micro_batch(self, parts: int) -> Shape:
        """Shape of the largest of a step's `parts` micro-batches."""

    @abstractmethod
    def dummy_batch(self, shape: Shape) -> Batch:
        """A micro-batch of this shape before `align`, with meaningless contents."""

    @property
    def best(self) -> str:
        """Metric that selects the best weights; '' saves none."""
        # '' in the configuration means the task's default, "none" disables best weights.
        return {"": self.entry.default_metric, "none": ""}.get(self.config.best, self.config.best)

    @cached_property
    def identity(self) -> dict[str, str]:
        """{name: fingerprint} of data and tokenizer; a resumed run must match its checkpoint."""
        return {
            "tokenizer": data.fingerprint(self.tokenizer),
            "content_hash": self.facts()["data"]["content_hash"],
        }

    @abstractmethod
    def steps(self, epochs: int) -> int:
        """Number of optimizer steps in `epochs` passes over the training data."""

    @abstractmethod
    def tokens_per_forward(self) -> int:
        """Rows of the activation matrices in one forward pass.

        For tables this is the mean over the micro-batches of the first epoch.
        """

    @abstractmethod
    def summary(self) -> str:
        """One line about the data, printed at the start of a run."""

    def preview(self) -> list[Any]:
        """Console lines (str or rich Text): one encoded example, and the effect of batching."""
        return []

    @abstractmethod
    def model(self) -> Any:
        """Builds or loads the float32 model on the CPU, before conversion.

        Random weights are drawn from torch's global generators, which the caller seeds.
        """

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        """Loss function of this task for `model`. `computes_in` is the dtype of the matmuls."""
        if not self.loss_words:
            return Objective.of(model, computes_in, self.config)
        return Objective(
            torch.compile(model) if self.config.compile else model,
            self.options,
            self.loss_words,
            scores=self.scores,
            criterion=self.criterion,
        )

    @staticmethod
    def scores(output: Any, batch: Batch) -> Tensor:
        """Scores of a model's output that the labels of `batch` index."""
        return whole_logits(output, batch)

    @staticmethod
    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        """Sum of the loss over all targets, a float32 scalar."""
        return aligned_loss(scores, labels)

    @staticmethod
    def align_labels(labels: Tensor) -> Tensor:
        """Moves the collator's labels so that labels[t] belongs to logits[t]."""
        return labels

    @classmethod
    def align(cls, batch: Batch, model: Any) -> Batch:
        """Converts the collator's batch to model inputs with aligned labels."""
        return batch | {"labels": cls.align_labels(batch["labels"])}

    @abstractmethod
    def feed(self, model: Any) -> Feed:
        """Training batches from the first step on. Raises if `model` cannot train on them."""

    @abstractmethod
    def evaluation(self, model: Any) -> Iterator[Batch]:
        """Validation batches, the same in every evaluation."""

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        """Computes metrics over the validation batches, one batch in memory at a time.

        `loss` comes first, the mean over targets. `tokens` is the number of targets.
        """
        found = readings(self.evaluation(model), lambda batch, _: data.valid_targets(batch))
        # Sum of losses over sum of targets, not a mean of batch means: batches have unequal target
        # counts.
        tokens = sum(count for _, count in found)
        return {"loss": total_of(found) / tokens, "tokens": tokens}

    def sample(self, model: Any) -> dict[str, str] | None:
        """Returns a `prompt` and the model's `text` for it; None if the task generates no text.

        The model is in evaluation mode. Global random generators are not advanced.
        """
        return None

    def trivial(self) -> dict[str, Any]:
        """Metrics of the best constant answer, and its name under `predictor`; {} if unknown."""
        return {}

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Entries of run.json: `data`, `tokens_per_step`, and additions to `model`."""


def total_of(found: list[tuple[float, Any]]) -> float:
    """Sum of the losses of all batches, added in order."""
    total = 0.0
    # Not sum(): it uses compensated summation since Python 3.12, so the last digits would depend on
    # the Python version.
    for loss, _ in found:
        total += loss
    return total


def task_class(name: str) -> type[TrainTask]:
    """Class of a task that `TASKS` lists; its file has the same name, with underscores."""
    if name not in TASKS:
        near = closest(name, TASKS, limit=1)
        raise ConfigError(
            f"task {name!r}: is none of {', '.join(TASKS)}.{f' Closest: {near}.' if near else ''}",
            code="task.unknown",
        )
    if name not in CLASSES:
        import_module(f"narrowgauge.train.tasks.{name.replace('-', '_')}")
    return CLASSES[name]
