"""Linears of other libraries as NarrowLayers: narrow, wide, and the names of their GEMMs (exact)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.conversion.coverage import coverage
from narrowgauge.conversion.products import mixed
from narrowgauge.errors import ConfigError
from narrowgauge.nn.foreign_modules import adapter, unknown_layers, words_on_unknown
from narrowgauge.nn.narrow_layer import narrow_layer, narrow_layers, recipe_of
from narrowgauge.nn.plan import OPERANDS, PRODUCTS
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import GEMMS
from narrowgauge.recipes import BF16
from tests.foreign import (
    Float8Linear,
    Linear8bitLt,
    MXCodes,
    MXFP8Linear,
    NF4Linear,
    TELinear,
    converted,
    fp8_autocast,
    transformer_engine,
)
from tests.lab.blame.planted import compute
from tests.raising import raises
from tests.small_model import IDS, Model


def gradients(model: nn.Module, suspended: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    if suspended:
        with ng.suspended(model):
            compute(model)()
    else:
        compute(model)()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class Seen:
    """An observer that keeps all it is told."""

    def __init__(self) -> None:
        self.operands: dict[tuple[str, str], tuple[torch.Tensor, QTensor | torch.Tensor]] = {}
        self.results: dict[str, torch.Tensor] = {}

    def __call__(self, gemm, role, original, operand):
        self.operands[gemm, role] = original, operand

    def multiplied(self, gemm, bias, result):
        self.results[gemm] = result


def test_a_qlinear_is_its_own_narrow_layer():
    model = ng.convert(Model(), "fp8-current")
    layers = dict(narrow_layers(model))
    assert layers and all(each is model.get_submodule(name) for name, each in layers.items())
    assert narrow_layer(model.embed) is None and recipe_of(model.layers[0].norm) is None


def test_suspended_gives_the_gradients_of_the_model_before_conversion():
    wide, model = gradients(Model()), converted(Model())
    narrow = gradients(model)
    assert not same(narrow, wide) and same(gradients(model, suspended=True), wide)
    # Nothing is left behind, so that compiled code and pickles do not change.
    assert not any("forward" in vars(each) for each in model.modules())
    assert same(gradients(model), narrow)


def test_observed_steps_are_bit_identical_and_show_each_gemm():
    model = converted(Model())
    before, layer = gradients(model), model.layers[1].down_proj
    seen = Seen()
    held = adapter(layer)
    held.observer = seen
    assert same(gradients(model), before)
    held.observer = None
    assert "forward" not in vars(layer) and adapter(layer) is not held
    assert set(seen.operands) == {
        (gemm, role) for gemm, roles in OPERANDS.items() for role in roles
    }
    assert torch.equal(seen.operands["output", "w"][0], layer.weight)
    for gemm, (left, right) in OPERANDS.items():
        decoded = [ng.dequantize(seen.operands[gemm, role][1]) for role in (left, right)]
        torch.testing.assert_close(seen.results[gemm], decoded[0] @ decoded[1].T)
        for role in (left, right):
            operand = seen.operands[gemm, role][1]
            side = "lhs" if role == left else "rhs"
            assert operand.cast == getattr(getattr(held.recipe, gemm), side)


@pytest.mark.parametrize("granularity", ["TENSORWISE", "AXISWISE"])
def test_codes_are_casts_of_the_originals_by_the_recipe(granularity):
    """The recipe is written in this library's words, and its casts give the stand-in's scales to the bit."""
    from narrowgauge.lab.blame.recast import own_scale, recast

    layer, seen = Float8Linear(nn.Linear(32, 48), granularity), Seen()
    adapter(layer).observer = seen
    x = torch.randn(3, 5, 32, requires_grad=True)
    layer(x).square().sum().backward()
    for (gemm, role), (original, operand) in seen.operands.items():
        rows = original if operand.shape == original.shape else original.T
        assert torch.equal(own_scale(rows, operand.cast), operand.full_scale()), (gemm, role)
        assert torch.equal(recast(rows, operand), ng.dequantize(operand)), (gemm, role)


def test_elements_half_way_between_two_codes_are_cast_as_the_library_does():
    """Under an amax of 1: 448 is not the reciprocal of its reciprocal, and 2**-16 lies half-way between two codes."""
    from narrowgauge.lab.blame.recast import recast

    layer, seen = Float8Linear(nn.Linear(32, 48)), Seen()
    adapter(layer).observer = seen
    numbers = torch.cat([torch.arange(128, 256) * 2.0**-each for each in range(7, 24)])
    x = numbers.clamp(max=1).reshape(-1, 32).to(torch.bfloat16)
    layer.to(torch.bfloat16)(x)
    operand = seen.operands["output", "x"][1]
    plain = ng.QTensor(
        data=operand.data, scale=operand.scale, cast=operand.cast, inner=operand.inner
    )
    assert torch.equal(recast(x, operand), ng.dequantize(operand))
    assert not torch.equal(recast(x, plain), ng.dequantize(operand))  # as through the reciprocal


def test_a_gemm_of_equal_axes_is_told_apart_by_its_order():
    """16 rows of 16 elements by a matrix of 16 x 16: all three GEMMs have one shape."""
    layer, seen = Float8Linear(nn.Linear(16, 16, bias=False)), Seen()
    adapter(layer).observer = seen
    x = torch.randn(16, 16, requires_grad=True)
    layer(x).square().sum().backward()
    assert torch.equal(seen.results["grad_input"], x.grad)
    assert torch.equal(seen.results["grad_weight"], layer.weight.grad)


@pytest.mark.parametrize("gemm", GEMMS)
def test_one_gemm_alone_in_16_bits(gemm):
    layer = Float8Linear(nn.Linear(32, 48))
    x, gy = torch.randn(4, 32), torch.randn(4, 48)

    def results() -> dict[str, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(leaf)
        y.backward(gy)
        return {
            "output": y.detach(),
            "grad_input": leaf.grad,
            "grad_weight": layer.weight.grad.clone(),
        }

    narrow = results()
    with ng.suspended(layer):
        wide = results()
    held = adapter(layer)
    held.compute_as(mixed(held.recipe, BF16, (gemm,)))
    some = results()
    held.compute_as(None)
    for name in GEMMS:
        assert torch.equal(some[name], (wide if name == gemm else narrow)[name]), name
        assert not torch.equal(wide[name], narrow[name])
    assert torch.equal(results()["output"], narrow["output"])


def test_another_recipe_is_refused_by_name():
    layer = adapter(Float8Linear(nn.Linear(32, 48)))
    with raises(ConfigError, "foreign.other-recipe", "torchao Float8Linear", "output"):
        layer.compute_as(ng.recipes.get("mxfp8"))


def test_checkpointing_and_passes_without_gradients_are_observed_too():
    layer, seen = Float8Linear(nn.Linear(32, 48)), Seen()
    x = torch.randn(4, 32, requires_grad=True)
    layer(x).sum().backward()
    plain = layer.weight.grad.clone(), x.grad.clone()
    adapter(layer).observer = seen
    layer.zero_grad(), x.grad.zero_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(layer.weight.grad, plain[0]) and torch.equal(x.grad, plain[1])
    assert set(seen.results) == set(GEMMS)
    seen.results.clear()
    with torch.no_grad():
        layer(x)
    assert set(seen.results) == {"output"}


def test_transformer_engine_computes_wide_outside_of_its_autocast():
    with transformer_engine():
        layer = TELinear(nn.Linear(32, 48))
        x = torch.randn(4, 32)
        with fp8_autocast():
            narrow = layer(x)
            with ng.suspended(layer):
                wide = layer(x, is_first_microbatch=True)
        assert torch.equal(wide, nn.functional.linear(x, layer.weight, layer.bias))
        assert not torch.equal(narrow, wide)
        found = adapter(layer)
        assert found.recipe.name == "TransformerEngine DelayedScaling" and found.unobserved


def test_bitsandbytes_computes_wide_by_the_decoded_weight():
    layer = Linear8bitLt(nn.Linear(32, 48))
    x = torch.randn(4, 32)
    decoded = layer.state.CB * (layer.state.SCB / 127)[:, None]
    with ng.suspended(layer):
        wide = layer(x)
    torch.testing.assert_close(wide, nn.functional.linear(x, decoded, layer.bias))
    assert not torch.equal(layer(x), wide)


def test_describe_has_a_row_for_each_and_says_which_are_not_known():
    model = converted(Model(), but=("lm_head", "gate", "down_proj"))
    model.layers[0].down_proj = NF4Linear(model.layers[0].down_proj)
    rows = {row.name: row for row in ng.describe(model)}
    assert rows["layers.0.up_proj"].recipe == "torchao float8"
    assert rows["layers.0.up_proj"].output.startswith("e4m3 tensor")
    assert rows["layers.0.up_proj"].backend == "torchao Float8Linear"
    [note] = rows["layers.0.down_proj"].notes
    assert note.code == "foreign.no-adapter" and "NF4Linear" in str(note)
    assert list(unknown_layers(model)) == ["layers.0.down_proj"]
    assert "layers.0.down_proj" in words_on_unknown(model)
    assert words_on_unknown(Model()) == ""


def test_convert_leaves_the_modules_of_other_libraries():
    model = converted(Model(), but=("lm_head", "gate", "down_proj"))
    ng.convert(model, "fp8-current")
    assert type(model.layers[0].up_proj) is Float8Linear
    assert isinstance(model.layers[0].down_proj, ng.QLinear)


def test_coverage_counts_the_gemms_of_other_libraries():
    theirs, ours = converted(Model()), ng.convert(Model(), "fp8-current")
    batch = {"ids": IDS}
    assert coverage(theirs, batch).narrow == coverage(ours, batch).narrow


def test_a_copy_of_a_suspended_model_is_suspended_by_itself():
    model = converted(Model())
    with ng.suspended(model):
        other = copy.deepcopy(model)
        wide = model(IDS)
        assert torch.equal(other(IDS), wide)
    with torch.no_grad():
        other.layers[0].up_proj.weight.zero_()
    # The copy's forward reads the copy's weight.
    assert not torch.equal(other(IDS), wide)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_torchao_itself_is_observed_to_the_bit(name):
    """The library's own modules, emulated: same gradients as unobserved, and each operand is a fresh cast of its original."""
    pytest.importorskip("torchao.float8")
    from benchmarks.foreign_faults import converted as by_torchao
    from narrowgauge.lab.blame.recast import own_scale, recast

    model = by_torchao(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), name)
    x, seen = torch.randn(32, 64).bfloat16().float(), [Seen(), Seen()]

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), *(each.grad.clone() for each in model.parameters())]

    before, layers = results(), [layer for _, layer in narrow_layers(model)]
    for layer, own in zip(layers, seen, strict=True):
        layer.observer = own
    assert same(results(), before)
    for layer, own in zip(layers, seen, strict=True):
        layer.observer = None
        for (gemm, role), (original, operand) in own.operands.items():
            cast = getattr(layer.recipe, gemm)
            side = cast.lhs if role == OPERANDS[gemm][0] else cast.rhs
            if side is None:
                assert type(operand) is not QTensor
                continue
            rows = original if PRODUCTS[role][0] == gemm else original.T
            assert operand.cast == side, (gemm, role)
            assert torch.equal(own_scale(rows, side), operand.full_scale()), (gemm, role)
            assert torch.equal(recast(rows, operand), ng.dequantize(operand)), (gemm, role)
    assert set(seen[1].results) == set(GEMMS)


