"""Dropout between a column-wise and a row-wise layer, where each rank has other features: each draws its own.

    x  ->  column-wise  ->  attention, activation, dropout  ->  row-wise  ->  y
    equal on all ranks      own features, own generators        equal on all ranks

Elsewhere activations are equal on all ranks of tensor parallelism, and so must be what dropout leaves out: there torch's generators are
seeded alike. Were they between the two layers as well, head n of every rank would leave out the same.

The first column-wise layer draws one number from the common generator, by which and by its rank torch's generators are seeded; the
row-wise layer sets them back. Checkpointing, which brings the generators back, repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from narrowgauge.distributed.agreement import Agreement
from narrowgauge.distributed.generators import generators, seed_all, set_generators
from narrowgauge.ops.random import hashed


class SplitDropout:
    """rank: among those that share the layers. agreement: of the model, whose layers draw by the micro-batch all the same."""

    def __init__(self, rank: int, device: torch.device, agreement: Agreement | None) -> None:
        self.rank, self.device, self.agreement = rank, device, agreement
        self._outside: dict[int, Any] = {}  # seed of a part -> the generators before it

    def install(self, columns: Iterable[nn.Module], rows: Iterable[nn.Module]) -> None:
        for each in columns:
            each.register_forward_hook(self.begin)
        for each in rows:
            each.register_forward_pre_hook(self.end)

    def begin(self, module: nn.Module, *_: Any) -> None:
        """A forward hook of column-wise layers; only the first of those that read one tensor finds anything to do."""
        if not module.training or torch.initial_seed() in self._outside:
            return
        low, high = hashed(int(torch.randint(2**62, (), device="cpu")), self.rank)
        seed = low | (high & 0x7FFFFFFF) << 32
        self._outside = {seed: generators()}  # of a part that checkpointing left early nothing is kept
        if self.agreement is not None:
            self.agreement.continue_as(seed, self.device)
        seed_all(seed)

    def end(self, module: nn.Module, _: Any) -> None:
        """A forward pre-hook of row-wise layers."""
        if (before := self._outside.pop(torch.initial_seed(), None)) is not None:
            set_generators(before)
