"""Regression: numbers for a text or a pair of texts, with Pearson and Spearman correlations.

loss = sum over rows and columns of (output - target)^2 / their number    [target units squared]

Targets are not scaled. A note reports their scale, and the loss of always answering their mean.
Correlations are scipy's, averaged over columns; constant outputs have correlation 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from narrowgauge import data
from narrowgauge.data.targets import squared_loss
from narrowgauge.errors import DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, Objective
from narrowgauge.train.model import ModelClass
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.classes import labelled
from narrowgauge.train.tasks.classification import padding_id
from narrowgauge.train.tasks.tables import TableTask
from narrowgauge.train.tasks.task import Readings, total_of

REGRESSOR = ModelClass(
    AutoModelForSequenceClassification, "model that gives numbers for texts", new=True
)
FAR = 10.0  # standard deviations, or units, beyond which a head initialized near 0 learns slowly
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class RegressionTask(TableTask):
    """Task "regression"; `labels` of an example is a float vector with one number per column."""

    name: ClassVar[str] = "regression"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "pearson"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        names = tuple(name.strip() for name in config.label_column.split(","))
        columns = data.Regression(
            text=config.text_column, pair=config.pair_column or None, labels=names
        )
        pad_id = padding_id(config, tokenizer)
        return columns, labelled(REGRESSOR, names, pad_token_id=pad_id, problem_type="regression")

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        names = list(task.model_class.options["id2label"].values())
        task.notes += scale_notes(names, numbers_of(task.train), config.data)
        # Called for its errors alone: a correlation with constant targets is undefined.
        scale_notes(names, numbers_of(task._evaluated), "the examples that evaluations see")
        return task

    def blank(self, width: int) -> dict[str, Any]:
        return super().blank(width) | {"labels": np.zeros(self.model_class.options["num_labels"])}

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        forward = torch.compile(model) if self.config.compile else model
        return Objective(forward, {}, "squared differences, their mean", criterion=squared_loss)

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        text = data.coloured_sample(self.tokenizer, example["input_ids"], None)
        text.append(
            f"  -> {', '.join(f'{number:g}' for number in example['labels'])}", "bold green"
        )
        return [text]

    def trivial(self) -> dict[str, Any]:
        return trivial.of_numbers(numbers_of(self._evaluated))

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


def scale_notes(names: list[str], numbers: Numbers, where: str) -> Iterator[str]:
    """A note on the scale of each column.

    Raises DataError for a constant column, which has no correlation.
    """
    for name, column in zip(names, numbers.T, strict=True):
        if np.ptp(column) == 0:
            raise DataError(
                f"{where}: every number in column {name!r} is {column[0]:g} ({len(column)} rows), so there is nothing to learn or to "
                "correlate with. Pass other data, a larger validation_fraction or another label_column.",
                code="regression.constant",
            )
    # A separate generator: the checks above must run when `scale_notes` is called, not when it is
    # iterated.
    return _scales(names, numbers)


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
