"""Who keeps the results of a Linear's `output` product from one forward pass to its repetition: selective checkpointing.

Kernels outside torch's dispatcher (Triton, C++) are invisible to what watches its operations, and a product that torch computes is cast,
rotated, filled up and scaled by further ones. So the Linear itself asks.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class Keeper(Protocol):
    """begin: a Linear begins -> the result that was kept of it, in a repetition. end: it has ended, with this result."""

    def begin(self) -> Tensor | None: ...
    def end(self, output: Tensor | None) -> None: ...


KEEPER: ContextVar[Keeper | None] = ContextVar("narrowgauge_kept_products", default=None)
