"""Combinations that fail in silence are named (exact), and the claim behind it is true (bounded)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.optim import AdamW, refuse_silent_failures, silent_failures
from tests.raising import raises


def weight(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.full((4, 4), 0.02).to(dtype))


def test_the_failure_is_real():
    """torch's AdamW in bfloat16 keeps v for ever at beta2 = 0.999, and does not move a weight of 0.02 by updates of 1e-5."""
    parameter = weight()
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-5, betas=(0.9, 0.999), weight_decay=0.0, foreach=False
    )
    for step in range(200):
        parameter.grad = torch.full_like(
            parameter, 1.0 if step == 0 else 0.0 if step < 100 else 1.0
        )
        optimizer.step()
        if step == 0:
            first = optimizer.state[parameter]["exp_avg_sq"].clone()
        if step == 99:
            assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], first)
    assert torch.equal(parameter, weight())


def test_each_failure_is_told_with_its_reason():
    words = silent_failures(torch.optim.AdamW([weight()], betas=(0.9, 0.999)))
    assert (
        len(words) == 2 and "below 1/512" in words[0] and "beta2 = 0.999 does not decay" in words[1]
    )
    assert len(silent_failures(torch.optim.AdamW([weight()], betas=(0.9, 0.95)))) == 1
    assert "eps = 1e-08 is zero" in silent_failures(torch.optim.Adam([weight(torch.float16)]))[1]
    assert silent_failures(torch.optim.AdamW([weight(torch.float32)])) == []
    assert "below 1/512" in silent_failures(torch.optim.SGD([weight()], lr=0.1))[0]
    assert silent_failures(AdamW([weight()], master="stochastic")) == []
    with raises(ConfigError, "optim.unfit", "AdamW"):
        refuse_silent_failures(torch.optim.AdamW([weight()]))


def test_stochastic_rounding_of_another_library_is_known():
    optim = pytest.importorskip("torchao.optim")
    plain = optim.AdamW8bit([weight()])
    rounding = optim.AdamW8bit([weight()], bf16_stochastic_round=True)
    assert silent_failures(plain) and not any(
        "below 1/512" in each for each in silent_failures(rounding)
    )
