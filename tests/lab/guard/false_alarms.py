"""How often does the guard's evidence call a healthy run worse, how soon does it find a gap, how soon does it certify? Simulated.

    python -m tests.lab.guard.false_alarms                 4,000 runs of 20 checks per case, about three minutes of one core
    python -m tests.lab.guard.false_alarms --runs 500

A check is the mean of the second half of a stretch of 100 steps. The differences of its steps follow an AR(1) process, with `drift`
also a random slope: chaos pulls two continuations apart at a pace of their own. Every fourth check has a control, drawn from the
same process, `control` times as wide. All lengths are in margins: `deviation` is that of a check's noise, `gap` the expected
difference. `between` is the correlation of neighbouring checks, `tails` the degrees of freedom of Student's t in their noise.
The number on the same weights is drawn beside it, as wide and with the same gap if nothing else is said (`same_deviation`, `same_gap`):
one batch at each check, so it does not depend on the one before, and PAIRS values with its noise.

The hypothesis of "worse" is true where both |gap| <= 1; that of "within" is false where one |gap| >= 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, record
from narrowgauge.lab.guard.bets import ENOUGH, RunBets
from narrowgauge.lab.guard.check import PAIRS

CHECKS = 20
STEPS = 100
TINY = 1e6  # margins in a deviation: no margin, and so no least scale, to speak of


@dataclass(frozen=True, kw_only=True)
class Case:
    """deviation, gap: in margins. within, between: correlation of neighbouring steps and checks. late: the check the gap begins at."""

    name: str
    deviation: float
    gap: float = 0.0
    within: float = 0.8
    drift: bool = False
    between: float = 0.0
    tails: float = math.inf
    control: float = 1.0
    late: int = 1
    same_deviation: float | None = None
    same_gap: float | None = None


def cases() -> list[Case]:
    """Those of healthy runs first."""
    steps = [
        Case(
            name=f"steps AR(1) {within}{' with drift' * drift}, no margin",
            deviation=TINY,
            within=within,
            drift=drift,
        )
        for within in (0.0, 0.5, 0.8, 0.95)
        for drift in (False, True)
    ]
    noise = [
        Case(
            name=f"noise {deviation} margins, gap {gap}, control {control:g} of it",
            deviation=deviation,
            gap=gap,
            control=control,
        )
        for deviation in (0.1, 0.33, 0.5, 1.0, 2.0)
        for gap in (0.0, 0.5, 1.0)
        for control in (1.0, 0.1)
    ]
    other = [
        Case(name="t with 3 degrees, no margin", deviation=TINY, tails=3),
        Case(
            name="t with 3 degrees, noise 0.5 margins, gap 1",
            deviation=0.5,
            gap=1.0,
            tails=3,
            control=0.1,
        ),
        Case(name="checks AR(1) 0.5, noise 0.5 margins", deviation=0.5, between=0.5, control=0.1),
        Case(name="checks AR(1) 0.95, noise 0.5 margins", deviation=0.5, between=0.95, control=0.1),
        Case(name="checks AR(1) 0.95, noise 1 margin", deviation=1.0, between=0.95, control=0.1),
    ]
    power = [
        *(
            Case(name=f"gap of {gap} deviations {where}, no margin", deviation=TINY, **gaps)
            for gap in (1, 2, 3)
            for where, gaps in (
                ("of the stretch alone", {"gap": gap * TINY, "same_gap": 0.0}),
                ("on the same weights alone", {"gap": 0.0, "same_gap": gap * TINY}),
                ("of both", {"gap": gap * TINY}),
            )
        ),
        # 0.01 nats where the margin is 0.003 (losses up to 1.2), 0.005 (a loss of 2) and 0.0075 (of 3)
        *(
            Case(name=f"0.01 nats, margin {margin}, noise {noise}", deviation=noise / margin, gap=0.01 / margin, control=0.1, same_gap=0.0)
            for margin in (0.003, 0.005, 0.0075)
            for noise in (0.0003, 0.001, 0.002)
        ),
        Case(name="0.03 nats from check 11 on, margin 0.005, noise 0.001", deviation=0.2, gap=6.0, control=0.1, late=11, same_gap=0.0),
    ]  # fmt: skip
    return [*steps, *noise, *other, *power]


def main() -> None:
    options = _options()
    rows = []
    print(
        "| case | worse, of runs | by check 3 | median check | within | by check 8 |\n|---|---|---|---|---|---|"
    )
    for case in cases():
        rows.append(row := measured(case, options.runs, options.seed))
        shares = (row["worse"], row["worse_by_3"], row["within"], row["within_by_8"])
        worse, by_3, within, by_8 = (f"{100 * share:.1f} %" for share in shares)
        print(
            f"| {case.name} | {worse} | {by_3} | {row['median_worse'] or '-'} | {within} | {by_8} |",
            flush=True,
        )
    record("guard_false_alarms", rows, options.results)


def measured(case: Case, runs: int, seed: int = 0) -> dict[str, Any]:
    """The shares of runs with each verdict at any of CHECKS checks."""
    source = np.random.default_rng([seed, *case.name.encode()])
    worse, within = [], []
    for numbers in zip(*drawn(case, runs, source), strict=True):
        found = first_verdicts(*numbers)
        worse.append(found["worse"])
        within.append(found["within"])
    alarms = [check for check in worse if check]
    return {
        "case": case.name,
        **{
            key: value
            for key, value in asdict(case).items()
            if key != "name" and value not in (None, math.inf)
        },
        "runs": runs,
        "worse": _share(worse, CHECKS),
        "worse_by_3": _share(worse, 3),
        "median_worse": statistics.median(alarms) if 2 * len(alarms) > runs else None,
        "within": _share(within, CHECKS),
        "within_by_8": _share(within, 8),
    }


def _share(firsts: list[int], by: int) -> float:
    return sum(0 < check <= by for check in firsts) / len(firsts)


def first_verdicts(differences: Any, controls: Any, same: Any) -> Mapping[str, int]:
    """The first check at which E is enough, 0 for none; the margin is 1."""
    bets, found = RunBets(), {"worse": 0, "within": 0}
    for number, (difference, control, (first, *noise)) in enumerate(
        zip(differences, controls, same, strict=True), 1
    ):
        bets.add(difference, first, 1.0, None if math.isnan(control) else control, noise)
        for name, e_value in (("worse", bets.e_worse), ("within", bets.e_within)):
            if e_value >= ENOUGH and not found[name]:
                found[name] = number
    return found


def drawn(case: Case, runs: int, source: Any) -> Iterator[Any]:
    """Differences and controls [runs, CHECKS] in margins; a check without control has NaN. Those on the same weights and their noise."""
    noise = np.stack([stretches(case, runs, source) for _ in range(CHECKS)], 1)
    if case.tails < math.inf:
        noise = _noise(case, noise.shape, source)
    for check in range(1, CHECKS):
        noise[:, check] *= math.sqrt(1 - case.between**2)
        noise[:, check] += case.between * noise[:, check - 1]
    gaps = case.gap * (np.arange(1, CHECKS + 1) >= case.late)
    yield (case.deviation * noise + gaps).tolist()
    controls = np.full((runs, CHECKS), math.nan)
    for check in range(0, CHECKS, 4):
        controls[:, check] = case.control * case.deviation * stretches(case, runs, source)
    yield controls.tolist()
    noise = _noise(case, (runs, CHECKS, 1 + PAIRS), source)
    noise *= case.deviation if case.same_deviation is None else case.same_deviation
    noise[:, :, 0] += case.gap if case.same_gap is None else case.same_gap
    yield noise.tolist()


def _noise(case: Case, shape: tuple[int, ...], source: Any) -> Any:
    """Independent, with a deviation of 1."""
    if case.tails == math.inf:
        return source.standard_normal(shape)
    return source.standard_t(case.tails, shape) / math.sqrt(case.tails / (case.tails - 2))


def stretches(case: Case, runs: int, source: Any) -> Any:
    """Means of the second halves of stretches, scaled to a deviation of 1; [runs]."""
    steps = source.standard_normal((runs, STEPS))
    for step in range(1, STEPS):
        steps[:, step] *= math.sqrt(1 - case.within**2)
        steps[:, step] += case.within * steps[:, step - 1]
    weights = np.zeros(STEPS)
    weights[STEPS // 2 :] = 2 / STEPS
    lags = np.abs(np.subtract.outer(np.arange(STEPS), np.arange(STEPS)))
    variance = weights @ case.within ** lags.astype(float) @ weights
    means = steps @ weights
    if case.drift:  # by its end a stretch has drifted by four deviations of its mean
        slope = 4 * math.sqrt(variance) / STEPS
        means += source.standard_normal(runs) * slope * (weights @ np.arange(STEPS))
        variance += (slope * (weights @ np.arange(STEPS))) ** 2
    return means / math.sqrt(variance)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests.lab.guard.false_alarms", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS / "guard_false_alarms.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
