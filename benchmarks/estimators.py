"""How noisy is each 4-bit estimate of a weight gradient, and is it unbiased? Relative variance, cosine, slope, by tail of the rows.

    make estimators

A gradient gy [512, 128] with rows of lognormal size (deviation sigma: .5 like language-model pre-training, 2.5 like a classification
head), x [512, 128] in INT4 codes, G = gy.T @ x. For each estimator, over replicates and several gradients:

    variance   E |estimate - E estimate|^2 / |G|^2
    cosine     between an estimate and G
    slope      <E estimate, G> / <G, G>: 1 when unbiased, in this direction at least (tests/estimators proves more)
    predicted  what relative_variance expects, for rows that are sampled and not rounded

Estimators take (gy, other, generator) and return an estimate of gy.T @ other; their quantizers are written out here as definitions,
independent of the recipes that the library trains with. The two marked "defect" repeat published mistakes: a bit split clamped at
6, LUQ rounded in the log domain with a natural logarithm.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.harness import RESULTS, Spread, record
from narrowgauge.nn import leverage_score

TOKENS, OUT, IN = 512, 128, 128
SIGMAS = (0.5, 1.5, 2.5)
RATIO, LEVELS = 14, 7  # of the bit split: 2 * 7 low levels fill the gap between two high ones
LUQ_POWERS = 7

Quantizer = Callable[
    [Tensor, Tensor], Tensor
]  # (x, uniform noise of its shape) -> float32 of its shape
Estimator = Callable[[Tensor, Tensor, Generator], Tensor]


def uniform(x: Tensor, generator: Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator)


def stochastically(y: Tensor, noise: Tensor) -> Tensor:
    floor = y.floor()
    return floor + (noise < y - floor)


def bit_split(
    x: Tensor, noise: Tensor, limit: int = LEVELS, by_row: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x ~ (14 high + low) * step: high to nearest, low stochastically, both within +-limit. Unbiased for limit 7 alone."""
    step = (x.abs().amax(dim=1, keepdim=True) if by_row else x.abs().amax()) / (RATIO * LEVELS)
    y = x / torch.where(step == 0, 1.0, step)
    high = (y / RATIO).round().clamp(-limit, limit)
    low = stochastically(y - RATIO * high, noise).clamp(-limit, limit)
    return high, low, step


def split(x: Tensor, noise: Tensor, limit: int = LEVELS) -> Tensor:
    high, low, step = bit_split(x, noise, limit)
    return (RATIO * high + low) * step


def split_by_row(x: Tensor, noise: Tensor) -> Tensor:
    """A step for each row: what the recipes do, in both products."""
    high, low, step = bit_split(x, noise, by_row=True)
    return (RATIO * high + low) * step


def split_clamped(x: Tensor, noise: Tensor) -> Tensor:
    """Defect: levels to 6 where 7 are needed."""
    return split(x, noise, limit=LEVELS - 1)


def integers(x: Tensor, noise: Tensor, largest: int = LEVELS, per_row: bool = False) -> Tensor:
    """Stochastic rounding to -largest ... largest, one scale for the tensor or each row ("min-max")."""
    step = (x.abs().amax(dim=1, keepdim=True) if per_row else x.abs().amax()) / largest
    return stochastically(x / torch.where(step == 0, 1.0, step), noise) * step


def per_token(x: Tensor, noise: Tensor) -> Tensor:
    return integers(x, noise, per_row=True)


def luq(x: Tensor, noise: Tensor) -> Tensor:
    """Zero and seven powers of two up to amax; stochastic between neighbours in the linear domain (arXiv 2112.10769, section 4)."""
    unit = x.abs().amax() / 2 ** (LUQ_POWERS - 1)
    y = x.abs() / torch.where(unit == 0, 1.0, unit)
    below = torch.exp2(torch.frexp(y.clamp(min=1)).exponent - 1.0)  # the power at or below y
    y = torch.where(y < 1, stochastically(y, noise), below * stochastically(y / below, noise))
    return y.copysign(x) * unit


