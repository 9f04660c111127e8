"""Batches as a pure function of (seed, step, micro-batch): the position in the data is a step number and nothing else.

A stream of n tokens holds  W = (n - 1) // T  windows; window i has the inputs [i T, i T + T) and, one further, the labels:

    inputs   t0 t1 t2 ... t(T-1)
    labels   t1 t2 t3 ... tT           already shifted: a loss compares logits[t] with labels[t]

Sample g of a run (g = step x batch_size + row) is in epoch g // W, at place g % W of that epoch's order: the windows
sorted by a hash of (seed, epoch, window). The hash is defined here, so the order does not change with a library's version,
with the machine, or with the number of micro-batches. Documents run on across windows. The (n - 1) % T labels
behind the last whole window are not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.data.cache import TokenStream
from narrowgauge.data.order import permutation
from narrowgauge.errors import ConfigError, DataError

IGNORED = -100  # a label that no loss counts, as in torch.nn.functional.cross_entropy
Batch = dict[str, Tensor]


def valid_targets(batch: Batch) -> int:
    """How many labels of the batch count in the loss."""
    return int((batch["labels"] != IGNORED).sum())


@lru_cache(maxsize=2)  # a batch can lie across two epochs
def epoch_order(windows: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The permutation of the windows that this epoch reads: 8 bytes per window, kept; about 0.3 s per million to make."""
    order = permutation(windows, b"%d:%d" % (seed, epoch))
    order.flags.writeable = False  # it is shared by every caller
    return order


class CausalBatches:
    """Next-token batches of a stream. Holds no position: `batch(step)` gives the same whenever it is asked."""

    def __init__(self, stream: TokenStream, sequence_length: int, batch_size: int, seed: int):
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name}: {value} is not a positive number.")
        if len(stream) < sequence_length + 1:
            raise DataError(
                f"{stream.name}: {len(stream)} tokens are fewer than one sequence of {sequence_length} and its last label, "
                f"{sequence_length + 1}. Pass more text, or a sequence length of at most {max(len(stream) - 1, 0)}."
            )
        self.stream, self.sequence_length, self.batch_size, self.seed = stream, sequence_length, batch_size, seed
        self.windows = (len(stream) - 1) // sequence_length

    def batch(self, step: int, micro_batch: int = 0, micro_batches: int = 1) -> Batch:
        """Micro-batch `micro_batch` of `micro_batches` of the step after `step` finished steps (0 is the first).

        -> input_ids, labels: [batch_size / micro_batches, T] int64. Micro-batch after micro-batch gives the rows of the
        whole batch in the same order, however many there are.
        """
        if step < 0 or micro_batches < 1 or not 0 <= micro_batch < micro_batches:
            raise ConfigError(
                f"batch: no micro-batch {micro_batch} of {micro_batches} at step {step}; all count from 0."
            )
        rows, rest = divmod(self.batch_size, micro_batches)
        if rest:
            raise ConfigError(
                f"batch_size {self.batch_size} cannot be split into {micro_batches} equal micro-batches. Pass a divisor."
            )
        first = step * self.batch_size + micro_batch * rows
        return self._rows([self._window(sample) for sample in range(first, first + rows)], len(self.stream) - 1)

    def evaluation(self, max_tokens: int | None = None) -> Iterator[Batch]:
        """The stream from its start, each label once: all len(stream) - 1 of them, or the first `max_tokens`.

        The last window is padded with label -100 (and input 0), the last batch has fewer rows: at most T - 1 positions
        are wasted, and `valid_targets` over all batches sums to the number of labels.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: {max_tokens} evaluates nothing. Pass a positive number, or None for all.")
        targets = min(len(self.stream) - 1, max_tokens or len(self.stream))
        windows = -(-targets // self.sequence_length)
        for first in range(0, windows, self.batch_size):
            yield self._rows(range(first, min(first + self.batch_size, windows)), targets)

    def _window(self, sample: int) -> int:
        epoch, place = divmod(sample, self.windows)
        return int(epoch_order(self.windows, self.seed, epoch)[place])

    def _rows(self, windows: list[int] | range, targets: int) -> Batch:
        """The windows as rows; no label beyond the stream's first `targets`."""
        length = self.sequence_length
        inputs = np.zeros((len(windows), length), dtype=np.int64)
        labels = np.full((len(windows), length), IGNORED, dtype=np.int64)
        for row, window in enumerate(windows):
            start = window * length
            stop = min(start + length, targets)
            inputs[row, : stop - start] = self.stream.tokens[start:stop]
            labels[row, : stop - start] = self.stream.tokens[start + 1 : stop + 1]
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
