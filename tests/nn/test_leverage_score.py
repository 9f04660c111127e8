"""The pieces of leverage-score sampling: budgets, scores, probabilities, draws.

Exact, or to float64's rounding, unless a test says statistical. That whole estimators are unbiased is proved in tests/estimators.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import estimators
from narrowgauge.nn import leverage_score
from tests.compare import assert_same, z_limit

ROUNDING = 1e-12  # sums of some hundred float64 numbers of size 1


def iterated(scores: Tensor, budget: int) -> Tensor:
    """The capping of arXiv 2306.11987, appendix A.2, as printed there: rescale what is below 1 until nothing passes 1."""
    p = budget * scores / scores.sum()
    for _ in range(len(scores)):
        p = p.clamp(max=1)
        capped = p >= 1
        if capped.all() or p[~capped].sum() == 0:
            break
        p = torch.where(capped, p, p * (budget - capped.sum()) / p[~capped].sum())
        if p.max() <= 1:
            break
    return p


score_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.sampled_from([1.0, 2.0])),
    min_size=1,
    max_size=40,
)


@given(score_lists, st.floats(0.01, 1))
def test_probabilities_are_a_capped_multiple_of_the_scores(values, keep):
    scores = torch.tensor(values, dtype=torch.float64)
    n = leverage_score.budget(len(values), keep)
    p = leverage_score.probabilities(scores, n)
    above_zero = int((scores > 0).sum())
    assert p.sum().item() == pytest.approx(min(n, above_zero), abs=len(values) * ROUNDING)
    assert (p <= 1).all() and bool(((p > 0) == (scores > 0)).all())
    if n < above_zero:
        below = (p > 0) & (p < 1 - 1e-9)
        rates = p[below] / scores[below]
        if below.any():
            assert (rates.max() - rates.min()) <= 1e-9 * rates.max()
            assert (scores[p >= 1 - 1e-9] * rates.max() >= 1 - 1e-6).all()
    else:
        assert (p[scores > 0] >= 1 - ROUNDING).all()


@pytest.mark.parametrize("sigma", [0.5, 2.5])
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_the_closed_form_is_where_the_iteration_ends(sigma, keep):
    scores = torch.exp(sigma * torch.randn(501, dtype=torch.float64))
    n = leverage_score.budget(501, keep)
    torch.testing.assert_close(
        leverage_score.probabilities(scores, n), iterated(scores, n), rtol=0, atol=1e-9
    )


def test_fewer_rows_than_the_budget_are_all_taken():
    scores = torch.tensor([0.0, 3.0, 0.0, 1e-9, 0.0, 0.0])
    assert leverage_score.probabilities(scores, 3).tolist() == [0, 1, 0, 1, 0, 0]
    sample = estimators.sample_rows(scores, 3, torch.rand(7))
    drawn = dict(zip(sample.rows.tolist(), sample.weights.tolist(), strict=True))
    assert drawn.pop(1) == 1 and drawn.pop(3) == 1
    assert list(drawn.values()) == [0]


def test_all_zero_rows_give_weight_zero():
    sample = estimators.sample_rows(torch.zeros(5), 2, torch.rand(6))
    assert_same(sample.weights, torch.zeros(2))
    assert len(set(sample.rows.tolist())) == 2


def test_no_rows_give_no_sample():
    sample = estimators.sample_rows(torch.zeros(0), leverage_score.budget(0, 0.5), torch.rand(1))
    assert sample.rows.shape == (0,) and sample.weights.shape == (0,)
    assert leverage_score.scatter_rows(torch.zeros(0, 3), sample, 0).shape == (0, 3)
    assert leverage_score.leverage_scores(torch.zeros(0, 4), torch.zeros(0, 2)).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_poisoned_score_poisons_every_weight(bad):
    scores = torch.rand(9)
    scores[4] = bad
    for n in (1, 5, 9):
        assert leverage_score.probabilities(scores, n).isnan().all()
        assert estimators.sample_rows(scores, n, torch.rand(10)).weights.isnan().all()


@given(score_lists, st.floats(0.01, 1), st.integers(0, 2**31))
def test_a_draw_is_distinct_and_of_static_size(values, keep, seed):
    scores = torch.tensor(values, dtype=torch.float64)
    n = leverage_score.budget(len(values), keep)
    p = leverage_score.probabilities(scores, n)
    sample = leverage_score.systematic(
        p, n, torch.rand(len(values) + 1, generator=torch.Generator().manual_seed(seed))
    )
    assert sample.rows.shape == sample.weights.shape == (n,)
    assert len(set(sample.rows.tolist())) == n
    drawn = sample.weights > 0
    assert int(drawn.sum()) == min(n, int((scores > 0).sum()))
    torch.testing.assert_close(sample.weights[drawn], (1 / p[sample.rows[drawn]]).float())


@pytest.mark.parametrize("offset", [0.0, 1 - 2**-24])
def test_the_ends_of_the_noise_draw_as_many_rows(offset):
    for rows, n in ((7, 3), (100, 33), (1000, 999)):
        noise = torch.cat((torch.rand(rows), torch.tensor([offset])))
        sample = estimators.sample_rows(torch.rand(rows) + 0.1, n, noise)
        assert int((sample.weights > 0).sum()) == n


def test_a_point_at_zero_hits_the_row_that_begins_there():
    """Four rows of one half, in their order, two points one apart from 0 on: the first and the third, and no fourth."""
    noise = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    sample = leverage_score.systematic(torch.full((4,), 0.5, dtype=torch.float64), 2, noise)
    assert sample.rows.tolist() == [0, 2] and sample.weights.tolist() == [2.0, 2.0]


def test_rows_are_drawn_with_their_probability():
    """Statistical: each row's count over 20,000 draws is binomial in its p. 12 comparisons, false alarm rate 1e-6."""
    scores, draws = torch.tensor([0.0, 1e-3, 0.1, 0.3, 0.5, 1, 1, 2, 3, 5, 8, 30]), 20_000
    p = leverage_score.probabilities(scores, 4)

    def drawn(noise: Tensor) -> Tensor:
        sample = leverage_score.systematic(p, 4, noise)
        return torch.zeros(12, dtype=torch.float64).scatter(
            0, sample.rows, (sample.weights > 0).double()
        )

    counts = torch.vmap(drawn)(torch.rand(draws, 13)).sum(dim=0)
    certain = (p == 0) | (p == 1)
    assert_same(counts[certain], p[certain] * draws)
    z = (counts - p * draws)[~certain] / (draws * p * (1 - p))[~certain].sqrt()
    assert z.abs().max() < z_limit(1e-6, 12), z


