"""The judge itself: passes what is unbiased, rejects a small bias in any direction (statistical, fixed seeds, see proof.py)."""

from __future__ import annotations

import pytest
import torch

from tests.estimators import proof

EXACT = torch.linspace(-1, 1, 1000)


def noisy(bias=0.0, scale=0.1):
    return lambda generator: EXACT + bias + scale * torch.randn(1000, generator=generator)


def test_noise_without_bias_passes():
    verdict = proof.assert_unbiased(noisy(), EXACT)
    assert verdict.z.shape == (1 + proof.DIRECTIONS,)
    assert all(0.5 < value < 1.5 for value in verdict.relative.values())
    assert verdict.variance == pytest.approx(0.01 * 1000 / float(EXACT.square().sum()), rel=0.02)


def test_an_exact_estimate_passes():
    proof.assert_unbiased(lambda generator: EXACT, EXACT)
    proof.assert_unbiased(
        lambda generator: EXACT * (1 + 1e-8 * torch.rand(1000, generator=generator)), EXACT
    )
    proof.assert_unbiased(lambda generator: torch.zeros(5), torch.zeros(5))


def test_a_bias_along_the_truth_is_rejected():
    """0.5 % of it, a 37th of the noise of one replicate."""
    proof.assert_biased(lambda generator: noisy()(generator) + 0.02 * EXACT, EXACT)
    assert proof.judge(lambda generator: noisy()(generator) + 0.005 * EXACT, EXACT).complaints


def test_a_bias_across_the_truth_is_rejected():
    """Orthogonal to G: no random direction need see it, the averages do."""
    verdict = proof.judge(noisy(bias=0.01), EXACT)
    assert any(line.startswith("average of 256") for line in verdict.complaints)
    assert verdict.relative[256] == pytest.approx(1 + 256 * 0.01, rel=0.15)


def test_a_constant_wrong_estimate_is_rejected():
    assert proof.judge(lambda generator: EXACT * 1.001, EXACT).complaints
    assert proof.judge(lambda generator: torch.full((5,), 1e-3), torch.zeros(5)).complaints


def test_replicates_that_are_not_independent_are_rejected():
    """Antithetic pairs: averages err less than chance allows."""
    pending: list[torch.Tensor] = []

    def estimate(generator):
        if not pending:
            noise = 0.1 * torch.randn(1000, generator=generator)
            pending.extend((noise, -noise))
        return EXACT + pending.pop()

    assert any(line.startswith("average of 4") for line in proof.judge(estimate, EXACT).complaints)


def test_an_estimate_that_is_not_finite_is_rejected():
    with pytest.raises(AssertionError, match="not finite"):
        proof.judge(lambda generator: EXACT * float("nan"), EXACT)
