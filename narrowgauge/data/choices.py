"""Multiple-choice examples (SWAG, RACE, ARC): each choice is encoded as a row of its own.

    [CLS] context [SEP] question choice [SEP]       with a context and a question
    [CLS] context [SEP] choice [SEP]                with one alone

Choices are a list, one column per choice, or an object with the lists `text` and `label` (ARC). The
label is the zero-based number of the right choice, a letter from A, or an entry of the object's
`label` list. Examples may have different numbers of choices; batches contain no filler rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from narrowgauge.data.batches import Indices
from narrowgauge.data.cache import token_dtype
from narrowgauge.data.encoder import Encoder
from narrowgauge.data.plan import runs
from narrowgauge.data.rows import PaddingReport, Waste, round_up, width_of
from narrowgauge.data.stored import GROUP, GROUPS, Stored, group_of
from narrowgauge.data.tables import Record, refuse_half_a_pair
from narrowgauge.data.task import Encoded, Item, Kind, Notes, Task
from narrowgauge.errors import ConfigError, DataError

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
    kind: ClassVar[Kind] = "multiple-choice"
    refits: ClassVar[bool] = True
    aside: ClassVar[frozenset[str]] = frozenset((LONGEST, GROUP))
    learnt: ClassVar[str] = "text"

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
    def lengths(stored: Stored) -> Indices:
        return np.asarray(stored.numbers(LONGEST), np.int64)

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


def choices_of(stored: Stored) -> Indices:
    """Number of choices of each example, int64."""
    return stored.sizes(SIZES)


def padding_of(
    stored: Stored,
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
