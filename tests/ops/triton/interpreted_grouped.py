"""Products of all experts in one launch, under Triton's interpreter; a process of its own.

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick interpreted_grouped      cases.py says what is printed

Casts have the bits of each expert's own casts (tests/ptx/proof.py compares the compiled ones likewise). A layer of experts is compared
with its loop over experts: the same codes, sums in another order. Compiled products are asked by tests/ptx/proof.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn import grouped_function
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.grouped import KERNELS, MX, launches, native, selfcheck
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.registry import KernelChoice
from narrowgauge.ops.selfcheck import examine
from narrowgauge.qtensor import QTensor, SwizzledQTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import from_exponents, swizzled, to_exponents, unswizzled
from tests.nn.test_grouped_linear import gradients
from tests.ops.triton.cases import Case
from tests.ptx.proof import compare_groups

COUNTS = ((0, 1, 127, 128, 129, 20, 14), (5, 0), (0, 0, 0, 3))
KINDS = ("casts ", "check ", "layer ")
E, HIDDEN, INNER = 3, 128, 256


def is_quick(name: str) -> bool:
    return name.startswith(("casts row (5", "casts mx (5", "layer mixtral fp8-row"))


def cases() -> Iterator[Case]:
    for name in ("vector", "row", "mx"):
        for counts in COUNTS:
            yield f"casts {name} {counts}", lambda given=(name, counts): compare_casts(*given)
    for kind in map(selfcheck.CHECK.kind, selfcheck.CHECK.examples()):
        if is_own(kind):
            yield f"check {kind}", lambda kind=kind: check_products(launches.passes, kind)
        if not is_tiled(kind) and not kind[2]:
            yield f"check by torch {kind}", lambda kind=kind: check_torch(kind)
    for recipe in ("fp8-block", "fp8-row"):
        for kind in ("mixtral", "gpt_oss"):
            given = kind, recipe
            yield f"layer {kind} {recipe}", lambda given=given: compare_layer(*given)
            others = f"layer {kind} {recipe}, rows of other ranks"
            yield others, lambda given=given: compare_layer(*given, E)
    yield "layer mixtral, frozen", lambda: compare_layer("mixtral", "fp8-block", frozen=True)


def compare_casts(name: str, counts: tuple[int, ...]) -> None:
    for rows, cols in ((True, True), (True, False), (False, True)):
        words = compare_groups(name, counts, rows, cols)
        assert not words, words


def is_own(kind: tuple[Any, ...]) -> bool:
    """Of kernels of ours: a scale for a row or for 128 elements."""
    return kind[0][1][1] != MX


def is_tiled(kind: tuple[Any, ...]) -> bool:
    return kind[0][1][1] == launches.TILE


def check_torch(kind: tuple[Hashable, ...]) -> None:
    """The operands of torch's grouped GEMM, read as its sources say; it has no kernel for a CPU."""

    def cast_for_units(x: Tensor, cast: Cast) -> QTensor:
        q = definition.quantize(x, cast, None, None, None)
        if not cast.mx_kind:
            return q
        return SwizzledQTensor.of_units(q.data, swizzled(to_exponents(q.scale)), cast, q.inner)

    with (
        patch.object(torch, "_scaled_grouped_mm", scaled_grouped_mm),
        patch.object(launches, "quantize", cast_for_units),
    ):
        check_products(native.passes, kind)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, *,
    out_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """torch's, as GroupedBlas.cpp and the layouts of torchao describe it; rows beyond the last end are NaN."""
    by_row, groups = a_scale.dtype == torch.float32, []
    begin = blocks = 0
    for expert, end in enumerate(ends.tolist()):
        if b.ndim == 3:
            own, other, rows = a[begin:end], b[expert], end - begin
            tiles = -(-rows // 128) * (a.shape[1] // 128)
        else:
            own, other, rows = a[:, begin:end], b[begin:end], a.shape[0]
            tiles = a.shape[0] // 128 * ((end - begin) // 128)
        if by_row:
            left = a_scale[begin:end] if b.ndim == 3 else a_scale.view(len(ends), -1)[expert]
            scales = left[:, None], b_scale.view(len(ends), -1)[expert]
        else:
            left = a_scale.view(torch.uint8).flatten()[blocks * 512 : (blocks + tiles) * 512]
            count = other.shape[1] // 128 * (other.shape[0] // 128)
            at = blocks // max(a.shape[0] // 128, 1) * (other.shape[1] // 128)
            flat = b_scale.view(torch.uint8)
            right = flat[expert] if b.ndim == 3 else flat.flatten()[at * 512 : (at + count) * 512]
            scales = spread(left, rows, own.shape[1]), spread(right, other.shape[1], own.shape[1]).T
        groups.append((own.float() * scales[0]) @ (other.float() * scales[1]))
        begin, blocks = end, blocks + tiles
    if b.ndim == 2:
        return torch.stack(groups).to(out_dtype)
    rest = torch.full((a.shape[0] - begin, b.shape[2]), torch.nan)
    return torch.cat([*groups, rest]).to(out_dtype)


def spread(units: Tensor, rows: int, columns: int) -> Tensor:
    """Exponents in the order of tensor cores -> a scale for each element."""
    return from_exponents(unswizzled(units, rows, columns // MX)).repeat_interleave(MX, 1)


def check_products(run: Any, kind: tuple[Hashable, ...]) -> None:
    result = examine("grouped", run, selfcheck.CHECK, kind, torch.device("cpu"))
    assert result.reason is None, result.reason


def compare_layer(kind: str, recipe: str, missing: int = 0, frozen: bool = False) -> None:
    """Results and gradients of a layer whose kernels are chosen, and of the loop. missing: a token's expert is of another rank."""
    looped, grouped = (experts(kind) for _ in range(2))
    for module in (looped, grouped):
        ng.convert(nn.ModuleList([module]), recipe)
        module.requires_grad_(not frozen)
    index = torch.tensor([(0, 1)] * 9 + [(1, 0)] * 4 + [(missing or 1, 0)])
    given = torch.randn(len(index), HIDDEN), index, torch.rand(index.shape)
    gy = torch.randn(len(index), HIDDEN)
    truth = passed(looped, given, gy)
    with as_on_a_gpu() as calls:
        found = passed(grouped, given, gy)
    assert len(calls) == 2, "the grouped products were not chosen"
    for name, got, own in zip(("y", "gx", "gw", *["parameter"] * 4), found, truth, strict=False):
        assert got.shape == own.shape, name
        error = float((got - own).norm() / own.norm())
        assert error < 1e-5, f"{name}: {error:.2g}"
    assert len(found) == len(truth)


def experts(kind: str) -> Any:
    from tests.nn.test_grouped_linear import experts as tiny

    with (
        patch("tests.nn.test_grouped_linear.E", E),
        patch("tests.nn.test_grouped_linear.K", HIDDEN),
        patch("tests.nn.test_grouped_linear.WIDE", INNER),
    ):
        return tiny(kind)


def passed(module: Any, given: tuple[Tensor, Tensor, Tensor], gy: Tensor) -> list[Tensor]:
    x = given[0].clone().requires_grad_()
    y = module(x, *given[1:])
    y.backward(gy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(each for each in gradients(module) if each is not None)]


@contextmanager
def as_on_a_gpu() -> Iterator[list[Any]]:
    """Within it, the grouped kernels are chosen for tensors on the CPU, and weights are cast to codes. Yields the calls."""
    [kernel] = (each for each in KERNELS.kernels if each.name == "triton")
    own_plan, apply = QLinear.plan, grouped_function.GroupedFunction.apply
    calls: list[Any] = []

    def plan(layer: QLinear, *given: Any) -> Any:
        own = own_plan(layer, *given)
        return replace(own, w=replace(own.w, rows_expand=None, cols_expand=None, kernels={}))

    def counted(*given: Any) -> Any:
        calls.append(given)
        return apply(*given)

    with (
        patch.object(grouped_function, "choose", lambda spec: KernelChoice(kernel, ())),
        patch.object(QLinear, "plan", plan),
        patch.object(grouped_function.GroupedFunction, "apply", counted),
    ):
        yield calls
