"""Compiled gradients are the eager ones, also with the oldest torch that is supported (`make oldest`), for every way to a result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.autograd_rules import alias_while_compiling
from tests.cold_start import shorten
from tests.compare import sqnr_db
from tests.selection import quick

RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "int8", "int4-lsq-luq")


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated"
)  # Dynamo's own use of autograd.Function
# Casts of this step, and with a window; `make test-slow` adds no cast, learned steps and all other recipes.
@pytest.mark.parametrize(
    ("recipe", "bias"),
    quick(
        [("fp8-delayed", True)],
        [(recipe, bias) for recipe in RECIPES for bias in (True, False)],
    ),
)
def test_compiled_gradients_are_those_of_eager_mode(recipe, bias):
    """In torch 2.11 all of them were zero, without a word. Seeds alone decide noise; codes may flip where sums differ."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ng.convert(nn.Sequential(nn.Linear(64, 32, bias=bias)), recipe)
    found = []
    for call in (model, torch.compile(model, backend="eager")):
        for _ in range(2):  # windows of delayed scaling are filled
            torch.manual_seed(1)
            model.zero_grad()
            x = torch.randn(40, 64, requires_grad=True)
            call(x).square().sum().backward()
            ng.advance(model)
        found.append([x.grad, model[0].weight.grad])
    for eager, compiled in zip(*found, strict=True):
        assert eager.norm() > 1
        torch.testing.assert_close(compiled.norm(), eager.norm(), rtol=0.05, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled_gradients_of_a_learned_step_are_of_the_rows_that_were_drawn():
    """torch.compile's partitioner drew them again in backward. The means of 60 draws: 5 standard errors, false alarm 6e-7 (statistical)."""
    model, x, target = _two_layers("int4-lsq-luq")
    means = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        draws = []
        for _ in range(60):
            _backward(call, model, x, target)
            draws.append(model[2].steps.x.grad.double())
        means.append((torch.stack(draws).mean(), torch.stack(draws).var() / len(draws)))
    (eager, of_eager), (compiled, of_compiled) = means
    assert abs(compiled - eager) < 5 * (of_eager + of_compiled).sqrt()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_both_operands_of_a_compiled_product_are_rotated_by_the_same_signs():
    """torch.compile's partitioner drew those of backward twice, and the weights' gradients were noise, at -9 dB (bounded).

    Of 60 draws in eager mode, the best and the worst are 0.5 dB apart.
    """
    model, x, target = _two_layers("mxfp4")
    with ng.suspended(model):
        exact = _backward(model, model, x, target)
    eager, compiled = (
        _backward(call, model, x, target)
        for call in (model, torch.compile(model, backend="aot_eager"))
    )
    for name, gradient in exact.items():
        assert sqnr_db(compiled[name], gradient) > sqnr_db(eager[name], gradient) - 1, name


def _two_layers(recipe):
    """A model past its cold start, an input and a target."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ng.convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), recipe)
    x, target = torch.randn(128, 64), torch.randn(128, 64)
    shorten(model)
    for _ in range(2):
        model(x)
        ng.advance(model)
    return model, x, target


def _backward(call, model, x, target):
    model.zero_grad()
    (call(x) - target).square().sum().backward()
    return {
        name: each.grad.clone()
        for name, each in model.named_parameters()
        if name.endswith("weight")
    }


def test_eager_outputs_may_be_changed_in_place():
    """A view of what a custom function returns may not: `nn.ReLU(inplace=True)` behind a Linear would raise."""
    y = torch.ones(3)
    assert alias_while_compiling(y) is y
    model = ng.convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)), "fp8-current")
    model(torch.randn(4, 16)).sum().backward()
