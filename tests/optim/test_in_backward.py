"""Who holds whom when the optimizer steps inside backward: what nothing needs any more is freed, and a lost optimizer is told."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError


def trained(steps: int = 2) -> tuple[nn.Module, ng.optim.AdamW]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = ng.optim.AdamW(model.parameters(), lr=1e-3, states="8bit")
    ng.optim.in_backward(optimizer)
    for _ in range(steps):
        model(torch.randn(8, 16)).sum().backward()
    return model, optimizer


def test_weights_and_states_are_freed_with_the_model():
    model, optimizer = trained()
    kept = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)


def test_backward_says_that_its_optimizer_is_gone():
    model, optimizer = trained()
    before = model[0].weight.detach().clone()
    del optimizer
    gc.collect()
    with pytest.raises(
        ConfigError, match=r"the optimizer that steps this parameter of \[.*\] is gone, nothing held it\. Keep it"
    ):
        model(torch.randn(8, 16)).sum().backward()
    assert torch.equal(model[0].weight, before)


def test_gradients_whose_squares_overflow_are_clipped_and_not_lost():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = ng.optim.SGD([weight], lr=1.0, momentum=0.0, backend="torch")
    ng.optim.in_backward(optimizer, clip_parameter_norm=1.0)
    (weight * 1e20).sum().backward()
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5))


def test_what_in_backward_returns_holds_it():
    model = nn.Linear(16, 4)
    stepping = ng.optim.in_backward(ng.optim.AdamW(model.parameters(), lr=1e-3))
    before = model.weight.detach().clone()
    gc.collect()
    model(torch.randn(8, 16)).sum().backward()
    assert not torch.equal(model.weight, before)
    stepping.remove()
