"""Float16 weights that are stepped by float16 gradients without a loss scale: told where float16 loses the gradients, not elsewhere."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import narrowgauge as ng
from tests.raising import with_code

OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    "8bit": lambda model: ng.optim.AdamW(
        model.parameters(), lr=1e-4, states="8bit", master="stochastic"
    ),
}


def told(
    model: nn.Module,
    optimizer,
    steps: int = 4,
    scale: float = 1.0,
    dtype=torch.float16,
    scaler=None,
) -> list[str]:
    """What was warned of; gradients are about 1e-2 times scale."""
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(64, 32, dtype=dtype)).float().square().mean() * scale
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            ng.advance(model)
    return [str(each) for each in with_code(found, "advance.float16")]


def converted() -> nn.Module:
    torch.manual_seed(0)
    return ng.convert(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), "fp8-current")


@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize(
    "scale, words", [(1e-8, "are 0"), (1e-3, "loses digits"), (1e7, "not finite")]
)
def test_gradients_that_float16_loses_are_told_once(which: str, scale: float, words: str) -> None:
    model = converted().half()
    (message,) = told(model, OPTIMIZERS[which](model), scale=scale)
    assert words in message and "2 layers" in message and "GradScaler" in message, message


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_gradients_that_float16_holds_are_not_told(which: str) -> None:
    model = converted().half()
    assert told(model, OPTIMIZERS[which](model)) == []


def test_a_loss_scale_is_not_told() -> None:
    model = converted().half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert told(model, OPTIMIZERS["fused AdamW"](model), scale=1e-3, scaler=scaler) == []


def test_gradients_in_bfloat16_are_not_told() -> None:
    model = converted()
    ng.optim.float16_weights(model)
    assert told(model, OPTIMIZERS["8bit"](model), scale=1e-8, dtype=torch.float32) == []


def test_float32_weights_are_not_told() -> None:
    model = converted()
    assert told(model, OPTIMIZERS["SGD"](model), scale=1e-12, dtype=torch.float32) == []
