"""States taken over in other formats: bit for bit where the format stays (exact), within half a step of the codes where not (bounded)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.optim import AdamW, Lion
from narrowgauge.optim.transfer import transfer
from tests.compare import assert_same
from tests.raising import raises

# dB of a moment in each format against float32, of these gradients: the coarsest are 4 bits with 16 levels in a tile of 128.
LEAST_DB = {"8bit": 25.0, "fp8": 25.0, "fp8-lm": 25.0, "4bit": 12.0}
MASTERS = ["fp32", "fp16-scaled", "bf16-remainder", "stochastic"]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 64), nn.Linear(64, 70)).to(
        dtype
    )  # tiles that do not fill the row


def optimizer(of, states="fp32", master=None):
    return AdamW(of.parameters(), lr=1e-2, states=states, master=master)


def train(of, optimizer, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in of.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()


def carried(source, old, target, new):
    return transfer(old, new, zip(source.parameters(), target.parameters(), strict=True))


def trained(states="fp32", master=None):
    dtype = torch.float32 if master is None else torch.bfloat16
    source = model(dtype)
    old = optimizer(source, states, master)
    train(source, old)
    return source, old


@pytest.mark.parametrize("master", [None, *MASTERS])
@pytest.mark.parametrize("states", ["8bit", "4bit"])
def test_the_same_formats_go_on_bit_for_bit(states, master):
    source, old = trained(states, master)
    target = model(next(source.parameters()).dtype)
    new = optimizer(target, states, master)
    found = carried(source, old, target, new)
    assert found.unchanged == found.states == 4 and str(found.losses["weights"]) == "exact"
    for of, by in ((source, old), (target, new)):
        by.param_groups[0]["lr"] /= 2  # a schedule that falls counts the rate of the step before
        train(of, by)
    for before, after in zip(source.parameters(), target.parameters(), strict=True):
        assert_same(after, before)


@pytest.mark.parametrize("states", LEAST_DB)
def test_float32_moments_become_codes_and_codes_become_what_they_stand_for(states):
    source, old = trained()
    target = model()
    new = optimizer(target, states)
    found = carried(source, old, target, new)
    assert str(found.losses["weights"]) == "exact"
    for name in ("exp_avg", "exp_avg_sq"):
        loss = found.losses[name]
        assert loss.noise <= loss.signal * 10 ** (-LEAST_DB[states] / 10)
        assert loss.changed > 0
    back = model()
    again = carried(target, new, back, optimizer(back))
    assert all(
        str(loss) == "exact" for loss in again.losses.values()
    )  # float32 holds every value of a code


@pytest.mark.parametrize("master", MASTERS)
def test_weights_pass_between_float32_and_masters(master):
    source, old = trained()
    wide = [parameter.detach().clone() for parameter in source.parameters()]
    target = model(torch.bfloat16)
    new = optimizer(target, "fp32", master)
    found = carried(source, old, target, new)
    is_exact = master in ("fp32", "bf16-remainder")
    assert (str(found.losses["weights"]) == "exact") == is_exact
    back = model()
    carried(target, new, back, optimizer(back))
    bits = {"fp32": 0.0, "bf16-remainder": 0.0, "fp16-scaled": 2.0**-10, "stochastic": 2.0**-8}[
        master
    ]
    for before, after in zip(wide, back.parameters(), strict=True):
        # Relative to the largest of its tile, whose scale a small weight's master shares.
        assert (before - after).abs().max() <= bits * before.abs().max()


def test_parameters_without_a_state_carry_their_weight_alone():
    source, target = model(), model(torch.bfloat16)
    new = optimizer(target, "8bit", "fp32")
    found = carried(source, optimizer(source), target, new)
    assert not found.states and not new.state
    for before, after in zip(source.parameters(), target.parameters(), strict=True):
        assert (
            torch.equal(before.bfloat16(), after)
            or (before - after.float()).abs().max() <= 2.0**-8 * before.abs().max()
        )


def test_torchs_adamw_gives_and_takes_states():
    source = model()
    old = torch.optim.AdamW(source.parameters(), lr=1e-2)
    train(source, old)
    target = model()
    new = optimizer(target, "8bit")
    carried(source, old, target, new)
    back = model()
    last = torch.optim.AdamW(back.parameters(), lr=1e-2)
    carried(target, new, back, last)
    train(back, last, 1)
    assert {float(state["step"]) for state in last.state.values()} == {4.0}


def test_another_rule_is_refused():
    source, old = trained()
    target = model()
    with raises(ConfigError, "optim.other-rule", "'adamw'", "'lion'"):
        carried(source, old, target, Lion(target.parameters()))
