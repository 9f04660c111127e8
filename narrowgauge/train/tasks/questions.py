"""Extractive question answering, as in SQuAD 1 and 2.

The model scores every token of a window as the start and as the end of the answer. The loss is -log
p of start and end, averaged over both and over all windows; padding gets probability 0.

Evaluation takes the best span over all windows of a question. If the data contain questions without
an answer, "no answer" is predicted where its score exceeds the best span's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering

from narrowgauge import data
from narrowgauge.data.batches import Indices
from narrowgauge.data.heads import span_scores
from narrowgauge.data.questions import KNOWN, OFFSETS, TEXT, nowhere_of
from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, Objective
from narrowgauge.train.model import ModelClass
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.answers import Scores, Span, best_span, exact_match, f1
from narrowgauge.train.tasks.reading import longest_example
from narrowgauge.train.tasks.tables import TableTask
from narrowgauge.train.tasks.task import Readings, total_of

READER = ModelClass(AutoModelForQuestionAnswering, "model that answers questions", new=True)


@dataclass
class QuestionsTask(TableTask):
    """Task "question-answering"; `labels` of an example is (first, last) token of the answer."""

    name: ClassVar[str] = "question-answering"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "f1"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        columns = data.Questions(
            question=config.question_column, context=config.context_column, answers=config.answers_column,
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
            task.known[f"{name}_questions"] = int((part.sizes(TEXT) > 0).sum())
        task.known["unanswerable"] = sum(
            int((part.numbers(KNOWN)[part.sizes(TEXT) > 0] == 0).sum()) for part in sides.values()
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
        known = self.known
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

    def together(self, part: data.Examples) -> Indices:
        """Question number of each window: windows of one question are evaluated together."""
        return np.cumsum(part.sizes(TEXT) > 0) - 1

    def blank(self, width: int) -> dict[str, Any]:
        return super().blank(width) | {"labels": (0, 0)}

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        forward = torch.compile(model) if self.config.compile else model
        return Objective(
            forward, {}, "of the first and the last token of an answer", scores=_scores
        )

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        first, last = example["labels"]
        labels = np.full(len(example["input_ids"]), data.IGNORED)
        labels[first : last + 1] = 0
        return [data.coloured_sample(self.tokenizer, example["input_ids"], labels.tolist())]

    def trivial(self) -> dict[str, Any]:
        part = self._evaluated
        ids = [part.array("input_ids", place) for place in range(len(part))]
        answered = [
            example["labels"][0] != nowhere_of(own, self.tokenizer)
            for example, own in zip(part, ids, strict=True)
        ]
        # Number of reference answers of each question, taken at its first window.
        known = part.numbers(KNOWN)[part.sizes(TEXT) > 0]
        nothing_is_a_choice = bool(self.known["unanswerable"])
        return trivial.of_spans(
            answered,
            list(map(len, ids)),
            float((known == 0).mean()) if nothing_is_a_choice else 0.0,
        )

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = readings(self.evaluation(model), _read)
        targets = sum(count for _, (count, _) in found)
        windows: dict[int, Scores] = {}
        for places, (_, (_, rows)) in zip(self.evaluated_places, found, strict=True):
            # Evaluation batches are sorted by length; scores go back to the order of the examples.
            windows |= dict(zip(places, rows, strict=True))
        return {"loss": total_of(found) / targets, "tokens": targets, **self._metrics(windows)}

    def _metrics(self, windows: Mapping[int, Scores]) -> dict[str, float]:
        """Exact match and F1, averaged over the evaluated questions.

        windows  {index in `_evaluated`: scores [2, tokens]}
        """
        part = self._evaluated
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
        part, best, place_of_best, nothing = self._evaluated, Span(-np.inf, 0, 0), -1, np.inf
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
        if place_of_best < 0 or (self.known["unanswerable"] and nothing > best.score):
            return ""
        offsets = part.array(OFFSETS, place_of_best).reshape(-1, 2)
        # Character offsets into the original context keep its spelling; decoded ids would lose it.
        return context[offsets[best.first, 0] : offsets[best.last, 1]].strip()


def _scores(output: Any, batch: Batch) -> Tensor:
    return span_scores(output, batch["attention_mask"])


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
        f"stride = {config.stride}: more than half of a window of {longest} tokens (max_length), which holds the question too. "
        f"Set a smaller stride, as {longest // 4}.",
        code="questions.stride",
    )
