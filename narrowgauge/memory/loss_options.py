"""How a chunked loss is computed, and what its two ways have in common: operands, logits, their cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from narrowgauge.memory.loss_parallel import VocabularyShard


@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed.

    rows         tokens of a chunk             words   of a slice of the vocabulary (loss_slices.py)
    softcap, z_loss  0 when they are off
    has_ignored  ignored tokens are among the rows
    shard        of a head that ranks share
    """

    rows: int
    words: int
    computes_in: torch.dtype
    multiplies_in: torch.dtype
    softcap: float
    z_loss: float
    needs_gradients: bool
    has_ignored: bool
    shard: VocabularyShard | None = None

    @property
    def wide(self) -> torch.dtype:
        """The type of softmax, loss and sums."""
        return torch.float64 if self.computes_in == torch.float64 else torch.float32

    def operand(self, x: Tensor) -> Tensor:
        """As it enters a product: rounded to the type of the computation, held in that of the multiplication."""
        return x.to(self.computes_in).to(self.multiplies_in)

    def logits(self, lhs: Tensor, rhs: Tensor, bias: Tensor | None) -> Tensor:
        """Of operands, rounded to the type of the computation, wide."""
        product = lhs @ rhs.T if bias is None else torch.addmm(self.operand(bias), lhs, rhs.T)
        return product.to(self.computes_in).to(self.wide)

    def capped(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
