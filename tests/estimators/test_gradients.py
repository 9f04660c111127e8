"""Every random rounding and every estimate of a gradient is unbiased; two published mistakes are not (statistical, see proof.py).

Rows are lognormal: near-uniform (deviation .5) and heavy-tailed (2.5). Sizes are ragged, some rows are zero.
"""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from benchmarks import estimators
from narrowgauge import formats
from narrowgauge.nn import leverage_score
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E8M0_CEIL, FP32, POW2
from tests.estimators.proof import assert_biased, assert_unbiased
from tests.selection import quick

SIGMAS = {"near-uniform": 0.5, "heavy-tailed": 2.5}
TOKENS, OUT, IN = 61, 23, 17

QUANTIZERS = {
    "min-max": estimators.integers,
    "per-token": estimators.per_token,
    "luq": estimators.luq,
    "bit split": estimators.split,
    "bit split by row": estimators.split_by_row,
}
# Rounding in the log domain with the right logarithm errs less: near-uniform rows alone show it in 256 replicates.
MISTAKES = [
    ("bit split, clamp 6", estimators.split_clamped, 0.5),
    ("bit split, clamp 6", estimators.split_clamped, 2.5),
    ("luq, natural log", estimators.luq_natural, 0.5),
    ("luq, natural log", estimators.luq_natural, 2.5),
    ("luq, log domain", estimators.luq_in_log_domain, 0.5),
]
GRAD_WEIGHT = {
    **{name: estimators.whole(quantizer) for name, quantizer in QUANTIZERS.items()},
    "sampled, split": estimators.sampled(estimators.split),
    "bit split, a step per output": estimators.whole(estimators.turned(estimators.split_by_row)),
    "sampled, split, a step per output": estimators.sampled(
        estimators.turned(estimators.split_by_row)
    ),
    "sampled, min-max": estimators.sampled(estimators.integers),
    "sampled a tenth, split": estimators.sampled(estimators.split, keep=0.1),
    "parts sampled, floats": estimators.sampled_parts(requantize=False),
    "parts sampled, int8": estimators.sampled_parts(requantize=True),
    "sums sampled, floats": estimators.sampled_sums(requantize=False),
    "sums sampled, int8": estimators.sampled_sums(requantize=True),
}
GRAD_INPUT = {
    "sampled, split": estimators.sampled_input(estimators.split, weigh_first=True),
    "split, sampled": estimators.sampled_input(estimators.split, weigh_first=False),
    "sampled a tenth, split": estimators.sampled_input(
        estimators.split, weigh_first=True, keep=0.1
    ),
    "sampled, split by row": estimators.sampled_input(estimators.split_by_row, weigh_first=True),
    "sampled, luq": estimators.sampled_input(estimators.luq, weigh_first=True),
    "split by row, digits sampled": estimators.sampled_digits(),
}
by_tail = pytest.mark.parametrize(
    "sigma", quick(list(SIGMAS.values())[-1:], SIGMAS.values()), ids=SIGMAS
)


def operands(sigma: float) -> tuple[Tensor, Tensor]:
    """gy [61, 23] with every seventh row zero, x [61, 17] in INT4 codes."""
    gy, x = estimators.operands(sigma, seed=1, tokens=TOKENS, out=OUT, inner=IN)
    gy[::7] = 0
    return gy, x


def noisy(quantizer, x: Tensor):
    return lambda generator: quantizer(x, torch.rand(x.shape, generator=generator))


@by_tail
@pytest.mark.parametrize("format", formats.ELEMENTS, ids=str)
def test_stochastic_rounding_of_a_format(format, sigma):
    x = operands(sigma)[0]
    values = format.values()
    values = values[
        values.isfinite() & (values.abs() <= format.max)
    ]  # codes beyond max are never produced
    x = x.abs() if values.min() == 0 else x
    # The signed dynamic map ends at 1 above and at -0.993 below: beyond the nearer end it would saturate.
    x = (
        x
        / x.abs().max()
        * (values.max() if values.min() == 0 else min(values.max(), -values.min()))
    )
    assert_unbiased(noisy(format.round, x), x)


