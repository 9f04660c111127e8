"""Extractive question answering, as in SQuAD 1 and 2: the answer is a span of the context.

A long context is cut into windows:

    [CLS] question [SEP] context, tokens 0 ... n - 1        [SEP]
    [CLS] question [SEP] context, from token n - stride on  [SEP]   ...

Labels are the positions of the first and last token of the first reference answer. A window without
the whole answer has the no-answer position twice: the classifier token (cls, else bos, else 0). All
windows of an unanswerable question have it, too.

An answer is a text and the character where it starts. The answers column holds a list of {"text",
"answer_start"}, or an object with a list for each key, as in Hugging Face tables. In CSV it holds
JSON. SQuAD's own files (.json) are read by `squad`.

The loss is -log p of the first and of the last token, averaged over both and over all windows;
padding gets probability 0. An evaluation takes the best span over all windows of a question:

    score of a span   first[i] + last[j],  i <= j < i + longest, both context tokens; maximum
                      over all windows
    no answer         first[0] + last[0] at the no-answer position; minimum over all windows
    exact match       1 if the normalized texts are equal
    F1                2 p r / (p + r) over the multiset of normalized words that both texts contain

Normalization: lower case, no ASCII punctuation, no articles (a, an, the), single spaces. Of several
reference answers the best score counts. A question without a reference answer scores 1 for the
empty text and 0 for any other. Sources: Rajpurkar et al. 2016 and 2018.
If the data contain questions without an answer, "no answer" is predicted where its score exceeds
the best span's.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering

from narrowgauge import data
from narrowgauge.data.cache import Values, token_dtype
from narrowgauge.data.example_arrays import GROUP, GROUPS, ExampleArrays, group_of
from narrowgauge.data.task import Encoded, Item, Notes, Task
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.pretrained import ModelClass
from narrowgauge.train.tasks.reading import longest_example
from narrowgauge.train.tasks.table import TableTask
from narrowgauge.train.tasks.task import Readings, total_of
from narrowgauge.train.tasks.trivial import entropy

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.tables import Record
    from narrowgauge.train.loss import Batch

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
    kind: ClassVar[str] = "question-answering"
    splits_into_windows: ClassVar[bool] = True
    evaluation_arrays: ClassVar[frozenset[str]] = frozenset((TEXT, OFFSETS, KNOWN, GROUP))

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
    def strata(stored: ExampleArrays) -> Indices:
        """1 for windows that hold an answer, else 0."""
        last = stored.scalars("labels").tolist()
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


Scores = np.ndarray[Any, np.dtype[np.float32]]  # [2, tokens]: start scores, end scores
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Span(NamedTuple):
    """A span of tokens in one window; `first` and `last` are both included."""

    score: float
    first: int
    last: int


def best_span(scores: Scores, inside: Any, longest: int) -> Span | None:
    """Returns the highest-scoring span of at most `longest` tokens, or None.

    scores   [2, tokens] float32, start and end scores
    inside   [tokens] bool, True for tokens of the context, which form one contiguous run
    longest  most tokens of a span

    Ties go to the shorter span, then to the earlier one. The result is None if no token is inside
    or a score is NaN.
    """
    places = np.flatnonzero(inside)
    best: Span | None = None
    # Loop over span lengths rather than start positions: each iteration is one vectorized sum, and
    # a strict > keeps the shortest span on ties.
    for more in range(min(longest, len(places))):
        sums = scores[0, places[: len(places) - more]] + scores[1, places[more:]]
        place = int(np.argmax(sums))
        if best is None or sums[place] > best.score:
            best = Span(float(sums[place]), int(places[place]), int(places[place + more]))
    return None if best is None or np.isnan(best.score) else best


def normalized(text: str) -> str:
    """Normalizes a text as the SQuAD evaluation script does."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact_match(predicted: str, known: Sequence[str]) -> float:
    """Returns 1.0 or 0.0. An empty `known` means a question without an answer."""
    return float(any(normalized(predicted) == normalized(each) for each in _right(known)))


def f1(predicted: str, known: Sequence[str]) -> float:
    """Best word F1 over the reference answers."""
    return max(
        _f1_of(normalized(predicted).split(), normalized(each).split()) for each in _right(known)
    )


