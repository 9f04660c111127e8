"""Blame leaves no trace: the run goes on with the bits that it would have had (exact)."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.formats import INT4
from narrowgauge.lab.blame import blame
from narrowgauge.recipe import Cast
from tests.compare import assert_same
from tests.lab.blame.planted import IDS, converted, recast
from tests.selection import quick


def ended(recipe, looks):
    """All that a run of four steps of two micro-batches ends with; it is looked at before the steps in `looks`, and within one."""
    torch.manual_seed(0)
    random.seed(0)
    model = torch.nn.Sequential(converted(recipe), torch.nn.Dropout(0.1))
    recast(
        model[0].layers[0].up_proj, "output", "lhs", Cast(format=INT4)
    ) if recipe == "fp8-delayed" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward(ids):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    losses = []
    for number in range(4):
        for micro in range(2):
            if number in looks and micro == looks[number]:
                blame(model, lambda: backward(IDS.flip(0)))
            losses.append(backward((IDS + 3 * number + micro) % 48))
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    drawn = torch.rand(3), torch.tensor(random.random())
    return [*losses, *drawn, *(each.clone() for each in model.state_dict().values())]


@pytest.mark.parametrize("recipe", quick(["int4-hq-lss"], recipes.names()))
def test_a_run_that_was_looked_at_is_the_run_that_was_not(recipe):
    """Before a step, and between two micro-batches; in the cold start of learned steps, and of windows, too."""
    for a, b in zip(ended(recipe, {}), ended(recipe, {0: 0, 2: 1, 3: 0}), strict=True):
        assert_same(a, b)


def test_what_a_step_that_raises_has_left_is_put_back():
    model = converted("fp8-delayed")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    generator = torch.get_rng_state()

    def compute():
        model(IDS).square().mean().backward()
        torch.rand(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        blame(model, compute)
    assert_same(torch.get_rng_state(), generator)
    assert all(each.grad is None for each in model.parameters())
    assert all(layer.observer is None for layer in model.modules() if isinstance(layer, ng.QLinear))
    for name, each in model.state_dict().items():
        assert_same(each, before[name])
