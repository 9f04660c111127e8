"""What the tasks on tables share: reading, the split into training and validation, batches by length, evaluation batches.

A run trains on `data` and validates on `validation_data`, or on a share of the rows of `data`. Which rows is decided by the
hash of their ids: adding or reordering rows moves no other row, and copies of a row land on the same side.

Micro-batches are parts of the step's batch, so their number changes memory and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge import data
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import Kind, own_configuration
from narrowgauge.train.tasks.task import Drawn

SPLIT_SEED = 0  # not the run's: runs of different seeds are compared on the same held-out rows
EVAL_ORDER = b"evaluation"
# Their first position has the number of the padding token plus one, so as many fewer tokens fit.
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"})
Align = Callable[[Batch], Batch]


@dataclass(frozen=True)
class Part:
    """Some of the examples, as a data set."""

    examples: data.Examples
    places: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.examples.lengths[self.places]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        """An example, or the list of several for a packed row."""
        if isinstance(index, Sequence):
            return [self.examples[int(self.places[one])] for one in index]
        return self.examples[int(self.places[index])]


@dataclass(frozen=True)
class Tables:
    """Encoded examples of both sides, and how the sides came about."""

    train: Part
    validation: Part
    longest: int | None
    split: str
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def longest_example(config: TrainConfig, kind: Kind, tokenizer: Any) -> int | None:
    """max_length of the configuration, or the tokens that model and tokenizer know positions for; None: no limit is known."""
    sizes = own_configuration(config, kind)
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


def read(config: TrainConfig, task: data.Task, tokenizer: Any, longest: int | None) -> Tables:
    """The examples of both sides, encoded or from the cache."""
    limits = data.Limits(max_length=longest, too_long=config.too_long, no_target=config.no_target)  # type: ignore[arg-type]
    options: dict[str, Any] = {"cache": Path(resolved(config).cache), "limits": limits, "header": header(config)}
    examples = _prepared(config.data, task, tokenizer, options)
    if config.validation_data:
        held_out = _prepared(config.validation_data, task, tokenizer, options)
        train, validation = _whole(examples), _whole(held_out)
        split = f"all of {config.validation_data}"
        notes = [*examples.notes, *(f"Validation: {note}" for note in held_out.notes)]
    else:
        held_out = examples
        train, validation = split_rows(examples, config.validation_fraction)
        split, notes = f"{config.validation_fraction:.4g} of the rows, by their hash", examples.notes
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
    return Tables(train, validation, longest, split, summary, [*notes, *padding_notes(tokenizer)])


def _prepared(source: str, task: data.Task, tokenizer: Any, options: dict[str, Any]) -> data.Examples:
    return data.prepare_examples(source, task, tokenizer, **options)


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


def _whole(examples: data.Examples) -> Part:
    return Part(examples, np.arange(len(examples)))


def split_rows(examples: data.Examples, fraction: float) -> tuple[Part, Part]:
    """(training, validation): a row validates if the hash of its ids, as a share of all hashes, is below `fraction`.

    Of few rows, where that leaves a side empty, the rows with the smallest hashes validate. Raises DataError for one row.
    """
    draws = np.array([_draw(examples[place]["input_ids"]) for place in range(len(examples))])
    held_out = draws < fraction
    if held_out.all() or not held_out.any():
        held_out = draws <= np.sort(draws)[max(0, round(fraction * len(draws)) - 1)]
    if held_out.all():
        raise DataError(
            f"{examples.summary['source']}: {len(examples)} rows with one text cannot be split. Pass validation_data, or more rows."
        )
    return Part(examples, np.flatnonzero(~held_out)), Part(examples, np.flatnonzero(held_out))


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

    def __init__(self, part: Part, sampler: data.LengthBatchSampler, collate: data.Collator, parts: int, align: Align):
        self.part, self.sampler, self.collate, self.parts, self.align = part, sampler, collate, parts, align
        self._iterator: Iterator[list[Any]] | None = None
        if not len(sampler.plan):
            raise DataError(
                "no example is left to train on: all are above the token budget. Raise token_budget or packing."
            )

    def draw(self, step: int) -> Drawn:
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
        return Drawn(batches, inputs, facts)

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


def epoch_steps(lengths: np.ndarray[Any, Any], chosen: data.Batching, epochs: int) -> int:
    """Optimizer steps of so many epochs; under a token budget their numbers differ a little."""
    return sum(len(data.plan(lengths, chosen, epoch)) for epoch in range(epochs))


def evaluated(part: Part, most_tokens: int) -> Part:
    """The examples that an evaluation looks at, always the same: all, or in a hashed order as many as `most_tokens` hold."""
    lengths = part.lengths
    if int(lengths.sum()) <= most_tokens:
        return part
    keys = [hashlib.sha256(EVAL_ORDER + b":%d" % place).digest() for place in range(len(part))]
    order = np.array(sorted(range(len(part)), key=keys.__getitem__))
    count = max(1, int(np.searchsorted(np.cumsum(lengths[order]), most_tokens, side="right")))
    return Part(part.examples, part.places[np.sort(order[:count])])


def evaluation_batches(part: Part, config: TrainConfig, pad_id: int, align: Align) -> Iterator[Batch]:
    """Purely sorted by length: the least padding. Batches hold what a micro-batch of training holds."""
    rows = None if config.token_budget else max(1, config.batch_size // config.micro_batches)
    budget = max(1, config.token_budget // config.micro_batches) if config.token_budget else None
    collate = data.Collator(pad_id=pad_id, multiple=config.pad_multiple)
    for places in data.sorted_batches(part.lengths, batch_size=rows, token_budget=budget, multiple=config.pad_multiple):
        yield align(collate([part[place] for place in places]))