def _right(known: Sequence[str]) -> Sequence[str]:
    """Reference answers that normalization leaves non-empty; else [""], as in SQuAD 2.0."""
    return [each for each in known if normalized(each)] or [""]


def _f1_of(predicted: list[str], known: list[str]) -> float:
    if not predicted or not known:
        return float(predicted == known)
    common = sum((Counter(predicted) & Counter(known)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(known)
    return 2 * precision * recall / (precision + recall)


READER = ModelClass(AutoModelForQuestionAnswering, "model that answers questions", new=True)


@dataclass
class QuestionsTask(TableTask):
    """Task "question-answering"; `labels` of an example is (first, last) token of the answer."""

    name: ClassVar[str] = "question-answering"
    options: ClassVar[Mapping[str, Any]] = {}
    loss_words: ClassVar[str] = "of the first and the last token of an answer"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        columns = Questions(
            question=config.column_of("question"), context=config.column_of("context"), answers=config.column_of("answers"),
            stride=_stride(config, longest_example(config, READER, tokenizer)),
        )  # fmt: skip
        return columns, READER

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        sides = {"train": task.train, "validation": task.validation}
        for name, part in sides.items():
            # Only the first window of a question stores the question's text, so a non-empty TEXT
            # marks a new question.
            task.data_facts[f"{name}_questions"] = int((part.sizes(TEXT) > 0).sum())
        task.data_facts["unanswerable"] = sum(
            int((part.scalars(KNOWN)[part.sizes(TEXT) > 0] == 0).sum()) for part in sides.values()
        )
        task.notes.append(task._words())
        stride = _stride(config, longest_example(config, READER, task.tokenizer))
        if stride != config.stride:
            task.notes.append(
                f"Neighbouring windows share {stride} tokens: {config.stride}, the default, is more than half of one."
            )
        return task

    def _words(self) -> str:
        """A note on the number of questions, windows and unanswerable questions."""
        known = self.data_facts
        unanswerable = known["unanswerable"]
        words = (
            f"{known['train_questions']:,} questions to learn and {known['validation_questions']:,} held out stand in "
            f"{len(self.train):,} and {len(self.validation):,} windows"
        )
        return words + (
            f"; {unanswerable:,} have no answer, so to say none is a choice."
            if unanswerable
            else "; all have an answer, so one is always given."
        )

    def groups(self, part: data.Examples) -> Indices:
        """Question number of each window: windows of one question are evaluated together."""
        return np.cumsum(part.sizes(TEXT) > 0) - 1

    def dummy_example(self, width: int) -> dict[str, Any]:
        return super().dummy_example(width) | {"labels": (0, 0)}

    @staticmethod
    def scores(output: Any, batch: Batch) -> Tensor:
        return span_scores(output, batch.get("attention_mask"))

    def show_example(self, example: Mapping[str, Any]) -> list[Any]:
        first, last = example["labels"]
        labels = np.full(len(example["input_ids"]), data.IGNORED)
        labels[first : last + 1] = 0
        return [data.coloured_sample(self.tokenizer, example["input_ids"], labels.tolist())]

    def trivial(self) -> dict[str, Any]:
        part = self.evaluation_set
        ids = [part.array("input_ids", place) for place in range(len(part))]
        answered = [
            example["labels"][0] != nowhere_of(own, self.tokenizer)
            for example, own in zip(part, ids, strict=True)
        ]
        # Number of reference answers of each question, taken at its first window.
        known = part.scalars(KNOWN)[part.sizes(TEXT) > 0]
        nothing_is_a_choice = bool(self.data_facts["unanswerable"])
        return of_spans(
            answered,
            list(map(len, ids)),
            float((known == 0).mean()) if nothing_is_a_choice else 0.0,
        )

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = readings(self.evaluation(model), _read)
        targets = sum(count for _, (count, _) in found)
        windows: dict[int, Scores] = {}
        for places, (_, (_, rows)) in zip(self.evaluation_indices, found, strict=True):
            # Evaluation batches are sorted by length; scores go back to the order of the examples.
            windows |= dict(zip(places, rows, strict=True))
        return {"loss": total_of(found) / targets, "tokens": targets, **self._metrics(windows)}

    def _metrics(self, windows: Mapping[int, Scores]) -> dict[str, float]:
        """Exact match and F1, averaged over the evaluated questions.

        windows  {index in `evaluation_set`: scores [2, tokens]}
        """
        part = self.evaluation_set
        exact, shared = [], []
        # One group of consecutive windows for each question.
        for places in np.split(np.arange(len(part)), np.flatnonzero(part.sizes(TEXT) > 0)[1:]):
            known = json.loads(bytes(part.array(TEXT, int(places[0]))))
            answer = self.answer(
                known["context"], {int(place): windows[int(place)] for place in places}
            )
            exact.append(exact_match(answer, known["answers"]))
            shared.append(f1(answer, known["answers"]))
        return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(shared))}

    def answer(self, context: str, windows: Mapping[int, Scores]) -> str:
        """Text of the best span over the windows of one question, or '' for "no answer"."""
        part, best, place_of_best, nothing = self.evaluation_set, Span(-np.inf, 0, 0), -1, np.inf
        for place, scores in windows.items():
            # Tokens of question, separators and padding have offsets of -1.
            inside = part.array(OFFSETS, place).reshape(-1, 2)[:, 0] >= 0
            span = best_span(scores, inside, self.config.answer_tokens)
            if span is not None and span.score > best.score:
                best, place_of_best = span, place
            # Minimum over windows, as in SQuAD 2.0: a window that lacks the answer scores "no
            # answer" high, and must not outvote the others.
            nothing = min(
                nothing,
                float(scores[:, nowhere_of(part.array("input_ids", place), self.tokenizer)].sum()),
            )
        if place_of_best < 0 or (self.data_facts["unanswerable"] and nothing > best.score):
            return ""
        offsets = part.array(OFFSETS, place_of_best).reshape(-1, 2)
        # Character offsets into the original context keep its spelling; decoded ids would lose it.
        return context[offsets[best.first, 0] : offsets[best.last, 1]].strip()


