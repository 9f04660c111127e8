"""Extractive questions (SQuAD): windows over long contexts, and each answer's token positions.

    [CLS] question [SEP] context, tokens 0 ... n - 1        [SEP]
    [CLS] question [SEP] context, from token n - stride on  [SEP]   ...

Labels are the positions of the first and last token of the first reference answer. A window without
the whole answer has the no-answer position twice: the classifier token (cls, else bos, else 0). All
windows of an unanswerable question have it, too.

An answer is a text and the character where it starts. The answers column holds a list of {"text",
"answer_start"}, or an object with a list for each key, as in Hugging Face tables. In CSV it holds
JSON. SQuAD's own files (.json) are read by `squad`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from narrowgauge.data.batches import Indices
from narrowgauge.data.cache import Values, token_dtype
from narrowgauge.data.encoder import Encoder
from narrowgauge.data.stored import GROUP, GROUPS, Stored, group_of
from narrowgauge.data.tables import Record
from narrowgauge.data.task import Encoded, Item, Kind, Notes, Task
from narrowgauge.errors import ConfigError, DataError

Answer = tuple[str, int]  # text, and the character of the context where it starts
# Array: context and all answers as UTF-8 JSON, at the first window of a question; empty elsewhere.
TEXT = "text"
OFFSETS = "offsets"  # array: start and end character of each context token, -1 for other tokens
KNOWN = "known"  # array: number of reference answers of the question
FORM = "a list of objects with 'text' and 'answer_start', or an object with a list of each"


@dataclass(frozen=True, kw_only=True)
class Questions(Task):
    """Columns with a question, its context, and the answers in it; [] if there is no answer.

    stride  tokens of the context that neighbouring windows share
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    stride: int = 128
    kind: ClassVar[Kind] = "question-answering"
    windows: ClassVar[bool] = True
    aside: ClassVar[frozenset[str]] = frozenset((TEXT, OFFSETS, KNOWN, GROUP))

    def __post_init__(self) -> None:
        if self.stride < 0:
            raise ConfigError(
                f"Questions: stride {self.stride}. Pass 0 or more tokens.", code="questions.stride"
            )

    @property
    def columns(self) -> list[str]:
        return [self.question, self.context, self.answers]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        return {
            "input_ids": token_dtype(encoder.vocabulary - 1), "token_type_ids": np.dtype("u1"), "labels": np.dtype("<u4"),
            OFFSETS: np.dtype("<i4"), TEXT: np.dtype("u1"), KNOWN: np.dtype("<u4"), GROUP: GROUPS,
        }  # fmt: skip

    @staticmethod
    def item(arrays: Item) -> Item:
        first, last = arrays["labels"].tolist()
        return arrays | {"labels": (first, last)}

    @staticmethod
    def strata(stored: Stored) -> Indices:
        """1 for windows that hold an answer, else 0."""
        last = stored.numbers("labels").tolist()
        return np.array(
            # A label at a context token (offset >= 0) is an answer; the classifier token has offset
            # -1.
            [int(stored.array(OFFSETS, place)[2 * token]) >= 0 for place, token in enumerate(last)],
            np.int64,
        )

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[list[Encoded]]:
        answers = [self.answers_of(row) for row in rows]
        pairs = [(row.text(self.question).strip(), row.text(self.context)) for row in rows]
        found = encoder.windows(pairs, max_length=max_length, stride=self.stride)
        for row, pair, known, windows in zip(rows, pairs, answers, found, strict=True):
            encoder.check_start(windows[0]["input_ids"], row.origin)
            yield list(_encoded(pair[1], known, windows, encoder))

    def answers_of(self, row: Record) -> list[Answer]:
        """Reference answers of a row.

        Raises DataError if one is not at its stated place in the context.
        """
        question, context = row.text(self.question), row.text(self.context)
        for column, text in ((self.question, question), (self.context, context)):
            if not text.strip():
                raise DataError(
                    f"{row.origin}: column {column!r} is empty. Correct the row, or remove it.",
                    code="questions.empty-column",
                )
        found = list(_pairs(row.values[self.answers], f"{row.origin}: column {self.answers!r}"))
        for text, start in found:
            there = context[start : start + len(text)] if start >= 0 else ""
            if there != text:
                raise DataError(
                    f"{row.origin}: the answer {text!r} does not stand at character {start} of the context, where {there!r} is. "
                    "Count characters (Unicode code points) from 0, and correct the row.",
                    code="questions.answer-place",
                )
            if not text.strip():
                raise DataError(
                    f"{row.origin}: an answer is empty. A question without an answer has an empty list in column {self.answers!r}.",
                    code="questions.empty-answer",
                )
        return found


def _pairs(value: Any, where: str) -> Iterator[Answer]:
    """Yields (text, start) of each answer, from any of the accepted forms."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise DataError(
                f"{where} holds {value[:60]!r}, which is no JSON. Write {FORM}.",
                code="questions.json",
            ) from None
    if isinstance(value, dict):
        lists = value.get("text"), value.get("answer_start")
        if not all(isinstance(each, list) for each in lists) or len(lists[0]) != len(lists[1]):  # type: ignore[arg-type]
            raise DataError(
                f"{where} holds an object without equally long lists 'text' and 'answer_start'. Write {FORM}.",
                code="questions.lists",
            )
        value = [{"text": text, "answer_start": start} for text, start in zip(*lists, strict=True)]  # type: ignore[arg-type]
    if not isinstance(value, list):
        raise DataError(f"{where} holds {value!r:.60}. Write {FORM}.", code="questions.answers")
    for each in value:
        text, start = (
            each.get(key) if isinstance(each, dict) else None for key in ("text", "answer_start")
        )
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise DataError(
                f"{where} holds the answer {each!r:.60}. Write {FORM}, texts and whole numbers.",
                code="questions.answer",
            )
        yield text, start


def _encoded(
    context: str, answers: list[Answer], windows: list[dict[str, Values]], encoder: Encoder
) -> Iterator[Encoded]:
    text = np.frombuffer(
        json.dumps({"context": context, "answers": [each for each, _ in answers]}).encode(),
        np.uint8,
    )
    # All questions on one context form a group: a split must not put the same text on both sides.
    group = group_of(context)
    for number, window in enumerate(windows):
        yield {
            "input_ids": window["input_ids"], "token_type_ids": window["token_type_ids"],
            "labels": np.array(_labels(answers[0] if answers else None, window, encoder)),
            OFFSETS: window["offsets"].reshape(-1), TEXT: text if number == 0 else text[:0],
            KNOWN: np.array([len(answers)]), GROUP: group,
        }  # fmt: skip


def _labels(answer: Answer | None, window: dict[str, Values], encoder: Encoder) -> tuple[int, int]:
    """(first, last) token of the answer; the no-answer position twice if it is not all inside."""
    offsets = window["offsets"]
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    nowhere = nowhere_of(window["input_ids"], encoder.tokenizer)
    if answer is None or not len(inside):
        return nowhere, nowhere
    starts, ends = offsets[inside].T
    first, end = answer[1], answer[1] + len(answer[0])
    if starts[0] > first or ends[-1] < end:
        return nowhere, nowhere
    # An answer can start or end inside a token; take the token that covers the character.
    begins = np.searchsorted(starts, first, side="right") - 1
    return int(inside[begins]), int(inside[max(begins, np.searchsorted(ends, end, side="left"))])


def nowhere_of(ids: Values, tokenizer: Any) -> int:
    """Position that means "no answer": the cls token's, else the bos token's, else 0."""
    for token in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        if token is not None and len(places := np.flatnonzero(ids == token)):
            return int(places[0])
    return 0
