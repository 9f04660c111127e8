"""Regression: numbers for a text or a pair of texts, with Pearson and Spearman correlations.

Numbers are read strictly: a missing number, NaN, infinity and a decimal comma are errors with the
row.

loss = sum over rows and columns of (output - target)^2 / their number    [target units squared]

Targets are not scaled. A note reports their scale, and the loss of always answering their mean.
Correlations are scipy's, averaged over columns; constant outputs have correlation 0.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from narrowgauge import data
from narrowgauge.data.cache import token_dtype
from narrowgauge.data.strata import strata_of
from narrowgauge.data.task import Encoded, Notes, Task
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.pretrained import ModelClass
from narrowgauge.train.tasks.classes import padding_id, with_labels
from narrowgauge.train.tasks.table import TableTask
from narrowgauge.train.tasks.task import Readings, total_of

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.example_arrays import ExampleArrays
    from narrowgauge.data.tables import Record
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch

DECIMAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
LARGEST = 3.4e38  # largest float32; the loss is computed in float32


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """Columns with a text, optionally a second one, and the target numbers in output order."""

    text: str = "text"
    pair: str | None = None
    labels: tuple[str, ...] = ("label",)
    kind: ClassVar[str] = "regression"
    can_truncate: ClassVar[bool] = True
    target_noun: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) != len(self.labels) or not all(self.labels):
            raise ConfigError(
                f"Regression: labels {self.labels!r}. Name each column with numbers once.",
                code="regression.labels",
            )

    @property
    def columns(self) -> list[str]:
        return [self.text, *([self.pair] if self.pair is not None else []), *self.labels]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        ids = token_dtype(encoder.vocabulary - 1)
        return {"input_ids": ids, "token_type_ids": np.dtype("u1"), "labels": np.dtype("<f8")}

    @staticmethod
    def strata(stored: ExampleArrays) -> Indices:
        """Quartile of the number in the last column."""
        return strata_of(stored.scalars("labels"), stored.sizes("input_ids"))

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        numbers = [np.array([number_of(row, column) for column in self.labels]) for row in rows]
        examples = encoder.rows(rows, self.text, self.pair, max_length)
        return (
            {**example, "labels": label} for example, label in zip(examples, numbers, strict=True)
        )


def number_of(row: Record, column: str, setting: str = "label") -> float:
    """Number in this column, also if it is written as text. Raises DataError for anything else.

    setting  name of the column among `data.columns`, for the message
    """
    value = row.values[column]
    # DECIMAL first: float() also accepts "nan", "inf" and underscores.
    number = float(value) if isinstance(value, str) and DECIMAL.fullmatch(value) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise DataError(
            f"{row.origin}: {value!r} in column {column!r} is no number. Correct the row, or name another column in "
            f"data.columns.{setting}.",
            code="regression.not-a-number",
        )
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise DataError(
            f"{row.origin}: {value!r} in column {column!r} cannot be learnt. Correct the row or remove it.",
            code="regression.not-finite",
        )
    return float(number)


REGRESSOR = ModelClass(
    AutoModelForSequenceClassification, "model that gives numbers for texts", new=True
)
FAR = 10.0  # standard deviations, or units, beyond which a head initialized near 0 learns slowly
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class NumberTask(TableTask):
    """Base of tasks whose targets are numbers. It computes their loss and their correlations.

    `labels` of an example is a float vector.
    """

    @staticmethod
    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        return squared_loss(scores, labels)

    def trivial(self) -> dict[str, Any]:
        return of_numbers(numbers_of(self.evaluation_set))

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = readings(self.evaluation(model), answered)
        answers, targets = (
            np.concatenate(part) for part in zip(*(pair for _, pair in found), strict=True)
        )
        return {
            "loss": total_of(found) / targets.size,
            "tokens": targets.size,
            **correlations(answers, targets),
        }


@dataclass
class RegressionTask(NumberTask):
    """Task "regression"; `labels` of an example is a float vector with one number per column."""

    name: ClassVar[str] = "regression"
    options: ClassVar[Mapping[str, Any]] = {}
    loss_words: ClassVar[str] = "squared differences, their mean"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        names = tuple(name.strip() for name in config.column_of("label").split(","))
        columns = Regression(
            text=config.column_of("text"), pair=config.column_of("pair") or None, labels=names
        )
        pad_id = padding_id(config, tokenizer)
        return columns, with_labels(
            REGRESSOR, names, pad_token_id=pad_id, problem_type="regression"
        )

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        names = list(task.model_class.options["id2label"].values())
        task.notes += scale_notes(names, numbers_of(task.train), config.data)
        # Called for its errors alone: a correlation with constant targets is undefined.
        scale_notes(names, numbers_of(task.evaluation_set), "the examples that evaluations see")
        return task

    def dummy_example(self, width: int) -> dict[str, Any]:
        return super().dummy_example(width) | {
            "labels": np.zeros(self.model_class.options["num_labels"])
        }

    def show_example(self, example: Mapping[str, Any]) -> list[Any]:
        text = data.coloured_sample(self.tokenizer, example["input_ids"], None)
        text.append(
            f"  -> {', '.join(f'{number:g}' for number in example['labels'])}", "bold green"
        )
        return [text]


def squared_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Sum of squared differences, a float32 scalar.

    values, targets  [rows, columns]; NaN targets do not count
    """
    counts = ~targets.isnan()
    # Replace NaN before the subtraction: masking afterwards would still give NaN gradients (0 x
    # NaN).
    difference = torch.where(counts, values.float() - targets.nan_to_num(), 0.0)
    return (difference * difference).sum()


