"""Cross-entropy in C++ (ops/cpp/cross_entropy.cpp)."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.ops import cpp
from narrowgauge.ops.registry import Refusal

if TYPE_CHECKING:
    from narrowgauge.ops.cross_entropy import CrossEntropySpec

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_LOGITS = (c_int32, c_void_p, c_int64, c_int64, c_void_p)
LIBRARY = cpp.Library(
    ("cross_entropy.cpp", "vectors.h"),
    "the kernel of cross-entropy",
    {
        "cross_entropy": (*_LOGITS, c_void_p, c_void_p),
        "cross_entropy_gradient": (*_LOGITS, c_void_p, c_void_p, c_void_p),
    },
)


def refuse(spec: CrossEntropySpec) -> Refusal | None:
    """Return the reason why the kernel does not compute this, or None."""
    if spec.is_empty:
        return Refusal("shape", "there is nothing to compute")
    if spec.dtype not in DTYPES:
        return Refusal("dtype", f"reads float32 and bfloat16, not {spec.dtype}")
    return LIBRARY.refuse(spec.device.type)


def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.cross_entropy`."""
    logits = _with_rows(logits)
    losses, sums = torch.empty(2, len(logits), dtype=torch.float32, device="cpu")
    _call("cross_entropy", logits, labels, losses, sums)
    return losses, sums


def backward(logits: Tensor, labels: Tensor, sums: Tensor, gradients: Tensor) -> Tensor:
    """See `ops.cross_entropy`."""
    logits = _with_rows(logits)
    out = torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
    _call("cross_entropy_gradient", logits, labels, sums, gradients.contiguous(), out)
    return out


def _call(name: str, logits: Tensor, labels: Tensor, *rest: Tensor) -> None:
    rows, columns = logits.shape
    layout = DTYPES[logits.dtype], logits, logits.stride(0), columns, labels.contiguous()
    LIBRARY.call(name, rows, logits.numel(), *layout, *rest)


def _with_rows(x: Tensor) -> Tensor:
    """x, or a copy of it if the elements of a row are apart. Rows may have any distance."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
