"""Norms and activations in C++ (ops/cpp/norm_act.cpp), forward and backward, without casts.

A training step on a CPU reads and writes each tensor once: the kernels compute in float32 from
registers and round once. Layers that read y cast it themselves.

Values and gradients differ from the definition by the order of sums and by exp and P, whose
errors ops/cpp/vectors.h states. Results are bit-identical for every number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops import cpp
from narrowgauge.ops.norm_act.spec import CastResult, Kind, NormActSpec, Statistics
from narrowgauge.ops.registry import Refusal

if TYPE_CHECKING:
    from narrowgauge.ops.norm_act.spec import CastRequest, Given, Requests

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Must match `Function` in norm_act.cpp.
FUNCTIONS = {"silu": 0, "gelu": 1, "gelu-tanh": 2, "relu": 3, "relu2": 4}
# A thread adds the gradients of weights over at least so many rows, and in at most so many parts:
# each part is written and read again.
LEAST_ROWS, MOST_PARTS = 32, 64


class NormArguments(Structure):
    """Must match `Norm` in norm_act.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "columns", "stride", "gradient_stride", "part")),
        *((name, c_int32) for name in ("x_narrow", "y_narrow", "centered", "rounds_n")),
        *((name, c_float) for name in ("eps", "plus")),
    )


class ActivationArguments(Structure):
    """Must match `Activation` in norm_act.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("columns", "stride", "second_stride", "gradient_stride")),
        *((name, c_int32) for name in ("narrow", "function")),
    )


_P = c_void_p
LIBRARY = cpp.Library(
    ("norm_act.cpp", "vectors.h"),
    "the kernel of norms and activations",
    {
        "norm_forward": (_P,) * 7,
        "norm_backward": (_P,) * 9,
        "part_sums": (_P, c_int64, c_int64, c_int64, c_int64, _P),
        "column_sums": (_P, c_int64, c_int64, _P),
        "activation_forward": (_P,) * 4,
        "activation_backward": (_P,) * 6,
        **dict.fromkeys(("exp", "normal", "bfloat16"), (_P, _P)),
    },
)


def refuse(spec: NormActSpec) -> Refusal | None:
    """Return the reason why the kernels do not compute this, or None."""
    if spec.casts or spec.kept is not None:
        return Refusal("operands", "reads and writes values alone, and leaves casts to the layers")
    if spec.is_empty:
        return Refusal("shape", "there is nothing to compute")
    count = 2 if spec.kind.is_gated else 1
    # A spec may name the dtype of x alone, which is then the dtype of all tensors.
    result = spec.kind.result_dtype((*spec.dtypes, spec.dtypes[0])[:2])
    if spec.kind.out is not None and not spec.kind.is_norm:
        return Refusal("dtype", f"writes activations in the dtype of x, not in {spec.kind.out}")
    wrong = [each for each in (*spec.dtypes, result) if each not in DTYPES]
    if wrong or len(set(spec.dtypes[:count])) > 1:
        return Refusal(
            "dtype", f"reads float32 and bfloat16, gate and up alike, not {spec.dtypes} to {result}"
        )
    return LIBRARY.refuse(spec.device.type)


def forward(
    kind: Kind, tensors: Sequence[Given], request: CastRequest | None
) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`; the request is None."""
    x, *others = _rows(tensors)
    dtype = kind.result_dtype([each.dtype for each in tensors])
    y = torch.empty(x.shape, dtype=dtype, device="cpu")
    if not kind.is_norm:
        u = others[0] if kind.is_gated else None
        LIBRARY.call("activation_forward", len(x), x.numel(), _activation(kind, x, u), x, u, y)
        return CastResult(y), (None, None)
    rate = torch.empty(len(x), dtype=torch.float32, device="cpu")
    mean = torch.empty_like(rate) if kind.name == "layer-norm" else None
    w, b = _parameters(others)
    of = _norm(kind, x, y)
    LIBRARY.call("norm_forward", len(x), x.numel(), of, x, w, b, y, mean, rate)
    return CastResult(y), (mean, rate)


