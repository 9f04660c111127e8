"""Evaluations score the weights twice: by the run's own products, and with those of Linears in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.ops.registry import Device
from narrowgauge.train import loop, validation
from tests.compare import assert_same, assert_sqnr
from tests.train import tiny


def evaluations(config):
    assert loop.run(config) == 0
    return tiny.events(Path(config.output), "eval")


def test_a_run_is_scored_narrow_and_wide_and_is_not_disturbed(make, capsys) -> None:
    both = evaluations(make("both", recipe="fp8-delayed", eval_every=3, eval_wide=True))
    assert "in 16 bits)" in capsys.readouterr().err
    alone = evaluations(make("alone", recipe="fp8-delayed", eval_every=3))
    assert [event["step"] for event in both] == [3, 6]
    for ours, theirs in zip(both, alone, strict=True):
        assert "wide" not in theirs and ours["loss"] == theirs["loss"]
        assert (
            set(ours["wide"]) == {"loss", "tokens"}
            and 0 < abs(ours["wide"]["loss"] - ours["loss"]) < 0.1
        )
    runs = [Path(make(name).output) for name in ("both", "alone")]
    assert tiny.losses(runs[0]) == tiny.losses(runs[1]) and tiny.digests(runs[0]) == tiny.digests(
        runs[1]
    )


def test_the_wide_score_is_that_of_a_run_in_16_bits(make) -> None:
    """At the first step, before anything was learnt, both runs have the same weights."""
    [narrow] = evaluations(
        make(
            "narrow",
            recipe="fp8-current",
            eval_wide=True,
            steps=1,
            learning_rate=1e-30,
            weight_decay=0.0,
        )
    )
    [wide] = evaluations(
        make("wide", recipe="none", eval_wide=True, steps=1, learning_rate=1e-30, weight_decay=0.0)
    )
    assert "wide" not in wide
    assert narrow["wide"]["loss"] == pytest.approx(wide["loss"], abs=2e-5)
    assert abs(narrow["loss"] - wide["loss"]) > 2e-5


@pytest.mark.parametrize("recipe", ["bf16", None])
def test_products_in_16_bits_are_scored_once(recipe) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    ng.convert(model, {"0": "fp8-current", "1": "fp8-current"})
    assert len(validation.narrow_forward(model)) == 2
    ng.convert(model, {"*": recipe} if recipe else None)
    assert validation.narrow_forward(model) == {}


def test_suspended_without_bfloat16_instructions_multiplies_in_float32(
    device_is, monkeypatch
) -> None:
    """The same numbers but for the order of the sums, and derivatives of derivatives as nn.Linear has them."""
    layer = ng.QLinear(64, 48, recipe="fp8-current")
    x = torch.randn(7, 64, requires_grad=True)
    plain = nn.functional.linear
    within: list[bool] = []

    def watched(*given):
        within.append(torch.is_autocast_enabled("cpu"))
        return plain(*given)

    found = []
    for has_units in (True, False):
        device_is(Device("cpu", bf16_gemm=has_units))
        monkeypatch.setattr(nn.functional, "linear", watched)
        with ng.suspended(layer), torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        monkeypatch.undo()
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert y.dtype == torch.bfloat16
        found.append((y.float(), gradient, second))
    assert within == [True, False]
    for ours, theirs in zip(*found, strict=True):
        assert_sqnr(ours, theirs, 45)
    with ng.suspended(layer):  # nothing is rounded where nobody asked for 16 bits
        assert_same(layer(x), plain(x, layer.weight, layer.bias))