@by_tail
@pytest.mark.parametrize("tile", [(-1, -1), (1, -1), (1, 8)], ids=str)
@pytest.mark.parametrize("scale", quick([FP32, E8M0_CEIL], [FP32, POW2, E8M0_CEIL]), ids=str)
def test_a_stochastic_cast(scale, tile, sigma):
    """INT4: the rules that never saturate. A ragged last tile and tiles of zeros are among them."""
    x = operands(sigma)[0]
    cast = Cast(format=formats.INT4, tile=tile, scale=scale, rounding="stochastic")
    assert_unbiased(noisy(lambda x, noise: dequantize(quantize(x, cast, noise=noise)), x), x)


@by_tail
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantizer(name, sigma):
    x = operands(sigma)[0]
    assert_unbiased(noisy(QUANTIZERS[name], x), x)


@by_tail
@pytest.mark.parametrize("name", GRAD_WEIGHT)
def test_grad_weight(name, sigma):
    gy, x = operands(sigma)
    assert_unbiased(
        lambda generator: GRAD_WEIGHT[name](gy, x, generator), gy.T.double() @ x.double()
    )


@by_tail
@pytest.mark.parametrize("name", GRAD_INPUT)
def test_grad_input(name, sigma):
    gy, w = operands(sigma)[0], torch.randn(IN, OUT, generator=torch.Generator().manual_seed(2))
    assert_unbiased(
        lambda generator: GRAD_INPUT[name](gy, w, generator), gy.double() @ w.T.double()
    )


# One of each way to leave rows out, and one that leaves none out.
@pytest.mark.parametrize(
    "name",
    quick(
        ["bit split by row", "sampled, split", "parts sampled, int8", "sums sampled, int8"],
        GRAD_WEIGHT,
    ),
)
@pytest.mark.parametrize("kept", quick([1], [0, 1, 5]), ids=["no row", "one row", "five rows"])
def test_rows_that_are_zero(name, kept):
    """Fewer rows than the budget of any keep ratio here, or none at all."""
    gy, x = operands(0.5)
    gy[kept:] = 0
    gy[0] = gy[0] if kept == 0 else torch.linspace(-1, 1, OUT)
    assert_unbiased(
        lambda generator: GRAD_WEIGHT[name](gy, x, generator), gy.T.double() @ x.double()
    )


@pytest.mark.parametrize(
    ("name", "quantizer", "sigma"),
    MISTAKES,
    ids=[f"{name}, {sigma}" for name, _, sigma in MISTAKES],
)
def test_published_mistakes_are_rejected(name, quantizer, sigma):
    """As quantizers, and in the product: the bias reaches the gradient."""
    gy, x = estimators.operands(sigma, seed=1, tokens=2 * TOKENS, out=OUT, inner=IN)
    assert_biased(noisy(quantizer, gy), gy)
    assert_biased(
        lambda generator: estimators.whole(quantizer)(gy, x, generator), gy.T.double() @ x.double()
    )


def test_sampling_with_wrong_weights_is_rejected():
    """Independent of the quantizer: weights left out, and the weight of all rows taken for each."""
    gy, x = operands(0.5)
    exact = gy.T.double() @ x.double()
    scores = leverage_score.leverage_scores(gy, x)

    def drawn(generator: Generator) -> leverage_score.Sample:
        return estimators.draw(scores, 0.5, generator)

    def unweighted(generator: Generator) -> Tensor:
        rows = drawn(generator).rows
        return gy[rows].T @ x[rows]

    def doubled(generator: Generator) -> Tensor:
        rows = drawn(generator).rows
        return 2 * gy[rows].T @ x[rows]

    assert_biased(unweighted, exact)
    assert_biased(doubled, exact)
