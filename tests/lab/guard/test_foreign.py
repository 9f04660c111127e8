"""A guard over the Linears of other libraries: sound ones pass, planted faults are alarms at the first check (exact)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.diagnose.verdict import WORSE
from narrowgauge.errors import ConfigError
from narrowgauge.lab.guard.result import KERNEL, STALE, UNCAST
from tests.foreign import NF4Linear, TELinear, converted, fp8_autocast, transformer_engine
from tests.lab.blame.planted import IDS, compute
from tests.raising import raises
from tests.small_model import Model


def trained(model: nn.Module, steps: int = 16, guarded: bool = True) -> list[dict[str, Any]]:
    """Events of the checks of eight steps: one in 16 steps."""
    optimizer, events = torch.optim.AdamW(model.parameters(), lr=1e-3), list[dict[str, Any]]()

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compute(model, ids)()
        optimizer.step()
        return loss

    guard: Any = (
        ng.Guard("every=8,steps=8", model, optimizer, step, tell=events.append) if guarded else step
    )
    for number in range(steps):
        guard((IDS + number) % 48)
    return events


def frozen() -> Any:
    """The factor of the first call for ever, a sixteenth too large soon."""
    kept: list[torch.Tensor] = []

    def stale(factor: torch.Tensor) -> torch.Tensor:
        kept.append(factor)
        return kept[0]

    return stale


def test_a_sound_model_raises_no_alarm_and_trains_as_without_a_guard():
    model, plain = converted(Model()), converted(Model())
    events = trained(model, 24)
    trained(plain, 24, guarded=False)
    assert len(events) == 2 and all(event["outcome"] != WORSE for event in events)
    assert all(event["unlike"] == {} and event["unseen"] == "" for event in events)
    assert events[0]["compared"] == 18 and events[0]["weights"] == 6
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not any("forward" in vars(each) for each in model.modules())


@pytest.mark.parametrize(
    ("gemm", "side", "fault", "kind"),
    [
        ("output", "rhs", frozen(), STALE),
        ("output", "lhs", lambda factor: factor * 16, UNCAST),
        ("grad_weight", "lhs", lambda factor: factor / 64, UNCAST),
    ],
    ids=["frozen", "saturating", "coarse"],
)
def test_a_wrong_scale_is_an_alarm_at_the_first_check(gemm, side, fault, kind):
    model = converted(Model())
    model.layers[1].down_proj.faults[gemm, side] = fault
    found = [event for event in trained(model) if event["outcome"] == WORSE]
    assert found and found[0]["unlike"][f"layers.1.down_proj:{gemm}"][0] == kind
    assert set(found[0]["unlike"]) == {f"layers.1.down_proj:{gemm}"}


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_a_kernel_that_drops_columns_is_an_alarm_at_the_first_check(gemm):
    model = converted(Model())
    model.layers[2].up_proj.dropped[gemm] = 8
    found = [event for event in trained(model) if event["outcome"] == WORSE]
    assert found and found[0]["unlike"][f"layers.2.up_proj:{gemm}"][0] == KERNEL


def test_layers_without_operands_and_unknown_ones_are_said_with_the_reason():
    with transformer_engine(), fp8_autocast():
        model = converted(Model(), TELinear)
        model.layers[0].gate = NF4Linear(model.layers[0].gate)
        [event] = trained(model)
    assert event["unlike"] == {} and event["weights"] == 6
    assert "6 layers" in event["unseen"] and "layers.0.gate" in event["unseen"]
    assert "NF4Linear" in event["unseen"]


def test_a_model_of_unknown_layers_alone_is_refused_with_their_names():
    model = converted(Model(), NF4Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with raises(ConfigError, "guard.not-converted", "hqq", "NF4Linear", "layers.0.up_proj"):
        ng.Guard("every=8,steps=8", model, optimizer, print)


def test_another_recipe_cannot_be_given_to_the_layers_of_other_libraries():
    model = converted(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with raises(ConfigError, "guard.then", "bf16"):
        ng.Guard("every=8,steps=8,then=bf16", model, optimizer, print)
