"""The product of scaled blocks and rotary embedding in programs of odd sizes, under Triton's interpreter; a process of its own.

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick interpreted_products      cases.py says what is printed

Sums of a product are compared with float64, a rotation with its definition to the bit, an operator with torch's rules for operators.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from narrowgauge.ops import rotary, selfcheck
from narrowgauge.ops.mm.triton import launch
from tests.ops.triton.cases import Case

# Name -> rows, columns, inner size, tiles of both sides, whether there is a bias.
PRODUCTS = {
    "1x128, 128x128": (150, 140, 300, (1, 128, 128, 128), True),
    "128x128, 1x128": (150, 140, 300, (128, 128, 1, 128), False),
    "1x128, 1x128": (33, 130, 128, (1, 128, 1, 128), True),
    "128x128, 128x128": (140, 257, 257, (128, 128, 128, 128), False),
    "1x64 by 64x64": (150, 140, 300, (1, 64, 64, 64), True),
    "64x64 by 1x64": (150, 140, 300, (64, 64, 1, 64), False),
    "1x256 by 16x64, one longer than a step": (70, 90, 700, (1, 256, 16, 64), False),
    "256x128 by 1x512": (300, 90, 700, (256, 128, 1, 512), False),
    "one element": (1, 1, 1, (1, 128, 128, 128), False),
    "nine tiles of rows": (1100, 129, 130, (1, 128, 128, 128), False),
}
KINDS = ("product ", "operator ", "rotary ")


def is_quick(name: str) -> bool:
    """An operator of each kind of tile, with a bias and without."""
    return name not in (
        f"operator narrowgauge::block_mm {(1, 128, 128, 128)}, bias: True",
        f"operator narrowgauge::block_mm {(1, 64, 64, 64)}, bias: False",
    )


def cases() -> Iterator[Case]:
    for name, given in PRODUCTS.items():
        yield f"product {name}", lambda given=given: compare_product(*given)
    for m, n, k, tiles in ((33, 70, 130, (1, 128, 128, 128)), (40, 20, 200, (1, 64, 64, 64))):
        for biased in (False, True):
            name = f"operator narrowgauge::block_mm {tiles}, bias: {biased}"
            yield name, lambda given=(m, n, k, tiles, biased): check_operator(*given)
    yield "rotary with two heads of five at a time", rotate_few_heads


def compare_product(m: int, n: int, k: int, tiles: tuple[int, ...], biased: bool) -> None:
    """Several kinds of tile on both sides, ragged in all three axes, few rows, bias, more groups of rows than one."""
    operands = lhs, rhs = torch.randn(m, k), torch.randn(n, k)
    scales = [
        torch.ldexp(ones, torch.randint(-5, 6, ones.shape)) for ones in ones_of((m, n), k, tiles)
    ]
    bias = torch.randn(n) if biased else None
    got = launch(lhs, scales[0], rhs, scales[1], bias, list(tiles), torch.float32).double()
    full = [
        x.double() * s.double().repeat_interleave(a, 0)[: x.shape[0]].repeat_interleave(b, 1)[:, :k]
        for x, s, (a, b) in zip(operands, scales, (tiles[:2], tiles[2:]), strict=True)
    ]
    truth, size = full[0] @ full[1].T, full[0].abs() @ full[1].abs().T
    if bias is not None:
        truth, size = truth + bias.double(), size + bias.double().abs()
    error = float(((got - truth).abs() / size).max())
    assert error < 2.0**-20, error


def ones_of(rows: tuple[int, int], k: int, tiles: tuple[int, ...]) -> list[Tensor]:
    """A scale for each tile of both operands."""
    return [
        torch.ones(-(-size // a), -(-k // b))
        for size, (a, b) in zip(rows, (tiles[:2], tiles[2:]), strict=True)
    ]


def check_operator(m: int, n: int, k: int, tiles: tuple[int, ...], biased: bool) -> None:
    """`block_mm` has no kernel for the CPU: the interpreted one stands in."""
    operator = torch.library.Library("narrowgauge", "IMPL")
    operator.impl("block_mm", launch, "CPU", allow_override=True)
    scales = [torch.rand_like(ones) for ones in ones_of((m, n), k, tiles)]
    bias = torch.randn(n) if biased else None
    given = (
        torch.randn(m, k),
        scales[0],
        torch.randn(n, k),
        scales[1],
        bias,
        list(tiles),
        torch.bfloat16,
    )
    torch.library.opcheck(torch.ops.narrowgauge.block_mm.default, given)


def rotate_few_heads() -> None:
    """Whole heads are examined with all other kernels (interpreted.py); not bfloat16, to which the interpreter rounds wrongly."""
    kind = ((torch.float16,) * 4, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "ELEMENTS", 32)  # two heads at a time, of five and two
        result = selfcheck.examine(
            "rotary", rotary.run_triton, rotary.CHECK, kind, torch.device("cpu")
        )
    assert result.reason is None, result.reason
