"""The kernel that rotates and encodes must prove itself on a device before it may compute there (see `ops.selfcheck`).

A 40 x 300 matrix of normal numbers, and the same with a NaN, is rotated in float64 on the CPU. Codes must be the nearest, where the sum's
order may decide between two neighbours:

    |code - clip(y / scale)| <= 1/2 + 2**-10        sums of 64 numbers in float32 are off by 64 * 2**-24 of their magnitudes, a
                                                    few units: below 2**-14 of the scale; wrong signs or blocks are off by units
    bits say |y / scale| <= max                     but within 2**-10 of it; packed codes are the codes; NaN is code 0, and clipped
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import Format
from narrowgauge.ops.hadamard.codes import unpack_bits
from narrowgauge.recipe import Hadamard

ROWS, COLUMNS, SCALE, SLACK, SEED = 40, 300, 0.3, 2.0**-10, 20260613
NAN_ROW, NAN_COLUMN = 17, 203


def compare(
    run: Callable[..., Any], order: int, format: Format, dtype: torch.dtype, device: torch.device
) -> tuple[float, str | None]:
    """(largest error of a code as a share of what is allowed, why the kernel fails or None)."""
    hadamard, whole, worst = Hadamard(block=order, signs="random"), -(-COLUMNS // order) * order, 0.0
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (whole,), generator=generator, dtype=torch.float32) * 2 - 1
    numbers = torch.randn(ROWS, COLUMNS, generator=generator)
    for poisoned in (False, True):
        x = numbers.clone()
        if poisoned:
            x[NAN_ROW, NAN_COLUMN] = float("nan")
        x = x.to(dtype)
        scale = torch.full((1, 1), SCALE)
        got = run(x.to(device), hadamard, signs.to(device), scale.to(device), format, True, True)
        codes, bits = got.codes.to("cpu"), unpack_bits(got.bits.to("cpu"), whole)
        ratio = _rotated(x, signs, order, whole) / float(scale)
        nearest = ratio.nan_to_num(nan=0.0).clamp(-format.max, format.max)
        if tuple(codes.shape) != tuple(nearest.shape):
            return float("inf"), f"its codes are {list(codes.shape)} on {device}, not {list(nearest.shape)}"
        if bool((codes[ratio.isnan()] != 0).any()):
            return float("inf"), f"it makes numbers of NaN on {device}"
        worst = max(worst, float((codes.to(torch.float64) - nearest).abs().max()) / (0.5 + SLACK))
        if worst > 1:
            return (
                worst,
                f"its codes are wrong on {device}: off by {worst * (0.5 + SLACK):.2g} steps where half of one is allowed",
            )
        certain = (ratio.abs() - format.max).abs() > SLACK  # not of NaN, whose distance is NaN
        if not torch.equal(bits[certain], ratio.abs()[certain] <= format.max) or bool(bits[ratio.isnan()].any()):
            return float("inf"), f"its bits of what was not clipped are wrong on {device}"
        if not torch.equal(got.packed.to("cpu"), format.pack(got.codes.to("cpu"))):
            return float("inf"), f"its packed codes are not its codes on {device}"
    return worst, None


def _rotated(x: Tensor, signs: Tensor, order: int, whole: int) -> Tensor:
    """x diag(signs) H in float64, [ROWS, whole]."""
    index = torch.arange(order)
    both = index[:, None] & index[None, :]
    parity = torch.zeros_like(both)
    while bool(both.any()):
        parity, both = parity ^ (both & 1), both >> 1
    matrix = (1.0 - 2.0 * parity.to(torch.float64)) * order**-0.5
    filled = torch.nn.functional.pad(x.to(torch.float64), (0, whole - x.shape[1])) * signs
    return (filled.reshape(-1, order) @ matrix).reshape(len(x), whole)
