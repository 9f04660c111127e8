"""Dropout of attention weights, whose noise both passes compute where they need it.

    weight of batch b, head h, key k, query q   is 0 if uniform[i] < rate, else times 1 / (1 - rate)
    i = ((b * heads + h) * keys + k) * queries + q, modulo 2^32     uniform: see ops/random.py

A call draws two numbers from torch's generator, whatever its sizes, and no mask is saved. Code that
restores the generator and repeats a forward pass, as checkpointing does, repeats the mask. In a call
of more than 2^32 weights the noise repeats itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.ops import random


@dataclass(frozen=True)
class Dropout:
    """Which weights of one call stay.

    rate   share that is dropped out, in 0 to 1
    words  the key of the noise
    """

    rate: float
    words: tuple[int, int]

    @classmethod
    def drawn(cls, rate: float) -> Dropout | None:
        """Draw the key of a call from torch's generator; None, and no draw, for a rate of 0."""
        if rate == 0:
            return None
        key = random.draw((), torch.device("cpu"))
        assert isinstance(key, random.Key) and isinstance(key.words, tuple)
        return cls(rate, key.words)

    @property
    def threshold(self) -> int:
        """Weights stay whose noise, in units of 2^-24, is at least this."""
        return math.ceil(self.rate * 2**24)

    @property
    def scale(self) -> float:
        """Factor of the weights that stay."""
        return 1.0 / (1.0 - self.rate) if self.rate < 1.0 else 0.0

    def kept(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return where weights [batch, heads, queries, keys] stay, as bools."""
        batch, heads, queries, keys = shape
        noise = random.reference(*self.words, (batch, heads, keys, queries), device)
        return (noise * 2.0**24 >= self.threshold).mT