def luq_in_log_domain(
    x: Tensor, noise: Tensor, logarithm: Callable[[float], float] = math.log2
) -> Tensor:
    """Defect: 2 ** round(log2 y + uniform + log(4/3) - 1/2) above the smallest power, which is no stochastic rounding."""
    unit = x.abs().amax() / 2 ** (LUQ_POWERS - 1)
    y = x.abs() / torch.where(unit == 0, 1.0, unit)
    power = (
        (y.clamp(min=1).log2() + noise - 0.5 + logarithm(4 / 3) - 0.5)
        .round()
        .clamp(0, LUQ_POWERS - 1)
    )
    return torch.where(y < 1, stochastically(y, noise), torch.exp2(power)).copysign(x) * unit


def luq_natural(x: Tensor, noise: Tensor) -> Tensor:
    """Defect: the same with a natural logarithm, as published."""
    return luq_in_log_domain(x, noise, math.log)


def unrounded(x: Tensor, noise: Tensor) -> Tensor:
    """No quantizer: what is left is the variance of sampling alone."""
    return x


def whole(quantizer: Quantizer) -> Estimator:
    """All rows."""
    return lambda gy, other, generator: quantizer(gy, uniform(gy, generator)).T @ other


def turned(quantizer: Quantizer) -> Quantizer:
    """The quantizer of gy.T, whose rows are the outputs: grad_weight's operand as its GEMM reads it."""
    return lambda x, noise: quantizer(x.T, noise.T).T


def sampled(quantizer: Quantizer, keep: float = 0.5) -> Estimator:
    """Leverage-score sampling, then the weights, then the quantizer: the library's order."""

    def estimate(gy: Tensor, other: Tensor, generator: Generator) -> Tensor:
        sample = draw(leverage_score.leverage_scores(gy, other), keep, generator)
        rows = leverage_score.importance_weighted(gy, sample)
        return quantizer(rows, uniform(rows, generator)).T @ other[sample.rows]

    return estimate


def sampled_parts(requantize: bool, keep: float = 0.5) -> Estimator:
    """The paper's order: bit split, then as many of the 2 T rows of parts; weights in floats or in a second rounding to INT8."""

    def estimate(gy: Tensor, other: Tensor, generator: Generator) -> Tensor:
        high, low, step = bit_split(gy, uniform(gy, generator))
        parts = torch.cat((RATIO * high, low))
        scores = leverage_score.row_norms(parts) * leverage_score.row_norms(other).repeat(2)
        sample = draw(scores, keep, generator)
        rows = leverage_score.importance_weighted(parts, sample) * step
        rows = integers(rows, uniform(rows, generator), 127) if requantize else rows
        return rows.T @ other[sample.rows % len(other)]

    return estimate


def sampled_sums(requantize: bool, keep: float = 0.5) -> Estimator:
    """Bit split, then rows of 14 high + low as one INT8 operand; weights as in `sampled_parts`."""

    def estimate(gy: Tensor, other: Tensor, generator: Generator) -> Tensor:
        codes = split(gy, uniform(gy, generator))
        sample = draw(leverage_score.leverage_scores(codes, other), keep, generator)
        rows = leverage_score.importance_weighted(codes, sample)
        rows = integers(rows, uniform(rows, generator), 127) if requantize else rows
        return rows.T @ other[sample.rows]

    return estimate


def sampled_uniformly(gy: Tensor, other: Tensor, generator: Generator) -> Tensor:
    """Every row with probability 1/2, whatever it weighs."""
    p = torch.full((len(gy),), 0.5, dtype=torch.float64)
    sample = leverage_score.systematic(
        p, leverage_score.budget(len(gy), 0.5), torch.rand(len(gy) + 1, generator=generator)
    )
    rows = leverage_score.importance_weighted(gy, sample)
    return split(rows, uniform(rows, generator)).T @ other[sample.rows]


def sampled_input(quantizer: Quantizer, *, weigh_first: bool, keep: float = 0.5) -> Estimator:
    """The outer axis: estimates gy @ other.T, other [K, N], from the rows that |g_i| draws."""

    def estimate(gy: Tensor, other: Tensor, generator: Generator) -> Tensor:
        sample = draw(leverage_score.leverage_scores(gy), keep, generator)
        rows = leverage_score.importance_weighted(gy, sample) if weigh_first else gy[sample.rows]
        product = quantizer(rows, uniform(rows, generator)) @ other.T
        product = product if weigh_first else product * sample.weights[:, None]
        return leverage_score.scatter_rows(product, sample, len(gy))

    return estimate


