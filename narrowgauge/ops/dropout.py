"""Dropout with noise that is a function of (key, element index), see `ops.random`.

    element i is 0 if uniform[i] < rate, else times 1 / (1 - rate) in float32
    uniform in steps of 2^-24

A call draws two numbers from torch's generator, whatever its size. Kernels compute the noise where
they need it, forward and backward, so no mask is saved. Code that restores the generator and repeats
a forward pass (activation checkpointing, a resumed run) repeats the mask bit for bit.

`nn.dropout` numbers the elements of a tensor in row-major order. Attention numbers its weights
[batch, heads, keys, queries] so: queries are the lanes of its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError
from narrowgauge.ops import random


@dataclass(frozen=True)
class Dropout:
    """Which elements of one call stay.

    rate   share that is dropped out, in 0 to 1
    words  the key of the noise
    """

    rate: float
    words: tuple[int, int]

    @classmethod
    def drawn(cls, rate: float) -> Dropout | None:
        """Draw the key of a call from torch's generator; None, and no draw, for a rate of 0.

        Raises ConfigError for a rate that is not in 0 to 1.
        """
        if rate == 0:
            return None
        if not 0 <= rate <= 1:
            raise ConfigError(
                f"dropout: the rate is {rate}; it must be between 0 and 1. Set the module's dropout to such a number.",
                code="dropout.rate",
            )
        key = random.draw((), torch.device("cpu"))
        assert isinstance(key, random.Key) and isinstance(key.words, tuple)
        return cls(rate, key.words)

    @property
    def threshold(self) -> int:
        """Elements stay whose noise is at least this, in units of 2^-24.

        Kernels compare whole numbers below 2^24, since a rate has no exact float32 value.
        """
        return math.ceil(self.rate * 2**24)

    @property
    def scale(self) -> float:
        """Factor of the elements that stay."""
        return 1.0 / (1.0 - self.rate) if self.rate < 1.0 else 0.0

    def kept(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return where the elements of a tensor stay, as bools of its shape."""
        noise = random.reference(*self.words, tuple(shape), device)
        return noise * 2.0**24 >= self.threshold
