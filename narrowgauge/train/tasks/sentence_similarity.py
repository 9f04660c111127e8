"""Sentence similarity (STS): the cosine of two embeddings, with Pearson and Spearman correlations.

Each text of a pair is encoded as a row of its own:

    [CLS] text [SEP]
    [CLS] pair [SEP]

    embedding = sum over tokens of the last hidden state / their number, special tokens included
    loss      = sum over pairs of (cosine of both embeddings - score)^2 / their number

Scores are from 0 to 1; any other number is an error with the row. Correlations are those of
`regression`.
`batch_size` counts pairs, so a batch has twice as many rows; `token_budget` counts the tokens of all
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel

from narrowgauge import data
from narrowgauge.data.cache import token_dtype
from narrowgauge.data.strata import strata_of
from narrowgauge.data.task import Encoded, Item, Notes, Task
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.pretrained import ModelClass, own_configuration
from narrowgauge.train.tasks.multiple_choice import LONGEST, SIZES, Choices, recounted
from narrowgauge.train.tasks.regression import NumberTask, number_of, numbers_of, refuse_constant

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.example_arrays import ExampleArrays
    from narrowgauge.data.tables import Record
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch

TEXTS = 2  # of an example


@dataclass(frozen=True, kw_only=True)
class Similarity(Task):
    """Columns with two texts, and with how alike they are."""

    text: str = "text"
    pair: str = "pair"
    score: str = "score"
    kind: ClassVar[str] = "sentence-similarity"
    can_truncate: ClassVar[bool] = True
    evaluation_arrays: ClassVar[frozenset[str]] = frozenset((LONGEST,))
    target_noun: ClassVar[str] = "text in one of both columns"

    def __post_init__(self) -> None:
        if len(set(self.columns)) != len(self.columns) or not all(self.columns):
            raise ConfigError(
                f"Similarity: columns {self.columns}. Name three different ones.",
                code="similarity.columns",
            )

    @property
    def columns(self) -> list[str]:
        return [self.text, self.pair, self.score]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        return {
            "input_ids": token_dtype(encoder.vocabulary - 1), "token_type_ids": np.dtype("u1"), SIZES: np.dtype("<u4"),
            LONGEST: np.dtype("<u4"), "labels": np.dtype("<f8"),
        }  # fmt: skip

    def length(self, example: Encoded) -> int:
        return int(example[LONGEST][0])

    @staticmethod
    def lengths(stored: ExampleArrays) -> Indices:
        return Choices.lengths(stored)

    @staticmethod
    def strata(stored: ExampleArrays) -> Indices:
        """Quartile of the score."""
        return strata_of(stored.scalars("labels"), Choices.lengths(stored))

    @staticmethod
    def item(arrays: Item) -> Item:
        border, labels = arrays.pop(SIZES)[:1], arrays.pop("labels")
        return {name: np.split(values, border) for name, values in arrays.items()} | {
            "labels": labels
        }

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        scores = [self._score(row) for row in rows]
        texts, pairs = (
            encoder.rows(rows, column, None, max_length) for column in (self.text, self.pair)
        )
        for score, *both in zip(scores, texts, pairs, strict=True):
            sizes = np.array([len(part["input_ids"]) for part in both])
            # A mean over no tokens is undefined, so a row with one text has no target.
            kept = both if sizes.all() else []
            yield {
                "input_ids": _joined([part["input_ids"] for part in kept]),
                "token_type_ids": _joined([part["token_type_ids"] for part in kept]),
                SIZES: sizes,
                LONGEST: np.array([sizes.max()]),
                "labels": np.array([score]),
            }

    def _score(self, row: Record) -> float:
        """Raises DataError with the row's origin for a number outside 0 ... 1."""
        score = number_of(row, self.score, "score")
        if not 0 <= score <= 1:
            raise DataError(
                f"{row.origin}: {score:g} in column {self.score!r} is not from 0 to 1. Correct the row, or divide all scores by the "
                "largest that they can have.",
                code="similarity.range",
            )
        return score


def _joined(parts: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.concatenate([np.zeros(0, np.int64), *parts])


ENCODER = ModelClass(AutoModel, "model that gives hidden states of texts", new=True)


@dataclass
class SimilarityTask(NumberTask):
    """Task "sentence-similarity"; `labels` of an example is a float vector with its score."""

    name: ClassVar[str] = "sentence-similarity"
    options: ClassVar[Mapping[str, Any]] = {}
    loss_words: ClassVar[str] = "squared differences of cosines and scores, their mean"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        sizes = own_configuration(config, ENCODER)
        if sizes.is_encoder_decoder:
            raise ConfigError(
                f"model = {config.model!r}: {sizes.model_type} is an encoder-decoder, whose last hidden state is that of a text it "
                "writes. Pass an encoder.",
                code="similarity.encoder-decoder",
            )
        columns = Similarity(
            text=config.column_of("text"),
            pair=config.column_of("pair"),
            score=config.column_of("score"),
        )
        return columns, ENCODER

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        longest = task.data_facts["longest"]
        if 0 < config.token_budget < TEXTS * longest and config.too_long != "skip":
            raise DataError(
                f"batch.token_budget = {config.token_budget}: two texts of {longest} tokens do not fit. Set "
                f"{TEXTS * (longest + 15)} or more, or data.too_long = 'skip'.",
                code="similarity.token-budget",
            )
        name, scores = config.column_of("score"), numbers_of(task.train)
        refuse_constant([name], scores, config.data, "score")
        # A correlation with constant scores is undefined.
        where = "the examples that evaluations see"
        refuse_constant([name], numbers_of(task.evaluation_set), where, "score")
        task.notes.append(
            f"Scores {name!r}: from {scores.min():g} to {scores.max():g}, mean {scores.mean():.4g}, deviation {scores.std():.4g}; "
            f"always answering the mean has a loss of {scores.var():.4g}."
        )
        return task

    @property
    def rows_per_example(self) -> int:
        return TEXTS

    def dummy_example(self, width: int) -> dict[str, Any]:
        ids = super().dummy_example(width)["input_ids"]
        return {"input_ids": [ids] * TEXTS, "labels": np.zeros(1)}

    def epoch(self, number: int) -> data.EpochPlan:
        plan = super().epoch(number)
        return recounted(plan, self.train, self._batching, self.config.micro_batches)

    @staticmethod
    def scores(output: Any, batch: Batch) -> Tensor:
        if "attention_mask" not in batch:
            raise ConfigError(
                "sentence-similarity: a batch without attention_mask, so padding would count as tokens. Pass the whole batch, as "
                "step_loss does.",
                code="similarity.no-mask",
            )
        # transformers.Trainer hands its losses a plain dict where a model returns one.
        hidden = output["last_hidden_state"]
        return cosines(hidden, batch["attention_mask"])

    def show_example(self, example: Mapping[str, Any]) -> list[Any]:
        shown = [data.coloured_sample(self.tokenizer, ids, None) for ids in example["input_ids"]]
        shown[-1].append(f"  -> {example['labels'][0]:g}", "bold green")
        return shown


def cosines(hidden: Tensor, mask: Tensor) -> Tensor:
    """Cosine of the mean hidden states of each two rows, float32 [pairs, 1].

    hidden  [2 pairs, width, size]; rows 2 i and 2 i + 1 are a pair
    mask    [2 pairs, width], 0 on padding
    """
    # float32: a sum of hundreds of 16-bit states loses their low bits.
    weights = mask.to(hidden.device, torch.float32)[..., None]
    means = (hidden.float() * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.cosine_similarity(means[0::2], means[1::2], dim=-1)[:, None]
