"""Reports of tensors saved for backward outside autograd: codes, outputs kept for recomputation.

Autograd's hooks do not see these tensors. Code that saves one calls `report_saved`. Measurements
receive the reports: `measure.saved_bytes` and the trace of `narrowgauge plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_ACTIVE: ContextVar[Callable[[Tensor], None] | None] = ContextVar("narrowgauge_noted", default=None)


@contextmanager
def reporting(callback: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `callback` with every tensor reported by `report_saved` inside this context."""
    token = _ACTIVE.set(callback)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def report_saved(*tensors: Tensor) -> None:
    """Report tensors saved for backward without autograd, if a measurement is active."""
    if (callback := _ACTIVE.get()) is not None:
        for tensor in tensors:
            callback(tensor)


def detached(tensor: Tensor) -> Tensor:
    """Return the tensor in a form that a saved-tensor hook may hold: detached unless it is a leaf.

    An operation that saves its own result would otherwise hold itself, and leak if backward never
    runs.
    """
    return tensor if tensor.is_leaf else tensor.detach()