def sampled_digits(keep: float = 0.5) -> Estimator:
    """The outer axis, the gradient split by row first: estimates gy @ other.T from T of its 2 T rows of digits.

    A row of INT4 digits times INT4 costs half a row of `sampled_input`, whose two digits are both
    read. Weights and steps are applied after the product, and digits of one row add up.
    """

    def estimate(gy: Tensor, other: Tensor, generator: Generator) -> Tensor:
        high, low, step = bit_split(gy, uniform(gy, generator), by_row=True)
        digits, steps = torch.cat((high, low)), torch.cat((RATIO * step, step))
        sample = draw(leverage_score.row_norms(digits * steps), keep, generator)
        product = digits[sample.rows] @ other.T * (steps[sample.rows] * sample.weights[:, None])
        whole = gy.new_zeros(len(gy), len(other))
        return whole.index_add(0, sample.rows % len(gy), product)

    return estimate


def draw(scores: Tensor, keep: float, generator: Generator) -> leverage_score.Sample:
    noise = torch.rand(len(scores) + 1, generator=generator)
    return sample_rows(scores, leverage_score.budget(len(scores), keep), noise)


# Cost beside one INT4 product over all rows: the split ones read twice the rows unless they sample half.
ESTIMATORS: dict[str, Estimator] = {
    "min-max": whole(integers),
    "luq": whole(luq),
    "luq, natural log (defect)": whole(luq_natural),
    "per-token": whole(per_token),
    "bit split": whole(split),
    "bit split, a step per output": whole(turned(split_by_row)),
    "bit split, clamp 6 (defect)": whole(split_clamped),
    "sampled, not rounded": sampled(unrounded),
    "sampled, split": sampled(split),
    "sampled, split, a step per output": sampled(turned(split_by_row)),
    "split, parts sampled, floats": sampled_parts(requantize=False),
    "split, parts sampled, int8": sampled_parts(requantize=True),
    "split, sums sampled, floats": sampled_sums(requantize=False),
    "split, sums sampled, int8": sampled_sums(requantize=True),
    "sampled uniformly, split": sampled_uniformly,
}
PREDICTED = "sampled, not rounded"


