"""Text classification: one class for a text or a pair of texts, with an encoder or a decoder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from transformers import AutoModelForSequenceClassification

from narrowgauge import data
from narrowgauge.data.cache import token_dtype
from narrowgauge.data.strata import strata_of
from narrowgauge.data.task import Encoded, Item, Notes, Task
from narrowgauge.errors import ConfigError, DataError, closest
from narrowgauge.train.pretrained import ModelClass, own_configuration
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.classes import (
    PROBLEM,
    chosen_classes,
    class_notes,
    names_of,
    padding_id,
    with_labels,
)
from narrowgauge.train.tasks.confusion import class_scores
from narrowgauge.train.tasks.reading import header
from narrowgauge.train.tasks.table import TableTask

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.example_arrays import ExampleArrays
    from narrowgauge.data.tables import Record
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.tasks.task import Readings

NUMBER = re.compile(r"-?\d{1,18}")
CLASSIFIER = ModelClass(AutoModelForSequenceClassification, "model that classifies texts", new=True)


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Columns with a text, optionally a second one, and a class.

    classes  names in the order of their ids, or their number if the data holds ids
    """

    classes: tuple[str, ...] | int
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    kind: ClassVar[str] = "classification"
    can_truncate: ClassVar[bool] = True
    target_noun: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        names = self.classes if isinstance(self.classes, tuple) else ()
        if self.count < 2 or len(set(names)) != len(names):
            raise ConfigError(
                f"Classification: classes {self.classes!r}. Name at least two, each once.",
                code="classification.classes",
            )

    @property
    def count(self) -> int:
        """Number of classes."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def columns(self) -> list[str]:
        return [self.text, *([self.pair] if self.pair is not None else []), self.label]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        ids = token_dtype(encoder.vocabulary - 1)
        return {"input_ids": ids, "token_type_ids": np.dtype("u1"), "labels": np.dtype("<i4")}

    @staticmethod
    def item(arrays: Item) -> Item:
        return arrays | {"labels": int(arrays["labels"][0])}

    @staticmethod
    def strata(stored: ExampleArrays) -> Indices:
        """Class of each example, or a group of classes with similar length."""
        return strata_of(stored.scalars("labels"), stored.sizes("input_ids"))

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        labels = [self.class_of(row) for row in rows]
        examples = encoder.rows(rows, self.text, self.pair, max_length)
        return (
            {**example, "labels": np.array([label])}
            for example, label in zip(examples, labels, strict=True)
        )

    def class_of(self, row: Record) -> int:
        """Class id of a row. Raises DataError for an unknown label."""
        value = row.values[self.label]
        if isinstance(self.classes, tuple):
            if value in self.classes:
                return self.classes.index(value)
            near = closest(str(value), self.classes)
            listing = (
                f"Closest: {near}."
                if near
                else f"Classes: {', '.join(map(repr, self.classes[:20]))}."
            )
            raise DataError(
                f"{row.origin}: label {value!r} in column {self.label!r} is none of the {self.count} classes. {listing} "
                "Correct the row, or name all classes.",
                code="classification.label",
            )
        number = int(value) if isinstance(value, str) and NUMBER.fullmatch(value.strip()) else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.count:
            raise DataError(
                f"{row.origin}: label {value!r} in column {self.label!r} is not a class from 0 to {self.count - 1}. Correct the row, "
                "pass the number of classes that the data has, or name them.",
                code="classification.number",
            )
        return number


@dataclass
class ClassificationTask(TableTask):
    """Task "classification"; `labels` of an example is the class id."""

    name: ClassVar[str] = "classification"
    options: ClassVar[Mapping[str, Any]] = {}
    loss_words: ClassVar[str] = "of one class for each example"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        """The data columns with their classes, and the model class."""

        # A function, because `chosen_classes` reads the table only if the configuration names no
        # classes.
        def rows() -> Iterator[data.Record]:
            return data.records(config.data, [config.column_of("label")], header=header(config))

        classes = chosen_classes(config, CLASSIFIER, rows)
        pad_id = padding_id(config, tokenizer)
        columns = Classification(
            classes=classes,
            text=config.column_of("text"),
            pair=config.column_of("pair") or None,
            label=config.column_of("label"),
        )
        return columns, with_labels(
            CLASSIFIER, names_of(classes), pad_token_id=pad_id, problem_type=PROBLEM
        )

    @classmethod
    def config_without_data(cls, config: TrainConfig) -> TrainConfig:
        if config.classes:
            return config
        # A plan has no labels to read: take the number from the model's configuration, two at
        # least.
        known = getattr(own_configuration(config, CLASSIFIER), "num_labels", None) or 2
        return replace(config, classes=str(max(2, known)))

    def dummy_example(self, width: int) -> dict[str, Any]:
        return super().dummy_example(width) | {"labels": 0}

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        task.data_facts["classes"] = task.classes
        learnt, held_out = (
            (example["labels"] for example in part) for part in (task.train, task.validation)
        )
        task.notes += class_notes(learnt, held_out, task.classes)
        return task

    @property
    def classes(self) -> list[str]:
        """Class names, in the order of the logits."""
        return list(self.model_class.options["id2label"].values())

    def show_example(self, example: Mapping[str, Any]) -> list[Any]:
        text = data.coloured_sample(self.tokenizer, example["input_ids"], None)
        text.append(f"  -> {self.classes[example['labels']]}", "bold green")
        return [text]

    def trivial(self) -> dict[str, Any]:
        return trivial.of_classes(
            [example["labels"] for example in self.evaluation_set], len(self.classes)
        )

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        return class_scores(readings, self.evaluation(model), len(self.classes))
