"""Options of the chunked loss, and the operations common to loss.py and loss_slices.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from narrowgauge.memory.loss_parallel import VocabularyShard


@dataclass(frozen=True)
class LossOptions:
    """Options of the chunked loss.

    rows             tokens per chunk
    words            words per slice of the vocabulary (loss_slices.py)
    computes_in      dtype to which operands and logits are rounded
    multiplies_in    dtype of the GEMM operands: computes_in, or float32 on CPUs that are faster
                     with it
    softcap, z_loss  0 when off
    needs_gradients  compute gradients in forward
    has_ignored      the rows may contain ignored tokens
    shard            this rank's part of a vocabulary-sharded head, or None
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
        """dtype of softmax, loss and sums: float32, or float64 for float64 inputs."""
        return torch.float64 if self.computes_in == torch.float64 else torch.float32

    def operand(self, x: Tensor) -> Tensor:
        """Round x to computes_in and return it in multiplies_in."""
        # The first cast rounds; the second changes only the container, so products are the same.
        return x.to(self.computes_in).to(self.multiplies_in)

    def logits(self, lhs: Tensor, rhs: Tensor, bias: Tensor | None) -> Tensor:
        """Return lhs @ rhs.T + bias, rounded to computes_in, in the dtype `wide`."""
        # Rounded as an unfused head would return its logits.
        product = lhs @ rhs.T if bias is None else torch.addmm(self.operand(bias), lhs, rhs.T)
        return product.to(self.computes_in).to(self.wide)

    def capped(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
