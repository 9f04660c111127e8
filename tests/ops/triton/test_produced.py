"""The kernels of `ops.norm_act` compiled without spills (exact). What they compute: tests/ops/triton/interpreted_produced.py.

The whole matrix of functions, casts and GPUs is marked slow; the quick cases are one per kernel.
"""

from __future__ import annotations

import pytest
import torch

from narrowgauge.formats import E4M3, E5M2, INT8
from narrowgauge.ops.norm_act.spec import KINDS, CastRequest, Kind, StoredAsCodes
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import WHOLE, Cast
from narrowgauge.scaling import POW2
from tests.ops.triton.compiling import TARGETS, Compiled, compiled
from tests.selection import quick

from narrowgauge.ops.triton import has_conversions  # isort: skip
from narrowgauge.ops.norm_act import triton_launch  # isort: skip
from narrowgauge.ops.quantize import triton_launch as quantizing  # isort: skip

CASTS = {
    "tensor": Cast(format=E4M3),
    "row": Cast(format=E4M3, tile=(1, WHOLE), scale=POW2),
    "int8-row": Cast(format=INT8, tile=(1, WHOLE)),
    "vector": Cast(format=E4M3, tile=(1, 128), scale=POW2),
    "e5m2": Cast(format=E5M2),
    "current": Cast(format=E4M3),  # by the maximum of this pass, in another launch
}
DELAYED = ("tensor", "e5m2")
PRODUCING = ("forward", "act_backward")
CASTING = (*PRODUCING, "settle_both")
# function, cast, whether of the gradient, sm
QUICK = [
    ("rms-norm", "tensor", False, 90),
    ("gelu", "vector", False, 90),
    ("swiglu", "e5m2", True, 90),
    ("layer-norm", "none", True, 90),
]
MATRIX = [
    (kind, cast, of_gradient, sm)
    for sm in TARGETS
    for kind in KINDS
    for of_gradient in (False, True)
    for cast in (*CASTS, "none")
    if (kind, cast, of_gradient, sm) not in QUICK
    and not (of_gradient and cast in ("row", "int8-row"))
    and not (of_gradient and kind.endswith("norm") and cast != "none")
    and not (of_gradient and cast == "vector")  # refused
    and not (cast == "e5m2" and not of_gradient)
]


def kernels(
    name: str, cast: str, of_gradient: bool, sm: int, dtype: torch.dtype = torch.bfloat16
) -> list[Compiled]:
    """What computing it would launch. The numbers do not matter, so most of the memory is never touched."""
    kind, columns = Kind(name, 1e-5), 4096  # type: ignore[arg-type]
    x = torch.empty(512, columns, dtype=dtype)
    parameters = [torch.empty(columns, dtype=dtype)] * (
        0 if not kind.is_norm else 1 + (name == "layer-norm")
    )
    tensors = [x, *([x] * kind.is_gated), *parameters]
    live = torch.zeros(3) if cast in DELAYED else None
    turned = cast in (*DELAYED, "current") or of_gradient
    order = CastRequest(CASTS[cast], live, True, turned) if cast != "none" else None
    statistics = (
        torch.empty(512) if name == "layer-norm" else None,
        torch.empty(512) if kind.is_norm else None,
    )

    def call() -> None:
        if not of_gradient:
            triton_launch.forward(kind, tensors, order)
        else:
            orders = [None] if kind.is_norm else [order] * len(tensors)
            triton_launch.backward(kind, tensors, statistics, x, orders)

    return list(compiled([triton_launch, quantizing], sm, call).values())


