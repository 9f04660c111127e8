"""Multiple choice, as in SWAG, RACE and ARC: the choice with the largest score is the answer.

The loss is -log softmax over the choices of a question. Each choice is one row of a batch.
`batch_size` counts questions, so a batch has more rows than that; `token_budget` counts the tokens
of all rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import AutoModelForMultipleChoice

from narrowgauge import data
from narrowgauge.data.choices import choices_of, padding_of
from narrowgauge.data.heads import choice_scores
from narrowgauge.errors import DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, Objective
from narrowgauge.train.model import ModelClass
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.tables import TableTask
from narrowgauge.train.tasks.task import Readings, total_of

CHOOSER = ModelClass(AutoModelForMultipleChoice, "model that chooses among several texts", new=True)
USUAL = 4  # choices of a question in a plan without data, as in SWAG, RACE and ARC


@dataclass
class ChoicesTask(TableTask):
    """Task "multiple-choice"; `labels` of an example is the position of the right choice."""

    name: ClassVar[str] = "multiple-choice"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "accuracy"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        columns = data.Choices(
            context=config.context_column or None, question=config.question_column or None,
            choices=tuple(_named(config)), label=config.label_column,
        )  # fmt: skip
        return columns, CHOOSER

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        most, longest = task.rows_per_example, task.known["longest"]
        if 0 < config.token_budget < most * longest and config.too_long != "skip":
            raise DataError(
                f"token_budget = {config.token_budget}: {most} choices of {longest} tokens do not fit. Set "
                f"{most * (longest + 15)} or more, or too_long = 'skip'.",
                code="choices.token-budget",
            )
        return task

    @cached_property
    def rows_per_example(self) -> int:
        """Largest number of choices of a question in either split."""
        if self.train is None:  # a plan, without data
            return len(_named(self.config)) if len(_named(self.config)) > 1 else USUAL
        return int(max(choices_of(part).max() for part in (self.train, self.validation)))

    def blank(self, width: int) -> dict[str, Any]:
        ids = super().blank(width)["input_ids"]
        return {"input_ids": [ids] * self.rows_per_example, "labels": 0}

    def epoch(self, number: int) -> data.Plan:
        plan, batching = super().epoch(number), self._batching
        steps: Any = plan.steps
        # The generic planner counts one row for each example, so padding is counted again over the
        # rows of all choices.
        padding = padding_of(
            self.train,
            steps,
            plan.widths,
            batching.multiple,
            batching.tokens_multiple,
            self.config.micro_batches,
        )
        return replace(plan, padding=padding)

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        forward = torch.compile(model) if self.config.compile else model
        return Objective(forward, {}, "of one choice for each question", scores=_scores)

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        shown = []
        for place, ids in enumerate(example["input_ids"]):
            shown.append(data.coloured_sample(self.tokenizer, ids, None))
            if place == example["labels"]:
                shown[-1].append("  -> this one", "bold green")
        return shown

    def trivial(self) -> dict[str, Any]:
        labels = [example["labels"] for example in self._evaluated]
        return trivial.of_choices(labels, choices_of(self._evaluated).tolist())

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = readings(self.evaluation(model), read)
        questions, right = (sum(counts[place] for _, counts in found) for place in (0, 1))
        return {
            "loss": total_of(found) / questions,
            "tokens": questions,
            "accuracy": right / questions,
        }


def _named(config: TrainConfig) -> list[str]:
    return [name.strip() for name in config.choices_column.split(",")]


def _scores(output: Any, batch: Batch) -> Tensor:
    return choice_scores(output.logits, batch["labels"])


def read(batch: Batch, scores: Tensor | None) -> tuple[int, int]:
    """Returns (questions, correctly answered questions).

    The first of equal scores counts as the answer.
    """
    assert scores is not None
    labels = batch["labels"].cpu()
    # Labels have one entry for each row; only the first row of a question carries the answer.
    first = labels != data.IGNORED
    return int(first.sum()), int((scores.cpu()[first].argmax(-1) == labels[first]).sum())
