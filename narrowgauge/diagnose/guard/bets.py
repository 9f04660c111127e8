"""E-processes: evidence that may be looked at after every check, without a correction for the number of looks.

An e-process E is a bet against a hypothesis H. It begins at 1, and while H holds it does not grow on average. So it ever reaches
1 / a with a probability of at most a (Ville): at 20 that is 5 % for the whole run, however often one looks.

The bet of one check, with the difference d, the scale s of its noise, and H: "the expected difference is at most m":

    factor = min(exp(bet * (d - m) / s - bet^2 / 2), LIMIT)

Its mean is at most 1 under H if the noise is sub-Gaussian with scale s. Which `bet` grows fastest depends on the size of the gap, so
several run side by side and their mean counts. LIMIT keeps one wild check from deciding alone.

A gap may begin late. So a part of the money, 1 / (t (t + 1)), waits for check t, and no earlier check can have lost it:

    W[t] = (W[t - 1] + 1 / (t (t + 1))) * factor[t],        E[t] = W[t] + 1 / (t + 1)

W stops at CEILING. Less than allowed is still a valid bet, and what was earned long ago no longer hides what comes now.

Sources: Ramdas, Gruenwald, Vovk and Shafer, Game-theoretic statistics and safe anytime-valid inference (2023); Howard, Ramdas,
McAuliffe and Sekhon, Time-uniform Chernoff bounds (2020). `benchmarks/guard_false_alarms.py` measures the rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from narrowgauge.diagnose.guard.verdict import SAME_WEIGHTS, STRETCH, UNKNOWN, WITHIN, WORSE

BETS = (0.5, 1.0, 2.0)  # in scales: the gaps beyond the margin that each one is made for
LIMIT = 30.0  # of one check's factor. E = 20 then needs two checks at least
CEILING = 1000.0
KEPT = 32
ENOUGH = 20.0  # 1 / 5 %
LEAST_SCALE = 1 / 3  # of the margin, before any noise was seen: a gap of twice the margin is found by the third check
LEAST_SCALE_WITHIN = 1 / 4  # the same for what is bet on "within"
SMALLEST_SCALE = 1e-12  # nats, where nothing was learnt and nothing scatters
WILD = 2  # margins: jumps between checks by more are no noise, unless controls jump as well
WEARS_OFF = 4  # noise values after which both are smaller by sqrt(2)
QUANTILE = 0.1  # of chi squared: the true scale exceeds the one taken in one of ten


class Money:
    """W of the bets of one hypothesis."""

    def __init__(self) -> None:
        self.checks = 0
        self._won = [0.0] * len(BETS)

    def bet(self, factors: Sequence[float]) -> None:
        """One check's factor for each of BETS."""
        self.checks += 1
        fresh = 1 / (self.checks * (self.checks + 1))
        self._won = [
            min((won + fresh) * min(factor, LIMIT), CEILING) for won, factor in zip(self._won, factors, strict=True)
        ]

    @property
    def value(self) -> float:
        """E, the mean of the bets."""
        return statistics.fmean(self._won) + 1 / (self.checks + 1)


def factors(excess: float) -> list[float]:
    """The factors of one check; excess = (d - m) / s."""
    return [min(math.exp(min(bet * excess - bet * bet / 2, 100.0)), LIMIT) for bet in BETS]


class Scale:
    """The scale of one check's noise, from what is known before the check, and from controls.

    Values that have the scale: each control (two BF16 continuations that differ in rounding alone), and each step between
    neighbouring differences over sqrt(2), which a constant gap leaves alone and a slow drift nearly. Their root mean square is
    taken up to the upper end of its 90 % interval, sqrt(n / chi2(0.1, n)): 8 times for one value, 2.3 times for three. One of
    four values, at most two, counts no more than the next smaller one, and is not counted in chi2's n: so neither a wild check
    nor the begin of a gap blinds the checks that follow. Only the last KEPT values count, since noise shrinks as training goes on.
    """

    def __init__(self) -> None:
        self._values: list[float] = []
        self._controls: list[float] = []  # those of the values that are controls
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
        """The value, but no more than `limit` where controls do not show that much: a run that jumps by more departs, that is no noise."""
        return min(self.value, max(limit, 3 * _upper(self._controls)))