def test_scores_are_products_of_row_norms():
    gradient, other = torch.randn(5, 3), torch.randn(5, 7)
    expected = gradient.double().norm(dim=1) * other.double().norm(dim=1)
    torch.testing.assert_close(
        leverage_score.leverage_scores(gradient, other), expected, rtol=1e-6, atol=0
    )
    codes = torch.tensor([[3, -4], [0, 0]], dtype=torch.int8)
    assert leverage_score.leverage_scores(codes).tolist() == [5, 0]


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e25, 1e38])
def test_norms_neither_underflow_nor_overflow(size):
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]]) / 4 * size
    torch.testing.assert_close(
        leverage_score.row_norms(x), x.double().norm(dim=1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_concentration_is_the_share_of_the_largest_rows(share):
    assert estimators.row_concentration(torch.ones(50), share).item() == pytest.approx(share)
    one = torch.zeros(50)
    one[17] = 3
    assert estimators.row_concentration(one, share).item() == 1
    assert estimators.row_concentration(torch.zeros(50), share).item() == 0


def test_variance_is_zero_where_nothing_is_left_out():
    scores = torch.tensor([0.0, 2.0, 5.0, 0.0])
    p = leverage_score.probabilities(scores, 2)
    assert estimators.relative_variance(p, scores).item() == 0
    assert estimators.relative_variance(torch.zeros(4), torch.zeros(4)).item() == 0


def test_budgets_are_rounded_up_and_bounded():
    assert [leverage_score.budget(rows, 0.5) for rows in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert (
        leverage_score.budget(100, 0.07) == 7
        and leverage_score.budget(100, 1) == 100
        and leverage_score.budget(3, 1e-12) == 1
    )


def test_a_sample_is_gathered_weighed_and_spread():
    rows = torch.arange(12.0).reshape(4, 3)
    sample = leverage_score.Sample(torch.tensor([3, 1]), torch.tensor([2.0, 0.5]))
    assert_same(
        leverage_score.importance_weighted(rows, sample), torch.stack((rows[3] * 2, rows[1] / 2))
    )
    spread = leverage_score.scatter_rows(
        leverage_score.importance_weighted(rows, sample), sample, 4
    )
    assert_same(spread, torch.stack((torch.zeros(3), rows[1] / 2, torch.zeros(3), rows[3] * 2)))


@pytest.mark.slow
def test_it_compiles_into_one_graph():
    """Traced; tests/nn/test_straight_through.py has Inductor generate code for a recipe's whole backward."""

    def both(gradient: Tensor, other: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = leverage_score.leverage_scores(gradient, other)
        p = leverage_score.probabilities(scores, leverage_score.budget(gradient.shape[0], 0.5))
        sample = leverage_score.systematic(p, leverage_score.budget(gradient.shape[0], 0.5), noise)
        product = leverage_score.importance_weighted(gradient, sample).T @ other[sample.rows]
        return sample.rows, product, estimators.relative_variance(p, scores, product.square().sum())

    arguments = torch.randn(37, 5), torch.randn(37, 6), torch.rand(38)
    expected = both(*arguments)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(*arguments)
    assert_same(compiled[0], expected[0])
    torch.testing.assert_close(compiled[1:], expected[1:], rtol=1e-5, atol=1e-5)
