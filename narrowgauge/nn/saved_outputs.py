"""Selective checkpointing: keep results of `output` GEMMs from a forward pass to its recomputation.

Policies of torch.utils.checkpoint see dispatcher operations. They miss kernels outside the
dispatcher (Triton, C++), and torch's GEMMs are surrounded by casts, rotations, padding and scaling.
The Linear therefore asks the active Keeper itself.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class Keeper(Protocol):
    """Stores results of Linears, in the order of their calls.

    begin  a Linear starts; returns its stored result during recomputation, else None
    end    the Linear has finished with this result
    """

    def begin(self) -> Tensor | None: ...
    def end(self, output: Tensor | None) -> None: ...


KEEPER: ContextVar[Keeper | None] = ContextVar("narrowgauge_kept_products", default=None)