class Bets:
    """Everything that is bet on one number of each check of a run: that it is worse, and that it is within the margin."""

    def __init__(self) -> None:
        self._scale = Scale()
        self._above, self._below, self._either = Money(), Money(), Money()
        self._not_above, self._not_below = Money(), Money()
        self._newest = 0.0

    def add(
        self, difference: float, margin: float, controls: Iterable[float] = (), *, grow: bool = True, within: float | None = None,
    ) -> None:  # fmt: skip
        """controls: what has the scale of this check's noise, and no more. grow=False leaves the scale as it is.

        within  the margin of "within", where it is smaller; None: the same
        """
        for each in filter(math.isfinite, controls):
            self._scale.control(each)
        scale = self.scale_at(margin)
        above, below = factors((difference - margin) / scale), factors((-difference - margin) / scale)
        self._above.bet(above)
        self._below.bet(below)
        self._either.bet([(up + down) / 2 for up, down in zip(above, below, strict=True)])
        within = margin if within is None else within
        scale = max(self._scale.value, self._least(within, LEAST_SCALE_WITHIN), SMALLEST_SCALE)
        self._not_above.bet(factors((within - difference) / scale))
        self._not_below.bet(factors((within + difference) / scale))
        self._newest = difference
        if grow:
            self._scale.difference(difference)

    def scale_at(self, margin: float) -> float:
        """The noise that is assumed of the next check, against "within"."""
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
        """The side on which it is worse, if it is."""
        above, below = self._above.value, self._below.value
        up = above > below if max(above, below) >= ENOUGH else self._newest > 0
        return "higher" if up else "lower"


class RunBets:
    """The bets on both numbers of a run's checks. Where no check had a number on the same weights, those on the stretch alone."""

    def __init__(self) -> None:
        self.stretch, self.same = Bets(), Bets()

    def add(
        self, difference: float, same: float | None, margin: float, control: float | None = None, noise: Iterable[float] = (),
        *, grow: bool = True, within: float | None = None,
    ) -> None:  # fmt: skip
        """One check; control, noise: of the stretch, and on the same weights. grow=False leaves the scales as they are.

        within  as in `Bets`
        """
        self.stretch.add(difference, margin, () if control is None else (control,), grow=grow, within=within)
        if same is not None:
            self.same.add(same, margin, noise, grow=grow, within=within)

    @property
    def _judged(self) -> list[Bets]:
        return [self.stretch, self.same] if self.same.checks else [self.stretch]

    @property
    def e_worse(self) -> float:
        """The mean of e-values is one."""
        return statistics.fmean(each.e_worse for each in self._judged)

    @property
    def e_within(self) -> float:
        """Against "one of both lies outside": the smaller one."""
        return min(each.e_within for each in self._judged)

    def verdict(self) -> tuple[str, str, str]:
        """Name, what it was seen on, direction."""
        if self.e_worse >= ENOUGH:
            loudest = max(self._judged, key=lambda each: each.e_worse)
            return WORSE, STRETCH if loudest is self.stretch else SAME_WEIGHTS, loudest.direction()
        return (WITHIN if self.e_within >= ENOUGH else UNKNOWN), "", ""


def _upper(values: Sequence[float]) -> float:
    """The upper end of the 90 % interval of the values' root mean square; zero of none."""
    values, wild = sorted(values), min(len(values) // 4, 2)
    values[len(values) - wild :] = values[len(values) - wild - 1 :][:1] * wild
    return (
        math.sqrt(math.fsum(value * value for value in values) / chi2_quantile(len(values) - wild)) if values else 0.0
    )


def chi2_quantile(freedom: int) -> float:
    """The quantile QUANTILE of chi squared: exact for 1 and 2, else by Wilson and Hilferty, 1.3 % too small at 3, less above."""
    if freedom == 1:
        return statistics.NormalDist().inv_cdf((1 + QUANTILE) / 2) ** 2
    if freedom == 2:
        return -2 * math.log(1 - QUANTILE)
    part = 2 / (9 * freedom)
    return freedom * (1 - part + statistics.NormalDist().inv_cdf(QUANTILE) * math.sqrt(part)) ** 3
