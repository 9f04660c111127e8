"""Compiled gradients are the eager ones, also with the oldest torch that is supported (`make oldest`), for every way to a result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.autograd_rules import alias_while_compiling
from tests.selection import quick

RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "int8", "int4-lsq-luq")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo's own use of autograd.Function
# Once for each way to a gradient: no cast, casts of this step, with a window, with learned steps.
@pytest.mark.parametrize(
    ("recipe", "bias"),
    quick(
        [("bf16", True), ("fp8-current", False), ("fp8-delayed", True), ("int4-lsq-luq", False)],
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
        for _ in range(2):  # past a cold start
            torch.manual_seed(1)
            model.zero_grad()
            x = torch.randn(40, 64, requires_grad=True)
            call(x).square().sum().backward()
            ng.advance(model)
        found.append([x.grad, model[0].weight.grad])
    for eager, compiled in zip(*found, strict=True):
        assert eager.norm() > 1
        torch.testing.assert_close(compiled.norm(), eager.norm(), rtol=0.05, atol=0)


def test_eager_outputs_may_be_changed_in_place():
    """A view of what a custom function returns may not: `nn.ReLU(inplace=True)` behind a Linear would raise."""
    y = torch.ones(3)
    assert alias_while_compiling(y) is y
    model = ng.convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)), "fp8-current")
    model(torch.randn(4, 16)).sum().backward()
