"""Gradients held in FP8: bounded by the cast alone, summed without bias, stepped tensor by tensor, counted in bytes."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.optim.held_gradients import NEAREST, NEAREST_PASSES, Fp8Gradient
from tests.compare import assert_same, z_limit, z_score
from tests.raising import raises


def model_of(recipe: str | None = "fp8-current") -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(128, 256), nn.LayerNorm(256), nn.Linear(256, 128), nn.Linear(128, 8)
    ).to(torch.bfloat16)
    return model if recipe is None else ng.convert(model, recipe)


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
    model(x).float().square().sum().backward()


def rounded(gradient: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(gradient, NEAREST)).to(gradient.dtype)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_is_the_ordinary_one_of_gradients_cast_to_fp8(clip):
    """Exact. Vectors and a matrix of 1,024 elements keep theirs."""
    found = []
    for holds in (True, False):
        model = model_of()
        optimizer = ng.optim.AdamW(model, lr=1e-2, states="fp8-lm", master="fp16-scaled")
        held = ng.optim.hold_gradients(optimizer, clip_norm=clip) if holds else None
        norms = []
        for step in range(3):
            backward(model, step)
            if held is not None:
                assert [p.grad is None for p in model.parameters()] == [
                    p.ndim > 1 and p.numel() >= 4096 for p in model.parameters()
                ]
                optimizer.step()
                norms.append(held.norm)
            else:
                for parameter in model.parameters():
                    if parameter.ndim > 1 and parameter.numel() >= 4096:
                        parameter.grad = rounded(parameter.grad)
                norms.append(
                    ng.optim.clip_gradients(model.parameters(), clip, wide=True) if clip else None
                )
                optimizer.step()
            optimizer.zero_grad()
        found.append(
            [model.state_dict(), dict(sorted(optimizer.state_dict()["state"].items())), *norms]
        )
    assert_same(*found)


@pytest.mark.slow
def test_later_micro_batches_sum_without_bias():
    """Eight are rounded to nearest; the mean of 64 draws of those behind them is their sum (z-scores, false alarm 1e-5)."""
    generator = torch.Generator().manual_seed(2)
    passes = [torch.randn(8, 200, generator=generator) for _ in range(NEAREST_PASSES + 3)]
    draws = []
    for seed in range(64):
        weight = nn.Parameter(torch.zeros(32, 200))
        held = ng.optim.hold_gradients(optimizer := ng.optim.AdamW([weight], seed=seed))
        for turn, each in enumerate(passes, 1):
            weight.backward(each.repeat(4, 1))
            if turn == NEAREST_PASSES:
                first = held._gradient(weight)[:8].double()
        draws.append(held._gradient(weight)[:8].double())
        del optimizer
    near = torch.stack(passes[:NEAREST_PASSES]).double().sum(0)
    assert 10 * math.log10(float(near.square().mean() / (first - near).square().mean())) > 24
    errors = torch.stack(draws) - (first + sum(each.double() for each in passes[NEAREST_PASSES:]))
    assert errors.std(0).min() > 0
    scores = errors.mean(0).flatten() / (errors.std(0).flatten() / 64**0.5)
    assert abs(z_score(scores, 0.0, 1.0)) < z_limit(1e-5)


def test_a_run_draws_the_same_numbers_again():
    found = []
    for _ in range(2):
        model = model_of()
        optimizer = ng.optim.AdamW(model, lr=1e-2, states="8bit", master="stochastic")
        ng.optim.hold_gradients(optimizer)
        for step in range(4):
            backward(model, step)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(model.state_dict())
    assert_same(*found)


def test_what_is_dropped_does_not_step():
    model = model_of(None)
    optimizer = ng.optim.AdamW(model, lr=1e-2, master="stochastic")
    held = ng.optim.hold_gradients(optimizer)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    backward(model, 0)
    assert held.bytes > 0 and "2 matrices of 65,536 parameters" in str(held)
    optimizer.zero_grad()
    optimizer.step()
    assert held.bytes == 0
    assert_same(model.state_dict(), before)
    held.remove()
    backward(model, 0)
    assert all(each.grad is not None for each in model.parameters())


def test_a_gradient_that_is_not_finite_stays_visible():
    gradient = torch.ones(2, 256)
    gradient[0, 3], gradient[1, 200] = math.nan, math.inf
    found = Fp8Gradient.of(gradient, 1, 1).decoded()
    assert found[0, :128].isnan().all() and found[1, 128:].isnan().all()
    assert_same(found[0, 128:], torch.ones(128))


def bytes_per_parameter(model: nn.Module, optimizer: ng.optim.AdamW, held: Any) -> float:
    """Of weights, masters, states and gradients, each storage once, after a backward pass."""
    kept = [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
    kept += [each.grad for each in model.parameters() if each.grad is not None]
    held_bytes = held.bytes - sum(
        each.grad.nbytes for each in model.parameters() if each.grad is not None
    )
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return (sum(storages.values()) + held_bytes) / sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("states", "wide", "expected"), [("fp8-lm", True, 6.0), ("8bit", False, 5.0)]
)
def test_a_model_of_linears_takes_six_bytes_a_parameter(states, wide, expected):
    """1 + 1 + 2 + 2, no weight and no gradient beside them; with bfloat16 weights and 8-bit states 1 + 1 + 1 + 2. Plus scales."""
    torch.manual_seed(0)
    model = ng.convert(
        nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))).to(torch.bfloat16),
        "fp8-current",
    )
    if wide:
        assert ng.optim.float16_weights(model) == ["0", "1", "2"]
    optimizer = ng.optim.AdamW(model, lr=1e-3, states=states, master="stochastic")
    held = ng.optim.hold_gradients(optimizer)
    for step in range(2):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step)).bfloat16()
        y = model(x)
        assert y.dtype == torch.bfloat16
        (y.float() - x.float()).square().mean().backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert expected < bytes_per_parameter(model, optimizer, held) < expected + 0.03


def test_a_float16_weight_keeps_gradients_that_float16_has_not():
    model = ng.convert(
        nn.Sequential(nn.Linear(128, 128, bias=False)).to(torch.bfloat16), "fp8-current"
    )
    ng.optim.float16_weights(model)
    for wraps in (True, False):
        optimizer = ng.optim.AdamW(model, lr=1e-3, states="fp8-lm", master="stochastic")
        held = ng.optim.hold_gradients(optimizer) if wraps else None
        x = torch.randn(16, 128).bfloat16()
        (model(x).float().sum() * 1e-10).backward()
        gradient = model[0].weight.grad if held is None else held._gradient(model[0].weight)
        assert gradient.dtype == torch.bfloat16 and float(gradient.abs().max()) > 0
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, model[0].weight)
        optimizer.zero_grad()
        if held is not None:
            held.remove()


def test_what_is_held_is_freed_with_the_model():
    model = model_of()
    optimizer = ng.optim.AdamW(model, master="stochastic")
    ng.optim.hold_gradients(optimizer)
    backward(model, 0)
    kept = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)


def test_what_cannot_be_held_is_refused():
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = ng.optim.AdamW([weight])
    with raises(ConfigError, "hold-gradients.optimizer", "AdamW"):
        ng.optim.hold_gradients(torch.optim.AdamW([weight]))  # type: ignore[arg-type]
    with raises(ConfigError, "hold-gradients.nothing", "4,096"):
        ng.optim.hold_gradients(ng.optim.AdamW([nn.Parameter(torch.zeros(64))]))
    with raises(ConfigError, "hold-gradients.clip-norm", "clip_norm = 0.0"):
        ng.optim.hold_gradients(optimizer, clip_norm=0.0)
    held = ng.optim.hold_gradients(optimizer)
    with raises(ConfigError, "hold-gradients.twice", "AdamW"):
        ng.optim.hold_gradients(optimizer)
    with raises(ConfigError, "in-backward.holds-gradients"):
        ng.optim.in_backward(optimizer)
    held.remove()
    ng.optim.in_backward(optimizer)
    with raises(ConfigError, "hold-gradients.twice"):
        ng.optim.hold_gradients(optimizer)
    with raises(ConfigError, "float16-weights.none"):
        ng.optim.float16_weights(model_of(None))
    model = model_of()
    model[2].weight.data[0, 0] = 1e30
    with raises(ConfigError, "float16-weights.too-large", "1.00026e+30", "65504"):
        ng.optim.float16_weights(model)
    assert model[0].weight.dtype == torch.bfloat16
