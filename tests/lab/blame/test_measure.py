"""What is measured of a product: against float64 (exact up to its rounding), and bounds of its kernel (bounded)."""

from __future__ import annotations

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.lab.blame import observed
from narrowgauge.lab.blame.measure import STRETCH, Product
from narrowgauge.lab.blame.watch import converted as layers_of
from narrowgauge.lab.blame.watch import watching
from narrowgauge.ops.mm import mm
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import Cast
from tests.lab.blame.planted import compute, converted
from tests.selection import quick

E4M3 = recipes.FP8_CURRENT.output.lhs


def operands(m=37, n=21, k=64):
    torch.manual_seed(0)
    originals = torch.randn(m, k), torch.randn(n, k)
    return originals, (quantize(originals[0], E4M3), quantize(originals[1], E4M3))


@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, 21)])
def test_distances_are_those_of_float64(bias, monkeypatch):
    monkeypatch.setattr(
        "narrowgauge.lab.blame.measure.STRETCH", 5 * 85
    )  # lhs in stretches of five rows
    originals, codes = operands()
    result = mm(*codes, bias=bias, out_dtype=torch.bfloat16)
    product = Product()
    product.add(originals, codes, bias, result, fast=False)

    wide, decoded = (
        (a.double(), b.double())
        for a, b in (originals, (dequantize(codes[0]), dequantize(codes[1])))
    )
    shift = 0 if bias is None else bias.double()
    exact, coded = wide[0] @ wide[1].T, decoded[0] @ decoded[1].T
    far = (result.double() - exact - shift).norm()
    assert math.isclose(product.error, far / exact.norm(), rel_tol=1e-9)
    assert math.isclose(
        product.kernel, (result.double() - coded - shift).norm() / coded.norm(), rel_tol=1e-9
    )
    columns = [each.square().sum(dim=0) for each in wide]
    assert math.isclose(product.noise, far / (columns[0] * columns[1]).sum().sqrt(), rel_tol=1e-9)
    assert math.isclose(
        product.lhs.off, (decoded[0] - wide[0]).norm() / wide[0].norm(), rel_tol=1e-9
    )
    assert product.shape == (37, 21, 64) and product.calls == 1
    assert STRETCH > 5 * 85


def test_shares_count_what_the_scale_clips_and_loses():
    x = torch.tensor([[1.0, -448.0, 449.0, 2.0**-10, 2.0**-11, 0.0, 900.0, -1e-9]])
    made = quantize(x, E4M3, amax=torch.tensor([[448.0]]))
    product = Product()
    product.add((x, x), (made, made), None, mm(made, made), fast=False)
    assert (product.lhs.saturated, product.lhs.underflown, product.lhs.nonzero) == (2, 3, 7)
    assert product.lhs.used == 448 and product.lhs.present == 900


def test_sums_of_micro_batches_and_ranks_add_up():
    originals, codes = operands()
    result = mm(*codes)
    whole, first, second = Product(), Product(), Product()
    whole.add(originals, codes, None, result, fast=False)
    for product, rows in ((first, slice(0, 10)), (second, slice(10, None))):
        own = quantize(originals[0], Cast(format=E4M3.format, tile=(1, -1)))
        assert own.data.shape == originals[0].shape
        part = quantize(originals[0][rows], E4M3, amax=originals[0].abs().amax().reshape(1, 1))
        product.add(
            (originals[0][rows], originals[1]), (part, codes[1]), None, result[rows], fast=False
        )
    first.take(second)
    assert math.isclose(first.error, whole.error, rel_tol=1e-9) and math.isclose(
        first.kernel, whole.kernel, rel_tol=1e-9
    )
    assert math.isclose(first.lhs.off, whole.lhs.off, rel_tol=1e-9) and first.calls == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", quick(["fp8-delayed", "int4-hq-lss", "nvfp4"], recipes.names()))
def test_kernels_are_within_their_roundings(recipe, dtype):
    """bounded: `roundings`, derived there"""
    model = converted(recipe)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = observed(model, compute(model))
    assert len(found.findings) == 18
    for each in found.findings:
        assert each.kernel <= each.kernel_most, each
        assert not each.is_kernel and each.is_finite


@pytest.mark.parametrize("recipe", ["fp8-current", "int4-hq-bs"])
def test_grad_weight_is_judged_against_x_and_not_its_codes(recipe):
    """x is kept while it is watched, in recipes that keep its codes."""
    model = converted(recipe)
    found = {each.name: each for each in observed(model, compute(model)).findings}
    for each in found.values():
        if each.product == "grad_weight":
            x = found[f"{each.layer}:output"].lhs
            assert each.rhs.role == x.role == "x"
            assert each.rhs.error == pytest.approx(x.error, rel=1e-6) and x.error > 0.01


def test_checkpointing_and_micro_batches_leave_the_numbers_as_they_are():
    """Forward passes that are repeated count twice, alike."""
    model = converted("mxfp8")
    whole = {each.name: each.error for each in observed(model, compute(model)).findings}

    def twice():
        compute(model)()
        compute(model)()

    assert {each.name: each.error for each in observed(model, twice).findings} == pytest.approx(
        whole, rel=1e-12
    )
    ng.memory.checkpoint(model, "full")
    again = {each.name: each.error for each in observed(model, compute(model)).findings}
    assert again == pytest.approx(whole, rel=1e-12)


def test_some_layers_at_once_are_all_of_them():
    model = converted("fp8-delayed")
    found = observed(model, compute(model))
    assert observed(model, compute(model), at_once=4).as_dict() == found.as_dict()


def test_observers_of_before_are_back():
    model, seen = converted(), []
    model.layers[0].up_proj.observer = mine = lambda *given: seen.append(given)
    with pytest.raises(ZeroDivisionError), watching(layers_of(model), {}):
        raise ZeroDivisionError
    assert model.layers[0].up_proj.observer is mine and not seen
