"""Judge which GEMMs are suspect, compared with a sound step or with other GEMMs of their kind.

A GEMM is suspect in three cases:

    kernel      the result differs from the product of its own codes by more than rounding explains
                (`measure.roundings`)
    not finite  NaN or infinity in an operand or the result
    operand     codes that are not a cast of the original (`recast`), or `times` above a limit

`times` is the error of an operand divided by its error at the sound step, or by the median of its
kind. The limit is LIMIT; for integers among integers LIMIT_OF_INTEGERS; for integers that are a
cast by their own amax LIMIT_OF_OUTLIERS. An operand that exceeds its amax history by a factor of up
to PASSING is not suspect: gradients of sound runs do that for single steps, and the history
contains the new amax then.

A kind is the same operand of the same GEMM under the same Gemm settings or, if fewer than SMALLEST
layers have these, of all low-precision operands. docs/trust.md has the figures.

Errors of operands are compared, and not errors of results. For float formats operand errors are
similar in all layers of sound models (at most 1.22 times the median). Errors of results vary by a
factor of up to 6 with cancellation in sums and with repeated rows. Errors of integers depend on how
far the largest element stands out (up to 5.0 times early in a run) and on learned steps (3.84).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from narrowgauge.errors import Reason
from narrowgauge.lab.blame.recast import SCALE_OFF
from narrowgauge.lab.blame.watch import OPERANDS, Key

if TYPE_CHECKING:
    from narrowgauge.lab.blame.measure import OperandSums, Product

LIMIT = 1.5
LIMIT_OF_INTEGERS = 4.0
LIMIT_OF_OUTLIERS = 8.0
# Sound gradients exceed a history of 120 steps by a factor of 2.1 to 2.5 in single steps.
PASSING = 4.0
SMALLEST = 4  # layers that make up a kind
SHARE = 0.01  # of elements that saturate or underflow: smaller shares are not reported


class Expected(NamedTuple):
    """Error of a sound operand; is_integer: True if it was cast to integers."""

    error: float
    is_integer: bool


Baseline = Mapping[Key, Mapping[str, Expected]]  # (layer, GEMM) -> role -> expected error


@dataclass(frozen=True)
class Reading:
    """Measurements of one operand.

    role, format                           "x", "w" or "gy", and its format
    error                                  |codes - original| / |original|
    expected                               the same of its kind, or of the sound step
    saturated, underflown                  shares of the non-zero elements
    lag                                    amax / amax that the scale was made for; None without
                                           delayed scaling
    is_narrow                              True if it was quantized
    among_integers                         True if it and the expected operand are integers
    slope, own_slope, distance, scale_off  see `recast`
    uncast                                 largest ratio of a measure to its limit: above 1 the
                                           codes are not a cast of the original
    is_by_amax                             True if its scale comes from its own amax
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
        """True if the codes are a cast of the original (`recast`)."""
        return self.uncast <= 1

    @property
    def times(self) -> float:
        """Error divided by the expected error."""
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
        """True if amax exceeds the history by no more than it may in a sound step."""
        return self.lag is not None and 1 < self.lag <= PASSING

    @property
    def is_suspect(self) -> bool:
        return self.is_narrow and (
            not self.is_cast or (not self.is_passing and not self.times <= self.limit)
        )

    @property
    def over(self) -> float:
        """Sort key of operands: `times` over its limit; for codes that are not a cast, `uncast`.

        Below 1 for operands that are not suspect.
        """
        if not self.is_narrow:
            return 0.0
        over = math.inf if math.isnan(self.times) else self.times / self.limit
        over = min(over, 0.99) if self.is_passing else over
        return over if self.is_cast else max(over, self.uncast)