def kernels_of_codes(name: str, of_gradient: bool, sm: int) -> list[Compiled]:
    """What is launched where the inputs of an activation, or y.T of a norm, are there as codes."""
    kind, rows, columns = Kind(name, 1e-5), 512, 4096  # type: ignore[arg-type]
    x = torch.empty(rows, columns, dtype=torch.bfloat16)
    if kind.is_norm:
        data = torch.empty(columns, rows, dtype=torch.float8_e4m3fn)
        codes = QTensor(data=data, scale=torch.ones(1, 1), cast=CASTS["tensor"], inner=rows)
        parameters = [torch.empty(columns, dtype=torch.bfloat16)] * (1 + (name == "layer-norm"))
        given = [StoredAsCodes(codes, torch.bfloat16, turned=True), *parameters]
    else:
        data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        codes = QTensor(
            data=data, scale=torch.ones(rows, columns // 128), cast=CASTS["vector"], inner=columns
        )
        given = [StoredAsCodes(codes, torch.bfloat16)] * (1 + kind.is_gated)
    order = CastRequest(CASTS["e5m2"], torch.zeros(3), True, True)

    def call() -> None:
        if of_gradient:
            orders = [None if kind.is_norm else order] * (1 if kind.is_norm else len(given))
            triton_launch.backward(kind, given, (None, torch.empty(rows)), x, orders)
        else:
            triton_launch.forward(
                kind, given, CastRequest(CASTS["tensor"], torch.zeros(3), False, True)
            )

    return list(compiled([triton_launch, quantizing], sm, call).values())


OF_CODES = [
    (name, of_gradient, sm)
    for sm in TARGETS
    for name in KINDS
    for of_gradient in (False, True)
    if of_gradient or not Kind(name).is_norm
]


@pytest.mark.parametrize(
    ("name", "of_gradient", "sm"), quick([("rms-norm", True, 90), ("swiglu", True, 90)], OF_CODES)
)
def test_kernels_that_read_codes_compile_without_spills(name, of_gradient, sm):
    """Codes are decoded by the GPU's own conversions, or in integers where it has none."""
    found = kernels_of_codes(name, of_gradient, sm)
    assert found
    for each in found:
        assert_stack(each, sm)
        assert_fits(each, sm)


def assert_fits(kernel: Compiled, sm: int) -> None:
    """Three programs of 8 warps to a multiprocessor of 9.0, or as many warps in others: with fewer, what is read is waited for."""
    if sm == 90 and kernel.name in (*PRODUCING, "norm_backward"):
        assert kernel.programs * kernel.usage["WARPS"] >= 24, (
            f"{kernel.name}: {kernel.usage}, {kernel.programs} programs"
        )


def assert_stack(kernel: Compiled, sm: int) -> None:
    """Nothing of a thread lies in memory on 9.0; elsewhere ptxas leaves 8 bytes of some forms there (Triton 3.9)."""
    assert kernel.spills <= (0 if sm == 90 else 8), f"{kernel.name}: {kernel.usage}"


def check(name: str, cast: str, of_gradient: bool, sm: int) -> None:
    found = kernels(name, cast, of_gradient, sm)
    assert found
    for each in found:
        assert_stack(each, sm)
        assert_fits(each, sm)
        assert not any(".NaN" in instruction for instruction in each.instructions()), (
            "maxima are integers"
        )
        assert not any("rsqrt" in instruction for instruction in each.instructions()), (
            "roots are rounded correctly"
        )
    if cast == "none":
        return
    # By the maximum of this pass another kernel casts.
    casting = [
        each for each in found if each.name in (CASTING if cast != "current" else ("cast_both",))
    ]
    for each in casting:
        conversions = {
            instruction for instruction in each.instructions() if "satfinite" in instruction
        }
        element = {E4M3: "e4m3", E5M2: "e5m2"}.get(CASTS[cast].format)
        assert conversions == (
            {f"cvt.rn.satfinite.{element}x2.f32"}
            if element and has_conversions(TARGETS[sm])
            else set()
        ), each.name


@pytest.mark.parametrize(("name", "cast", "of_gradient", "sm"), QUICK)
def test_kernels_compile_without_spills(name, cast, of_gradient, sm):
    check(name, cast, of_gradient, sm)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cast", "of_gradient", "sm"), MATRIX)
def test_all_kernels_compile_without_spills(name, cast, of_gradient, sm):
    check(name, cast, of_gradient, sm)
