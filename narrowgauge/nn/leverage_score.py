"""Leverage-score sampling: an unbiased estimate of a GEMM from a few of its rows.

`straight_through` says which two operands a recipe samples, and `recipes` with which numbers.

    R rows (tokens), n = ceil(keep * R) sampled; g_i row i of the gradient, a_i of the other operand
    c_i score of row i, p_i its probability

    grad_weight = sum_i g_i^T a_i    contracted axis    c_i = |g_i| |a_i|
                  estimate           sum over the sample of (g_i / p_i)^T a_i
    grad_input  = rows  g_i W        outer axis         c_i = |g_i|
                  estimate           rows (g_i W) / p_i, zero outside the sample

    p_i = min(1, lambda c_i), sum p = n    minimises the variance  sum_i (1 - p_i) / p_i c_i^2

Source: section 4.2 and appendices A.2, A.3 and B of "Training Transformers with 4-bit Integers"
(arXiv 2306.11987), with two changes. The cap has a closed form instead of an iteration, and
`systematic` draws exactly n rows, so shapes are static and nothing waits for the host.

**Sample first, cast afterwards.** 1 / p_i lies on the contracted axis of grad_weight and cannot be
applied in an epilogue. The sampled float rows are multiplied by 1 / p_i and then cast
stochastically as usual: one rounding, unbiased, and the GEMM stays in integers. The paper splits
the gradient first and samples rows of the parts, and docs/four-bit.md measures both. An outer axis
could apply the weights in the epilogue: of a gradient that is split by row, sampling half of the 2 R
rows of digits has 0.19 to 0.23 of the variance (`benchmarks.estimators.sampled_digits`). A row of
one digit costs half a row of two on INT4 units alone. INT8 units and CPUs multiply both digits as
one code, so there it would cost as much as all rows, and grad_input samples as above.

Plain torch on float64 scores, without host synchronization. It compiles with fullgraph=True. A
score that is not finite makes all probabilities and weights NaN, so a faulty gradient stays
visible. The caller passes the random numbers, so it can repeat a draw.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import holds_numbers
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.ops.chunking import row_chunks

if TYPE_CHECKING:
    from narrowgauge.recipe import LeverageScore

# Variance that is unknown or above float32. Finite, because averages of two models (EMA) compute
# differences, and infinity minus infinity is NaN.
UNREAD = torch.finfo(torch.float32).max
UNSEEN = -1.0  # no backward pass in this step yet


class Sample(NamedTuple):
    """The sampled rows, which stand for all rows.

    rows     [n] int64, distinct. If fewer than n rows have p > 0, undrawn rows fill up the sample
    weights  [n] float32: 1 / p of each row, 0 for a filling row, NaN if any score was not finite
    """

    rows: Tensor
    weights: Tensor


def budget(rows: int, keep: float) -> int:
    """Number of sampled rows: ceil(keep * rows), at least 1 if rows > 0. keep: in (0, 1]."""
    return min(
        rows, max(math.ceil(keep * rows - 1e-9), min(rows, 1))
    )  # 0.07 * 100 is above 7 in binary


def row_norms(x: Tensor) -> Tensor:
    """x [R, C], floats or integer codes -> Euclidean norm of each row, [R] float64.

    Squares are computed of x / amax in float32, so a gradient of 1e-30 has norms too. Rows 1e-19
    times smaller than amax count as zero.
    """
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], dtype=torch.float64)
    chunks = row_chunks(x)
    amax = torch.stack([x[each].to(torch.float32).abs().amax() for each in chunks]).amax()
    unit = torch.where(amax == 0, 1.0, amax)
    # Scale before squaring: squares of numbers below 1e-19 or above 1e19 leave float32's range.
    norms = torch.cat(
        [torch.linalg.vector_norm(x[each].to(torch.float32) / unit, dim=1) for each in chunks]
    )
    return norms.to(torch.float64) * unit.to(torch.float64)


def leverage_scores(
    gradient: Tensor, other: Tensor | None = None, norms: Tensor | None = None
) -> Tensor:
    """Scores c of the rows, [R] float64, the input of `probabilities`.

    gradient  [R, N], one row per token
    other     [R, K], the other operand of grad_weight, whose contracted axis is the rows; None for
              grad_input
    norms     `row_norms(gradient)`, if it is known
    """
    scores = row_norms(gradient) if norms is None else norms
    return scores if other is None else scores * row_norms(other)


def probabilities(scores: Tensor, budget: int) -> Tensor:
    """Inclusion probabilities, proportional to the scores, capped at 1: [R] float64, sum `budget`.

    With the scores in descending order, M is the first m with c_m (n - m) <= sum of c_j over j >=
    m. The M largest scores have p = 1. The others share n - M in proportion to c. If at most
    `budget` scores are positive, those have p = 1 and the others 0, and sampling loses nothing.
    """
    assert min(len(scores), 1) <= budget <= len(scores)
    scores = scores.to(torch.float64)
    poison = scores.sum() * 0.0  # NaN if any score is not finite
    if budget == scores.shape[0]:
        return (scores > 0).to(torch.float64) + poison
    ordered = scores.sort(descending=True).values
    tail = ordered.flip(0).cumsum(0).flip(0)  # small scores first, else they are rounded away
    left = budget - torch.arange(scores.shape[0], device=scores.device, dtype=torch.float64)
    first = (ordered * left <= tail).to(torch.int8).argmax().reshape(1)
    rate = left.gather(0, first) / tail.gather(0, first)
    # rate * c exceeds 1 for exactly the M largest scores. If nothing is left to share, rate is
    # infinite: `clamp` turns c * inf into 1, and `where` drops the NaN of 0 * inf.
    p = torch.where(scores > 0, (scores * rate).clamp(max=1.0), 0.0)
    return p + poison


def systematic(p: Tensor, budget: int, noise: Tensor) -> Sample:
    """Draw exactly min(budget, sum p) distinct rows, row i with probability p_i.

    p      [R], from `probabilities`
    noise  [R + 1] independent uniform numbers in [0, 1): R for a random order, 1 for the offset

    Systematic sampling: the rows lie end to end in random order, each with length p_i. Points
    spaced one apart select the rows that they hit. No length exceeds 1, so no row is hit twice.
    Cost: two sorts of R numbers.
    """
    assert noise.shape == (p.shape[0] + 1,)
    order = noise[:-1].argsort()
    # Move the points by half a step of float32's uniform numbers: with a point at exactly 0, one
    # draw in 2^24, rounding of the cumulative sum admits one row too many.
    offset = noise[-1:].to(torch.float64) + 2.0**-25
    ends = p.to(torch.float64)[order].cumsum(0)
    points = (ends - offset).ceil().clamp(min=0.0)
    hit = points - torch.cat((torch.zeros_like(offset), points[:-1])) if p.shape[0] else points
    drawn = torch.zeros_like(p, dtype=torch.bool).scatter(0, order, hit > 0)
    index = drawn.to(torch.int8).argsort(descending=True, stable=True)[:budget]
    chosen = p[index]
    weight = torch.where(drawn[index] | chosen.isnan(), 1.0 / chosen, 0.0)
    return Sample(index, weight.to(torch.float32))


def importance_weighted(rows: Tensor, sample: Sample) -> Tensor:
    """rows [R, C] -> the sampled rows divided by their probability, [n, C] in the dtype of `rows`.

    Apply it before the cast, for a contracted axis and for an outer one.
    """
    return rows[sample.rows] * sample.weights[:, None].to(rows.dtype)


def scatter_rows(rows: Tensor, sample: Sample, length: int) -> Tensor:
    """rows [n, C], one per sampled row -> [length, C], zero for rows outside the sample."""
    index = sample.rows[:, None].expand_as(rows)
    return rows.new_zeros(length, rows.shape[1]).scatter(0, index, rows)


def sampling_variance(p: Tensor, scores: Tensor) -> Tensor:
    """E |estimate - GEMM|^2 added by sampling: sum (1 - p) / p c^2 (proposition 4.1), 0-d float64.

    For an outer axis the formula requires c_i = |g_i W|. With c_i = |g_i| the result is the
    variance of the sampled gradient before the GEMM.
    """
    term = (1.0 - p) / torch.where(p == 0, 1.0, p) * scores.to(torch.float64).square()
    return torch.where(p == 0, 0.0, term).sum()


def note(readings: Tensor, place: int, variance: Tensor, whole: Tensor) -> None:
    """Record the variance that sampling adds to a GEMM in a layer's readings.

    readings  [2], updated in place by a maximum, which does not depend on the order of
              micro-batches
    place     index of the GEMM in RowSampling.PRODUCTS
    variance  from `sampling_variance`
    whole     squared norm of the GEMM's result, the unit of the reading
    """
    relative = torch.where(variance == 0, 0.0, variance / whole).to(torch.float32)
    # A sum of squares beyond float32 made the variance 0, which reads as "sampling costs nothing".
    relative = torch.where(whole.isfinite(), relative, UNREAD).clamp(max=UNREAD)
    here = torch.arange(2, device=readings.device) == place
    relative = torch.where(relative.isnan(), UNREAD, relative)  # NaN in the gradient: use all rows
    readings.copy_(torch.where(here, torch.maximum(relative, readings), readings))


class RowSampling(LayerState):
    """Decides which GEMMs of a layer sample their rows.

    settings  GEMM -> LeverageScore of the recipe
    variance  [2] float32: relative variance that sampling would add to grad_input and grad_weight,
              as predicted in the last step; UNREAD before the first step, in which all rows are
              used
    live      [2] float32: the same for the current step; UNSEEN before its first backward pass
    active    names of the GEMMs that sample in this step
    """

    variance: Tensor
    live: Tensor
    PRODUCTS = ("grad_input", "grad_weight")

    def __init__(self, settings: dict[str, LeverageScore], device: torch.device) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer("variance", torch.full((2,), UNREAD, device=device))
        self.register_buffer("live", torch.full((2,), UNSEEN, device=device), persistent=False)
        self.decide([UNREAD, UNREAD])

    def decide(self, variance: list[float]) -> None:
        """Set `active` from the values of `variance`, on the host."""
        self.active: tuple[str, ...] = tuple(
            product
            for product, predicted in zip(self.PRODUCTS, variance, strict=True)
            if product in self.settings
            and (
                predicted <= self.settings[product].max_variance
                or self.settings[product].max_variance == math.inf
            )
        )

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if not self.variance.is_meta:
            # Earlier versions saved NaN and infinity.
            self.variance.nan_to_num_(nan=UNREAD).clamp_(max=UNREAD)
            if self.live.is_meta:  # non-persistent, so no load has filled it
                self.live = torch.full_like(self.variance, UNSEEN)
            self.reread()

    def reread(self) -> None:
        self.decide(self.variance.tolist())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.variance.fill_(UNREAD)
        self.live.fill_(UNSEEN)
        self.decide([UNREAD, UNREAD])

    def extra_repr(self) -> str:
        return ", ".join(f"{product}: {sampler}" for product, sampler in self.settings.items())


@torch.no_grad()
def decide(samplings: list[RowSampling]) -> None:
    """End a step for these layers (at least one), with one read from the device for all.

    A layer without a gradient in this step keeps its reading.
    """
    for each in samplings:
        each.variance.copy_(torch.where(each.live == UNSEEN, each.variance, each.live))
        each.live.fill_(UNSEEN)
    if holds_numbers(samplings[0].variance):
        readings = torch.stack([each.variance for each in samplings]).tolist()
        for each, variance in zip(samplings, readings, strict=True):
            each.decide(variance)
