"""Figures of the page on several runs: mean curves with intervals, and paired differences.

A line is the mean over the runs of a recipe. Its band is the 95 % t interval of that mean, computed
at each step separately. Figures contain no user text: the page writes names beside them, in the
colours of `SERIES`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from narrowgauge.diagnose.format_text import true_minus
from narrowgauge.diagnose.paired_tests import half_width
from narrowgauge.report.figures import (
    STYLE,
    THEME,
    UNITS_PER_INCH,
    Points,
    canvas,
    for_desk_and_phone,
    label_axes,
    plot,
    step_limits,
    svg,
    thinned,
)

# CSS variable -> the colour that stands for it while drawing; the reference first. Okabe and Ito,
# plus Tol's purple and olive. None equals a colour of figures.THEME: text replacement must tell
# them apart.
SERIES = {
    "series-0": "#d55e02", "series-1": "#0072b3", "series-2": "#009e74", "series-3": "#aa3378", "series-4": "#8c7a00", "series-5": "#56b4ea"
}  # fmt: skip
DASHES = ((None, None), (6, 2), (2, 2))  # for more recipes than colours
STRIP = (320, 40)  # width and height of a row's figure in pixels
AXIS = 26


@dataclass(frozen=True)
class Line:
    """One recipe: the mean over its runs, and an interval if there are at least two runs."""

    number: int  # index of the recipe; 0 is the reference
    points: Points
    half_widths: Mapping[int, float]  # step -> half the width of the interval
    is_dotted: bool = False  # draw a marker at each point, for curves with few points


def colour_of(number: int) -> str:
    return list(SERIES.values())[number % len(SERIES)]


def mean_line(number: int, curves: Sequence[Points], is_dotted: bool = False) -> Line:
    """Mean of curves at their common steps; a run that ended early ends the mean."""
    by_step = [{step: value for step, value in curve if math.isfinite(value)} for curve in curves]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    points = [(step, statistics.fmean(each[step] for each in by_step)) for step in steps]
    halves = (
        {step: half_width([each[step] for each in by_step]) or 0.0 for step in steps}
        if len(by_step) > 1
        else {}
    )
    return Line(number, points, halves, is_dotted)


@for_desk_and_phone
def curves(lines: Sequence[Line], name: str, label: str, title: str, zero: bool = False) -> str:
    """Draw lines with their bands over the steps.

    zero  draws a horizontal line at zero, which is the reference
    """
    with canvas(1000, 340 if not zero else 260) as (figure, axes):
        for line in lines:
            draw(axes, line)
        if zero:
            axes.axhline(0.0, color=colour_of(0), linewidth=1.6)
        axes.set_ylim(*limits(lines, zero))
        axes.set_xlim(*step_limits(step for line in lines for step, _ in line.points))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
        sign = "+" if zero else ""
        axes.yaxis.set_major_formatter(
            FuncFormatter(
                lambda value, _: true_minus(f"{value:{sign}.6g}") if value or not zero else "0"
            )
        )
        label_axes(axes, label)
        return themed(svg(figure, name, title))


def draw(axes: Axes, line: Line) -> None:
    colour, dashes = colour_of(line.number), DASHES[line.number // len(SERIES) % len(DASHES)]
    style: dict[str, Any] = {"dashes": dashes} if dashes[0] else {}
    if line.half_widths:
        banded = [(step, value, line.half_widths[step]) for step, value in line.points]
        low, high = ([value + side * half for _, value, half in banded] for side in (-1, 1))
        axes.fill_between(
            [step for step, _, _ in banded], low, high, color=colour, alpha=0.16, linewidth=0
        )
    marker = "o" if (line.is_dotted and len(line.points) <= 60) or len(line.points) == 1 else ""
    plot(
        axes,
        thinned(line.points),
        color=colour,
        linewidth=1.8,
        marker=marker,
        markersize=4,
        **style,
    )


def limits(lines: Sequence[Line], zero: bool) -> tuple[float, float]:
    """Limits that show every line, and the bands unless they are far wider than the lines.

    Intervals over two runs are often that wide.
    """
    values = [value for line in lines for _, value in late(line.points)] + [0.0] * zero
    bands = sorted(
        value + side * line.half_widths.get(step, 0.0)
        for line in lines
        for step, value in late(line.points)
        for side in (-1, 1)
    )
    if not bands:  # no line has a point
        return (-0.5, 0.5) if zero else (0.0, 1.0)
    low, high = min(values), max(values)
    room = 1.5 * (high - low) or 0.05 * abs(high) or 0.5
    # Bands may extend the limits by 1.5 times the range of the lines on either side.
    low, high = max(low - room, min(bands[0], low)), min(high + room, max(bands[-1], high))
    margin = 0.05 * (high - low) or 0.001
    return low - margin, high + margin


def late(points: Points) -> Points:
    """Points without the first twentieth, whose steep descent would flatten the rest."""
    return points[len(points) // 20 :]


# Final values


def axis_limits(
    differences: Sequence[Sequence[float]],
    intervals: Sequence[tuple[float, float] | None],
    margin: float | None,
) -> tuple[float, float]:
    """Common axis of all recipes' rows: every difference and interval, with zero in the middle.

    Includes the margin unless it is far outside.
    """
    shown = [abs(value) for each in differences for value in each] + [
        abs(end) for each in intervals if each for end in each
    ]
    largest = max(shown, default=0.0) or margin or 1.0
    if margin is not None and margin < 4 * largest:
        largest = max(largest, margin)
    return -1.12 * largest, 1.12 * largest


def strip(name: str, number: int, differences: Sequence[float], interval: tuple[float, float] | None, margin: float | None,
          ends: tuple[float, float]) -> str:  # fmt: skip
    """Draw one row: a dot for each pair, their mean with its interval, and the shaded margin."""
    with row(STRIP, ends) as (figure, axes):
        shade(axes, margin, ends)
        if interval:
            axes.plot(
                interval,
                (0.42, 0.42),
                color=colour_of(number),
                linewidth=3.2,
                solid_capstyle="butt",
            )
        if differences:
            mean = statistics.fmean(differences)
            axes.plot(
                [mean],
                [0.42],
                "D",
                color=colour_of(number),
                markersize=7,
                markeredgecolor=THEME["paper"],
                markeredgewidth=1.2,
            )
        axes.plot(
            differences,
            [0.8] * len(differences),
            "o",
            color=colour_of(number),
            markersize=4.5,
            alpha=0.75,
            markeredgewidth=0,
        )
        return themed(
            svg(figure, f"pairs-{name}", "Differences of the pairs, their mean and its interval")
        )


def axis(ends: tuple[float, float], margin: float | None) -> str:
    """Draw the axis under the rows."""
    with row((STRIP[0], AXIS), ends) as (figure, axes):
        axes.axhline(0.98, color=THEME["rule"], linewidth=1)
        for value in MaxNLocator(4, steps=(1, 2, 5, 10), symmetric=True).tick_values(*ends):
            if 0.86 * ends[0] < value < 0.86 * ends[1]:  # keeps the label inside the figure
                axes.plot([value, value], [0.98, 0.8], color=THEME["rule"], linewidth=1)
                text = true_minus(f"{value:+.4g}") if abs(value) > 1e-12 else "0"
                axes.text(value, 0.08, text, color=THEME["muted"], fontsize=11, ha="center")
        return themed(svg(figure, "pairs-axis", "Axis of the differences"))


def shade(axes: Axes, margin: float | None, ends: tuple[float, float]) -> None:
    if margin is not None:
        axes.axvspan(
            max(-margin, ends[0]),
            min(margin, ends[1]),
            color=THEME["muted"],
            alpha=0.13,
            linewidth=0,
        )
    axes.axvline(0.0, color=colour_of(0), linewidth=1.6)


@contextmanager
def row(size: tuple[int, int], ends: tuple[float, float]) -> Any:
    """Axes without a frame that fill the figure."""
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(size[0] / UNITS_PER_INCH, size[1] / UNITS_PER_INCH))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(*ends)
        axes.set_ylim(0, 1)
        axes.axis("off")
        yield figure, axes


def themed(text: str) -> str:
    for variable, colour in SERIES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text