def test_an_adapter_made_earlier_speaks_for_the_one_that_the_module_holds():
    """Two adapters of a module, of which neither ends what the other one asked for."""
    layer, x, seen = Float8Linear(nn.Linear(32, 16)), torch.randn(4, 32), Seen()
    narrow, wide = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    earlier = narrow_layer(layer)
    with ng.suspended(layer):
        earlier.observer = seen
        assert earlier.is_suspended and torch.equal(layer(x), wide)
    assert torch.equal(layer(x), narrow) and ("output", "w") in seen.operands
    earlier.observer = None
    other = narrow_layer(layer)
    other.compute_as(other.recipe.with_gemm(output=BF16.output))
    assert earlier.recipe == other.recipe
    earlier.compute_as(None)
    assert torch.equal(layer(x), narrow) and "forward" not in vars(layer)


def test_arguments_beside_x_change_nothing():
    """TransformerEngine's modules get is_first_microbatch, and some loops name x."""
    x = torch.randn(4, 32)
    with transformer_engine(), fp8_autocast():
        layer = TELinear(nn.Linear(32, 16))
        narrow, wide = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
        held = narrow_layer(layer)
        held.compute_as(held.recipe.with_gemm(output=BF16.output))
        assert not torch.equal(narrow, wide)
        for y in (layer(x, True), layer(x, is_first_microbatch=True), layer(x=x)):
            assert torch.equal(y, wide)
        with torch.no_grad():
            assert torch.equal(layer(x, is_first_microbatch=True), wide)
        held.compute_as(None)
        with ng.suspended(layer):
            assert torch.equal(layer(is_first_microbatch=True, x=x), wide)
            with pytest.raises(TypeError, match="x"):
                layer()
    layer, seen = Float8Linear(nn.Linear(32, 16)), Seen()
    narrow_layer(layer).observer = seen
    layer(x=x).sum().backward()
    assert {gemm for gemm, _ in seen.operands} == {"output", "grad_weight"}


def test_an_expert_without_tokens_has_operands_of_no_rows():
    layer = MXFP8Linear(nn.Linear(64, 32))
    scale = torch.zeros(0, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    codes = MXCodes(torch.zeros(0, 64).to(torch.float8_e4m3fn), scale, torch.float32)
    operand = adapter(layer).operand(codes, is_rhs=False)
    assert operand.shape == (0, 64) and ng.dequantize(operand).shape == (0, 64)
