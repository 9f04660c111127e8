"""Do verdicts over seeds hold what they promise? Coverage of the intervals, wrong verdicts and power, by simulated studies.

    python -m tests.diagnose.seed_verdicts --picture docs/images/seeds.png

A study is n pairs; a difference of a pair is the true one plus noise of deviation 1: normal, with heavy tails (Student's t with 3 degrees
of freedom, scaled), or skewed (an exponential, shifted). The margin is 1 deviation or 2. Counted over many studies, for n = 2 to 20:

    coverage   of the 95 % interval of the mean difference, and of the interval for one more seed
    wrong      "equivalent" where the true difference is the margin; "worse" where it is the margin too: 5 % at most
    power      "equivalent" where there is no difference; beside it what `power_of_equivalence` predicts
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.harness import RESULTS, record
from narrowgauge.diagnose.paired_tests import ALPHA, power_of_equivalence

SEEDS = (2, 3, 4, 5, 7, 10, 15, 20)
NOISES = ("normal", "heavy tails", "skewed")
MARGINS = (1.0, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.diagnose.seed_verdicts", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--studies", type=int, default=40_000)
    parser.add_argument("--picture", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=RESULTS / "seed_verdicts.jsonl")
    options = parser.parse_args()
    rows = [simulated(noise, n, options.studies) for noise in NOISES for n in SEEDS]
    record("seed_verdicts", rows, options.results)
    for row in rows:
        shown = (
            f"{key} {100 * value:.1f} %" for key, value in row.items() if isinstance(value, float)
        )
        print(f"{row['noise']}, {row['seeds']} seeds: {'; '.join(shown)}")
    if options.picture:
        draw(rows, options.picture)


def simulated(noise: str, n: int, studies: int, seed: int = 0) -> dict[str, Any]:
    """Shares of so many studies."""
    draw = np.random.default_rng([seed, n, NOISES.index(noise)])
    values = noises(noise, draw, (studies, n + 1))
    pairs, next_one = values[:, :n], values[:, n]
    mean, spread = pairs.mean(1), pairs.std(1, ddof=1)
    error, quantile = spread / math.sqrt(n), stats.t.ppf(0.975, n - 1)
    row: dict[str, Any] = {
        "noise": noise, "seeds": n, "studies": studies,
        "interval_holds_the_mean": float((np.abs(mean) <= quantile * error).mean()),
        "interval_holds_the_next": float((np.abs(next_one - mean) <= quantile * spread * math.sqrt(1 + 1 / n)).mean()),
    }  # fmt: skip
    for margin in MARGINS:
        name = f"margin {margin:g}"
        row[f"{name}: equivalent, wrongly"] = float(
            equivalent(mean + margin, error, n, margin).mean()
        )
        row[f"{name}: worse, wrongly"] = float(
            (p_above(mean + margin, error, n, margin) < ALPHA).mean()
        )
        row[f"{name}: equivalent, rightly"] = float(equivalent(mean, error, n, margin).mean())
        row[f"{name}: worse, rightly"] = float(
            (p_above(mean + 2 * margin, error, n, margin) < ALPHA).mean()
        )
        row[f"{name}: predicted"] = power_of_equivalence(n, 1.0, margin)
    return row


def noises(name: str, draw: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Mean 0, deviation 1."""
    if name == "normal":
        return draw.standard_normal(shape)
    return (
        draw.standard_t(3, shape) / math.sqrt(3)
        if name == "heavy tails"
        else draw.exponential(1.0, shape) - 1.0
    )


def p_above(mean: Any, error: Any, n: int, bound: float) -> Any:
    """`paired_tests.p_above` of many studies."""
    return stats.t.sf((mean - bound) / error, n - 1)


def equivalent(mean: Any, error: Any, n: int, margin: float) -> Any:
    return np.maximum(p_above(mean, error, n, -margin), p_above(-mean, error, n, -margin)) < ALPHA


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Coverage, wrong verdicts and power over the number of seeds."""
    import matplotlib.style
    from matplotlib.figure import Figure

    colours = dict(zip(NOISES, ("#0072b2", "#d55e00", "#009e73"), strict=True))
    with matplotlib.style.context(
        ["default", {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}]
    ):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        coverage, wrong, power = figure.subplots(1, 3)
        for noise in NOISES:
            of = [row for row in rows if row["noise"] == noise]
            n = [row["seeds"] for row in of]
            percent = {
                key: [100 * row[key] for row in of]
                for key in of[0]
                if isinstance(of[0][key], float)
            }
            coverage.plot(
                n,
                percent["interval_holds_the_mean"],
                "o-",
                color=colours[noise],
                markersize=3,
                label=noise,
            )
            coverage.plot(
                n, percent["interval_holds_the_next"], "s--", color=colours[noise], markersize=3
            )
            for margin, style in zip(MARGINS, ("o-", "s--"), strict=True):
                wrong.plot(
                    n,
                    percent[f"margin {margin:g}: equivalent, wrongly"],
                    style,
                    color=colours[noise],
                    markersize=3,
                )
                power.plot(
                    n,
                    percent[f"margin {margin:g}: equivalent, rightly"],
                    style,
                    color=colours[noise],
                    markersize=3,
                )
            wrong.plot(
                n, percent["margin 1: worse, wrongly"], "^:", color=colours[noise], markersize=3
            )
        for axes, level, limits in (
            (coverage, 95, (84, 100)),
            (wrong, 5, (0, 18)),
            (power, 80, (0, 102)),
        ):
            axes.axhline(level, color="#5c6672", linewidth=0.8)
            axes.set_ylim(*limits)
            axes.set_xlabel("seeds")
            axes.set_xticks(SEEDS)
        coverage.set_title("intervals hold, % (solid: of the mean;\ndashed: of one more seed)")
        wrong.set_title(
            "wrong at the margin, % (solid: “equivalent”,\nmargin 1; dashed: 2; dotted: “worse”)"
        )
        power.set_title(
            "“equivalent” of no difference, %\n(solid: margin of 1 deviation; dashed: of 2)"
        )
        coverage.legend(frameon=False, loc="lower right")
        figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
