"""Leverage-score sampling: a matrix product estimated from a few of its rows, without bias.

    R rows of the gradient (tokens), n = ceil(keep * R) of them used; g_i row i of the gradient, a_i row i of the other operand

    grad_weight = sum_i g_i^T a_i    contracted axis   c_i = |g_i| |a_i|   estimate  sum over the sample of (g_i / p_i)^T a_i
    grad_input  = rows  g_i W        outer axis        c_i = |g_i|         estimate  rows (g_i W) / p_i, zero outside the sample

    p_i = min(1, lambda c_i), sum p = n             minimises the variance  sum_i (1 - p_i) / p_i c_i^2

Section 4.2 and appendices A.2, A.3 and B of "Training Transformers with 4-bit Integers" (arXiv 2306.11987), with two changes: the cap
has a closed form in place of an iteration, and `systematic` draws exactly n rows, so that shapes are static and nothing waits for the host.

**Sample first, cast afterwards.** 1 / p_i belongs to the contracted axis of grad_weight and cannot wait for an epilogue. The sampled rows
are multiplied by it as floats and the product's ordinary stochastic cast comes after: one rounding, unbiased, integer product. The paper
splits first and samples the rows of parts; docs/four-bit.md measures both. An outer axis, whose epilogue could apply the weights, gains
as well: relative variance .017 against .035 at rows of deviation 1.5, since they do not multiply the noise of rounding.

Plain torch on float64 scores, no host synchronisation, compiled with fullgraph=True. A score that is not finite makes all probabilities
and weights NaN: a poisoned gradient stays visible. Randomness comes in as an argument, so that whoever draws it can repeat it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import holds_numbers
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.ops.pieces import by_rows
from narrowgauge.recipe import LeverageScore

# A reading that was not taken, or one beyond float32. Finite: infinity less infinity would make NaN of an average of two models.
UNREAD = torch.finfo(torch.float32).max
UNSEEN = -1.0  # in this step


class Sample(NamedTuple):
    """Rows that stand for all rows.

    rows     [n] int64, distinct. Where fewer than n rows were drawn (the others are zero), undrawn ones fill it up.
    weights  [n] float32: 1 / p of each, 0 for one that only fills up, NaN if any score was not finite
    """

    rows: Tensor
    weights: Tensor


def budget(rows: int, keep: float) -> int:
    """How many of `rows` rows a keep ratio in (0, 1] allows: ceil(keep * rows), at least 1 of any."""
    return min(rows, max(math.ceil(keep * rows - 1e-9), min(rows, 1)))  # 0.07 * 100 is above 7 in binary


def row_norms(x: Tensor) -> Tensor:
    """x [R, C], floats or integer codes -> Euclidean norm of each row, [R] float64.

    Squares are taken of x / amax, in float32: a gradient of 1e-30 has norms too. Rows 1e-19 times smaller than amax count as zero.
    """
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], dtype=torch.float64)
    amax = by_rows(lambda some: some.to(torch.float32).abs().amax().reshape(1), x).amax()
    unit = torch.where(amax == 0, 1.0, amax)
    norms = by_rows(lambda some: torch.linalg.vector_norm(some.to(torch.float32) / unit, dim=1), x)
    return norms.to(torch.float64) * unit.to(torch.float64)


def leverage_scores(gradient: Tensor, other: Tensor | None = None) -> Tensor:
    """Scores c of the rows, [R] float64, from which `probabilities` are made.

    gradient  [R, N], one row per token
    other     [R, K], the operand that meets the gradient on the contracted axis (grad_weight); None for an outer axis
    """
    scores = row_norms(gradient)
    return scores if other is None else scores * row_norms(other)


def probabilities(scores: Tensor, budget: int) -> Tensor:
    """Inclusion probabilities p proportional to the scores, none above 1, summing to the budget: [R] float64.

    With the scores in descending order, M is the first m with c_m (n - m) <= sum of c_j over j >= m; the M largest have
    p = 1 and the rest share n - M in proportion to c. If no more than `budget` scores are above zero, p = 1 for these and 0
    for the others: nothing is lost by sampling then.
    """
    assert min(len(scores), 1) <= budget <= len(scores)
    scores = scores.to(torch.float64)
    poison = scores.sum() * 0.0  # NaN if any score is not finite
    if budget == scores.shape[0]:
        return (scores > 0).to(torch.float64) + poison
    ordered = scores.sort(descending=True).values
    tail = ordered.flip(0).cumsum(0).flip(0)  # from the small end, which keeps the small ones
    left = budget - torch.arange(scores.shape[0], device=scores.device, dtype=torch.float64)
    first = (ordered * left <= tail).to(torch.int8).argmax().reshape(1)
    rate = left.gather(0, first) / tail.gather(0, first)
    # rate * c is above 1 for exactly the M largest; it is infinite, or 0 / 0, where nothing is left to share.
    p = torch.where(scores > 0, (scores * rate).clamp(max=1.0), 0.0)
    return p + poison


def systematic(p: Tensor, budget: int, noise: Tensor) -> Sample:
    """Draws exactly min(budget, sum p) distinct rows, row i with probability p_i.

    p      [R] as `probabilities` returns it
    noise  [R + 1] independent uniform numbers in [0, 1): the order of the rows, and the place of the first point

    The rows in random order lie end to end, each as long as its p; equally spaced points, one apart, hit those that are
    drawn. No row is longer than 1, so none is hit twice. Two sorts of R numbers.
    """
    assert noise.shape == (p.shape[0] + 1,)
    order = noise[:-1].argsort()
    # Half a step of float32's uniform numbers: a point exactly at 0 would let rounding admit one row too many at the end.
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
    """rows [R, C] -> the sampled ones over their probability, [n, C] in rows' dtype: cast this for a contracted axis."""
    return rows[sample.rows] * sample.weights[:, None].to(rows.dtype)


