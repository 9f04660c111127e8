"""Multiple choice (SWAG, RACE, ARC): the choice with the largest score is the answer.

Each choice is encoded as a row of its own:

    [CLS] context [SEP] question choice [SEP]       with a context and a question
    [CLS] context [SEP] choice [SEP]                with one alone

Choices are a list, one column per choice, or an object with the lists `text` and `label` (ARC). The
label is the zero-based number of the right choice, a letter from A, or an entry of the object's
`label` list. Examples may have different numbers of choices; batches contain no filler rows.

The loss is -log softmax over the choices of a question.
`batch_size` counts questions, so a batch has more rows than that; `token_budget` counts the tokens
of all rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from torch import Tensor
from transformers import AutoModelForMultipleChoice

from narrowgauge import data
from narrowgauge.data.batches import IGNORED, Indices
from narrowgauge.data.cache import token_dtype
from narrowgauge.data.epochs import runs
from narrowgauge.data.example_arrays import GROUP, GROUPS, ExampleArrays, group_of
from narrowgauge.data.rows import PaddingReport, Waste, round_up, width_of
from narrowgauge.data.tables import Record, refuse_half_a_pair
from narrowgauge.data.task import Encoded, Item, Notes, Task
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.loss import Batch, whole_logits
from narrowgauge.train.pretrained import ModelClass
from narrowgauge.train.tasks.table import TableTask
from narrowgauge.train.tasks.task import Readings, total_of
from narrowgauge.train.tasks.trivial import counts_of, entropy

if TYPE_CHECKING:
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.train.config.settings import TrainConfig

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SIZES, LONGEST = "sizes", "longest"  # array names: tokens of each choice, tokens of the longest


@dataclass(frozen=True, kw_only=True)
class Choices(Task):
    """Columns of a multiple-choice table; either context or question may be None.

    context   column with a text
    question  column with a question about it
    choices   one column with a list, or several columns with one choice each
    label     column with the right choice
    """

    context: str | None = "context"
    question: str | None = "question"
    choices: tuple[str, ...] = ("choices",)
    label: str = "label"
    kind: ClassVar[str] = "multiple-choice"
    can_truncate: ClassVar[bool] = True
    evaluation_arrays: ClassVar[frozenset[str]] = frozenset((LONGEST, GROUP))
    target_noun: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if self.context is None and self.question is None:
            raise ConfigError(
                "Choices: neither context nor question. Name the column of one at least.",
                code="choices.no-context",
            )
        if not self.choices or len(set(self.columns)) != len(self.columns):
            raise ConfigError(
                f"Choices: columns {self.columns}. Name each once, and one with choices at least.",
                code="choices.columns",
            )

    @property
    def columns(self) -> list[str]:
        return [
            *(each for each in (self.context, self.question) if each is not None),
            *self.choices,
            self.label,
        ]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        return {
            "input_ids": token_dtype(encoder.vocabulary - 1), "token_type_ids": np.dtype("u1"), SIZES: np.dtype("<u4"),
            LONGEST: np.dtype("<u4"), "labels": np.dtype("<i4"), GROUP: GROUPS,
        }  # fmt: skip

    def length(self, example: Encoded) -> int:
        return int(example[LONGEST][0])

    @staticmethod
    def lengths(stored: ExampleArrays) -> Indices:
        return np.asarray(stored.scalars(LONGEST), np.int64)

    @staticmethod
    def item(arrays: Item) -> Item:
        sizes, label = arrays.pop(SIZES), int(arrays.pop("labels")[0])
        borders = np.cumsum(sizes)[:-1]
        return {name: np.split(values, borders) for name, values in arrays.items()} | {
            "labels": label
        }

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        found = [self.read(row) for row in rows]
        encoded = iter(
            encoder.ids([text for texts, _ in found for text in texts], max_length=max_length)
        )
        for row, (texts, label) in zip(rows, found, strict=True):
            # All rows' choices were encoded in one call, for the tokenizer's threads.
            parts = [next(encoded) for _ in texts]
            for part in parts:
                encoder.check_start(part["input_ids"], row.origin)
            sizes = np.array([len(part["input_ids"]) for part in parts])
            # All choices of an example lie in one array; SIZES holds the borders.
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            yield {
                **joined,
                SIZES: sizes,
                LONGEST: np.array([sizes.max()]),
                "labels": np.array([label]),
                GROUP: group_of(texts[0][0]),
            }

    def read(self, row: Record) -> tuple[list[tuple[str, str]], int]:
        """Returns ([(first text, second text) of each choice], number of the right one).

        Raises DataError with the row's origin.
        """
        choices, names = self._choices(row)
        if len(choices) < 2:
            raise DataError(
                f"{row.origin}: {len(choices)} choices, and two at least are needed. Correct the row.",
                code="choices.too-few",
            )
        for place, choice in enumerate(choices):
            if not isinstance(choice, str) or not choice.strip():
                raise DataError(
                    f"{row.origin}: choice {place} is {choice!r:.60}, and must be a text. Correct the row.",
                    code="choices.choice",
                )
            refuse_half_a_pair(choice, f"{row.origin}: choice {place}")
        asked = [row.text(column) for column in (self.context, self.question) if column is not None]
        if not "".join(asked).strip():
            raise DataError(
                f"{row.origin}: there is neither a context nor a question. Correct the row, or remove it.",
                code="choices.empty-row",
            )
        first, *more = asked
        pairs: list[tuple[str, str]] = [(first, " ".join((*more, choice))) for choice in choices]
        return pairs, self._label(row, len(choices), names)

    def _choices(self, row: Record) -> tuple[list[Any], list[str]]:
        """Returns (choices, their labels in the row or [])."""
        if len(self.choices) > 1:
            return [row.text(column) for column in self.choices], []
        value = row.values[self.choices[0]]
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        # ARC's form; the labels may be "A", "B", ... or "1", "2", ....
        if isinstance(value, dict):
            texts, names = value.get("text"), value.get("label")
            if (
                isinstance(texts, list)
                and isinstance(names, list)
                and len(texts) == len(names) == len(set(map(str, names)))
            ):
                return texts, list(map(str, names))
            value = None
        if not isinstance(value, list):
            raise DataError(
                f"{row.origin}: column {self.choices[0]!r} holds no list of texts, and no object with the lists 'text' and 'label'. "
                "Write one of them, or name the columns of all choices with commas.",
                code="choices.list",
            )
        return value, []

    def _label(self, row: Record, count: int, names: list[str]) -> int:
        """Number of the right choice. Raises DataError for a label that names no choice."""
        value = row.values[self.label]
        known = names or [*map(str, range(count))]
        text = (
            str(value).strip()
            if isinstance(value, str | int) and not isinstance(value, bool)
            else ""
        )
        if text in known:
            return known.index(text)
        if not names and len(text) == 1 and text in LETTERS[:count]:
            return LETTERS.index(text)
        kinds = (
            f"one of {', '.join(map(repr, names))}"
            if names
            else f"a number from 0 to {count - 1} or a letter from A to {LETTERS[min(count, len(LETTERS)) - 1]}"
        )
        raise DataError(
            f"{row.origin}: label {value!r} in column {self.label!r} names none of {count} choices: it must be {kinds}. Correct the row.",
            code="choices.label",
        )


def choices_of(stored: ExampleArrays) -> Indices:
    """Number of choices of each example, int64."""
    return stored.sizes(SIZES)


def padding_of(
    stored: ExampleArrays,
    steps: Sequence[Sequence[Sequence[int]]],
    widths: tuple[int, ...],
    multiple: int,
    tokens_multiple: int,
    micro_batches: int = 1,
) -> PaddingReport:
    """Padding report of a plan in which every choice is a row.

    steps  steps[step][rank] lists the examples of a batch
    """
    longest, counts, tokens = Choices.lengths(stored), choices_of(stored), stored.sizes("input_ids")
    batches = [np.asarray(batch) for step in steps for batch in step]
    drawn = np.concatenate(batches) if batches else np.zeros(0, np.int64)
    total = int(tokens[drawn].sum())

    def waste(parts: list[Indices], wide: Any) -> Waste:
        return Waste(
            total,
            sum(
                int(counts[part].sum()) * wide(int(longest[part].max()), int(counts[part].sum()))
                for part in parts
            ),
        )

    cut = [np.asarray(run) for batch in batches for run in runs(batch.tolist(), micro_batches)]
    # Baseline for the report; a fixed seed keeps the figure reproducible.
    mixed = (
        np.array_split(np.random.default_rng(0).permutation(drawn), max(1, len(batches)))
        if batches
        else []
    )
    return PaddingReport(
        fixed=waste([drawn] if len(drawn) else [], lambda size, rows: round_up(size, multiple)),
        shuffled=waste(
            [part for part in mixed if len(part)], lambda size, rows: round_up(size, multiple)
        ),
        planned=waste(cut, lambda size, rows: width_of(size, rows, widths, tokens_multiple)),
    )


def recounted(
    plan: data.EpochPlan, stored: ExampleArrays, batching: data.Batching, micro_batches: int
) -> data.EpochPlan:
    """The same plan, with its padding counted over the rows of all choices.

    The generic planner counts one row for each example.
    """
    steps: Any = plan.steps
    padding = padding_of(
        stored,
        steps,
        plan.widths,
        batching.multiple,
        batching.tokens_multiple,
        micro_batches,
    )
    return replace(plan, padding=padding)


CHOOSER = ModelClass(AutoModelForMultipleChoice, "model that chooses among several texts", new=True)
USUAL = 4  # choices of a question in a plan without data, as in SWAG, RACE and ARC


@dataclass
class ChoicesTask(TableTask):
    """Task "multiple-choice"; `labels` of an example is the position of the right choice."""

    name: ClassVar[str] = "multiple-choice"
    options: ClassVar[Mapping[str, Any]] = {}
    loss_words: ClassVar[str] = "of one choice for each question"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        columns = Choices(
            context=config.column_of("context") or None, question=config.column_of("question") or None,
            choices=tuple(_named(config)), label=config.column_of("label"),
        )  # fmt: skip
        return columns, CHOOSER

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        most, longest = task.rows_per_example, task.data_facts["longest"]
        if 0 < config.token_budget < most * longest and config.too_long != "skip":
            raise DataError(
                f"batch.token_budget = {config.token_budget}: {most} choices of {longest} tokens do not fit. Set "
                f"{most * (longest + 15)} or more, or data.too_long = 'skip'.",
                code="choices.token-budget",
            )
        return task

    @cached_property
    def rows_per_example(self) -> int:
        """Largest number of choices of a question in either split."""
        if self.train is None:  # a plan, without data
            return len(_named(self.config)) if len(_named(self.config)) > 1 else USUAL
        return int(max(choices_of(part).max() for part in (self.train, self.validation)))

    def dummy_example(self, width: int) -> dict[str, Any]:
        ids = super().dummy_example(width)["input_ids"]
        return {"input_ids": [ids] * self.rows_per_example, "labels": 0}

    def epoch(self, number: int) -> data.EpochPlan:
        plan = super().epoch(number)
        return recounted(plan, self.train, self._batching, self.config.micro_batches)

    @staticmethod
    def scores(output: Any, batch: Batch) -> Tensor:
        return choice_scores(whole_logits(output, batch), batch["labels"])

    def show_example(self, example: Mapping[str, Any]) -> list[Any]:
        shown = []
        for place, ids in enumerate(example["input_ids"]):
            shown.append(data.coloured_sample(self.tokenizer, ids, None))
            if place == example["labels"]:
                shown[-1].append("  -> this one", "bold green")
        return shown

    def trivial(self) -> dict[str, Any]:
        labels = [example["labels"] for example in self.evaluation_set]
        return of_choices(labels, choices_of(self.evaluation_set).tolist())

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = readings(self.evaluation(model), read)
        questions, right = (sum(counts[place] for _, counts in found) for place in (0, 1))
        return {
            "loss": total_of(found) / questions,
            "tokens": questions,
            "accuracy": right / questions,
        }


def _named(config: TrainConfig) -> list[str]:
    return [name.strip() for name in config.column_of("choices").split(",")]


def choice_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Scores [total, total]: row i holds the logits of the choices of row i's question.

    logits  [total, 1], one for each choice
    labels  [total], not IGNORED at the first choice of each question

    Questions may have different numbers of choices. No shape depends on a value, so a GPU is not
    synchronized. Memory: total^2 elements.
    """
    # A cumulative sum numbers the questions without a host sync.
    question = (labels.to(logits.device) != IGNORED).cumsum(0)
    same = question[:, None] == question[None, :]
    return logits.view(1, -1).expand(len(same), -1).masked_fill(~same, -math.inf)


def of_choices(labels: Sequence[int], choices: Sequence[int]) -> dict[str, Any]:
    """Most frequent answer position, or a uniform guess over the choices of each question.

    labels   position of the right choice of each question
    choices  number of choices of each question
    """
    counts, sizes = counts_of([np.asarray(labels)]), np.asarray(choices, np.float64)
    return {
        "predictor": "places of answers",
        "loss": min(entropy(counts), float(np.log(sizes).mean())),
        "accuracy": max(float(counts.max() / counts.sum()), float((1 / sizes).mean())),
    }


def read(batch: Batch, scores: Tensor | None) -> tuple[int, int]:
    """Returns (questions, correctly answered questions).

    The first of equal scores counts as the answer.
    """
    assert scores is not None
    labels = batch["labels"].cpu()
    # Labels have one entry for each row; only the first row of a question carries the answer.
    first = labels != data.IGNORED
    return int(first.sum()), int((scores.cpu()[first].argmax(-1) == labels[first]).sum())
