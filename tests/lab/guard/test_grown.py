"""Recipes with learned steps: a loss that is lower than BF16's is told, and the run is left alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.ops.registry import Device
from tests.small_model import Model


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "acts"), [("int4-lsq-luq", False), ("fp8-current", True)])
def test_a_lower_loss_takes_no_narrow_run_to_bf16_where_weights_grow_into_steps(
    recipe, acts, device_is
):
    device_is(Device("cpu", bf16_gemm=False, int8_gemm=False))
    torch.manual_seed(0)
    model = ng.convert(Model(), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randint(48, (2, 8))

    def step(ids):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        return loss.detach() + model.layers[0].up_proj.is_suspended  # BF16 is worse by a nat

    guard = ng.Guard("every=2,steps=2,then=stay", model, optimizer, step, tell=lambda event: None)
    for _ in range(10):
        guard(batch)
    verdicts = [(event["verdict"], event["direction"]) for event in guard.events]
    assert ("worse", "lower") in verdicts
    taken = {event["then"] for event in guard.events if event["verdict"] == "worse"}
    assert taken == ({"stay"} if acts else {"warn"})