def backward(
    kind: Kind, tensors: Sequence[Given], statistics: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`; the requests are None."""
    x, *others = _rows(tensors)
    gy = _with_rows(gy.to(kind.result_dtype([each.dtype for each in tensors])))
    dx = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    if not kind.is_norm:
        u = others[0] if kind.is_gated else None
        du = torch.empty_like(dx) if kind.is_gated else None
        of = _activation(kind, x, u, gy)
        LIBRARY.call("activation_backward", len(x), x.numel(), of, x, u, gy, dx, du)
        return [CastResult(each) for each in (dx, du) if each is not None], []
    part, parts = _parts(len(x))
    partial = [
        torch.empty(parts, x.shape[1], dtype=torch.float32, device="cpu")
        for _ in range(2 if kind.name == "layer-norm" else 1)
    ]
    w, _ = _parameters(others)
    of = _norm(kind, x, gy, part)
    sums = (*partial, None)[:2]
    LIBRARY.call("norm_backward", parts, x.numel(), of, x, gy, w, *statistics, dx, *sums)
    return [CastResult(dx)], [
        _column_sums(each).to(parameter.dtype)
        for each, parameter in zip(partial, others, strict=True)
    ]


def summed_rows(x: Tensor) -> Tensor:
    """x [rows, columns] bfloat16, not empty -> [columns] float32, the sum over its rows.

    One read of x. torch's `sum(dim=0, dtype=float32)` first writes a copy in float32: 5 to 10 times
    as long.
    """
    x = _with_rows(x)
    part, parts = _parts(len(x))
    partial = torch.empty(parts, x.shape[1], dtype=torch.float32, device="cpu")
    LIBRARY.call("part_sums", parts, x.numel(), x, *x.shape, x.stride(0), part, partial)
    return _column_sums(partial)


def _parts(rows: int) -> tuple[int, int]:
    """Rows of a part, and the number of parts."""
    part = max(LEAST_ROWS, -(-rows // MOST_PARTS))
    return part, -(-rows // part)


def _column_sums(partial: Tensor) -> Tensor:
    parts, columns = partial.shape
    if parts == 1:
        return partial[0]
    sums = torch.empty(columns, dtype=torch.float32, device="cpu")
    LIBRARY.call("column_sums", columns, partial.numel(), partial, parts, columns, sums)
    return sums


def _rows(tensors: Sequence[Given]) -> list[Tensor]:
    plain = []
    for each in tensors:
        assert isinstance(each, Tensor)
        plain.append(_with_rows(each))
    return plain


def _with_rows(x: Tensor) -> Tensor:
    """x, or a copy of it if the elements of a row are apart. Rows may have any distance."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _parameters(given: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in float32, which is exact."""
    w, *b = (each.to(torch.float32).contiguous() for each in given)
    return w, b[0] if b else None


def _norm(kind: Kind, x: Tensor, y: Tensor, part: int = 0) -> Any:
    rounds_n = kind.name == "rms-norm" and not kind.wide and x.dtype != torch.float32
    return _norm_arguments(
        *x.shape, x.stride(0), y.stride(0), part, DTYPES[x.dtype], DTYPES[y.dtype],
        kind.name == "layer-norm", rounds_n, kind.eps, 1.0 if kind.name == "gemma-norm" else 0.0,
    )  # fmt: skip


def _activation(kind: Kind, x: Tensor, u: Tensor | None, gy: Tensor | None = None) -> Any:
    strides = (0 if each is None else each.stride(0) for each in (u, gy))
    function = FUNCTIONS[kind.activation]
    return _activation_arguments(x.shape[1], x.stride(0), *strides, DTYPES[x.dtype], function)


# A model calls with a few shapes, again and again.
@lru_cache(256)
def _norm_arguments(*values: float) -> Any:
    return NormArguments(*values)


@lru_cache(256)
def _activation_arguments(*values: int) -> Any:
    return ActivationArguments(*values)
