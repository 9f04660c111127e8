"""What the tasks on tables share: reading, the split into training and validation, batches by length, evaluation batches.

A run trains on `data` and validates on `validation_data`, or on a share of the rows of `data`. Which rows is decided by the
hash of their ids: adding or reordering rows moves no other row, and copies of a row land on the same side.

Micro-batches are parts of the step's batch, so their number changes memory and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from narrowgauge import data
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import ModelClass, own_configuration
from narrowgauge.train.tasks.task import StepBatch

SPLIT_SEED = 0  # not the run's: runs of different seeds are compared on the same held-out rows
EVAL_ORDER = b"evaluation"
# Their first position has the number of the padding token plus one, so as many fewer tokens fit.
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"})
Align = Callable[[Batch], Batch]


@dataclass(frozen=True)
class Tables:
    """Encoded examples of both sides; what is known of them; the most tokens that an example may have."""

    train: data.Examples
    validation: data.Examples
    longest: int | None
    summary: dict[str, Any]


def longest_example(config: TrainConfig, model_class: ModelClass, tokenizer: Any) -> int | None:
    """max_length of the configuration, or the tokens that model and tokenizer know positions for; None: no limit is known."""
    sizes = own_configuration(config, model_class)
    positions = getattr(sizes, "max_position_embeddings", None)
    if positions is not None and sizes.model_type in OFFSET_POSITIONS:
        positions -= (sizes.pad_token_id or 0) + 1
    known = [number for number in (positions, tokenizer.model_max_length) if number is not None and number < 10**9]
    limit = min(known, default=None)
    if not config.max_length:
        return limit
    if positions is not None and config.max_length > positions:
        raise ConfigError(
            f"max_length = {config.max_length}: the model knows positions up to {positions}. Set max_length to {positions} or less."
        )
    return config.max_length


def read(config: TrainConfig, task: data.Task, tokenizer: Any, model_class: ModelClass) -> tuple[Tables, list[str]]:
    """(the examples of both sides, encoded or from the cache; notes)."""
    longest = longest_example(config, model_class, tokenizer)
    limits = data.Limits(max_length=longest, too_long=config.too_long, no_target=config.no_target)  # type: ignore[arg-type]

    def prepared(source: str) -> data.Examples:
        cache = resolved(config).cache
        return data.prepare_examples(source, task, tokenizer, cache=cache, limits=limits, header=header(config))

    examples = held_out = prepared(config.data)
    notes = list(examples.notes)
    if config.validation_data:
        held_out = prepared(config.validation_data)
        train, validation = examples, held_out
        split = f"all of {config.validation_data}"
        notes += [f"Validation: {note}" for note in held_out.notes]
    else:
        train, validation = split_rows(examples, config.validation_fraction)
        split = f"{config.validation_fraction:.4g} of the rows, by their hash"
    content = [examples.summary["content_hash"], held_out.summary["content_hash"], repr(task), asdict(limits)]
    summary = {
        "source": examples.summary["source"],
        "content_hash": hashlib.sha256(repr(content).encode()).hexdigest(),
        "rows": examples.summary["rows"],
        "train_examples": len(train),
        "validation_examples": len(validation),
        "train_tokens": int(train.lengths.sum()),
        "validation_tokens": int(validation.lengths.sum()),
        "longest": int(train.lengths.max()),
        "max_length": longest,
        "split": split,
        "notes": notes,
    }
    return Tables(train, validation, longest, summary), [*notes, *padding_notes(tokenizer)]


def header(config: TrainConfig) -> list[str] | None:
    return [name.strip() for name in config.columns.split(",")] if config.columns else None


def padding_notes(tokenizer: Any) -> list[str]:
    if tokenizer.pad_token_id is None:
        return ["The tokenizer has no padding token: rows are filled with another, and masked by their lengths."]
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        return [
            "Padding is the end-of-text token. Rows are masked by their lengths, so the one behind a text still counts."
        ]
    return []


def split_rows(examples: data.Examples, fraction: float) -> tuple[data.Examples, data.Examples]:
    """(training, validation): a row validates if the hash of its ids, as a share of all hashes, is below `fraction`.

    Of few rows, where that leaves a side empty, the rows with the smallest hashes validate. Raises DataError for one row.
    """
    draws = np.array([_draw(example["input_ids"]) for example in examples])
    held_out = draws < fraction
    if held_out.all() or not held_out.any():
        held_out = draws <= np.sort(draws)[max(0, round(fraction * len(draws)) - 1)]
    if held_out.all():
        raise DataError(
            f"{examples.summary['source']}: {len(examples)} rows with one text cannot be split. Pass validation_data, or more rows."
        )
    return examples.select(np.flatnonzero(~held_out)), examples.select(np.flatnonzero(held_out))


def _draw(ids: np.ndarray[Any, Any]) -> float:
    digest = hashlib.sha256(b"%d:" % SPLIT_SEED + ids.astype("<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def batching(config: TrainConfig) -> data.Batching:
    """How training examples become batches, from the configuration."""
    return data.Batching(
        batch_size=None if config.token_budget else config.batch_size,
        token_budget=config.token_budget or None,
        row_length=config.packing or None,
        seed=config.seed,
        multiple=config.pad_multiple,
        classes=config.length_buckets,
        too_long="skip" if config.too_long == "skip" else "error",
    )


class TableFeed:
    """Batches by length, epoch after epoch. The place is the sampler's: (epoch, step)."""

    def __init__(
        self, part: data.Examples, sampler: data.LengthBatchSampler, collate: data.Collator, parts: int, align: Align
    ):
        self.part, self.sampler, self.collate, self.parts, self.align = part, sampler, collate, parts, align
        self._iterator: Iterator[list[Any]] | None = None
        if not len(sampler.plan):
            raise DataError(
                "no example is left to train on: all are above the token budget. Raise token_budget or packing."
            )

    def draw(self, step: int) -> StepBatch:
        items = self._next()
        batches = [self._batch(items[start:stop]) for start, stop in pieces(len(items), self.parts)]
        examples = [index for item in items for index in (item if isinstance(item, tuple) else (item,))]
        inputs = int(self.part.lengths[examples].sum())
        facts = {
            "epoch": self.sampler.epoch + self.sampler.state_dict()["step"] / len(self.sampler),
            "examples": len(examples),
            "inputs": inputs,
            "positions": sum(max(batch["input_ids"].numel(), batch["labels"].numel()) for batch in batches),
        }
        return StepBatch(batches, inputs, facts)

    def _next(self) -> list[Any]:
        while True:
            self._iterator = self._iterator or iter(self.sampler)
            items = next(self._iterator, None)
            if items is not None:
                return items
            self._iterator = None  # the sampler's next pass is the next epoch

    def _batch(self, items: Sequence[Any]) -> Batch:
        return self.align(self.collate([self.part[item] for item in items]))

    def probe(self) -> Batch:
        items = self.sampler.plan.steps[0][0]
        start, stop = pieces(len(items), self.parts)[0]
        return self._batch(items[start:stop])

    def state(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self._iterator = None


def pieces(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` rows in at most `parts` runs of nearly equal length, none empty."""
    parts = min(count, parts)
    bounds = [count * place // parts for place in range(parts + 1)]
    return list(pairwise(bounds))


def evaluated(part: data.Examples, most_tokens: int) -> data.Examples:
    """The examples that an evaluation looks at, always the same: all, or in a hashed order as many as `most_tokens` hold."""
    lengths = part.lengths
    if int(lengths.sum()) <= most_tokens:
        return part
    keys = [hashlib.sha256(EVAL_ORDER + b":%d" % place).digest() for place in range(len(part))]
    order = np.array(sorted(range(len(part)), key=keys.__getitem__))
    count = max(1, int(np.searchsorted(np.cumsum(lengths[order]), most_tokens, side="right")))
    return part.select(np.sort(order[:count]))


def evaluation_batches(part: data.Examples, config: TrainConfig, pad_id: int) -> Iterator[Batch]:
    """Purely sorted by length: the least padding. Batches hold what a micro-batch of training holds."""
    rows = None if config.token_budget else max(1, config.batch_size // config.micro_batches)
    budget = max(1, config.token_budget // config.micro_batches) if config.token_budget else None
    collate = data.Collator(pad_id=pad_id, multiple=config.pad_multiple)
    for places in data.sorted_batches(part.lengths, batch_size=rows, token_budget=budget, multiple=config.pad_multiple):
        yield collate([part[place] for place in places])