@dataclass(frozen=True)
class Finding:
    """Measurements of one GEMM of one layer.

    error, noise, kernel, kernel_most  see `measure`
    lhs, rhs                           its operands
    recipe                             name of the layer's recipe
    shape                              [M, N, K]
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
        """The operand with the larger excess over its limit."""
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
        """Sort key: non-finite GEMMs, then faulty kernels, then operands by excess, then noise."""
        if not self.is_finite:
            return (3.0, 0.0, 0.0)
        if self.is_kernel:
            return (2.0, self.kernel / self.kernel_most, 0.0)
        worse = self.worse
        if worse.is_narrow and not worse.is_cast:
            # Layers that share the casts of x all read the same faulty codes. The layer that made
            # them was called first; equal scores (two digits) and a stable sort keep it in front.
            return (1.0, float(f"{worse.over:.2g}"), 0.0)
        return (1.0, worse.over, self.noise)

    @property
    def name(self) -> str:
        return f"{self.layer}:{self.product}"

    @property
    def reason(self) -> Reason:
        """Clause on the error; for a GEMM that is not suspect, on how it compares."""
        if not self.is_finite:
            return Reason("not-finite", "holds numbers that are not finite")
        if self.is_kernel:
            return Reason(
                "kernel",
                f"its result is {self.kernel:.2g} off the product of its own codes, of which rounding explains {self.kernel_most:.2g}: "
                "the kernel, not the format",
            )
        worse = self.worse
        if worse.is_narrow and not worse.is_cast:
            return Reason("uncast", _uncast(worse))
        usual = (
            f", {worse.times:.1f} times the {worse.expected:.2g} of its kind"
            if worse.expected
            else ""
        )
        words = f"{worse.role} as {worse.format} is {worse.error:.2g} off{usual}"
        for share, what in ((worse.saturated, "saturates"), (worse.underflown, "becomes zero")):
            words += f"; {share:.0%} of it {what}" if share >= SHARE else ""
        if worse.lag is not None and not 0.5 <= worse.lag <= 2:
            side = (
                f"{worse.lag:.2g} times"
                if worse.lag > 1
                else f"1/{1 / max(worse.lag, 1e-30):.2g} of"
            )
            words += f"; its largest element is {side} what its window gives"
            return Reason("amax-history", words)
        return Reason("format", words)


def _uncast(reading: Reading) -> str:
    """Clause on the reason why codes are not a cast of their tensor."""
    words = (
        f"the codes of {reading.role} as {reading.format} are not a cast of {reading.role}: {reading.distance:.2g} of its norm apart, "
        f"slope {reading.slope:.4f}, of a fresh cast {reading.own_slope:.4f}"
    )
    if reading.scale_off > SCALE_OFF:
        words += f"; a scale is off that of its amax by {reading.scale_off:.1%}"
    return words + (
        f"; {reading.saturated:.0%} of it saturates" if reading.saturated >= SHARE else ""
    )


def found_in(products: Mapping[Key, Product], recipes: Mapping[str, Any]) -> list[Finding]:
    """Findings compared with their kinds, worst first. recipes: layer -> its Recipe."""
    kinds = _kinds(products, recipes)
    found = []
    for (layer, product), seen in products.items():
        readings = []
        for role, operand in zip(OPERANDS[product], (seen.lhs, seen.rhs), strict=True):
            gemm = getattr(recipes[layer], product)
            # First the same settings, then all quantized operands. Unquantized operands expect 0.
            kind = (
                kinds.get((product, gemm, role))
                or kinds.get((product, None, role))
                or Expected(0.0, False)
            )
            readings.append(_reading(role, operand, kind))
        numbers = seen.error, seen.noise, seen.kernel, seen.kernel_most
        found.append(Finding(layer, product, recipes[layer].name, seen.shape, *numbers, *readings))
    return sorted(found, key=lambda each: each.score, reverse=True)


def errors_of(findings: Iterable[Finding]) -> Baseline:
    """The `baseline` for a later step."""
    return {
        (each.layer, each.product): {
            one.role: Expected(one.error, one.is_integer) for one in (each.lhs, each.rhs)
        }
        for each in findings
    }


def judged_by(findings: Iterable[Finding], baseline: Baseline) -> list[Finding]:
    """The same readings compared with a sound step.

    GEMMs that the baseline lacks keep their kinds.
    """

    def beside(each: Finding, reading: Reading) -> Reading:
        own = baseline.get((each.layer, each.product), {}).get(reading.role)
        if own is None:
            return reading
        return replace(reading, expected=own[0], among_integers=reading.is_integer and bool(own[1]))

    judged = [
        replace(each, lhs=beside(each, each.lhs), rhs=beside(each, each.rhs)) for each in findings
    ]
    return sorted(judged, key=lambda each: each.score, reverse=True)


def _reading(role: str, seen: OperandSums, expected: Expected) -> Reading:
    there = max(seen.nonzero, 1)
    return Reading(
        role=role, format=seen.format, error=seen.off, expected=expected.error,
        saturated=seen.saturated / there, underflown=seen.underflown / there,
        lag=seen.present / seen.used if seen.is_delayed and seen.used > 0 else None, is_narrow=seen.is_narrow,
        is_integer=seen.is_integer, among_integers=seen.is_integer and expected.is_integer,
        slope=seen.recast.slope, own_slope=seen.recast.own_slope, distance=seen.recast.distance, scale_off=seen.recast.scale_off,
        uncast=seen.recast.over, is_by_amax=seen.is_by_amax,
    )  # fmt: skip


def _kinds(
    products: Mapping[Key, Product], recipes: Mapping[str, Any]
) -> dict[tuple[str, Any, str], Expected]:
    """(GEMM, Gemm settings or None for all, role) -> expected error of this kind.

    The error is the median over quantized operands; `is_integer` if most operands are integers.
    """
    members: dict[tuple[str, Any, str], list[OperandSums]] = {}
    for (layer, product), seen in products.items():
        gemm = getattr(recipes[layer], product)
        for role, operand in zip(OPERANDS[product], (seen.lhs, seen.rhs), strict=True):
            if operand.is_narrow and operand.size > 0 and math.isfinite(operand.off):
                members.setdefault((product, gemm, role), []).append(operand)
                members.setdefault((product, None, role), []).append(operand)
    return {
        key: Expected(
            statistics.median(each.off for each in own),
            sum(each.is_integer for each in own) * 2 > len(own),
        )
        for key, own in members.items()
        # The median of a few operands could be the faulty one itself.
        if key[1] is None or len(own) >= SMALLEST
    }


def as_numbers(finding: Finding) -> dict[str, Any]:
    """Convert to JSON's types; see `from_numbers`."""
    return asdict(finding)


def from_numbers(numbers: Mapping[str, Any]) -> Finding:
    """Restore a Finding from `as_numbers` after JSON."""
    readings = {side: Reading(**numbers[side]) for side in ("lhs", "rhs")}
    return Finding(**{**numbers, "shape": tuple(numbers["shape"]), **readings})
