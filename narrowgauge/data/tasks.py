"""Table tasks for text generation and classification: how a row becomes arrays of ids.

    Completion      prompt + completion; loss on the completion and its end-of-text token
    Chat            messages in the tokenizer's template; loss on the assistant's answers
    Classification  a text or a pair of texts, and a class
    Seq2Seq         a source for the encoder, a target for the decoder

Prompt and completion are tokenized as one text. A token that spans both counts as prompt, in chats
as well. A note reports such examples, because at inference the prompt is tokenized by itself and
ends in another token.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from narrowgauge.data.batches import IGNORED, Indices
from narrowgauge.data.cache import Values, token_dtype
from narrowgauge.data.chat import Span, answers, check_messages
from narrowgauge.data.encoder import Encoder
from narrowgauge.data.stored import Stored
from narrowgauge.data.strata import strata_of
from narrowgauge.data.tables import Record
from narrowgauge.data.task import Encoded, Item, Kind, Notes, Task
from narrowgauge.data.tokenizer import end_of_text
from narrowgauge.errors import ConfigError, DataError, closest

NUMBER = re.compile(r"-?\d{1,18}")
STRADDLING = (
    "{count} examples have a token across the border of prompt and completion; it counts as prompt, and what it holds of the "
    "completion is not learnt. A prompt that ends without a space, and a completion that begins with one, often helps."
)
STRADDLING_CHAT = (
    "{count} chats have a token across the border of a prompt and its answer; it counts as prompt, and what it holds of the answer "
    "is not learnt. A template whose prompt ends in a special token or a line break has none."
)
UNFINISHED = "{count} chats end without the end-of-text token {token}: the template does not write it behind the last answer."


class _Causal(Task):
    """A token sequence with a loss on some of its tokens."""

    kind: ClassVar[Kind] = "causal-lm"

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        # Stored as one byte per token; labels are derived from ids and mask.
        return {"input_ids": token_dtype(encoder.vocabulary - 1), "targets": np.dtype("u1")}

    def targets(self, example: Encoded) -> int:
        example["targets"][:1] = 0  # no token precedes the first one, so none predicts it
        return int(example["targets"].sum())

    @staticmethod
    def item(arrays: Item) -> Item:
        learnt = arrays.pop("targets") != 0
        return arrays | {"labels": np.where(learnt, arrays["input_ids"], IGNORED)}


@dataclass(frozen=True, kw_only=True)
class Completion(_Causal):
    """Columns with a prompt, which may be empty, and its completion."""

    prompt: str = "prompt"
    completion: str = "completion"

    @property
    def columns(self) -> list[str]:
        return [self.prompt, self.completion]

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        prompts = [row.text(self.prompt) for row in rows]
        texts = [
            prompt + row.text(self.completion) for prompt, row in zip(prompts, rows, strict=True)
        ]
        learnt = _learnt(
            rows, texts, [[(len(prompt), sys.maxsize)] for prompt in prompts], encoder, special=True
        )
        end = end_of_text(encoder.tokenizer)
        for row, ids, targets, straddles in learnt:
            notes[STRADDLING] += straddles
            if not len(ids) or ids[-1] != end:
                ids, targets = np.append(ids, end), np.append(targets, False)
            # An empty completion teaches nothing, not even to stop.
            targets[-1] = bool(row.values[self.completion])
            yield {"input_ids": ids, "targets": targets}


@dataclass(frozen=True, kw_only=True)
class Chat(_Causal):
    """A column with a list of messages, each with a role and a content.

    train_on  "answers": loss on all answers; "last": on the last one
    """

    messages: str = "messages"
    train_on: Literal["answers", "last"] = "answers"

    def __post_init__(self) -> None:
        if self.train_on not in ("answers", "last"):
            raise ConfigError(
                f"Chat: train_on {self.train_on!r}. Pass 'answers' or 'last'.", code="chat.train-on"
            )

    @property
    def columns(self) -> list[str]:
        return [self.messages]

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        chats = [check_messages(row.values[self.messages], row.origin) for row in rows]
        rendered = [
            answers(encoder.tokenizer, chat, row.origin, self.train_on)
            for chat, row in zip(chats, rows, strict=True)
        ]
        texts, spans = [text for text, _ in rendered], [found for _, found in rendered]
        end, token = encoder.tokenizer.eos_token_id, str(encoder.tokenizer.eos_token)
        # special=False: the template writes special tokens itself; adding them again would give two
        # beginning-of-text tokens.
        for _, ids, targets, straddles in _learnt(rows, texts, spans, encoder, special=False):
            notes[STRADDLING_CHAT] += straddles
            if end is not None and end not in ids[targets]:
                notes[UNFINISHED.replace("{token}", token)] += 1
            yield {"input_ids": ids, "targets": targets}


def _learnt(
    rows: Sequence[Record],
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    encoder: Encoder,
    *,
    special: bool,
) -> Iterator[tuple[Record, Values, Values, bool]]:
    """Yields (row, ids, targets, straddles) of each text.

    targets    bool per token: it starts inside a span of characters
    straddles  True if a token crosses the start of a span
    """
    for row, wanted, (ids, places) in zip(
        rows, spans, encoder.spans(texts, special=special), strict=True
    ):
        encoder.check_start(ids, row.origin)
        targets, straddles = np.zeros(len(ids), bool), False
        for first, last in wanted:
            targets |= (places[:, 0] >= first) & (places[:, 0] < last)
            straddles |= bool(((places[:, 0] < first) & (places[:, 1] > first)).any())
        yield row, ids, targets, straddles


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Columns with a text, optionally a second one, and a class.

    classes  names in the order of their ids, or their number if the data holds ids
    """

    classes: tuple[str, ...] | int
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    kind: ClassVar[Kind] = "classification"
    refits: ClassVar[bool] = True
    learnt: ClassVar[str] = "text"

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
    def strata(stored: Stored) -> Indices:
        """Class of each example, or a group of classes with similar length."""
        return strata_of(stored.numbers("labels"), stored.sizes("input_ids"))

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


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Task):
    """Columns with the encoder's source and the decoder's target.

    keeps_text  also store the target's text, as UTF-8 in an array "text" that no batch contains
    """

    source: str = "source"
    target: str = "target"
    keeps_text: bool = False
    aside: ClassVar[frozenset[str]] = frozenset({"text"})
    kind: ClassVar[Kind] = "seq2seq"
    refits: ClassVar[bool] = True

    @property
    def columns(self) -> list[str]:
        return [self.source, self.target]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        ids = token_dtype(encoder.vocabulary - 1)
        return {"input_ids": ids, "labels": ids} | (
            {"text": np.dtype("u1")} if self.keeps_text else {}
        )

    def length(self, example: Encoded) -> int:
        return max(len(example["input_ids"]), len(example["labels"]))

    @staticmethod
    def lengths(stored: Stored) -> Indices:
        return np.maximum(stored.sizes("input_ids"), stored.sizes("labels"))

    tokens = lengths

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        sources = encoder.ids([row.text(self.source) for row in rows], max_length=max_length)
        targets = encoder.ids(
            [row.text(self.target) for row in rows], target=True, max_length=max_length
        )
        for row, source, target in zip(rows, sources, targets, strict=True):
            encoder.check_start(source["input_ids"], row.origin)
            # The original text, for BLEU: decoding the ids would lose what the tokenizer
            # normalizes.
            text = (
                {"text": np.frombuffer(row.text(self.target).encode(), np.uint8)}
                if self.keeps_text
                else {}
            )
            yield {"input_ids": source["input_ids"], "labels": target["input_ids"], **text}
