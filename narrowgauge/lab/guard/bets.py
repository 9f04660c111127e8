"""E-processes: evidence that is valid at every look, without a correction for repeated looks.

An e-process E is a bet against a hypothesis H. It starts at 1, and while H holds its expected value
does not grow. It therefore ever reaches 1 / a with a probability of at most a (Ville): at 20 that
is 5 % for the whole run, for any number of looks.

The bet of one check, with difference d, noise scale s, and H: "the expected difference is at most
m":

    factor = min(exp(bet * (d - m) / s - bet^2 / 2), LIMIT)

Its mean is at most 1 under H if the noise is sub-Gaussian with scale s. The fastest growing `bet`
depends on the size of the gap, so several run side by side and their mean counts. LIMIT prevents
one wild check from deciding alone.

A gap may start late. A part of the capital, 1 / (t (t + 1)), is therefore reserved for check t, so
no earlier check can lose it:

    W[t] = (W[t - 1] + 1 / (t (t + 1))) * factor[t],        E[t] = W[t] + 1 / (t + 1)

W is capped at CEILING. A bet that is smaller than allowed stays valid, and old gains no longer hide
new losses.

Sources: Ramdas, Gruenwald, Vovk and Shafer, Game-theoretic statistics and safe anytime-valid
inference (2023); Howard, Ramdas, McAuliffe and Sekhon, Time-uniform Chernoff bounds (2020).
`tests/lab/guard/false_alarms.py` measures the rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from narrowgauge.diagnose.verdict import EQUIVALENT, UNKNOWN, WORSE
from narrowgauge.lab.guard.result import HIGHER, LOWER, SAME_WEIGHTS, STRETCH

BETS = (0.5, 1.0, 2.0)  # in scales: the gap beyond the margin for which each bet is optimal
LIMIT = 30.0  # on the factor of one check; E = 20 then needs at least two checks
CEILING = 1000.0
# Noise values in use.
KEPT = 32
ENOUGH = 20.0  # 1 / 5 %
# Share of the margin, before any noise was observed: controls agree to 0.0001 where a recipe's
# checks scatter by 0.001. A third finds a gap of twice the margin by the third check; a half does
# not.
LEAST_SCALE = 1 / 3
LEAST_SCALE_WITHIN = 1 / 4  # the same for bets on "within"
SMALLEST_SCALE = 1e-12  # nats, if nothing was learnt and nothing scatters
# Margins. Larger jumps between checks are not noise, unless controls jump as well. Otherwise a
# fault that training adapts to (+0.03, +0.003, -0.04, -0.15) hides behind its own jumps.
WILD = 2
WEARS_OFF = 4  # number of noise values after which both shares are smaller by sqrt(2)
QUANTILE = 0.1  # of chi-squared: the true scale exceeds the estimate in one of ten cases


class Money:
    """Capital W of the bets against one hypothesis."""

    def __init__(self) -> None:
        self.checks = 0
        self._won = [0.0] * len(BETS)

    def bet(self, factors: Sequence[float]) -> None:
        """Apply one check's factor for each of BETS."""
        self.checks += 1
        fresh = 1 / (self.checks * (self.checks + 1))
        self._won = [
            min((won + fresh) * min(factor, LIMIT), CEILING)
            for won, factor in zip(self._won, factors, strict=True)
        ]

    @property
    def value(self) -> float:
        """E, the mean of the bets."""
        return statistics.fmean(self._won) + 1 / (self.checks + 1)


def factors(excess: float) -> list[float]:
    """Factors of one check; excess = (d - m) / s."""
    # The inner min prevents overflow of exp.
    return [min(math.exp(min(bet * excess - bet * bet / 2, 100.0)), LIMIT) for bet in BETS]


class Scale:
    """Noise scale of one check, from earlier checks and from controls.

    Values used: each control (two BF16 probes that differ in rounding alone), and each step between
    neighbouring differences over sqrt(2), which is unaffected by a constant gap and nearly so by a
    slow drift. The scale is their root mean square at the upper end of its 90 % interval, sqrt(n /
    chi2(0.1, n)): 8 times for one value, 2.3 times for three.

    One of every four values, two at most, is trimmed to the next smaller value and not counted in
    chi2's n. A wild check or the start of a gap then does not hide later checks. Only the last KEPT
    values count, since noise shrinks during training.
    """

    def __init__(self) -> None:
        self._values: list[float] = []
        self._controls: list[float] = []  # the values that come from controls
        self._last: float | None = None

    def control(self, difference: float) -> None:
        self._add(abs(difference))
        self._controls = [*self._controls, abs(difference)][-KEPT:]

    def difference(self, difference: float) -> None:
        if self._last is not None:
            self._add(abs(difference - self._last) / math.sqrt(2))
        self._last = difference

    def _add(self, value: float) -> None:
        self._values.append(value)
        del self._values[:-KEPT]

    @property
    def count(self) -> int:
        return len(self._values)

    @property
    def value(self) -> float:
        """Zero before anything is known."""
        return _upper(self._values)

    def limited(self, limit: float) -> float:
        """The value, limited to `limit` unless controls show that much noise.

        A run that jumps by more departs from the reference; such jumps are not noise.
        """
        # Jumps up to three times the controls' scale count as noise of rounding.
        return min(self.value, max(limit, 3 * _upper(self._controls)))


