"""Casts that correct their scales (EDEN), under Triton's interpreter; a process of its own. Bits of the definition.

TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick interpreted_eden      cases.py says what is printed
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import torch

from narrowgauge import recipes
from narrowgauge.formats import E2M1, E2M3, INT4, INT8
from narrowgauge.ops.quantize import definition, triton_launch
from narrowgauge.ops.quantize.selfcheck import sample
from narrowgauge.ops.random import Key
from narrowgauge.qtensor import SwizzledQTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import (
    E4M3_EDEN,
    E4M3_EDEN_FOUR_OVER_SIX,
    E4M3_TWO_LEVEL,
    scale_shape,
    swizzled_length,
)
from tests.compare import assert_same
from tests.ops.triton.cases import Case

KEY = Key((2**32 - 5, 77))
EDEN = {"rounding": "eden"}
OF_RECIPES = tuple(
    dict.fromkeys(
        cast
        for recipe in recipes.ALL
        for gemm in recipe.gemms().values()
        for cast in (gemm.lhs, gemm.rhs)
        if cast is not None and cast.rounding == "eden"
    )
)
# Every width of a tile, blocks of one tile and of 64, floats and integers, both kinds of rules.
OTHERS = (
    Cast(format=E2M1, tile=(1, 32), scale=E4M3_EDEN, block=32, **EDEN),
    Cast(format=E2M1, tile=(1, 64), scale=E4M3_EDEN_FOUR_OVER_SIX, block=256, **EDEN),
    Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL, block=1024, **EDEN),
    Cast(format=INT4, tile=(1, 16), block=16, **EDEN),
    Cast(format=INT8, tile=(1, 128), block=512, **EDEN),
    Cast(format=E2M3, tile=(1, 64), block=128, **EDEN),
)
SHAPES = ((144, 272), (37, 131), (5, 16), (1, 1))
KINDS = ("cast ", "numbers of one magnitude ", "scales of tensor cores ")


def is_quick(name: str) -> bool:
    return name.endswith(f"{list(SHAPES[1])}") and any(str(each) in name for each in OF_RECIPES)


def cases() -> Iterator[Case]:
    for cast in (*OF_RECIPES, *OTHERS):
        for shape in SHAPES if cast in OF_RECIPES else SHAPES[1:2]:
            yield (
                f"cast {cast}, block {cast.block}, {list(shape)}",
                lambda given=(cast, shape): compare_sample(*given),
            )
        yield (
            f"numbers of one magnitude {cast}, block {cast.block}",
            lambda cast=cast: compare_ties(cast),
        )
    for cast in OF_RECIPES:
        if cast.scale.two_level:
            yield f"scales of tensor cores {cast}", lambda cast=cast: compare_units(cast)


def compare_units(cast: Cast) -> None:
    """Bytes in cuBLAS' blocks, where compute capability 10.0 and up reads them: ragged and whole."""

    def allocate(shape: tuple[int, int], cast: Cast, device: torch.device) -> torch.Tensor:
        columns = scale_shape(shape, cast.tile)[1]
        return torch.zeros(swizzled_length(shape[0], columns), dtype=torch.uint8)

    for shape in ((144, 272), (128, 256), (37, 131)):
        x = sample(torch.float32, False)[: shape[0], : shape[1]]
        with patch.object(triton_launch, "empty_units", allocate):
            found = triton_launch.eden(x, cast, None, KEY, None)
        assert isinstance(found, SwizzledQTensor)
        truth = definition.quantize(x, cast, None, KEY, None)
        assert_same(found.scale, truth.scale)
        assert_same(found.data, truth.data)


def compare_sample(cast: Cast, shape: tuple[int, int]) -> None:
    """With NaN and infinity too, both types and orders of memory, codes and decoded values."""
    for dtype in (torch.float32, torch.bfloat16):
        for poisoned in (False, True):
            x = sample(dtype, poisoned)[: shape[0], : shape[1]]
            for expand in (None, torch.float32):
                compare(x, cast, expand)
            compare(x.T.contiguous().T, cast, None)


def compare_ties(cast: Cast) -> None:
    """Both candidates of a rule that compares err alike, and corrections lie next to one."""
    x = torch.full((8, 256), 1.5)
    x[1::2] *= -1
    x[2] = 0.0
    x[3, 1::3] = 2.0**-140
    compare(x, cast, None)


def compare(x: torch.Tensor, cast: Cast, expand: torch.dtype | None) -> None:
    noise = KEY if cast.draws else None
    truth = definition.quantize(x, cast, None, noise, expand)
    found = triton_launch.eden(x, cast, None, noise, expand)
    assert_same(found.scale, truth.scale)
    assert_same(found.data, truth.data)
    if truth.global_scale is not None:
        assert_same(found.global_scale, truth.global_scale)
