"""Which products are suspect: beside a healthy step of the same product or, without one, beside the others of their kind.

    times    of an operand    its error / that of the same operand of the healthy step, or the median of its kind
             of a product     the larger of its two operands'
    suspect  kernel           result further from the product of its own codes than rounding explains (`measure.roundings`)
             not finite       a number that is none
             operand          codes that are no cast of the original (`recast`)
                              or times above LIMIT, of integers among integers above LIMIT_OF_INTEGERS, of those that are a cast by their
                              own amax above LIMIT_OF_OUTLIERS; but not where it passes the window of earlier steps by a factor of up to
                              PASSING: gradients of healthy runs do that for a step, and the window has seen it then

A kind is the same operand of the same product under the same Gemm or, where fewer than SMALLEST layers have that, of all that are narrow.
Errors of operands are compared and not those of results: of a float format the first are alike in all layers of healthy models (1.22 times
the median at most), while sums that cancel, or rows that repeat, move the second by a factor of up to 6. Errors of integers follow from how
far the largest element stands out (up to 5.0 times early in a run), and from learned steps (3.84). Figures in docs/trust.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from narrowgauge.diagnose.blame.measure import Operand, Product
from narrowgauge.diagnose.blame.recast import SCALE_OFF
from narrowgauge.diagnose.blame.watch import OPERANDS, Key

LIMIT = 1.5
LIMIT_OF_INTEGERS = 4.0
LIMIT_OF_OUTLIERS = 8.0
PASSING = 4.0
SMALLEST = 4  # layers of a kind
SHARE = 0.01  # of elements that saturate or underflow: below it nobody is told


class Expected(NamedTuple):
    """The error of an operand that is healthy, and whether that was one of integers."""

    error: float
    is_integer: bool


Baseline = Mapping[Key, Mapping[str, Expected]]  # (layer, product) -> role -> what is expected


@dataclass(frozen=True)
class Reading:
    """What was seen of an operand; `expected` is what its kind, or the healthy step, shows; among_integers: so is what is expected.

    slope, own_slope, distance, scale_off  see `recast`
    uncast                                 the largest of them over its limit: above 1 the codes are no cast of the original
    """

    role: str
    format: str
    error: float
    expected: float
    saturated: float
    underflown: float
    lag: float | None
    is_narrow: bool
    is_integer: bool
    among_integers: bool
    slope: float = 1.0
    own_slope: float = 1.0
    distance: float = 0.0
    scale_off: float = 0.0
    uncast: float = 0.0
    is_by_amax: bool = False

    @property
    def is_cast(self) -> bool:
        """Whether its codes are a cast of the original (`recast`)."""
        return self.uncast <= 1

    @property
    def times(self) -> float:
        """How many times what is expected."""
        if self.expected > 0:
            return self.error / self.expected
        return math.nan if math.isnan(self.error) else 0.0 if self.error == 0 else math.inf

    @property
    def limit(self) -> float:
        if not self.among_integers:
            return LIMIT
        return LIMIT_OF_OUTLIERS if self.is_by_amax and self.is_cast else LIMIT_OF_INTEGERS

    @property
    def is_passing(self) -> bool:
        """Whether it is larger than its window gives, and not more than a healthy tensor may be for a step."""
        return self.lag is not None and 1 < self.lag <= PASSING

    @property
    def is_suspect(self) -> bool:
        return self.is_narrow and (not self.is_cast or (not self.is_passing and not self.times <= self.limit))

    @property
    def over(self) -> float:
        """By which operands are ordered: times over its limit, below 1 for what is no suspect; codes that are no cast, by how far."""
        if not self.is_narrow:
            return 0.0
        over = math.inf if math.isnan(self.times) else self.times / self.limit
        over = min(over, 0.99) if self.is_passing else over
        return over if self.is_cast else max(over, self.uncast)


@dataclass(frozen=True)
class Finding:
    """One product of one layer.

    error, noise, kernel, kernel_most  see `measure`
    lhs, rhs                           its operands
    recipe                             of the layer
    """

    layer: str
    product: str
    recipe: str
    shape: tuple[int, int, int]
    error: float
    noise: float
    kernel: float
    kernel_most: float
    lhs: Reading
    rhs: Reading

    @property
    def worse(self) -> Reading:
        """The operand that is further from what is expected."""
        return max((self.rhs, self.lhs), key=lambda each: (each.over, each.is_narrow))

    @property
    def is_kernel(self) -> bool:
        return self.kernel > self.kernel_most

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.noise, self.kernel, self.lhs.error, self.rhs.error)))

    @property
    def is_suspect(self) -> bool:
        return not self.is_finite or self.is_kernel or self.lhs.is_suspect or self.rhs.is_suspect

    @property
    def score(self) -> tuple[float, ...]:
        """By which findings are ordered: what is no number, kernels that are off, limits that are passed, then the noise of results."""
        if not self.is_finite:
            return (3.0, 0.0, 0.0)
        if self.is_kernel:
            return (2.0, self.kernel / self.kernel_most, 0.0)
        worse = self.worse
        if worse.is_narrow and not worse.is_cast:
            # Layers that share the casts of x all read them: the one that made them was called first, and sorting keeps that order.
            return (1.0, float(f"{worse.over:.2g}"), 0.0)
        return (1.0, worse.over, self.noise)

    @property
    def name(self) -> str:
        return f"{self.layer}:{self.product}"

    @property
    def reason(self) -> str:
        """What is wrong with it, a clause; of one that is no suspect, how it compares."""
        if not self.is_finite:
            return "holds numbers that are not finite"
        if self.is_kernel:
            return (
                f"its result is {self.kernel:.2g} off the product of its own codes, of which rounding explains {self.kernel_most:.2g}: "
                "the kernel, not the format"
            )
        worse = self.worse
        if worse.is_narrow and not worse.is_cast:
            return _uncast(worse)
        usual = f", {worse.times:.1f} times the {worse.expected:.2g} of its kind" if worse.expected else ""
        words = f"{worse.role} as {worse.format} is {worse.error:.2g} off{usual}"
        for share, what in ((worse.saturated, "saturates"), (worse.underflown, "becomes zero")):
            words += f"; {share:.0%} of it {what}" if share >= SHARE else ""
        if worse.lag is not None and not 0.5 <= worse.lag <= 2:
            side = f"{worse.lag:.2g} times" if worse.lag > 1 else f"1/{1 / max(worse.lag, 1e-30):.2g} of"
            words += f"; its largest element is {side} what its window gives"
        return words


def _uncast(reading: Reading) -> str:
    """Why codes are no cast of their tensor, a clause."""
    words = (
        f"the codes of {reading.role} as {reading.format} are not a cast of {reading.role}: {reading.distance:.2g} of its norm apart, "
        f"slope {reading.slope:.4f}, of a fresh cast {reading.own_slope:.4f}"
    )
    if reading.scale_off > SCALE_OFF:
        words += f"; a scale is off that of its amax by {reading.scale_off:.1%}"
    return words + (f"; {reading.saturated:.0%} of it saturates" if reading.saturated >= SHARE else "")


def found_in(products: Mapping[Key, Product], recipes: Mapping[str, Any]) -> list[Finding]:
    """The findings beside their kinds, worst first. recipes: layer -> its Recipe."""
    kinds = _kinds(products, recipes)
    found = []
    for (layer, product), seen in products.items():
        readings = []
        for role, operand in zip(OPERANDS[product], (seen.lhs, seen.rhs), strict=True):
            gemm = getattr(recipes[layer], product)
            kind = kinds.get((product, gemm, role)) or kinds.get((product, None, role)) or Expected(0.0, False)
            readings.append(_reading(role, operand, kind))
        numbers = seen.error, seen.noise, seen.kernel, seen.kernel_most
        found.append(Finding(layer, product, recipes[layer].name, seen.shape, *numbers, *readings))
    return sorted(found, key=lambda each: each.score, reverse=True)


def errors_of(findings: Iterable[Finding]) -> Baseline:
    """The `baseline` of a later step."""
    return {
        (each.layer, each.product): {one.role: Expected(one.error, one.is_integer) for one in (each.lhs, each.rhs)}
        for each in findings
    }


def judged_by(findings: Iterable[Finding], baseline: Baseline) -> list[Finding]:
    """The same readings beside a healthy step; products that it does not know, beside their kinds."""

    def beside(each: Finding, reading: Reading) -> Reading:
        own = baseline.get((each.layer, each.product), {}).get(reading.role)
        if own is None:
            return reading
        return replace(reading, expected=own[0], among_integers=reading.is_integer and bool(own[1]))

    judged = [replace(each, lhs=beside(each, each.lhs), rhs=beside(each, each.rhs)) for each in findings]
    return sorted(judged, key=lambda each: each.score, reverse=True)


def _reading(role: str, seen: Operand, expected: Expected) -> Reading:
    there = max(seen.nonzero, 1)
    return Reading(
        role=role, format=seen.format, error=seen.off, expected=expected.error,
        saturated=seen.saturated / there, underflown=seen.underflown / there,
        lag=seen.present / seen.used if seen.is_delayed and seen.used > 0 else None, is_narrow=seen.is_narrow,
        is_integer=seen.is_integer, among_integers=seen.is_integer and expected.is_integer,
        slope=seen.recast.slope, own_slope=seen.recast.own_slope, distance=seen.recast.distance, scale_off=seen.recast.scale_off,
        uncast=seen.recast.over, is_by_amax=seen.is_by_amax,
    )  # fmt: skip


def _kinds(products: Mapping[Key, Product], recipes: Mapping[str, Any]) -> dict[tuple[str, Any, str], Expected]:
    """(product, Gemm or None for all, role) -> the median error of narrow operands of this kind, and whether most are integers."""
    members: dict[tuple[str, Any, str], list[Operand]] = {}
    for (layer, product), seen in products.items():
        gemm = getattr(recipes[layer], product)
        for role, operand in zip(OPERANDS[product], (seen.lhs, seen.rhs), strict=True):
            if operand.is_narrow and operand.size > 0 and math.isfinite(operand.off):
                members.setdefault((product, gemm, role), []).append(operand)
                members.setdefault((product, None, role), []).append(operand)
    return {
        key: Expected(statistics.median(each.off for each in own), sum(each.is_integer for each in own) * 2 > len(own))
        for key, own in members.items()
        if key[1] is None or len(own) >= SMALLEST
    }


def as_numbers(finding: Finding) -> dict[str, Any]:
    """JSON's types; see `from_numbers`."""
    return asdict(finding)


def from_numbers(numbers: Mapping[str, Any]) -> Finding:
    """What `as_numbers` gave, after JSON."""
    readings = {side: Reading(**numbers[side]) for side in ("lhs", "rhs")}
    return Finding(**{**numbers, "shape": tuple(numbers["shape"]), **readings})
