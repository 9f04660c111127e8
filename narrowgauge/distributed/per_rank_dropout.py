"""Independent dropout masks per rank between column-wise and row-wise parallel layers.

    x  ->  column-wise  ->  attention, activation, dropout  ->  row-wise  ->  y
    replicated              own features, own generators        replicated

Outside this region activations are replicated over the tensor-parallel ranks, so dropout masks must
be identical and torch's generators have the same seed. Inside, each rank has other features: with
identical seeds, head n of every rank would drop the same elements.

The first column-wise layer draws one number from the common generator. torch's generators are
seeded by that number and the rank, and the row-wise layer restores them. Activation checkpointing
restores the common generator and so repeats the draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge.ops.random import hashed
from narrowgauge.ops.rng import own_generators, seed_own, set_own

if TYPE_CHECKING:
    from narrowgauge.distributed.state import DistributedState


class PerRankDropout:
    """Hooks that reseed torch's generators between column-wise and row-wise layers.

    rank    of this process among the ranks that share the layers
    device  of the layers
    state   of the model; its layers continue to draw by micro-batch. None: not distributed
    """

    def __init__(self, rank: int, device: torch.device, state: DistributedState | None) -> None:
        self.rank, self.device, self.state = rank, device, state
        # Seed of the region -> generator states before it.
        self._states_before: dict[int, Any] = {}

    def install(self, columns: Iterable[nn.Module], rows: Iterable[nn.Module]) -> None:
        for each in columns:
            each.register_forward_hook(self.begin)
        for each in rows:
            each.register_forward_pre_hook(self.end)

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Forward hook of column-wise layers: reseed torch's generators.

        Only the first of several layers with the same input has an effect.
        """
        if not module.training or torch.initial_seed() in self._states_before:
            return
        low, high = hashed(int(torch.randint(2**62, (), device="cpu")), self.rank)
        seed = low | (high & 0x7FFFFFFF) << 32
        # Replaces the entry of a region that checkpointing left early, before its row-wise layer.
        self._states_before = {seed: own_generators()}
        if self.state is not None:
            self.state.reuse_key(seed, self.device)
        seed_own(seed)

    def end(self, module: nn.Module, _: Any) -> None:
        """Forward pre-hook of row-wise layers: restore the generators."""
        if (before := self._states_before.pop(torch.initial_seed(), None)) is not None:
            set_own(before)
