"""What the kernel that rotates and encodes must compute rightly on a device first (see `ops.selfcheck`).

A 40 x 300 matrix of normal numbers, and the same with a NaN, is rotated in float64 on the CPU. Codes must be the nearest, where the sum's
order may decide between two neighbours:

    |code - clip(y / scale)| <= 1/2 + 2**-10        sums of 64 numbers in float32 are off by 64 * 2**-24 of their magnitudes, a
                                                    few units: below 2**-14 of the scale; wrong signs or blocks are off by units
    bits say |y / scale| <= max                     but within 2**-10 of it; packed codes are the codes; NaN is code 0, and clipped
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import INT4, Format
from narrowgauge.ops.hadamard import hadamard_matrix
from narrowgauge.ops.hadamard.codes import Codes, unpack_bits
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import Check, Comparison
from narrowgauge.recipe import Hadamard

ROWS, COLUMNS, SCALE, SLACK, SEED = 40, 300, 0.3, 2.0**-10, 20260613
NAN_ROW, NAN_COLUMN = 17, 203


@dataclass(frozen=True)
class Spec:
    """What a kernel is chosen by."""

    device: Device
    dtype: torch.dtype
    shape: tuple[int, int]
    order: int
    format: Format


Kind = tuple[int, Format, torch.dtype]


def _compare(run: Callable[..., Codes], kind: Kind, device: torch.device) -> Iterator[Comparison]:
    order, format, dtype = kind
    hadamard, whole = Hadamard(block=order, signs="random"), -(-COLUMNS // order) * order
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (whole,), generator=generator, dtype=torch.float32) * 2 - 1
    numbers = torch.randn(ROWS, COLUMNS, generator=generator)
    for with_nan in (False, True):
        x = numbers.clone()
        if with_nan:
            x[NAN_ROW, NAN_COLUMN] = float("nan")
        x = x.to(dtype)
        scale = torch.full((1, 1), SCALE)
        got = run(x.to(device), hadamard, signs.to(device), scale.to(device), format, True, True)
        assert got.packed is not None and got.bits is not None
        ratio = _rotated(x, signs, order) / float(scale)
        bound = torch.where(ratio.isnan(), 0.0, 0.5 + SLACK)
        yield Comparison("codes", got.codes, ratio.nan_to_num(nan=0.0).clamp(-format.max, format.max), bound)
        certain = ~((ratio.abs() - format.max).abs() <= SLACK)  # of NaN too, which counts as clipped
        inside = unpack_bits(got.bits.to("cpu"), whole)
        yield Comparison("bits of what was not clipped", inside & certain, (ratio.abs() <= format.max) & certain)
        yield Comparison("packed codes", got.packed, format.pack(got.codes.to("cpu")))


def _rotated(x: Tensor, signs: Tensor, order: int) -> Tensor:
    """x diag(signs) H in float64, [ROWS, whole blocks]."""
    matrix = hadamard_matrix(order, torch.device("cpu")).sign().to(torch.float64) * order**-0.5
    filled = torch.nn.functional.pad(x.to(torch.float64), (0, len(signs) - x.shape[1])) * signs
    return (filled.reshape(-1, order) @ matrix).reshape(len(x), -1)


def _examples() -> Iterator[Spec]:
    for order in (16, 32, 64):
        for dtype in (torch.float32, torch.bfloat16):
            yield Spec(Device("cpu"), dtype, (ROWS, COLUMNS), order, INT4)


CHECK: Check[Spec] = Check(lambda spec: (spec.order, spec.format, spec.dtype), _compare, _examples)