def operands(
    sigma: float, seed: int, tokens: int = TOKENS, out: int = OUT, inner: int = IN
) -> tuple[Tensor, Tensor]:
    """gy [tokens, out] with rows of lognormal size, x [tokens, inner] in INT4 codes of a normal activation."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(sigma * torch.randn(tokens, 1, generator=generator))
    gy = size * torch.randn(tokens, out, generator=generator)
    x = torch.randn(tokens, inner, generator=generator)
    return gy, (x / 0.3535).round().clamp(
        -LEVELS, LEVELS
    )  # the step with the least error for a normal operand


def measure(
    estimator: Estimator, gy: Tensor, x: Tensor, replicates: int, seed: int
) -> dict[str, float]:
    """Relative variance, cosine and slope over so many replicates."""
    generator = torch.Generator().manual_seed(seed)
    exact = gy.T.double() @ x.double()
    norm_squared = exact.square().sum()
    mean, squares, cosine = torch.zeros_like(exact), 0.0, 0.0
    for _ in range(replicates):
        estimate = estimator(gy, x, generator).double()
        mean += estimate / replicates
        squares += float(estimate.square().sum()) / replicates
        cosine += (
            float((estimate * exact).sum() / (estimate.norm() * norm_squared.sqrt())) / replicates
        )
    variance = (squares - float(mean.square().sum())) * replicates / (replicates - 1)
    return {
        "variance": variance / float(norm_squared),
        "cosine": cosine,
        "slope": float((mean * exact).sum() / norm_squared),
    }


def predicted(gy: Tensor, x: Tensor, keep: float = 0.5) -> float:
    """What sampling alone adds to the relative variance, by relative_variance."""
    scores = leverage_score.leverage_scores(gy, x)
    p = leverage_score.probabilities(scores, leverage_score.budget(len(gy), keep))
    return float(relative_variance(p, scores, (gy.T @ x).square().sum()))


def concentration(gy: Tensor) -> float:
    """The share of the row norms that the largest tenth of the rows holds."""
    return float(row_concentration(leverage_score.row_norms(gy)))


def sample_rows(scores: Tensor, budget: int, noise: Tensor) -> leverage_score.Sample:
    """`systematic` with the `probabilities` of these scores [R]; noise [R + 1]."""
    return leverage_score.systematic(leverage_score.probabilities(scores, budget), budget, noise)


def relative_variance(p: Tensor, scores: Tensor, norm_squared: Tensor | None = None) -> Tensor:
    """`leverage_score.sampling_variance` over the squared norm of the product, 0-d float64; 0 for a product of zeros.

    norm_squared  |G|^2. None: the sum of the squared scores, which is exact for
                  an outer axis, whose rows are orthogonal pieces of the result
    """
    whole = (
        scores.to(torch.float64).square().sum()
        if norm_squared is None
        else norm_squared.to(torch.float64)
    )
    variance = leverage_score.sampling_variance(p, scores)
    return torch.where(variance == 0, 0.0, variance / whole)


def row_concentration(norms: Tensor, share: float = 0.1) -> Tensor:
    """Which part of the sum of the norms [R] the largest ceil(share * R) rows hold: 0-d float64, between share and 1.

    Near `share`, sampling loses much; near 1, nothing. 0 when all rows are zero.
    """
    norms = norms.to(torch.float64)
    whole = norms.sum()
    largest = norms.topk(leverage_score.budget(norms.shape[0], share)).values.sum()
    return torch.where(whole == 0, 0.0, largest / whole)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.estimators", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--replicates", type=int, default=100)
    parser.add_argument(
        "--gradients", type=int, default=5, help="gradients per sigma; the table shows their median"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(ESTIMATORS), default=list(ESTIMATORS), metavar="ESTIMATOR"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        line
        for sigma in SIGMAS
        for line in compared(sigma, options.replicates, options.gradients, options.only)
    ]
    print(markdown(lines))
    record("estimators", lines, RESULTS / "estimators.jsonl")


def compared(
    sigma: float, replicates: int, gradients: int, only: Sequence[str]
) -> list[dict[str, Any]]:
    """A row per estimator of `only`: median and quartiles over the gradients."""
    data = [operands(sigma, seed) for seed in range(gradients)]
    lines: list[dict[str, Any]] = []
    for name in only:
        estimator = ESTIMATORS[name]
        found = [measure(estimator, gy, x, replicates, seed) for seed, (gy, x) in enumerate(data)]
        line: dict[str, Any] = {
            "case": name,
            "sigma": sigma,
            "replicates": replicates,
            "gradients": gradients,
        }
        line["row_concentration"] = Spread.of([concentration(gy) for gy, _ in data]).median
        for key in found[0]:
            spread = Spread.of([one[key] for one in found])
            line |= {key: spread.median, f"{key}_quartiles": [spread.q1, spread.q3]}
        if name == PREDICTED:
            line["predicted"] = Spread.of([predicted(gy, x) for gy, x in data]).median
        lines.append(line)
    return lines


def markdown(lines: list[dict[str, Any]]) -> str:
    """One row per estimator; variance and cosine for each sigma, and the slope at the largest."""
    sigmas = sorted({line["sigma"] for line in lines})
    table = [
        "| estimator | "
        + " | ".join(f"sigma {sigma}: variance / cosine" for sigma in sigmas)
        + " | slope |"
    ]
    table.append("|---" * (len(sigmas) + 2) + "|")
    for name in dict.fromkeys(line["case"] for line in lines):
        mine = {line["sigma"]: line for line in lines if line["case"] == name}
        cells = [f"{mine[sigma]['variance']:.2g} / {mine[sigma]['cosine']:.3f}" for sigma in sigmas]
        table.append(f"| {name} | " + " | ".join(cells) + f" | {mine[sigmas[-1]]['slope']:.4f} |")
        if "predicted" in mine[sigmas[0]]:
            table.append(
                "| predicted | "
                + " | ".join(f"{mine[sigma]['predicted']:.2g}" for sigma in sigmas)
                + " | |"
            )
    return "\n".join(table)


if __name__ == "__main__":
    main()
