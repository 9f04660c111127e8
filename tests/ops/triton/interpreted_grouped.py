"""Products of all experts in one launch, under Triton's interpreter; a process of its own.

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick interpreted_grouped      cases.py says what is printed

Casts have the bits of each expert's own casts (tests/ptx/proof.py compares the compiled ones likewise). A layer of experts is compared
with its loop over experts: the same codes, sums in another order. Compiled products are asked by tests/ptx/proof.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.nn import grouped_function
from narrowgauge.nn.experts import stacks
from narrowgauge.nn.frozen_experts import store_stack_as_codes
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.operands import Operand
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
KINDS = ("casts ", "check ", "layer ", "way ")
E, HIDDEN, INNER = 3, 128, 256


def is_quick(name: str) -> bool:
    return name.startswith(
        ("casts row (5", "casts mx (5", "layer mixtral fp8-row", "layer mixtral, codes")
    )


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
    for kind in ("mixtral", "gpt_oss"):
        yield f"layer {kind}, codes", lambda kind=kind: compare_codes(kind)
    for recipe in ("fp8-row", "fp8-block"):
        for way in ("step", "checkpointed", "autocast", "float16", "one gradient"):
            given = recipe, way
            yield f"way {recipe}, {way}", lambda given=given: compare_way(*given)
    yield "way mxfp8 by torch", compare_mx
    yield "way NaN in the weights of expert 0", compare_nan


def compare_casts(name: str, counts: tuple[int, ...]) -> None:
    for rows, cols in ((True, True), (True, False), (False, True)):
        words = compare_groups(name, counts, rows, cols)
        assert not words, words


def is_own(kind: tuple[Any, ...]) -> bool:
    """Of kernels of ours: a scale for a row or for 128 elements."""
    return kind[0][1][1] != MX


def is_tiled(kind: tuple[Any, ...]) -> bool:
    return kind[0][1][1] == launches.TILE


def for_units(q: QTensor) -> QTensor:
    """As a cast on 10.x leaves it: exponents in the order of tensor cores."""
    if not q.cast.mx_kind:
        return q
    return SwizzledQTensor.of_units(q.data, swizzled(to_exponents(q.scale)), q.cast, q.inner)


def check_torch(kind: tuple[Hashable, ...]) -> None:
    """The operands of torch's grouped GEMM, read as its sources say; it has no kernel for a CPU."""

    def cast_for_units(x: Tensor, cast: Cast) -> QTensor:
        return for_units(definition.quantize(x, cast, None, None, None))

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


def compare_codes(kind: str) -> None:
    """Frozen experts kept as codes: the products of the same experts with a 16-bit stack, bit for bit."""
    wide, coded = (experts(kind) for _ in range(2))
    for module in (wide, coded):
        ng.convert(nn.ModuleList([module]), "fp8-block")
        module.requires_grad_(False)
    for name in stacks(coded):
        store_stack_as_codes(coded, name)
    index = torch.tensor([(0, 1)] * 9 + [(1, 0)] * 4 + [(2, 0)])
    given = torch.randn(len(index), HIDDEN), index, torch.rand(index.shape)
    gy = torch.randn(len(index), HIDDEN)
    with as_on_a_gpu() as calls:
        truth = passed(wide, given, gy)
        # Once more after the codes have moved apart, and after they were written.
        for change in (None, "moved", "written"):
            for layer in coded.slices("down_proj") if change else ():
                if change == "moved":
                    layer.frozen.codes = layer.frozen.codes.clone()
                else:
                    layer.frozen.write(layer, wide.slices("down_proj")[layer.place.index].weight)
            assert coded.kernel_of("down_proj") == "triton", change
            found = passed(coded, given, gy)
            for name, got, own in zip(("y", "gx", "gw"), found, truth, strict=False):
                assert torch.equal(got, own), f"{name}, {change}"
    assert len(calls) == 8, "the grouped products were not chosen"
    assert coded.down_proj.untyped_storage().nbytes() == 4


