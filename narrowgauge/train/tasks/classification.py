"""Encoders, or decoders, that name the class of a text or of a pair of texts; and the metrics of classes.

counts[t, p]   examples of class t that were taken for class p

accuracy = trace / total
mcc      = (trace total - sum_k true_k predicted_k) / sqrt((total^2 - sum predicted_k^2) (total^2 - sum true_k^2))
f1_k     = 2 counts[k, k] / (true_k + predicted_k)
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from narrowgauge import data
from narrowgauge.errors import DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, Objective
from narrowgauge.train.model import ModelClass, own_configuration
from narrowgauge.train.tasks.reading import header
from narrowgauge.train.tasks.tables import TableTask
from narrowgauge.train.tasks.task import Readings, total_of

SHOWN_CLASSES = 10
MOST_CLASSES = 1000  # more distinct labels than that are hardly classes, but texts or numbers
CLASSIFIER = ModelClass(AutoModelForSequenceClassification, "model that classifies texts", new=True)


@dataclass
class ClassificationTask(TableTask):
    name: ClassVar[str] = "classification"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "mcc"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        classes = chosen_classes(config)
        names = list(map(str, classes if isinstance(classes, tuple) else range(classes)))
        options = {
            "num_labels": len(names), "id2label": dict(enumerate(names)), "pad_token_id": padding_id(config, tokenizer),
            "label2id": {name: place for place, name in enumerate(names)}, "problem_type": "single_label_classification",
        }  # fmt: skip
        columns = data.Classification(
            classes=classes, text=config.text_column, pair=config.pair_column or None, label=config.label_column
        )
        return columns, replace(CLASSIFIER, options=options)

    @classmethod
    def planned(cls, config: TrainConfig) -> TrainConfig:
        if config.classes:
            return config
        known = getattr(own_configuration(config, CLASSIFIER), "num_labels", None) or 2
        return replace(config, classes=str(max(2, known)))

    def blank(self, width: int) -> dict[str, Any]:
        return super().blank(width) | {"labels": 0}

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        task.known["classes"] = task.classes
        task.notes += _class_notes(task.train, task.validation, task.classes)
        return task

    @property
    def classes(self) -> list[str]:
        """Their names, in the order of the logits."""
        return list(self.model_class.options["id2label"].values())

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        return Objective(torch.compile(model) if self.config.compile else model, {}, "of one class for each example")

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        text = data.coloured_sample(self.tokenizer, example["input_ids"], None)
        text.append(f"  -> {self.classes[example['labels']]}", "bold green")
        return [text]

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        confusion, examples = Confusion(len(self.classes)), 0
        found = readings(self.evaluation(model), predicted)
        for _, (classes, labels) in found:
            examples += len(labels)
            confusion.count(classes, labels)
        return {"loss": total_of(found) / examples, "tokens": examples, **confusion.metrics()}


def predicted(batch: Batch, logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """The class of the largest logit of each example, the first of equal ones, and the labels; on the host."""
    assert logits is not None
    return logits.argmax(-1).cpu(), batch["labels"].cpu()


def _class_notes(train: data.Examples, validation: data.Examples, names: list[str]) -> list[str]:
    """How many examples of each class there are, and what that makes of the metrics."""
    learnt, held_out = (Counter(example["labels"] for example in part) for part in (train, validation))
    shown = ", ".join(
        f"{name} {learnt[place]} and {held_out[place]}" for place, name in enumerate(names[:SHOWN_CLASSES])
    )
    more = f", and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
    notes = [f"Classes, with examples to train on and held out: {shown}{more}."]
    if len(held_out) == 1:
        notes.append(
            f"Every held-out example ({len(validation)}) is of class {names[next(iter(held_out))]}, so mcc is 0 whatever the "
            "model says. Pass validation_data, or a larger validation_fraction."
        )
    return notes


def padding_id(config: TrainConfig, tokenizer: Any) -> int:
    """The token by which a decoder finds the end of a text. Raises DataError if there is none."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise DataError(
            f"{config.tokenizer or config.model}: the tokenizer has neither a padding nor an end-of-text token, and a decoder "
            "finds the end of a text by it. Set pad_token in its tokenizer_config.json."
        )
    return int(found)


