"""Weights whose gradient stops while their row goes on: no further than torch moves them (bounded), and the bound itself (exact)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.optim import SGD, AdamW, Lion, moments, noise, rules
from narrowgauge.optim.moments import STATES
from tests.compare import assert_same

NARROW = [name for name in STATES if name != "fp32"]
ROWS, COLUMNS = 16, 256
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def walk(build: Build, dead: int, before: int = 100, remains: float = 0.0) -> float:
    """The furthest that a dead weight, one of two, goes in so many steps, after `before` steps with all gradients.

    remains  the share of its gradient that is left
    Magnitudes spread over four decades in a row, so that first moments lie at all codes, the least among them.
    """
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = build([weight])
    generator = torch.Generator().manual_seed(1)
    size = 1e-3 * torch.exp(1.5 * torch.randn(ROWS, COLUMNS, generator=generator))
    size[:, :8] *= 30
    start = weight.detach().clone()
    for step in range(before + dead):
        gradient = (torch.randn(ROWS, COLUMNS, generator=generator) + 0.1) * size
        if step >= before:
            gradient[:, 1::2] *= remains
        if step == before:
            start = weight.detach().clone()
        weight.grad = gradient
        optimizer.step()
    return float((weight.detach() - start)[:, 1::2].abs().max())


def adamw(states: str | None, beta2: float, **options: Any) -> Build:
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, beta2), "weight_decay": 0.0}
    if states is None:
        return lambda p: torch.optim.AdamW(p, **settings)
    return lambda p: AdamW(p, **settings, states=states, **options)  # type: ignore[arg-type]


@cache
def torchs_walk(beta2: float, dead: int, remains: float) -> float:
    return walk(adamw(None, beta2), dead, remains=remains)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta2", "dead", "remains", "states"),
    [
        *((0.95, 1200, remains, states) for states in NARROW for remains in (0.0, 1e-6)),
        (0.999, 3000, 0.0, "8bit"),
    ],
)
def test_dead_weights_go_no_further_than_torchs(beta2, dead, remains, states):
    """Within twice torch's, of which half is for what the last live steps had rounded.

    Codes that stall took 8bit to 108 and 12. `python -m benchmarks.closed dead_weights` has 0.999 for
    every format: 3,000 steps take minutes each.
    """
    truth = torchs_walk(beta2, dead, remains)
    found = walk(adamw(states, beta2), dead, remains=remains)
    assert found <= 2 * truth, f"{states}: {found:.3g}, torch {truth:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("states", NARROW)
def test_dead_weights_stop_in_every_rule(states):
    """SGD: within twice torch's. Lion, whose exact momentum keeps its sign for ever, goes less far and comes to rest."""

    def sgd(p):
        return SGD(p, lr=1.0, momentum=0.9, states=states)

    assert walk(sgd, 1200) <= 2 * walk(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), 1200)

    def lion(states: str) -> Build:
        return lambda p: Lion(p, lr=1e-3, betas=(0.9, 0.95), states=states)  # type: ignore[arg-type]

    assert walk(lion("fp32"), 600) == pytest.approx(0.6, rel=1e-4)
    assert walk(lion(states), 1200) == walk(lion(states), 1800) < 1.2


@pytest.mark.slow
def test_in_plain_torch_too():
    truth = walk(adamw(None, 0.95), 300)
    for states in ("8bit", "4bit"):
        assert walk(adamw(states, 0.95, backend="torch"), 300) <= 2 * truth