def scatter_rows(rows: Tensor, sample: Sample, length: int) -> Tensor:
    """rows [n, C], one per sampled row -> [length, C] with zeros elsewhere: the end of a product sampled on its outer axis."""
    index = sample.rows[:, None].expand_as(rows)
    return rows.new_zeros(length, rows.shape[1]).scatter(0, index, rows)


def sampling_variance(p: Tensor, scores: Tensor) -> Tensor:
    """E |estimate - product|^2 that sampling alone adds: sum (1 - p) / p c^2 (proposition 4.1), 0-d float64.

    For an outer axis c_i must be |g_i W|; with c_i = |g_i| the result stands for the gradient before the product.
    """
    term = (1.0 - p) / torch.where(p == 0, 1.0, p) * scores.to(torch.float64).square()
    return torch.where(p == 0, 0.0, term).sum()


def note(readings: Tensor, place: int, variance: Tensor, whole: Tensor) -> None:
    """Notes the variance that sampling adds to a product, relative to its squared norm `whole`, in a layer's readings [2].

    The largest of the step's micro-batches, so that their order does not matter.
    """
    relative = torch.where(variance == 0, 0.0, variance / whole).to(torch.float32)
    relative = torch.where(whole.isfinite(), relative, UNREAD).clamp(max=UNREAD)  # no reason to sample
    here = torch.arange(2, device=readings.device) == place
    relative = torch.where(relative.isnan(), UNREAD, relative)  # a poisoned gradient: all rows
    readings.copy_(torch.where(here, torch.maximum(relative, readings), readings))


class RowSampling(LayerState):
    """Which products of a layer sample their rows.

    variance  [2] float32: the relative variance that sampling would add to grad_input and grad_weight, as predicted in the
              last step; UNREAD before the first, so that a layer begins with all its rows
    live      [2] float32: that of this step so far, UNSEEN before its first backward pass
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
        """Takes over readings of `variance`."""
        self.active: tuple[str, ...] = tuple(
            product
            for product, predicted in zip(self.PRODUCTS, variance, strict=True)
            if product in self.settings
            and (predicted <= self.settings[product].max_variance or self.settings[product].max_variance == math.inf)
        )

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if not self.variance.is_meta:
            # NaN and infinite in states of earlier versions.
            self.variance.nan_to_num_(nan=UNREAD).clamp_(max=UNREAD)
            if self.live.is_meta:  # it is in no state dict
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
    """Ends a step for layers, at least one, with one read from the device. One without a gradient in the step keeps its reading."""
    for each in samplings:
        each.variance.copy_(torch.where(each.live == UNSEEN, each.variance, each.live))
        each.live.fill_(UNSEEN)
    if holds_numbers(samplings[0].variance):
        readings = torch.stack([each.variance for each in samplings]).tolist()
        for each, variance in zip(samplings, readings, strict=True):
            each.decide(variance)
