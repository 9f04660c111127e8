"""Text classification: one class for a text or a pair of texts, with an encoder or a decoder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from transformers import AutoModelForSequenceClassification

from narrowgauge import data
from narrowgauge.errors import DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Objective
from narrowgauge.train.model import ModelClass, own_configuration
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.classes import PROBLEM, chosen_classes, class_notes, labelled, names_of
from narrowgauge.train.tasks.confusion import class_scores
from narrowgauge.train.tasks.reading import header
from narrowgauge.train.tasks.tables import TableTask
from narrowgauge.train.tasks.task import Readings

CLASSIFIER = ModelClass(AutoModelForSequenceClassification, "model that classifies texts", new=True)


@dataclass
class ClassificationTask(TableTask):
    """Task "classification"; `labels` of an example is the class id."""

    name: ClassVar[str] = "classification"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "mcc"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        """The data columns with their classes, and the model class."""

        # A function, because `chosen_classes` reads the table only if the configuration names no
        # classes.
        def rows() -> Iterator[data.Record]:
            return data.records(config.data, [config.label_column], header=header(config))

        classes = chosen_classes(config, CLASSIFIER, rows)
        pad_id = padding_id(config, tokenizer)
        columns = data.Classification(
            classes=classes,
            text=config.text_column,
            pair=config.pair_column or None,
            label=config.label_column,
        )
        return columns, labelled(
            CLASSIFIER, names_of(classes), pad_token_id=pad_id, problem_type=PROBLEM
        )

    @classmethod
    def planned(cls, config: TrainConfig) -> TrainConfig:
        if config.classes:
            return config
        # A plan has no labels to read: take the number from the model's configuration, two at
        # least.
        known = getattr(own_configuration(config, CLASSIFIER), "num_labels", None) or 2
        return replace(config, classes=str(max(2, known)))

    def blank(self, width: int) -> dict[str, Any]:
        return super().blank(width) | {"labels": 0}

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        task.known["classes"] = task.classes
        learnt, held_out = (
            (example["labels"] for example in part) for part in (task.train, task.validation)
        )
        task.notes += class_notes(learnt, held_out, task.classes)
        return task

    @property
    def classes(self) -> list[str]:
        """Class names, in the order of the logits."""
        return list(self.model_class.options["id2label"].values())

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        return Objective(
            torch.compile(model) if self.config.compile else model,
            {},
            "of one class for each example",
        )

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        text = data.coloured_sample(self.tokenizer, example["input_ids"], None)
        text.append(f"  -> {self.classes[example['labels']]}", "bold green")
        return [text]

    def trivial(self) -> dict[str, Any]:
        return trivial.of_classes(
            [example["labels"] for example in self._evaluated], len(self.classes)
        )

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        return class_scores(readings, self.evaluation(model), len(self.classes))


def padding_id(config: TrainConfig, tokenizer: Any) -> int:
    """Token id by which a decoder finds the end of a text; DataError if there is none."""
    # Decoders of transformers classify the last token that is not pad_token_id.
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise DataError(
            f"{config.tokenizer or config.model}: the tokenizer has neither a padding nor an end-of-text token, and a decoder "
            "finds the end of a text by it. Set pad_token in its tokenizer_config.json.",
            code="classification.no-padding",
        )
    return int(found)