def span_scores(output: Any, mask: Tensor | None = None) -> Tensor:
    """Start and end scores [rows, 2, width] from start_logits and end_logits.

    mask  [rows, width], 0 on padding
    """
    scores = torch.stack((output.start_logits, output.end_logits), dim=1)
    # transformers' own heads include padding in the softmax: a window's loss then depends on the
    # width of its batch (decisions/training.md, "Answers, tags and choices").
    return (
        scores
        if mask is None
        else scores.masked_fill(mask.to(scores.device)[:, None] == 0, -math.inf)
    )


def of_spans(
    has_answer: Sequence[bool], lengths: Sequence[int], unanswered: float
) -> dict[str, Any]:
    """Constant prediction of the first and last token of an answer, for each window of a text.

    has_answer  bool for each window
    lengths     tokens of each window
    unanswered  share of questions without an answer, which "no answer" gets right
    """
    share = float(np.mean(has_answer))
    others = np.maximum(np.asarray(lengths, np.float64)[np.asarray(has_answer, bool)] - 1, 1)
    # The no-answer position has probability 1 - share; a window's other tokens split `share`
    # evenly.
    inside = float(np.log(others).sum()) / len(lengths) if len(lengths) else 0.0
    loss = entropy(np.array([share, 1 - share])) + inside
    return {
        "predictor": "“no answer”, or any token,",
        "loss": loss,
        "exact_match": unanswered,
        "f1": unanswered,
    }


def _read(batch: Batch, scores: Tensor | None) -> tuple[int, list[Scores]]:
    """Returns (targets of the batch, scores [2, tokens] of each window); 8 bytes for each token."""
    assert scores is not None
    rows, sizes = scores.float().cpu().numpy(), batch["attention_mask"].sum(1).tolist()
    # A copy, or each row would keep its whole padded batch alive.
    return data.valid_targets(batch), [
        row[:, :size].copy() for row, size in zip(rows, sizes, strict=True)
    ]


def _stride(config: TrainConfig, longest: int | None) -> int:
    """Tokens that neighbouring windows share.

    The default shrinks to a quarter of a short window. An explicit setting above half of a window
    raises ConfigError.
    """
    if longest is None or 2 * config.stride <= longest:
        return config.stride
    if config.stride == TrainConfig.stride:
        return longest // 4
    raise ConfigError(
        f"task.stride = {config.stride}: more than half of a window of {longest} tokens (data.max_length), which holds the question too. "
        f"Set a smaller stride, as {longest // 4}.",
        code="questions.stride",
    )