def numbers_of(examples: data.Examples) -> Numbers:
    """Targets of all examples, [examples, columns] float64."""
    return np.stack([examples.array("labels", place) for place in range(len(examples))])


def answered(batch: Batch, logits: Tensor | None) -> tuple[Numbers, Numbers]:
    """(outputs, targets), both [rows, columns] float64 on the host."""
    assert logits is not None
    return logits.double().cpu().numpy(), batch["labels"].double().cpu().numpy()


def correlations(answers: Numbers, targets: Numbers) -> dict[str, float]:
    """Pearson and Spearman correlation, averaged over columns; NaN if an output is not finite.

    answers, targets  [rows, columns]
    """
    # Imported here because only this task needs scipy.
    from scipy import stats

    found: dict[str, list[float]] = {"pearson": [], "spearman": []}
    for output, target in zip(answers.T, targets.T, strict=True):
        for name, correlate in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
            # scipy returns NaN for constant input; a model that has learnt nothing should score 0.
            if np.ptp(output) == 0:
                found[name].append(0.0)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NearConstantInputWarning
                found[name].append(float(correlate(output, target).statistic))
    return {name: float(np.mean(values)) for name, values in found.items()}


def of_numbers(targets: Numbers) -> dict[str, Any]:
    """Mean of each target column. targets is [examples, columns]; NaN does not count."""
    squares = (targets - np.nanmean(targets, axis=0)) ** 2
    return {
        "predictor": "means",
        "loss": float(np.nanmean(squares)),
        "pearson": 0.0,
        "spearman": 0.0,
    }


def scale_notes(names: list[str], numbers: Numbers, where: str) -> Iterator[str]:
    """A note on the scale of each column.

    Raises DataError for a constant column, which has no correlation.
    """
    refuse_constant(names, numbers, where)
    # A separate generator: the checks above must run when `scale_notes` is called, not when it is
    # iterated.
    return _scales(names, numbers)


def refuse_constant(names: list[str], numbers: Numbers, where: str, setting: str = "label") -> None:
    """Raises DataError for a column whose numbers are all equal.

    setting  name of the column among `data.columns`, for the message
    """
    for name, column in zip(names, numbers.T, strict=True):
        if np.ptp(column) == 0:
            raise DataError(
                f"{where}: every number in column {name!r} is {column[0]:g} ({len(column)} rows), so there is nothing to learn or to "
                f"correlate with. Pass other data, a larger data.validation_fraction or another data.columns.{setting}.",
                code="regression.constant",
            )


def _scales(names: list[str], numbers: Numbers) -> Iterator[str]:
    for name, column in zip(names, numbers.T, strict=True):
        mean, deviation = float(column.mean()), float(column.std())
        words = (
            f"Targets {name!r}: from {column.min():g} to {column.max():g}, mean {mean:.4g}, deviation {deviation:.4g}; always answering "
            f"the mean has a loss of {deviation**2:.4g}."
        )
        if abs(mean) > FAR * max(1.0, deviation) or not 1 / FAR < deviation < FAR:
            words += " A new head begins near 0 and with a deviation below 1: numbers scaled to those are learnt sooner."
        yield words
