"""Page of `narrowgauge debug`: the result, the setting to use, and differences from BF16.

A rung is one replay of the same steps under one change (`lab.ladder`). The page is one file,
readable offline, and the same for the same input.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from narrowgauge.diagnose.compare import smooth
from narrowgauge.diagnose.format_text import count, decimals, duration, loss_value, signed
from narrowgauge.diagnose.same_curve import CONTROLS
from narrowgauge.diagnose.verdict import BETTER, EQUIVALENT, WITHIN_MARGIN, WORSE, Verdict
from narrowgauge.lab.ladder import AGAIN, CONTROL, PRODUCT, RECIPE, WIDE, Ladder, Rung
from narrowgauge.report import several_figures, template
from narrowgauge.report.figures import (
    THEME,
    Points,
    canvas,
    label_axes,
    note,
    plot,
    signed_values,
    step_limits,
    svg,
)

WORDS = {EQUIVALENT: "same within control", WORSE: "differs", BETTER: "differs"}
QUESTIONS = {
    AGAIN: "its own recipe once more",
    WIDE: "every product in 16 bits",
    CONTROL: "bf16 in another order of sums",
}


def write(ladder: Ladder, fix: str, run: str, path: Path) -> Path:
    """Write the page of a finished ladder to `path` and return it.

    run  name of the run
    fix  command that continues training with the fix, or ''
    """
    return template.write(path, "lab/ladder.html.jinja", page(ladder, fix, run))


def page(ladder: Ladder, fix: str, run: str) -> dict[str, Any]:
    """Variables of the template."""
    *_, conclusion = ladder.report()
    return {
        "ladder": ladder, "run": run, "fix": fix, "notice": template.notice(verdict(ladder, conclusion)), "repeats": ladder.repeats(),
        "rows": [row(ladder, place, rung) for place, rung in enumerate(ladder.rungs.values())],
        "scores": scores(ladder), "differences": differences(ladder), "losses": losses(ladder), "controls": f"{CONTROLS:g}",
        "half": ladder.begun + ladder.steps // 2 + 1, "last": ladder.begun + ladder.steps,
        "spent": duration(sum(rung.spent_s for rung in ladder.rungs.values())),
    }  # fmt: skip


def verdict(ladder: Ladder, conclusion: str) -> Verdict:
    """Verdict on the run's own recipe, with the conclusion of all rungs as its sentence."""
    if not ladder.recipe:
        return Verdict(outcome=EQUIVALENT, sentence=conclusion)
    return replace(ladder.against_bf16().verdict(), sentence=conclusion)


# --- The table


