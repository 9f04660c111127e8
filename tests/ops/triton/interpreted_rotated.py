"""Casts of x.T under a rotation and of x beside it, under Triton's interpreter; a process of its own. Bits of the definition.

TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick interpreted_rotated      cases.py says what is printed
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from narrowgauge import recipes
from narrowgauge.formats import E4M3
from narrowgauge.nn.keep_policy import KeepPolicy
from narrowgauge.nn.linear_context import LinearContext, RankOptions
from narrowgauge.nn.linear_function import plan_of
from narrowgauge.nn.operands import find
from narrowgauge.nn.rotation import NONE, Rotation
from narrowgauge.ops import registry
from narrowgauge.ops.hadamard import casting
from narrowgauge.ops.quantize import triton_launch
from narrowgauge.ops.quantize.selfcheck import KEYS, sample
from narrowgauge.ops.quantize.spec import Turn
from narrowgauge.ops.random import Stream
from narrowgauge.ops.registry import Device
from narrowgauge.ops.triton import cast_constants
from narrowgauge.qtensor import SwizzledQTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import POW2, scale_shape, swizzled_length
from tests.compare import assert_same
from tests.ops.triton.cases import Case

OF_RECIPES = tuple(
    dict.fromkeys(
        cast
        for recipe in recipes.ALL
        for gemm in recipe.gemms().values()
        for cast in (gemm.lhs, gemm.rhs)
        if gemm.rotate is not None
        and cast is not None
        and casting.refuse_cast(cast, gemm.rotate.block) is None
    )
)
OTHERS = (Cast(format=E4M3, tile=(1, 16), scale=POW2),)  # one level, eight bits, a tile of a block
SHAPES = ((144, 272), (37, 131), (5, 16), (16, 1), (1, 1))
KINDS = ("cast ", "scales of tensor cores ", "decoded ", "operands ", "programs ")
QUICK = recipes.NVFP4.grad_weight.lhs, recipes.NVFP4.grad_weight.rhs


def is_quick(name: str) -> bool:
    of_nvfp4 = any(f"cast {cast}, block 16, [37, 131]" == name for cast in QUICK)
    return of_nvfp4 or name.startswith(("operands ", "programs "))


def cases() -> Iterator[Case]:
    for cast in (*OF_RECIPES, *OTHERS):
        for block in casting.ORDERS:
            for shape in SHAPES if cast in OF_RECIPES else SHAPES[1:2]:
                yield (
                    f"cast {cast}, block {block}, {list(shape)}",
                    lambda given=(cast, block, shape): compare_sample(*given),
                )
        yield f"decoded {cast}", lambda cast=cast: compare_decoded(cast)
    yield "programs share pieces", compare_shared_pieces
    for role in ("x", "w", "gy"):
        yield f"operands of a Linear: {role}", lambda role=role: compare_operands(role)
    for cast in OF_RECIPES:
        yield f"scales of tensor cores {cast}", lambda cast=cast: compare_units(cast)


def compare_units(cast: Cast) -> None:
    """Bytes in cuBLAS' blocks, where compute capability 10.0 and up reads them: ragged and whole."""

    def allocate(shape: tuple[int, int], cast: Cast, device: torch.device) -> torch.Tensor:
        columns = scale_shape(shape, cast.tile)[1]
        return torch.zeros(swizzled_length(shape[0], columns), dtype=torch.uint8)

    for shape in ((144, 272), (128, 256), (37, 131)):
        x = sample(torch.bfloat16, False)[: shape[0], : shape[1]]
        with patch.object(triton_launch, "empty_units", allocate):
            found = compare(x, cast, 16, True, None)
        assert all(isinstance(each, SwizzledQTensor) for each in found)


def compare_decoded(cast: Cast) -> None:
    compare(sample(torch.bfloat16, False)[:37, :131], cast, 16, False, torch.float32)


def compare_shared_pieces() -> None:
    """The largest magnitudes of 15 pieces, found by two programs."""
    with patch.object(triton_launch, "PARTS", (2,)):
        compare(sample(torch.bfloat16, False), QUICK[1], 16, True, None)


def compare_sample(cast: Cast, block: int, shape: tuple[int, int]) -> None:
    """With NaN and infinity too, both types and orders of memory, alone and with x beside it."""
    for dtype in (torch.float32, torch.bfloat16):
        for poisoned in (False, True):
            x = sample(dtype, poisoned)[: shape[0], : shape[1]]
            for beside in (False, True):
                compare(x, cast, block, beside, None)
            compare(x, cast, block, True, None, signed=False)
            compare(x.T.contiguous().T, cast, block, True, None)


def compare(
    x: torch.Tensor,
    cast: Cast,
    block: int,
    beside: bool,
    expand: torch.dtype | None,
    signed: bool = True,
) -> tuple[object, ...]:
    length = -(-x.shape[0] // block) * block
    signs = torch.randint(0, 2, (length,)) * 2.0 - 1.0 if signed else None
    noise = KEYS if cast.draws else (None, None)
    turn = Turn(block, signs)
    truth = casting.reference(x.T, cast, turn, noise, expand, beside)
    found = triton_launch.rotated(x.T, cast, turn, noise, expand, beside)
    for got, wanted in zip(found, truth, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert_same(got.scale, wanted.scale)
            assert_same(got.data, wanted.data)
            if wanted.global_scale is not None:
                assert_same(got.global_scale, wanted.global_scale)
    return found


def constants(x: torch.Tensor, cast: Cast, expand: torch.dtype | None = None) -> object:
    """Those of the interpreter, on a device that has units for NVFP4."""
    return cast_constants.constants_of(cast, (0, 0), expand is not None)


def compare_operands(role: str) -> None:
    """Of a Linear that takes narrow units: rows and cols by the launches of both, and by the CPU."""
    x = sample(torch.bfloat16, False)[:48, :80]
    made = []
    for device in (None, Device("cuda", (10, 0), cuda=(13, 0))):
        with pytest.MonkeyPatch.context() as patch:
            if device is not None:
                patch.setattr(registry, "cpu_facts", lambda device=device: device)
                patch.setattr(triton_launch, "constants", constants)
            plan = plan_of(recipes.NVFP4, x.device)
            keep = KeepPolicy(codes_of_x=True, weight="recast")
            ranks = RankOptions(stream=Stream("layer", (3, 4)))
            context = LinearContext(plan=plan, out_dtype=x.dtype, keep=keep, ranks=ranks)
            patch.setattr(triton_launch, "empty_units", lambda *_: None)
            operand = find(role, x, context, (True, True), None)
            # Both casts of x and of its gradient are there before a GEMM asks; of a weight its amax.
            if device is not None:
                casts = operand.casts
                assert casts.rows is not None
                assert (casts.cols is not None, casts.amax is not None) == (
                    role != "w",
                    role == "w",
                )
            rows = operand.rows(NONE)
            turn = NONE if role == "w" else Rotation.draw(plan.gy.cols_rotate, x.T)
            made.append((rows, operand.cols(turn, operand)))
    for wanted, got in zip(*made, strict=True):
        wanted = wanted.compact()
        assert_same(got.data, wanted.data)
        assert_same(got.scale, wanted.scale)
        assert_same(got.global_scale, wanted.global_scale)