class Bets:
    """All bets on one number of each check: that it is worse, and that it is within the margin."""

    def __init__(self) -> None:
        self._scale = Scale()
        self._above, self._below, self._either = Money(), Money(), Money()
        self._not_above, self._not_below = Money(), Money()
        self._newest = 0.0

    def add(
        self, difference: float, margin: float, controls: Iterable[float] = (), *, grow: bool = True, within: float | None = None,
    ) -> None:  # fmt: skip
        """Add one check.

        controls  values that have this check's noise scale
        grow      False leaves the scale unchanged
        within    margin of "within", if it is smaller; None: the same margin
        """
        for each in filter(math.isfinite, controls):
            self._scale.control(each)
        scale = self.scale_at(margin)
        above, below = (
            factors((difference - margin) / scale),
            factors((-difference - margin) / scale),
        )
        self._above.bet(above)
        self._below.bet(below)
        # Bets on either side at each check: saturating amax histories change the sign of the
        # difference. A sign change between the first two checks was found at the fifth check
        # without this bet, at the second with it.
        self._either.bet([(up + down) / 2 for up, down in zip(above, below, strict=True)])
        within = margin if within is None else within
        scale = max(self._scale.value, self._least(within, LEAST_SCALE_WITHIN), SMALLEST_SCALE)
        self._not_above.bet(factors((within - difference) / scale))
        self._not_below.bet(factors((within + difference) / scale))
        self._newest = difference
        if grow:
            self._scale.difference(difference)

    def scale_at(self, margin: float) -> float:
        """Noise scale assumed for the next check, for bets on "worse"."""
        return max(self._scale.limited(WILD * margin), self._least(margin, LEAST_SCALE))

    def _least(self, margin: float, part: float) -> float:
        return part * margin / math.sqrt(1 + self._scale.count / WEARS_OFF)

    @property
    def e_worse(self) -> float:
        return statistics.fmean((self._above.value, self._below.value, self._either.value))

    @property
    def e_within(self) -> float:
        return min(self._not_above.value, self._not_below.value)

    @property
    def checks(self) -> int:
        return self._above.checks

    def direction(self) -> str:
        """Side on which the run is worse, if it is."""
        above, below = self._above.value, self._below.value
        up = above > below if max(above, below) >= ENOUGH else self._newest > 0
        return HIGHER if up else LOWER


class RunBets:
    """Bets on both numbers of a run's checks.

    Only on the probe's if no check has a same-weights number.
    """

    def __init__(self) -> None:
        self.stretch, self.same = Bets(), Bets()

    def add(
        self, difference: float, same: float | None, margin: float, control: float | None = None, noise: Iterable[float] = (),
        *, grow: bool = True, within: float | None = None,
    ) -> None:  # fmt: skip
        """Add one check.

        difference, control  of the probe
        same, noise          on the same weights
        grow, within         as in `Bets.add`
        """
        self.stretch.add(
            difference, margin, () if control is None else (control,), grow=grow, within=within
        )
        if same is not None:
            self.same.add(same, margin, noise, grow=grow, within=within)

    @property
    def _judged(self) -> list[Bets]:
        return [self.stretch, self.same] if self.same.checks else [self.stretch]

    @property
    def e_worse(self) -> float:
        """Mean of the e-values, which is an e-value."""
        return statistics.fmean(each.e_worse for each in self._judged)

    @property
    def e_within(self) -> float:
        """E against "at least one number lies outside": the smaller value."""
        return min(each.e_within for each in self._judged)

    def verdict(self) -> tuple[str, str, str]:
        """(outcome, evidence on which it rests, direction)."""
        if self.e_worse >= ENOUGH:
            loudest = max(self._judged, key=lambda each: each.e_worse)
            return WORSE, STRETCH if loudest is self.stretch else SAME_WEIGHTS, loudest.direction()
        return (EQUIVALENT if self.e_within >= ENOUGH else UNKNOWN), "", ""


def _upper(values: Sequence[float]) -> float:
    """Upper end of the 90 % interval of the values' root mean square; zero without values."""
    values, wild = sorted(values), min(len(values) // 4, 2)
    values[len(values) - wild :] = values[len(values) - wild - 1 :][:1] * wild
    return (
        math.sqrt(math.fsum(value * value for value in values) / chi2_quantile(len(values) - wild))
        if values
        else 0.0
    )


def chi2_quantile(freedom: int) -> float:
    """Quantile QUANTILE of chi-squared without scipy.

    Exact for 1 and 2 degrees of freedom, else by Wilson and Hilferty: 1.3 % too small for 3, better
    above.
    """
    if freedom == 1:
        return statistics.NormalDist().inv_cdf((1 + QUANTILE) / 2) ** 2
    if freedom == 2:
        return -2 * math.log(1 - QUANTILE)
    part = 2 / (9 * freedom)
    return freedom * (1 - part + statistics.NormalDist().inv_cdf(QUANTILE) * math.sqrt(part)) ** 3
