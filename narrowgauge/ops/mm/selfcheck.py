"""Self-check of GEMM kernels (see `ops.selfcheck`): one small random GEMM.

    136 x 272 by 264 x 272      no axis is a multiple of 16, 32 or 128, except K of 16; the scales
                                of tiles differ by up to 2**12

It runs without and with a NaN in the left operand, and with a bias of the magnitude of the result,
rounded to bfloat16. The reference result is computed on the CPU, from the decoded operands in
float64. The kernel passes if

    |out - truth| <= allowed * (|x_lhs| @ |x_rhs|.T)   everywhere, and NaN appears exactly in the
                                                       right rows and columns

    allowed   integers: 2**-20. Their sums are exact, and scaled in float32
              floats:   2**-8 + 2**-13 * ceil(K / 32). The result is rounded once to bfloat16.
                        Tensor cores keep 13 bits behind the point when they add 32 products at a
                        time (Hopper with fast_accumulate; arXiv 2412.19437, 3.3.2)

A kernel with a wrong order of scales, or with a skipped or repeated block, has an error of the size
of the result: a hundred times more. A check runs once per pair of casts and takes 5 to 11 ms of CPU
time (docs/gpu.md) and five synchronized launches. Compiling a Triton kernel comes on top, but the
first call would need it anyway.

LARGE is for `KernelCheck.large`: more tiles than a device computes at once, and sums of training's
length. Its reference result is computed for every 61st row, so each tile of 64 rows or more has
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.formats import IntFormat
from narrowgauge.ops.flat_cast import FlatCast, flatten_cast, is_flattenable, plain, unflatten_cast
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.quantize import definition as quantization
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison, spread_normal
from narrowgauge.recipe import Cast

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

Run = Callable[..., Tensor]

ROWS, COLUMNS, CONTRACTED, SEED = 136, 264, 272, 20260529
SMALL, LARGE = (ROWS, COLUMNS, CONTRACTED), (4096, 4096, 2048)
EVERY = 61  # of the large result's rows, with a reference result
SPREAD = 6  # tiles of the operands differ by up to 2**(2 * SPREAD)


def _kind(spec: MmSpec) -> tuple[FlatCast | Cast, ...]:
    """Return both casts as tuples (`flat_cast`), or unmodified if they cannot be encoded."""
    casts = [cast for cast in spec.casts if cast is not None]
    return (
        tuple(flatten_cast(cast) for cast in casts)
        if all(map(is_flattenable, casts))
        else tuple(casts)
    )


def _compare(
    run: Run, kind: tuple[FlatCast | Cast, ...], device: torch.device,
    sizes: tuple[int, int, int] = SMALL,
) -> Iterator[OutputComparison]:  # fmt: skip
    rows, columns, contracted = sizes
    lhs, rhs = (plain(each) if isinstance(each, Cast) else unflatten_cast(*each) for each in kind)
    exact = isinstance(lhs.format, IntFormat) and isinstance(rhs.format, IntFormat)
    allowed = 2.0**-20 if exact else 2.0**-8 + 2.0**-13 * -(-contracted // 32)
    every = EVERY if sizes == LARGE else 1
    for with_nan in (False, True) if sizes == SMALL else (False,):
        left, x = _operand(rows, contracted, lhs, with_nan)
        right, w = _operand(columns, contracted, rhs, False)
        x = x[::every]
        truth = x.to(torch.float64) @ w.to(torch.float64).T
        bound = (x.abs() @ w.abs().T).clamp_min(torch.finfo(torch.float32).tiny) * allowed
        for fast_accumulate in (False, True):
            out = run(left.to(device), right.to(device), None, torch.float32, fast_accumulate)
            yield OutputComparison("result", out[::every], truth, bound)
        if not with_nan:
            bias = truth[0].to(torch.bfloat16)
            out = run(left.to(device), right.to(device), bias.to(device), torch.bfloat16, False)
            # Eight times the cost of two roundings; a missing bias has an error of its own size.
            rounding = 2.0**-5 * (truth.abs() + bias.abs())
            yield OutputComparison(
                "result with a bias", out[::every], truth + bias.to(torch.float64), bound + rounding
            )


def _operand(rows: int, contracted: int, cast: Cast, with_nan: bool) -> tuple[QTensor, Tensor]:
    """Return a quantized operand [rows, contracted], and its decoded values in float32.

    It has normal numbers with a random power of two per 16 x 16 block, and one NaN if requested.
    """
    x = spread_normal(rows, contracted, SPREAD, torch.Generator().manual_seed(SEED + rows))
    if with_nan:
        x[rows // 2, contracted // 3] = float("nan")
    q = quantization.quantize(x, cast, None, None, None)
    return q, quantization.dequantize(q)


def _examples() -> Iterator[MmSpec]:
    """Yield the GEMMs of all recipes."""
    from narrowgauge import recipes  # imported here because a GEMM does not need it

    gemms = {gemm for recipe in recipes.ALL for gemm in recipe.gemms().values()}
    pairs = dict.fromkeys(
        (plain(gemm.lhs), plain(gemm.rhs)) for gemm in gemms if gemm.lhs and gemm.rhs
    )
    yield from (MmSpec(lhs, rhs, Device("cpu")) for lhs, rhs in pairs)


CHECK: KernelCheck[MmSpec] = KernelCheck(
    _kind, _compare, _examples, large=partial(_compare, sizes=LARGE)
)