# Classes


def chosen_classes(config: TrainConfig) -> tuple[str, ...] | int:
    """The classes as configured; else those of the training data, in the model's own order if it was trained on the same."""
    given = config.classes.strip()
    if given.isdecimal():
        return int(given)
    if given:
        return tuple(name.strip() for name in given.split(","))
    found = classes_of(config.data, config.label_column, header(config))
    own = getattr(own_configuration(config, CLASSIFIER), "id2label", None) or {}
    names = tuple(str(own[place]) for place in sorted(own))
    if isinstance(found, tuple) and all(isinstance(name, str) for name in found) and set(names) == set(found):
        return names
    return found


def classes_of(source: str, column: str, header: list[str] | None) -> tuple[str, ...] | int:
    """The distinct labels of a table: sorted names, or how many where they are the numbers 0, 1, ... without a gap."""
    labels: dict[Any, str] = {}  # to where it stands first
    for row in data.records(source, [column], header=header):
        label = row.values[column]
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise DataError(
                f"{row.origin}: label {label!r} in column {column!r} is neither text nor a whole number. Correct the row, or name "
                "another label_column."
            )
        if isinstance(label, str) and not label.strip():
            raise DataError(f"{row.origin}: the label in column {column!r} is empty. Correct the row, or remove it.")
        labels.setdefault(label, row.origin)
        if len(labels) > MOST_CLASSES:
            raise DataError(
                f"{source}: column {column!r} has more than {MOST_CLASSES:,} different labels up to {row.origin}. Name another "
                "label_column, or list the classes."
            )
    if not labels:
        raise DataError(f"{source}: has no rows. Pass a file with examples.")
    if len(labels) < 2:
        raise DataError(
            f"{source}: column {column!r} has one label, {next(iter(labels))!r}. Pass data with two at least."
        )
    for label, origin in labels.items():
        if isinstance(label, str) and label != label.strip() and label.strip() in labels:
            raise DataError(
                f"{origin}: label {label!r} in column {column!r} is {label.strip()!r} but for its spaces, and would be a class of its "
                "own. Correct the row."
            )
    numbers = {str(label) for label in labels}
    if numbers == set(map(str, range(len(numbers)))):
        return len(numbers)
    return tuple(sorted(labels, key=lambda label: (not isinstance(label, int), label)))


# Metrics


class Confusion:
    """counts [classes, classes] int64; rows are the truth, columns what was predicted. Batches are added and forgotten."""

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device="cpu")

    def count(self, predicted: Tensor, labels: Tensor) -> None:
        """[rows] each, whole numbers on the host."""
        classes = len(self.counts)
        places = labels * classes + predicted
        self.counts += torch.bincount(places, minlength=classes**2).view(classes, classes)

    def metrics(self) -> dict[str, float]:
        """As a table of names: see the top of the file.

        mcc is Gorodkin's for many classes, 0 where all is one class. f1 is the mean over the classes that occur in truth or
        prediction, f1_binary that of the second of two classes.
        """
        rows = self.counts.tolist()  # Python's integers: squares of counts do not overflow
        true, predicted = [sum(row) for row in rows], [sum(column) for column in zip(*rows, strict=True)]
        hits, total = [row[place] for place, row in enumerate(rows)], sum(true)
        right = sum(hits)
        above = right * total - sum(t * p for t, p in zip(true, predicted, strict=True))
        below = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in true))
        f1 = [2 * each / (t + p) if t + p else None for each, t, p in zip(hits, true, predicted, strict=True)]
        occurring = [value for value in f1 if value is not None]
        found = {
            "accuracy": right / total if total else 0.0,
            "mcc": above / math.sqrt(below) if below else 0.0,
            "f1": sum(occurring) / len(occurring) if occurring else 0.0,
        }
        return found | ({"f1_binary": f1[1] or 0.0} if len(f1) == 2 else {})
