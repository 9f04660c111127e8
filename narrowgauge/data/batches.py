"""Batches of running text as a pure function of (seed, step, micro-batch).

The step number is the whole position in the data. A stream of n tokens has W = (n - 1) // T
windows. Window i has inputs [i T, i T + T), and labels shifted by one token: a loss compares
logits[t] with labels[t]. The last (n - 1) % T labels are not trained on. Windows cross document
boundaries.

Sample g of a run (g = step x batch_size + row) is entry g % W of epoch g // W. An epoch's order
sorts the windows by a hash of (seed, epoch, window), see `permutation`. It depends neither on
library versions nor on the machine or the number of micro-batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, DataError

if TYPE_CHECKING:
    from narrowgauge.data.cache import TokenStream

IGNORED = -100  # label without loss, as in torch.nn.functional.cross_entropy
Batch = dict[str, Tensor]
Indices = np.ndarray[Any, np.dtype[np.int64]]


def permutation(count: int, key: bytes) -> Indices:
    """Permutes 0 ... count - 1 by the key alone. Takes about 0.3 s and 8 MB per million.

    Sorts element i by the i-th output of SplitMix64 (Steele, Lea, Flood 2014), seeded with the
    SHA-256 of the key. The outputs are distinct, so there are no ties.
    """
    # Not numpy's Generator.permutation: its algorithm may change between numpy releases.
    start = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    # uint64 arithmetic wraps around, as SplitMix64 requires.
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)))


def valid_targets(batch: Batch) -> int:
    """Number of labels that count in the loss: not -100, or for float labels not NaN."""
    labels = batch["labels"]
    # -100 is a possible regression target, so float labels use NaN instead.
    return int((~labels.isnan() if labels.is_floating_point() else labels != IGNORED).sum())


def without_targets(batch: Batch) -> Batch:
    """The same batch with all labels ignored."""
    labels = batch["labels"]
    return batch | {
        "labels": torch.full_like(labels, math.nan if labels.is_floating_point() else IGNORED)
    }


@lru_cache(maxsize=2)  # a batch can span two epochs
def epoch_order(windows: int, seed: int, epoch: int) -> Indices:
    """Order of the windows in an epoch. Cached; takes about 0.3 s per million windows."""
    order = permutation(windows, b"%d:%d" % (seed, epoch))
    order.flags.writeable = False  # the cache returns one array to all callers
    return order


class CausalBatches:
    """Next-token batches of a token stream. Stateless: `batch(step)` always returns the same batch.

    stream           token ids
    sequence_length  T, tokens of a window
    batch_size       windows of a step
    seed             seed of the order
    windows          W, windows of the stream
    """

    def __init__(self, stream: TokenStream, sequence_length: int, batch_size: int, seed: int):
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(
                    f"{name}: {value} is not a positive number.", code="batch.not-positive"
                )
        if len(stream) < sequence_length + 1:
            raise DataError(
                f"{stream.name}: {len(stream)} tokens are fewer than one sequence of {sequence_length} and its last label, "
                f"{sequence_length + 1}. Pass more text, or a sequence length of at most {max(len(stream) - 1, 0)}.",
                code="tokens.too-few",
            )
        self.stream, self.sequence_length, self.batch_size, self.seed = (
            stream,
            sequence_length,
            batch_size,
            seed,
        )
        self.windows = (len(stream) - 1) // sequence_length

    def batch(self, step: int, micro_batch: int = 0, micro_batches: int = 1) -> Batch:
        """Returns rows of micro-batch `micro_batch`, counted from 0, of a step.

        ->  {"input_ids", "labels"}, each int64 [batch_size / micro_batches, T]
        """
        if step < 0 or micro_batches < 1 or not 0 <= micro_batch < micro_batches:
            raise ConfigError(
                f"batch: no micro-batch {micro_batch} of {micro_batches} at step {step}; count from 0.",
                code="batch.index",
            )
        rows, rest = divmod(self.batch_size, micro_batches)
        if rest:
            raise ConfigError(
                f"batch_size {self.batch_size} is no multiple of {micro_batches} micro-batches. Pass a divisor of it.",
                code="batch.micro-batches",
            )
        windows = self.windows_of(step, range(micro_batch * rows, (micro_batch + 1) * rows))
        return self._rows(windows, len(self.stream) - 1)

    def windows_of(self, step: int, rows: range | None = None) -> list[int]:
        """Window numbers of some rows of a batch, or of all; window n starts at token n T."""
        # A batch can span two epochs, so each row computes its own.
        places = (
            divmod(step * self.batch_size + row, self.windows)
            for row in rows or range(self.batch_size)
        )
        return [int(epoch_order(self.windows, self.seed, epoch)[place]) for epoch, place in places]

    def evaluation(self, max_tokens: int | None = None) -> Iterator[Batch]:
        """Yields the stream in order, each label once.

        max_tokens  stop after this many labels; None: all len(stream) - 1

        The last window is padded with label -100 and input 0. The last batch may have fewer rows.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(
                f"max_tokens: {max_tokens} evaluates nothing. Pass a positive number, or None for all.",
                code="evaluation.max-tokens",
            )
        # `or` treats None as no limit; 0 was refused above.
        targets = min(len(self.stream) - 1, max_tokens or len(self.stream))
        windows = -(-targets // self.sequence_length)
        for first in range(0, windows, self.batch_size):
            yield self._rows(range(first, min(first + self.batch_size, windows)), targets)

    def _rows(self, windows: list[int] | range, targets: int) -> Batch:
        """Windows as rows, without labels beyond the first `targets` of the stream."""
        length = self.sequence_length
        # int64: torch's embedding and cross_entropy need int64 indices; the stream is uint16 or
        # uint32.
        inputs = np.zeros((len(windows), length), dtype=np.int64)
        labels = np.full((len(windows), length), IGNORED, dtype=np.int64)
        for row, window in enumerate(windows):
            start = window * length
            stop = min(start + length, targets)
            inputs[row, : stop - start] = self.stream.tokens[start:stop]
            labels[row, : stop - start] = self.stream.tokens[start + 1 : stop + 1]
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
