"""Proof that a random estimator is unbiased, or its rejection; `assert_unbiased` holds for anything that estimates a known tensor.

R = 256 independent replicates E_r of an estimate of G, errors e_r = E_r - G.

    projections     z = mean(a) / (sd(a) / sqrt(R)) with a_r = <e_r, d>, for d = G and 32 random directions. Element-wise z
                    would be correlated with one another; a projection is one number per replicate.
    concentration   the squared error of an average of B replicates falls as 1 / B for B = 1, 4, 16, 64, 256. A bias, in whichever
                    direction, is a floor under it: at 256 one of a 16th of the standard deviation doubles it.

False alarms. A projection is rejected when |z| > 4 twice: in a first set of replicates, and with the same sign in a second,
independent one, which is drawn only then. A correct estimator does so with probability 8.3e-5 * 4.2e-5 = 3.5e-9 per direction
(Student's t, 255 degrees of freedom); a biased one has no better chance in the second set than in the first. A concentration is
rejected when its two-sided p-value is below 1e-8. With at most 500 cases of 33 directions and 4 sizes of average:
500 * (33 * 3.5e-9 + 4 * 1e-8) = 7.8e-5 for the whole suite; the count of cases is checked. Seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

REPLICATES = 256
DIRECTIONS = 32
Z_LIMIT = 4.0
P_LIMIT = 1e-8
AVERAGED = (4, 16, 64, 256)
MOST_CASES = 500
ROUNDING = 1e-7  # of float32 sums, relative to |G|: no smaller standard error is believed

Estimate = Callable[[Generator], Tensor]

_cases = 0


@dataclass(frozen=True)
class Verdict:
    """What was found; `complaints` is empty for an estimator that passes.

    z           [33] of the first set: the direction of G, then random ones
    relative    B -> squared error of an average of B replicates over that of one, times B: 1 without bias
    variance    E |E_r - mean|^2 / |G|^2
    """

    z: Tensor
    relative: dict[int, float]
    variance: float
    complaints: tuple[str, ...]


def judge(estimate: Estimate, exact: Tensor, seed: int = 0) -> Verdict:
    """Both tests of an estimate of `exact`; deterministic for a seed."""
    global _cases
    _cases += 1
    assert _cases <= MOST_CASES, (
        f"more than {MOST_CASES} cases: the stated false-alarm rate no longer holds"
    )
    exact = exact.detach().double().flatten()
    errors = replicates(estimate, exact, 2 * seed)
    directions = torch.randn(
        DIRECTIONS, exact.numel(), dtype=torch.float64, generator=_generator(seed)
    )
    directions = torch.cat((exact[None], directions))
    directions /= directions.norm(dim=1, keepdim=True).clamp(min=1e-300)
    z = projected(errors, directions, exact)
    complaints = []
    if (z.abs() > Z_LIMIT).any():
        again = projected(replicates(estimate, exact, 2 * seed + 1), directions, exact)
        twice = (z.abs() > Z_LIMIT) & (again.abs() > Z_LIMIT) & (z * again > 0)
        complaints += [
            f"direction {'of the truth' if i == 0 else i}: z {z[i]:.1f} and {again[i]:.1f}"
            for i in twice.nonzero().flatten()
        ]
    relative, p_values = concentration(errors)
    floor = (ROUNDING * exact.norm()) ** 2
    for size, p in p_values.items():
        if p < P_LIMIT and (relative[size] < 1 or errors.mean(dim=0).square().sum() > floor):
            share = relative[size]
            complaints.append(
                f"average of {size}: squared error {share:.3g} times what 1/{size} of one predicts, p {p:.1e}"
            )
    variance = float(errors.var(dim=0).sum() / exact.square().sum()) if exact.any() else 0.0
    return Verdict(z, relative, variance, tuple(complaints))


def assert_unbiased(estimate: Estimate, exact: Tensor, seed: int = 0) -> Verdict:
    """Fails with the directions and averages that speak against the estimate."""
    __tracebackhide__ = True
    verdict = judge(estimate, exact, seed)
    assert not verdict.complaints, "\n".join(verdict.complaints)
    return verdict


def assert_biased(estimate: Estimate, exact: Tensor, seed: int = 0) -> Verdict:
    """For negative controls: fails unless the true direction and the largest average both speak against the estimate."""
    __tracebackhide__ = True
    verdict = judge(estimate, exact, seed)
    for witness in ("direction of the truth", f"average of {REPLICATES}"):
        assert any(line.startswith(witness) for line in verdict.complaints), (
            f"{witness}: nothing seen; z {verdict.z[0]:.1f}, relative errors {verdict.relative}"
        )
    return verdict


def replicates(estimate: Estimate, exact: Tensor, seed: int) -> Tensor:
    """Errors of independent replicates, [R, numel] float64."""
    generator = _generator(seed)
    estimates = torch.stack(
        [estimate(generator).detach().double().flatten() for _ in range(REPLICATES)]
    )
    assert estimates.isfinite().all(), "the estimate is not finite"
    return estimates - exact


def projected(errors: Tensor, directions: Tensor, exact: Tensor) -> Tensor:
    """z of each direction."""
    a = errors @ directions.T
    standard_error = a.std(dim=0) / math.sqrt(len(a)) + ROUNDING * exact.norm()
    return torch.where(
        standard_error > 0, a.mean(dim=0) / standard_error, a.mean(dim=0) * math.inf
    ).nan_to_num(0.0)


def concentration(errors: Tensor) -> tuple[dict[int, float], dict[int, float]]:
    """B -> B |average of B errors|^2 / V, and its two-sided p-value.

    Averages of errors with covariance S / B have squared norms of mean tr S / B and variance 2 tr S^2 / B^2: a chi-squared of
    d = (tr S)^2 / tr S^2 degrees of freedom per average (Welch and Satterthwaite). V and d come from the centred errors, so
    that a bias cannot hide itself.
    """
    count = len(errors)
    gram = errors @ errors.T
    centred = errors - errors.mean(dim=0)
    inner = centred @ centred.T
    variance = float(inner.diagonal().sum()) / (count - 1)
    squares = float(inner.square().sum() - inner.diagonal().square().sum()) / (count * (count - 1))
    if variance == 0:
        biased = float(gram.abs().amax()) > 0
        return dict.fromkeys(AVERAGED, 1.0 + biased), dict.fromkeys(
            AVERAGED, 0.0 if biased else 1.0
        )
    freedom = max(variance**2 / max(squares, 1e-300), 1.0)
    relative, p_values = {}, {}
    for size in AVERAGED:
        groups = count // size
        blocks = gram.reshape(groups, size, groups, size).sum(dim=(1, 3)).diagonal() / size**2
        relative[size] = size * float(blocks.mean()) / variance
        shape = torch.tensor(groups * freedom / 2, dtype=torch.float64)
        at = shape * relative[size]
        p_values[size] = 2 * float(
            torch.minimum(torch.special.gammainc(shape, at), torch.special.gammaincc(shape, at))
        )
    return relative, p_values


def _generator(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)
