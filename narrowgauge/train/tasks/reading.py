"""Reads the rows of a table as training and validation examples.

Validation uses `validation_data`, or a share of the rows of `data`. A hash of the row's token ids
decides the split. Adding or reordering rows moves no other row, and copies of a row land on the
same side. Related rows (`ExampleArrays.group`, such as all questions on one text) share one hash, the hash
of their group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge import data
from narrowgauge.diagnose.format_text import plural
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.pretrained import ModelClass, own_configuration
from narrowgauge.train.tasks.task import SPLIT_SEED

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices

FEW = 20  # validation examples below which a note warns
# Position ids of these model types start at pad_token_id + 1; the positions before carry no token.
OFFSET_POSITIONS = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"}
)


def longest_example(config: TrainConfig, model_class: ModelClass, tokenizer: Any) -> int | None:
    """Most tokens of an example; None if unlimited.

    The limit is `max_length` if set, else the smaller limit of model and tokenizer.

    Raises ConfigError if `max_length` exceeds the model's positions.
    """
    sizes = own_configuration(config, model_class)
    positions = getattr(sizes, "max_position_embeddings", None)
    if positions is not None and sizes.model_type in OFFSET_POSITIONS:
        positions -= (sizes.pad_token_id or 0) + 1
    if not config.max_length:
        # Tokenizers without a limit report about 1e30 as model_max_length.
        known = [
            number
            for number in (positions, tokenizer.model_max_length)
            if number is not None and number < 10**9
        ]
        return min(known, default=None)
    if positions is not None and config.max_length > positions:
        raise ConfigError(
            f"data.max_length = {config.max_length}: the model knows positions up to {positions}. Set it to {positions} or less.",
            code="examples.max-length",
        )
    return config.max_length


def read(
    config: TrainConfig, task: data.Task, tokenizer: Any, longest: int | None
) -> tuple[data.Examples, data.Examples, dict[str, Any]]:
    """Returns (training examples, validation examples, summary for run.json).

    Examples are encoded, or loaded from the cache.
    """
    limits = data.Limits(max_length=longest, too_long=config.too_long, no_target=config.no_target)  # type: ignore[arg-type]

    def prepared(source: str) -> data.Examples:
        cache = resolved(config).cache
        return data.prepare_examples(
            source, task, tokenizer, cache=cache, limits=limits, header=header(config)
        )

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
    notes += few_notes(len(validation))
    # The fingerprint covers columns and limits too: the same table encoded otherwise is other data.
    content = [
        examples.summary["content_hash"],
        held_out.summary["content_hash"],
        repr(task),
        asdict(limits),
    ]
    summary = {
        "source": examples.summary["source"],
        "content_hash": hashlib.sha256(repr(content).encode()).hexdigest(),
        "rows": examples.summary["rows"],
        "train_examples": len(train),
        "validation_examples": len(validation),
        "train_tokens": int(train.tokens.sum()),
        "validation_tokens": int(validation.tokens.sum()),
        "longest": int(train.lengths.max()),
        "max_length": longest,
        "split": split,
        "notes": notes,
    }
    return train, validation, summary


def keys(examples: data.Examples) -> Iterator[bytes]:
    """Bytes that decide the split of each example; equal for examples of one group."""
    if examples.group is None:
        return (
            examples.array("input_ids", place).astype("<i8").tobytes()
            for place in range(len(examples))
        )
    return (int(group).to_bytes(8, "little") for group in examples.group)


def header(config: TrainConfig) -> list[str] | None:
    """Column names of a CSV file without a header line, or None."""
    return [name.strip() for name in config.header.split(",")] if config.header else None


def split_rows(examples: data.Examples, fraction: float) -> tuple[data.Examples, data.Examples]:
    """Splits into (training, validation) examples by the hash of their ids."""
    learnt, held_out = split_places(keys(examples), fraction, examples.summary["source"], "text")
    return examples.select(learnt), examples.select(held_out)


def split_places(
    contents: Iterator[bytes], fraction: float, source: str, what: str
) -> tuple[Indices, Indices]:
    """Indices of (training, validation) examples; hash / 2^64 < fraction selects validation.

    If that leaves one side empty, the round(fraction n) smallest hashes, one at least, form the
    validation set. Raises DataError if all contents are equal.
    """
    digests = (hashlib.sha256(b"%d:" % SPLIT_SEED + content).digest() for content in contents)
    draws = np.array([int.from_bytes(digest[:8], "big") / 2**64 for digest in digests])
    held_out = draws < fraction
    if held_out.all() or not held_out.any():
        # <=, not a slice of the argsort: equal contents have equal hashes and stay on one side.
        held_out = draws <= np.sort(draws)[max(0, round(fraction * len(draws)) - 1)]
    if held_out.all():
        raise DataError(
            f"{source}: {len(draws)} rows with one {what} cannot be split. Pass validation_data, or more rows.",
            code="data.cannot-split",
        )
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def few_notes(count: int) -> list[str]:
    """A note if the validation set has fewer than FEW examples."""
    if count >= FEW:
        return []
    return [
        f"The validation loss is of {plural(count, 'example')} alone, too few to tell runs apart or to choose weights by. "
        "Raise data.validation_fraction, or pass data.validation_data."
    ]
