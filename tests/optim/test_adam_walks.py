"""Random gradient histories: weights walk as far as under exact Adam (bounded); tests/optim/adam_walks.py has 10,000 of them."""

from __future__ import annotations

import statistics

import pytest
import torch

from tests.optim import adam_loop, adam_walks
from tests.optim.adam_walks import SETTINGS, Setting
from tests.selection import needs_compiler, quick


def worst(
    rule: str, states: str, setting: Setting, rows: int, decades: float, **options: object
) -> tuple[float, float]:
    """(over, under): of the median ratio over the elements of each history."""
    build = adam_walks.builder(rule, states, setting, **options)
    walks = adam_walks.search(rule, setting, {states: build}, rows, decades, seed=7)
    found = adam_walks.summary(walks, states)
    return found["over"], found["under"]


LONG = SETTINGS[5]  # a first moment remembers for 50 steps
SHORT = [each for each in SETTINGS if each is not LONG]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("setting", SHORT, ids=lambda each: f"{each.betas} {each.eps}")
@pytest.mark.parametrize("states", ["8bit", "fp8"])
def test_eight_bits_walk_as_far_as_exact_moments(states, setting):
    """Nine decades in a tile. To nearest, E5M2 walked 4 times too far; tapers of 60 octaves walked 15 times too short."""
    over, under = worst("adamw", states, setting, 48, 9.0)
    assert over <= 2 and under <= 2, (over, under)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("states", ["8bit", "fp8"])
@pytest.mark.parametrize("setting", SETTINGS[:2], ids=lambda each: str(each.betas))
def test_eight_bits_of_sgd_walk_as_far_as_exact_moments(states, setting):
    over, under = worst("sgd", states, setting, 16, 9.0)
    assert over <= 2 and under <= 2, (over, under)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "decades"), [("8bit", 8.0), ("e4m3/8bit", 3.0), ("fp8-lm", 3.0)]
)
def test_a_long_first_moment_is_followed_over_fewer_decades(states, decades):
    """Gradients that change their sign leave a hundredth of themselves in a first moment of beta1 = 0.98."""
    over, under = worst("adamw", states, LONG, 48, decades)
    assert over <= 2 and under <= 2, (over, under)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("setting", SHORT, ids=lambda each: f"{each.betas} {each.eps}")
@pytest.mark.parametrize("states", ["e4m3/8bit", "fp8-lm"])
def test_narrower_ranges_are_followed_over_four_decades(states, setting):
    over, under = worst("adamw", states, setting, 48, 4.0)
    assert over <= 2 and under <= 2, (over, under)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "lr", "ratio"), [("8bit", 0.02, 2.0), ("8bit", 0.03, 2.0), ("fp8-lm", 0.02, 1.0)]
)
def test_a_regression_ends_at_its_target(states, lr, ratio):
    """Squared distance beside torch's: about 200 if the correction ignores a falling learning rate.

    The median of 15 seeds of `8bit` is 1.24 and 1.26, single ones reach 2.6 (docs/optimizers.md).
    """
    found = [
        adam_loop.distance(states, 0.95, lr, seed) / adam_loop.distance("torch", 0.95, lr, seed)
        for seed in range(5)
    ]
    assert statistics.median(found) < ratio, found


@needs_compiler
@pytest.mark.parametrize(
    "states", quick(["8bit", "4bit"], ["8bit", "fp8", "e4m3/8bit", "fp8-lm", "4bit"])
)
def test_plain_torch_and_the_compiled_step_walk_the_same(states, monkeypatch):
    """Bit for bit, over histories of nine decades, so that rows of the search stand for both."""
    monkeypatch.setattr(adam_walks, "STEPS", 40)
    for setting in SETTINGS[2:4]:
        builds = {
            each: adam_walks.builder("adamw", states, setting, backend=each)
            for each in ("native", "torch")
        }
        walks = adam_walks.search("adamw", setting, builds, 16, 9.0, seed=3)
        assert torch.equal(walks.found["native"], walks.found["torch"])


@pytest.mark.slow
def test_plain_torch_follows_too(monkeypatch):
    monkeypatch.setattr(adam_walks, "STEPS", 120)
    over, under = worst("adamw", "8bit", SETTINGS[1], 16, 9.0, backend="torch")
    assert over <= 2 and under <= 2, (over, under)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("states", ["8bit", "e4m3/8bit", "fp8", "fp8-lm"])
def test_a_weight_that_oscillates_after_a_burst_stays(states):
    """Ten steps of 1, then +-1e-3 beside N(0, 1): 21.5 lr under exact Adam; 603 before moments were corrected."""
    weight = torch.nn.Parameter(torch.zeros(16, 512))
    setting = Setting((0.9, 0.95))
    optimizer = adam_walks.builder("adamw", states, setting)(weight)
    generator = torch.Generator().manual_seed(0)
    for step in range(800):
        weight.grad = torch.randn(16, 512, generator=generator)
        weight.grad[:, ::4] = 1.0 if step < 10 else 1e-3 * (-1) ** step
        optimizer.step()
    assert 21.5 / 2 < float(weight.detach()[:, ::4].abs().max()) / adam_walks.LR < 2 * 21.5
