"""What a GEMM must multiply rightly on a device before it may compute there (see `ops.selfcheck`): one small random product.

    136 x 272 by 264 x 272      no multiple of 16, 32 or 128 in any axis but K of 16; scales from tile to tile up to 2**12 apart

and the same with a NaN in the left operand, and with a bias of the size of the result, rounded to bfloat16. The truth is computed on
the CPU from the decoded operands in float64. The kernel passes if

    |out - truth| <= allowed * (|x_lhs| @ |x_rhs|.T)   everywhere, and NaN spoils the rows and columns that it must, no others

    allowed   of integers 2**-20: their sums are exact, and scaled in float32
              of floats   2**-8 + 2**-13 * ceil(K / 32): one rounding to bfloat16 on the way out, and tensor cores that keep 13 bits
                          behind the point when they add (Hopper with fast_accumulate; arXiv 2412.19437, 3.3.2), 32 products at a time

A kernel that reads its scales in another order, leaves a block out or repeats one is wrong by the size of the product itself, a
hundred times more. Once per pair of casts: 5 to 11 ms of a processor (docs/gpu.md), five launches that are waited for. Compiling a Triton
kernel, where there is one, comes on top; a call would need it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from narrowgauge.formats import IntFormat
from narrowgauge.ops.cast_words import Words, as_words, has_words, of_words, plain
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.quantize import definition as quantization
from narrowgauge.ops.quantize import dequantize
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import Check, Comparison, spread_normal
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

Run = Callable[..., Tensor]

ROWS, COLUMNS, CONTRACTED, SEED = 136, 264, 272, 20260529
SPREAD = 6  # tiles of the operands differ by up to 2**(2 * SPREAD)


def _kind(spec: MmSpec) -> tuple[Words | Cast, ...]:
    """Both casts in words; as they are if words cannot name them."""
    casts = [cast for cast in spec.casts if cast is not None]
    return tuple(as_words(cast) for cast in casts) if all(map(has_words, casts)) else tuple(casts)


def _compare(run: Run, kind: tuple[Words | Cast, ...], device: torch.device) -> Iterator[Comparison]:
    lhs, rhs = (plain(each) if isinstance(each, Cast) else of_words(*each) for each in kind)
    exact = isinstance(lhs.format, IntFormat) and isinstance(rhs.format, IntFormat)
    allowed = 2.0**-20 if exact else 2.0**-8 + 2.0**-13 * -(-CONTRACTED // 32)
    for with_nan in (False, True):
        (left, x), (right, w) = _operand(ROWS, lhs, with_nan), _operand(COLUMNS, rhs, False)
        truth = x.to(torch.float64) @ w.to(torch.float64).T
        bound = (x.abs() @ w.abs().T).clamp_min(torch.finfo(torch.float32).tiny) * allowed
        for fast_accumulate in (False, True):
            out = run(left.to(device), right.to(device), None, torch.float32, fast_accumulate)
            yield Comparison("result", out, truth, bound)
        if not with_nan:
            bias = truth[0].to(torch.bfloat16)
            out = run(left.to(device), right.to(device), bias.to(device), torch.bfloat16, False)
            rounding = 2.0**-5 * (
                truth.abs() + bias.abs()
            )  # eight times what two roundings cost; one that is left out is off by all of it
            yield Comparison("result with a bias", out, truth + bias.to(torch.float64), bound + rounding)


def _operand(rows: int, cast: Cast, with_nan: bool) -> tuple[QTensor, Tensor]:
    """Normal numbers, each 16 x 16 of them scaled by a power of two of their own, perhaps one NaN; and decoded, float32."""
    x = spread_normal(rows, CONTRACTED, SPREAD, torch.Generator().manual_seed(SEED + rows))
    if with_nan:
        x[rows // 2, CONTRACTED // 3] = float("nan")
    q = quantization.quantize(x, cast, None, None, None)
    return q, dequantize(q)


def _examples() -> Iterator[MmSpec]:
    """The products of all recipes."""
    from narrowgauge import recipes  # who multiplies needs them not

    gemms = {gemm for recipe in recipes.ALL for gemm in recipe.gemms().values()}
    pairs = dict.fromkeys((plain(gemm.lhs), plain(gemm.rhs)) for gemm in gemms if gemm.lhs and gemm.rhs)
    yield from (MmSpec(lhs, rhs, Device("cpu")) for lhs, rhs in pairs)


CHECK: Check[MmSpec] = Check(_kind, _compare, _examples)