def row(ladder: Ladder, place: int, rung: Rung) -> dict[str, Any]:
    half = rung.losses[len(rung.losses) // 2 :]
    found = {
        "series": series(place), "name": rung.name, "question": question(rung.name), "refused": rung.refused,
        "loss": loss_value(sum(half) / len(half)) if half else "–", "difference": "", "verdict": "", "mends": False, "is_far": False,
        "spent": duration(rung.spent_s) if rung.losses else "–",
    }  # fmt: skip
    lost = f"not finite at step {count(rung.lost)}" if rung.lost else ""
    if rung.refused or rung.name == WIDE or not ladder.recipe:
        return found | {
            "verdict": "not taken"
            if rung.refused
            else lost or ("reference" if rung.name == WIDE else "")
        }
    against = ladder.against_bf16(rung.name)
    mends = rung.name.startswith((RECIPE, PRODUCT)) and ladder.mends(rung.name)
    words = "within the margin" if against.detail == WITHIN_MARGIN else WORDS.get(against.outcome)
    verdict = lost or words or "not known"
    return found | {
        "difference": signed(against.difference, decimals(against.difference)),
        "verdict": f"mends it: {verdict}" if mends else verdict,
        "mends": mends,
        "is_far": against.differs,
    }


def question(name: str) -> str:
    head, _, what = name.partition(":")
    if name in QUESTIONS:
        return QUESTIONS[name]
    return (
        f"every layer in {what}" if head == RECIPE[:-1] else f"{what} in 16 bits, the rest as it is"
    )


def series(place: int) -> dict[str, Any]:
    """Colour and dashes of a rung's line by its position."""
    # The first rung is the run's own recipe and the second is bf16; exchanged, so that bf16 gets
    # the reference's colour on every page.
    number = {0: 1, 1: 0}.get(place, place)
    # Colours repeat after SERIES; the second turn is dashed.
    turn = number // len(several_figures.SERIES)
    return {"number": number, "colour": number % len(several_figures.SERIES), "dashed": turn > 0}


def scores(ladder: Ladder) -> list[tuple[str, str, str, str]]:
    """(metric, value with the recipe, value in 16 bits, difference).

    Measured on the validation set at the checkpoint.
    """
    narrow, wide = ladder.scores.get("narrow", {}), ladder.scores.get("wide", {})
    return [
        (name, f"{value:.4f}", f"{wide[name]:.4f}" if name in wide else "–", signed(value - wide[name]) if name in wide else "–")
        for name, value in narrow.items()
    ]  # fmt: skip


# --- The figures


def differences(ladder: Ladder) -> str:
    """Draw each rung's loss minus BF16's over the steps, with control and margin.

    Returns '' without a BF16 rung or without a finite difference.
    """
    if not ladder.recipe or WIDE not in ladder.rungs:
        return ""
    curves = {
        place: gaps(ladder, rung)
        for place, rung in enumerate(ladder.rungs.values())
        if rung.name != WIDE
    }
    shown = {place: points for place, points in curves.items() if points}
    if not shown:
        return ""
    own = ladder.against_bf16()
    with canvas(1000, 320) as (drawn, axes):
        first, last = ladder.begun + 1, ladder.begun + ladder.steps
        axes.set_xlim(*step_limits([first, last]))
        axes.axvspan(
            ladder.begun + ladder.steps // 2 + 0.5,
            last,
            color=THEME["muted"],
            alpha=0.07,
            linewidth=0,
        )
        axes.axhline(0.0, color=several_figures.colour_of(0), linewidth=1.6)
        levels = [value for points in shown.values() for _, value in points]
        bands = [] if own.control is None else [CONTROLS * own.control]
        if bands:
            axes.axhspan(
                -bands[0], bands[0], color=several_figures.colour_of(0), alpha=0.25, linewidth=0
            )
        # A margin far outside would flatten the curves.
        if math.isfinite(own.margin) and own.margin < 4 * max(map(abs, levels), default=0.0):
            bands.append(own.margin)
            for bound in (own.margin, -own.margin):
                axes.axhline(bound, color=THEME["ink"], linewidth=1.0, linestyle=(0, (3, 2)))
            note(axes, "margin", (1, own.margin), (-4, 4), axes.get_yaxis_transform(), ha="right")
        for place, points in shown.items():
            line(axes, place, points, strong=place == 0)
        levels += [side * band for band in bands for side in (-1, 1)]
        room = 0.08 * (max(levels) - min(levels)) or 0.001
        axes.set_ylim(min(levels) - room, max(levels) + room)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        signed_values(axes)
        label_axes(axes, "loss minus that of bf16 on the same batch, nats")
        return several_figures.themed(
            svg(drawn, "rungs", "Differences of the rungs to BF16 over the steps")
        )


def gaps(ladder: Ladder, rung: Rung) -> Points:
    """Differences of the rung's losses from BF16's, smoothed over a tenth of the steps."""
    pairs = enumerate(zip(rung.losses, ladder.rungs[WIDE].losses, strict=False), ladder.begun + 1)
    # Unsmoothed differences of several rungs are an unreadable tangle (decisions/ranks.md).
    found = smooth(
        [(step, ours - wide) for step, (ours, wide) in pairs], max(ladder.steps // 20, 1)
    )
    return [(step, gap) for step, gap in found if math.isfinite(gap)]


def line(axes: Axes, place: int, points: Points, strong: bool) -> None:
    found = series(place)
    style: dict[str, Any] = {"dashes": (6, 2)} if found["dashed"] else {}
    plot(
        axes,
        points,
        color=several_figures.colour_of(found["number"]),
        linewidth=2.4 if strong else 1.5,
        **style,
    )


def losses(ladder: Ladder) -> str:
    """Draw the losses of the run's own recipe and of BF16; '' if none is finite."""
    lines = [
        several_figures.Line(series(place)["number"], points, {})
        for place, rung in enumerate(ladder.rungs.values())
        if rung.name in (AGAIN, WIDE)
        and (
            points := [
                (step, loss)
                for step, loss in enumerate(rung.losses, ladder.begun + 1)
                if math.isfinite(loss)
            ]
        )
    ]
    return (
        several_figures.curves(lines, "losses", "loss, nats", "Losses over the steps")
        if lines
        else ""
    )
