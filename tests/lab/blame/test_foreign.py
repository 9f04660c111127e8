"""Blame over the Linears of other libraries: the faulty product stands first, confirmed by the gradient (exact)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.lab.blame import Blame, blame
from narrowgauge.recipe import GEMMS
from tests.foreign import (
    Float8Linear,
    MXFP8Linear,
    NF4Linear,
    TELinear,
    converted,
    fp8_autocast,
    transformer_engine,
)
from tests.lab.blame.planted import compute, train
from tests.raising import raises
from tests.small_model import Model


@pytest.mark.parametrize("granularity", ["TENSORWISE", "AXISWISE"])
def test_a_sound_model_has_no_suspect(granularity):
    model = converted(Model(), lambda layer: Float8Linear(layer, granularity))
    train(model, 3)
    found = blame(model, compute(model))
    assert not found.suspects and len(found.findings) == 18
    assert [each.code for each in found.notes] == ["blame.foreign"]


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("factor", [0.9, 16.0], ids=["frozen", "saturating"])
def test_a_wrong_scale_stands_first(gemm, side, factor):
    model = converted(Model())
    model.layers[1].down_proj.faults[gemm, side] = lambda own: own * factor
    found = blame(model, compute(model), confirm=0)
    [suspect] = found.suspects
    assert suspect is found.findings[0] and suspect.name == f"layers.1.down_proj:{gemm}"
    assert suspect.worse is getattr(suspect, side) and not suspect.worse.is_cast
    # `recipe.layers` is no setting of that library's.
    assert found.setting == "" and Blame.from_dict(found.as_dict()) == found


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_kernel_that_drops_columns_stands_first_and_is_confirmed(gemm):
    model = converted(Model())
    model.layers[1].up_proj.dropped[gemm] = 8
    found = blame(model, compute(model), confirm=1)
    [suspect] = found.suspects
    assert suspect.name == f"layers.1.up_proj:{gemm}" and suspect.is_kernel
    assert found.confirmations[0].hurts
    assert not any("forward" in vars(each) for each in model.modules())


def test_codes_of_an_older_weight_stand_first():
    """As a library would that casts a weight once for several steps, and misses one."""
    model = converted(Model())
    layer = model.layers[0].up_proj
    stale = layer.weight.detach().clone()
    train(model, 5)
    product = layer.product
    layer.product = lambda gemm, lhs, rhs: product(gemm, lhs, stale if gemm == "output" else rhs)
    found = blame(model, compute(model), confirm=0)
    [suspect] = found.suspects
    assert suspect.name == "layers.0.up_proj:output" and suspect.worse.role == "w"


def test_blocks_of_32_with_a_row_of_zeros_are_sound_and_a_small_scale_stands_first():
    """The last token of each sequence has no loss, so rows of grad_output are zeros: E8M0's smallest scale."""
    model = converted(Model(), MXFP8Linear)
    assert not blame(model, compute(model)).suspects
    model.layers[1].down_proj.shift = 1
    [suspect] = blame(model, compute(model), confirm=0).suspects
    assert suspect.name == "layers.1.down_proj:output" and suspect.worse.role == "x"
    assert suspect.worse.scale_off == 0.5 and suspect.worse.saturated > 0


def test_gemms_that_stay_wide_are_no_suspects():
    model = converted(Model(), lambda layer: Float8Linear(layer, "AXISWISE", wide=("grad_weight",)))
    found = blame(model, compute(model))
    narrow = {each.product for each in found.findings if each.lhs.is_narrow}
    assert narrow == {"output", "grad_input"} and not found.suspects


def test_layers_without_operands_are_refused_or_noted_with_the_reason():
    with transformer_engine(), fp8_autocast():
        alone = converted(Model(), TELinear)
        with raises(ConfigError, "blame.hidden", 6, "layers.0.up_proj"):
            blame(alone, compute(alone))
        some = converted(Model())
        some.layers[1].gate = TELinear(some.layers[1].gate)
        some.layers[2].gate = NF4Linear(some.layers[2].gate)
        found = blame(some, compute(some))
    assert {each.code for each in found.notes} == {
        "blame.foreign",
        "blame.hidden",
        "foreign.unknown",
    }
    assert len(found.findings) == 18 and torch.isfinite(torch.tensor(found.findings[0].error))
