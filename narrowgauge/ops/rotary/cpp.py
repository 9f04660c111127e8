"""Rotary embedding in C++ (ops/cpp/rotary.cpp), bit-identical to the definition."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops import cpp
from narrowgauge.ops.registry import Refusal

if TYPE_CHECKING:
    from narrowgauge.ops.rotary import Dtypes, Pair, RotarySpec

DTYPES = (torch.float32, torch.bfloat16)


class SideArguments(Structure):
    """Must match `Side` in rotary.cpp: heads, then (batch, head, token) strides in and out."""

    _fields_ = (("heads", c_int64), ("strides_in", c_int64 * 3), ("strides_out", c_int64 * 3))


class RotaryArguments(Structure):
    """Must match `Rotary` in rotary.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "half", "angle_batch")),
        ("sides", SideArguments * 2),
        *((name, c_int32 * 2) for name in ("in_narrow", "out_narrow", "rounds")),
        ("inverse", c_int32),
    )


LIBRARY = cpp.Library(
    ("rotary.cpp", "vectors.h"), "the kernel of rotary embeddings", {"rotary": (c_void_p,) * 7}
)


def refuse(spec: RotarySpec) -> Refusal | None:
    """Return the reason why the kernel does not compute this, or None."""
    if spec.is_empty:
        return Refusal("shape", "there is nothing to rotate")
    if spec.head % 2:
        return Refusal("shape", f"turns heads of even length, not {spec.head}")
    if any(each not in DTYPES for each in spec.dtypes):
        return Refusal("dtype", f"reads float32 and bfloat16, not {spec.dtypes}")
    return LIBRARY.refuse(spec.device.type)


def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtypes: Dtypes, inverse: bool) -> Pair:
    """See `ops.rotary`.

    Gradients lie token by token, [batch, tokens, heads, head], as the projections before them read
    them.
    """
    inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k)]
    results = [
        _by_token(x, dtype) if inverse else torch.empty_like(x, dtype=dtype)
        for x, dtype in zip(inputs, dtypes, strict=True)
    ]
    # A product has torch's dtype of its factors; that of a gradient is then rounded to the result's.
    rounds = [
        torch.bfloat16 in (torch.promote_types(x.dtype, cos.dtype), y.dtype if inverse else None)
        for x, y in zip(inputs, results, strict=True)
    ]
    angles = [x.to(torch.float32).contiguous() for x in (cos, sin)]
    batch, _, tokens, head = q.shape
    sides = tuple(
        (x.shape[1], x.stride()[:3], y.stride()[:3]) for x, y in zip(inputs, results, strict=True)
    )
    narrow = tuple(
        tuple(each.dtype == torch.bfloat16 for each in pair) for pair in (inputs, results)
    )
    shared = 0 if cos.shape[0] == 1 else tokens * head
    of = _arguments((tokens, head // 2, shared), sides, *narrow, tuple(rounds), inverse)
    elements = q.numel() + k.numel()
    LIBRARY.call("rotary", batch * tokens, elements, of, *inputs, *angles, *results)
    return results[0], results[1]


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, head = x.shape
    return torch.empty(batch, tokens, heads, head, dtype=dtype, device="cpu").transpose(1, 2)


@lru_cache(256)
def _arguments(
    sizes: tuple[int, ...],
    sides: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...],
    in_narrow: tuple[bool, ...],
    out_narrow: tuple[bool, ...],
    rounds: tuple[bool, ...],
    inverse: bool,
) -> Any:
    three, two = c_int64 * 3, c_int32 * 2
    both = [SideArguments(heads, three(*x), three(*y)) for heads, x, y in sides]
    flags = (two(*each) for each in (in_narrow, out_narrow, rounds))
    return RotaryArguments(*sizes, (SideArguments * 2)(*both), *flags, inverse)