def compare_way(recipe: str, way: str) -> None:
    """Ways to call a layer, two micro-batches of two steps each, beside the same way with the loop."""

    def steps() -> list[Tensor]:
        torch.manual_seed(1)
        dtype = torch.float16 if way == "float16" else torch.float32
        model = nn.ModuleList([experts("mixtral").to(dtype)])
        ng.convert(model, recipe, weight_codes="step" if way == "step" else "auto")
        found = []
        for _ in range(2):
            for _ in range(2):
                x = torch.randn(12, HIDDEN, dtype=dtype, requires_grad=True)
                index, weights = torch.randint(E, (12, 2)), torch.rand(12, 2, dtype=dtype)
                call = partial(checkpoint, model[0], use_reentrant=False)
                with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                    y = (call if way == "checkpointed" else model[0])(x, index, weights)
                gy = torch.randn_like(y)
                if way == "one gradient":
                    found += torch.autograd.grad(y, [x], gy)
                else:
                    y.backward(gy)
                    found += [y.detach(), x.grad, *(each.clone() for each in gradients(model[0]))]
            ng.advance(model)
        return found

    truth = steps()
    with as_on_a_gpu() as calls:
        found = steps()
    assert len(calls) >= 8
    # The last bit of a bfloat16 number moves one in sixteen FP8 codes of the second product, by 6 %.
    allowed = 4e-2 if way == "autocast" else 2e-3 if way == "float16" else 1e-5
    for number, (got, own) in enumerate(zip(found, truth, strict=True)):
        assert got.dtype == own.dtype, number
        error = float((got.float() - own.float()).norm() / own.float().norm())
        assert error < allowed, f"{number}: {error:.2g}"


def compare_mx() -> None:
    """A layer of `mxfp8` whose products read operands as torch's grouped GEMM does."""
    [kernel] = (each for each in KERNELS.kernels if each.name == "native-mx")

    def steps() -> list[Tensor]:
        module = experts("mixtral").bfloat16()
        ng.convert(nn.ModuleList([module]), "mxfp8")
        index = torch.tensor([(0, 1)] * 9 + [(1, 0)] * 4 + [(E, 0)])
        generator = torch.Generator().manual_seed(4)
        x, gy = (torch.randn(14, HIDDEN, generator=generator).bfloat16() for _ in range(2))
        return passed(module, (x, index, torch.full(index.shape, 0.5).bfloat16()), gy)

    truth, cast = steps(), Operand.cast

    def swizzling(operand: Operand, *given: Any) -> Any:
        return for_units(cast(operand, *given))

    with (
        as_on_a_gpu(kernel) as calls,
        patch.object(torch, "_scaled_grouped_mm", scaled_grouped_mm),
        patch.object(Operand, "cast", swizzling),
    ):
        found = steps()
    assert len(calls) == 2
    for got, own in zip(found, truth, strict=True):
        error = float((got.float() - own.float()).norm() / own.float().norm())
        assert error < 5e-3, f"{error:.2g}"


def compare_nan() -> None:
    """Rows of other ranks stay zero, and rows of other experts numbers."""
    module = experts("mixtral")
    ng.convert(nn.ModuleList([module]), "fp8-row")
    with torch.no_grad():
        module.gate_up_proj[0, 3] = torch.nan
    index = torch.tensor([(0,), (1,), (E,), (2,)])
    with as_on_a_gpu():
        y = module(torch.randn(4, HIDDEN), index, torch.ones(4, 1))
    assert y[0].isnan().any() and not y[1:].isnan().any() and not y[2].any()


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
def as_on_a_gpu(kernel: Any = None) -> Iterator[list[Any]]:
    """Within it, a grouped kernel is chosen for tensors on the CPU, and weights are cast to codes. Yields the calls."""
    [triton] = (each for each in KERNELS.kernels if each.name == "triton")
    kernel = kernel or triton
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
