"""Encoders, or decoders, that name the class of a text or of a pair of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import AutoModelForSequenceClassification

from narrowgauge import data
from narrowgauge.errors import DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Objective
from narrowgauge.train.model import ModelClass, own_configuration
from narrowgauge.train.tasks import tables
from narrowgauge.train.tasks.scores import Confusion
from narrowgauge.train.tasks.table_task import TableTask, tokenizer_of
from narrowgauge.train.tasks.task import Scorer

SHOWN_CLASSES = 10
MOST_CLASSES = 1000  # more distinct labels than that are hardly classes, but texts or numbers
CLASSIFIER = ModelClass(AutoModelForSequenceClassification, "model that classifies texts", new=True)


@dataclass
class ClassificationTask(TableTask):
    """classes: their names, in the order of the logits."""

    classes: tuple[str, ...]

    name: ClassVar[str] = "classification"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "mcc"

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        tokenizer = tokenizer_of(config)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad_id is None:
            raise DataError(
                f"{config.tokenizer or config.model}: the tokenizer has neither a padding nor an end-of-text token, and a decoder "
                "finds the end of a text by it. Set pad_token in its tokenizer_config.json."
            )
        classes = chosen_classes(config)
        names = tuple(map(str, classes if isinstance(classes, tuple) else range(classes)))
        columns = data.Classification(
            classes=classes, text=config.text_column, pair=config.pair_column or None, label=config.label_column
        )
        model_class = with_classes(names, pad_id)
        table, notes = tables.read(config, columns, tokenizer, model_class)
        table.summary["classes"] = list(names)
        return cls(config, tokenizer, [*notes, *_class_notes(table, names)], model_class, table, names)

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        return Objective.of_classes(model, compiled=self.config.compile)

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        text = data.coloured_sample(self.tokenizer, example["input_ids"], None)
        text.append(f"  -> {self.classes[example['labels']]}", "bold green")
        return [text]

    def evaluate(self, model: Any, scorer: Scorer) -> dict[str, Any]:
        confusion, total, examples = Confusion(len(self.classes)), 0.0, 0
        for batch in self.evaluation(model):
            with scorer.context():
                loss, logits = scorer.objective.scored(batch, scorer.device)
            total += float(loss)
            examples += len(batch["labels"])
            confusion.add(logits, batch["labels"])
        return {"loss": total / examples, "tokens": examples, **confusion.metrics()}

    def sample(self, model: Any) -> None:
        return None


def _class_notes(table: tables.Tables, names: tuple[str, ...]) -> list[str]:
    """How many examples of each class there are, and what that makes of the metrics."""
    sides = [Counter(example["labels"] for example in part) for part in (table.train, table.validation)]
    shown = ", ".join(
        f"{name} {sides[0][place]} and {sides[1][place]}" for place, name in enumerate(names[:SHOWN_CLASSES])
    )
    more = f", and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
    notes = [f"Classes, with examples to train on and held out: {shown}{more}."]
    if len(sides[1]) == 1:
        only = names[next(iter(sides[1]))]
        notes.append(
            f"Every held-out example ({len(table.validation)}) is of class {only}, so mcc is 0 whatever the model says. Pass "
            "validation_data, or a larger validation_fraction."
        )
    return notes


def with_classes(names: tuple[str, ...], pad_id: int) -> ModelClass:
    """The kind of model that has these classes, and pads with this token."""
    ids = {name: place for place, name in enumerate(names)}
    options = {
        "num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": ids, "pad_token_id": pad_id,
        "problem_type": "single_label_classification",
    }  # fmt: skip
    return ModelClass(CLASSIFIER.auto, CLASSIFIER.words, options, new=True)


def chosen_classes(config: TrainConfig) -> tuple[str, ...] | int:
    """The classes as configured; else those of the training data, in the model's own order if it has the same."""
    given = config.classes.strip()
    if given.isdecimal():
        return int(given)
    if given:
        return tuple(name.strip() for name in given.split(","))
    return _model_order(config, classes_of(config.data, config.label_column, tables.header(config)))


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


def _model_order(config: TrainConfig, found: tuple[str, ...] | int) -> tuple[str, ...] | int:
    """A model that was trained on these classes keeps the order of its logits."""
    own = getattr(own_configuration(config, CLASSIFIER), "id2label", None) or {}
    names = tuple(str(own[place]) for place in sorted(own))
    if isinstance(found, tuple) and all(isinstance(name, str) for name in found) and set(names) == set(found):
        return names
    return found
