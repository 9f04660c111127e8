"""How good the 4-bit estimates are, beside each other and beside what is predicted of them (statistical, fixed seeds).

Sizes and gradients are those of benchmarks/estimators.py. A variance measured over r replicates of an estimate with d effective
dimensions errs by sqrt(2 / (r d)); the least d here, in sampling from heavy tails, is about 5.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import estimators
from narrowgauge.nn import leverage_score
from tests.selection import quick

SEEDS = (0, 1, 2)


def variance(estimator, sigma: float, seed: int, replicates: int = 20) -> float:
    return estimators.measure(estimator, *estimators.operands(sigma, seed), replicates, seed)[
        "variance"
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_sampling_wins_where_rows_are_heavy_tailed(seed):
    """30 times below min-max rounding and 5 below LUQ, with the rows of half a product; it adds little to the bit split."""
    ours = variance(estimators.sampled(estimators.split), 2.5, seed)
    assert variance(estimators.whole(estimators.integers), 2.5, seed) >= 30 * ours
    assert variance(estimators.whole(estimators.luq), 2.5, seed) >= 5 * ours
    assert ours <= 1.1 * variance(estimators.whole(estimators.split), 2.5, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_per_row_is_never_noisier(seed):
    """In grad_weight, where a row is an output, a little; in grad_input, where it is a token, manifold."""
    for sigma in estimators.SIGMAS:
        by_output = variance(
            estimators.whole(estimators.turned(estimators.split_by_row)), sigma, seed
        )
        assert by_output <= 1.05 * variance(estimators.whole(estimators.split), sigma, seed)
    gy = estimators.operands(2.5, seed)[0]
    noise = torch.rand(gy.shape, generator=torch.Generator().manual_seed(seed))
    errors = [
        (rounded(gy, noise) - gy).square().sum()
        for rounded in (estimators.split, estimators.split_by_row)
    ]
    assert errors[0] > 10 * errors[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_sampling_loses_where_rows_are_alike(seed):
    """Then the bit split of all rows is far below LUQ (15 times in a published table of one gradient), and sampling above it."""
    luq = variance(estimators.whole(estimators.luq), 0.5, seed)
    assert variance(estimators.whole(estimators.split), 0.5, seed) <= luq / 10
    assert variance(estimators.sampled(estimators.split), 0.5, seed) >= 3 * luq


def test_a_uniform_choice_is_worse_than_leverage_scores():
    for sigma in (0.5, 2.5):
        ours = variance(estimators.sampled(estimators.split), sigma, 0)
        assert variance(estimators.sampled_uniformly, sigma, 0) >= 1.5 * ours


@pytest.mark.parametrize("sigma", quick(estimators.SIGMAS[1:2], estimators.SIGMAS))
@pytest.mark.parametrize("keep", [0.25, 0.5])
def test_the_variance_of_grad_weight_is_predicted(keep, sigma):
    """Within 10 %: 400 replicates with at least 5 effective dimensions err by 3 %."""
    gy, x = estimators.operands(sigma, seed=1)
    measured = estimators.measure(estimators.sampled(estimators.unrounded, keep), gy, x, 400, 0)[
        "variance"
    ]
    assert estimators.predicted(gy, x, keep) == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", estimators.SIGMAS)
def test_the_variance_of_grad_input_is_predicted(sigma):
    """Within 10 %, from the gradient alone: a weight of 128 x 128 normal numbers keeps the sizes of rows."""
    gy, _ = estimators.operands(sigma, seed=1)
    w = torch.randn(estimators.IN, estimators.OUT)
    generator, exact = torch.Generator().manual_seed(0), gy @ w.T
    estimate = estimators.sampled_input(estimators.unrounded, weigh_first=True)
    errors = [(estimate(gy, w, generator) - exact).square().sum() for _ in range(400)]
    measured = float(torch.stack(errors).mean() / exact.square().sum())
    scores = leverage_score.leverage_scores(gy)
    p = leverage_score.probabilities(scores, leverage_score.budget(len(gy), 0.5))
    assert float(estimators.relative_variance(p, scores)) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("sigma", "limit"), [(0.0, 0.26), (0.5, 0.26), (1.5, 0.32)])
def test_sampled_digits_of_grad_input_have_a_quarter_of_the_variance(sigma, limit):
    """At as many INT4 multiplications; 16 draws of 512 x 128 elements each, whose ratio moves by 2 %."""
    gy, _ = estimators.operands(sigma, seed=1)
    w = torch.randn(estimators.IN, estimators.OUT, generator=torch.Generator().manual_seed(2))
    generator, exact = torch.Generator().manual_seed(0), gy @ w.T
    found = []
    for estimate in (
        estimators.sampled_digits(),
        estimators.sampled_input(estimators.split_by_row, weigh_first=True),
    ):
        errors = [(estimate(gy, w, generator) - exact).square().sum() for _ in range(16)]
        found.append(float(torch.stack(errors).mean() / exact.square().sum()))
    assert found[0] < limit * found[1]


def test_concentration_tells_the_tails_apart():
    """Near-uniform rows: the largest tenth holds about twice its share; heavy-tailed: most of everything."""
    found = [
        estimators.concentration(estimators.operands(sigma, seed=1)[0])
        for sigma in estimators.SIGMAS
    ]
    assert 0.15 < found[0] < 0.3 and found[0] < found[1] < found[2] and found[2] > 0.7
