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
    vocab_slice      words per slice of the vocabulary (loss_slices.py)
    compute_dtype    dtype to which operands and logits are rounded
    gemm_dtype       dtype of the GEMM operands: compute_dtype, or float32 on CPUs that are faster
                     with it
    softcap, z_loss  0 when off
    needs_gradients  compute gradients in forward
    has_ignored      the rows may contain ignored tokens
    shard            this rank's part of a vocabulary-sharded head, or None
    """

    rows: int
    vocab_slice: int
    compute_dtype: torch.dtype
    gemm_dtype: torch.dtype
    softcap: float
    z_loss: float
    needs_gradients: bool
    has_ignored: bool
    shard: VocabularyShard | None = None

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """dtype of softmax, loss and sums: float32, or float64 for float64 inputs."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def operand(self, x: Tensor) -> Tensor:
        """Round x to compute_dtype and return it in gemm_dtype."""
        # The first cast rounds; the second changes only the container, so products are the same.
        return x.to(self.compute_dtype).to(self.gemm_dtype)

    def logits(self, lhs: Tensor, rhs: Tensor, bias: Tensor | None) -> Tensor:
        """Return lhs @ rhs.T + bias, rounded to compute_dtype, in the dtype `accumulate_dtype`."""
        # Rounded as an unfused head would return its logits.
        product = lhs @ rhs.T if bias is None else torch.addmm(self.operand(bias), lhs, rhs.T)
        return product.to(self.compute_dtype).to(self.accumulate_dtype)

    def capped(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