@pytest.mark.slow
@pytest.mark.parametrize("states", NARROW)
def test_units_that_wake_are_taken_back_as_torchs_are(states):
    """The loss after half of the hidden units come back, and 20 steps later: at most twice that of torch."""

    def losses(build: Build) -> tuple[float, float]:
        torch.manual_seed(0)
        first, second = nn.Linear(16, 128), nn.Linear(128, 64)
        optimizer = build([*first.parameters(), *second.parameters()])
        alive = torch.ones(128)
        found = []
        for step in range(720):
            alive[:64] = 0.0 if 200 <= step < 700 else 1.0
            x = torch.randn(64, 16)
            loss = (second(torch.relu(first(x)) * alive) - x.repeat(1, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found[700], found[719]

    truth = losses(adamw(None, 0.95))
    found = losses(adamw(states, 0.95))
    assert found[0] < 2 * truth[0] and found[1] < 2 * truth[1], f"{found}, torch {truth}"


# --- the bound -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "betas",
    [
        (0.9, 0.95),
        (0.9, 0.999),
        (0.0, 0.9),
        (0.9, 0.81),
        (0.95, 0.9),
        (0.9, 0.0),
        (0.99, 0.5),
        (0.0, 0.0),
    ],
)
def test_the_bound_holds_at_every_step_and_is_reached(betas):
    """In float64, by the gradients that attain it, (b1 / b2)^age, and below it by others."""
    beta1, beta2 = betas
    for steps in (1, 2, 3, 10, 40):
        limit = rules.bound(beta1, beta2, steps)
        worst = [(beta1 / beta2) ** age if beta2 else 1.0 for age in reversed(range(steps))]
        others = torch.randn(
            50, steps, generator=torch.Generator().manual_seed(steps), dtype=torch.float64
        ).tolist()
        for gradients in (worst, *others):
            m = v = 0.0
            for g in gradients:
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            assert abs(m) <= limit * math.sqrt(v) * (1 + 1e-9) / rules.SLACK or limit == rules.MOST
            if gradients is worst and beta2:
                assert abs(m) * rules.SLACK == pytest.approx(limit * math.sqrt(v))


def test_the_bound_is_the_known_one_after_many_steps():
    assert rules.bound(0.9, 0.95, 10_000) / rules.SLACK == pytest.approx(1.16496, abs=1e-4)
    assert rules.bound(0.9, 0.999, 100_000) / rules.SLACK == pytest.approx(7.27026, abs=1e-4)
    assert rules.bound(0.99, 0.5, 100_000) == rules.MOST  # b1^2 > b2: it grows without end


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.8, 0.7)])
def test_an_exact_step_is_not_changed_by_being_held(betas):
    """float32 moments, 300 steps of gradients over decades, rising, constant and stopping: the same moments, held or not."""
    group = {"lr": 1e-2, "weight_decay": 0.1, "betas": betas, "eps": 1e-8}
    generator = torch.Generator().manual_seed(3)
    scale = torch.exp(4 * torch.randn(8, 64, generator=generator))
    free, held = ((torch.zeros(8, 64),) * 3 for _ in range(2))
    for step in range(1, 301):
        g = torch.randn(8, 64, generator=generator) * scale
        g[0], g[1], g[2] = scale[0], scale[1] * (betas[1] / betas[0]) ** step, float(step < 20)
        constants = rules.ADAMW.constants(group, step)
        free = rules.ADAMW.update(free[0], g, *free[1:], constants, False)[:3]
        held = rules.ADAMW.update(held[0], g, *held[1:], constants, True)[:3]
    assert_same(held[1:], free[1:])
    torch.testing.assert_close(
        held[0], free[0], rtol=1e-5, atol=1e-6
    )  # the order of a product and a quotient differs


# --- rounding ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format", [moments.E5M2, moments.E4M3_FIRST, moments.E4M3, moments.DYNAMIC4], ids=str
)
def test_what_only_decays_reaches_zero(format):
    """Beside a number that keeps the scale: never above the number itself (E5M2: its next code), and at zero in the end."""
    above = 1.25 if format is moments.E5M2 else 1 + 2.0**-20  # E5M2 is rounded stochastically
    x = torch.linspace(-1, 1, 256).view(1, 1, 256)
    index = torch.arange(256).view(1, 1, 256)
    decays = torch.ones(1, 1, 256, dtype=torch.bool)
    decays[..., -1] = False
    for step in range(400):
        x = x * 0.9
        x[..., -1] = 1.0
        rounded = format.decode(format.encode(x, noise.bits(noise.key(step, 0), index), decays))
        assert (rounded[..., :-1].abs() <= x[..., :-1].abs() * above).all()
        x = rounded
    assert not x[..., :-1].any() and x[0, 0, -1] == 1.0


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_row_without_gradients_keeps_its_momentum(backend):
    """No tile is rounded toward zero as a whole: after 20 such steps of 4bit it is 0.9^20 of what it was, within the 1 % of its scales."""
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = AdamW([weight], states="4bit", backend=backend)  # type: ignore[arg-type]
    sums = []
    for step in range(21):
        weight.grad = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * (
            step == 0
        )
        optimizer.step()
        state = optimizer.state[weight]
        codes = torch.stack((state["exp_avg"] & 0xF, state["exp_avg"] >> 4), -1).view(
            ROWS, -1, STATES["4bit"].tile
        )
        moment = moments.DYNAMIC4.decode(moments.Encoded(codes, state["exp_avg_scale"]))
        sums.append(float(moment.abs().sum()))
    assert (
        sums[20] / sums[0] == pytest.approx(0.9**20, rel=20 * 2**-7)
        and sums[20] >= sums[0] * 0.9**20
    )
