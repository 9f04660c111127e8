"""The report's figures: numbers in, one inline SVG element out.

Each function returns a string to paste into HTML. It holds no user text (names and samples belong to the page, which
escapes them), no outside reference, and no colour of its own: `THEME` names CSS variables, which the page sets for
light, dark and print. One unit of the drawing is one CSS pixel at full width. The same numbers give the same string.

Matplotlib is used through its objects, never through pyplot, and without the user's matplotlibrc.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.diagnose.compare import Estimate, smooth, spread
from narrowgauge.diagnose.format_text import superscript, true_minus


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Errors only from the logger `name`."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# Where the home cannot be written, matplotlib warns at import that its font cache is in a temporary folder. Fine.
with quiet("matplotlib"):
    import matplotlib.style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

# CSS variable: the colour that stands for it alone while drawing. After Okabe and Ito, for colour-blind readers.
THEME = {
    "ink": "#1c2026",
    "muted": "#5c6672",
    "rule": "#dfe3e8",
    "paper": "#fefefe",
    "run": "#0072b2",
    "reference": "#d55e00",
    "zone-zero": "#cc79a7",
    "zone-subnormal": "#e69f00",
    "zone-saturated": "#d55e01",
}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "text.color": THEME["ink"],
    "text.parse_math": False,
    "axes.edgecolor": THEME["rule"],
    "axes.labelcolor": THEME["muted"],
    "axes.facecolor": "none",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": THEME["rule"],
    "grid.linewidth": 1.0,
    "xtick.color": THEME["rule"],
    "xtick.labelcolor": THEME["muted"],
    "ytick.color": THEME["rule"],
    "ytick.labelcolor": THEME["muted"],
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "svg.fonttype": "none",
}
UNITS_PER_INCH = 72  # of matplotlib's SVG


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The losses of one run."""

    steps: Sequence[int]
    losses: Sequence[float]  # training, one per step; not finite where the run broke
    evaluations: Sequence[tuple[int, float]] = ()  # (step, validation loss)


@dataclass(frozen=True, kw_only=True)
class Range:
    """What a format can hold: magnitudes of the codes. smallest_normal is None where all codes are evenly spaced."""

    largest: float
    smallest: float
    smallest_normal: float | None = None


def range_of(name: str) -> Range | None:
    """Of the format called `name`, from the registry; None for an unknown one. Imports torch."""
    from narrowgauge import formats

    if name not in formats.NAMES:
        return None
    format = formats.get(name)
    normal = format.smallest_normal if isinstance(format, formats.FloatFormat) and format.mantissa else None
    return Range(largest=format.max, smallest=format.smallest, smallest_normal=normal)


@dataclass(frozen=True, kw_only=True)
class TensorPicture:
    """One tensor at one step: the counts by floor(log2 |x|), and the scale that was in use, positive and finite."""

    lowest_exponent: int
    counts: Sequence[int]
    scale: float | None
    range: Range | None


@dataclass(frozen=True, kw_only=True)
class History:
    """One tensor over the run; None where a reading is not positive and finite."""

    steps: Sequence[int]
    amax: Sequence[float | None]
    scale: Sequence[float | None]
    range: Range | None


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Things that happened to a run, by step."""

    resumed: Sequence[int] = field(default_factory=tuple)
    switched: Sequence[int] = field(default_factory=tuple)
    nonfinite: int | None = None


def loss_curves(
    run: Curve,
    reference: Curve | None,
    unigram_entropy: float | None,
    marks: Marks,
    radius: int,
    unit: str = "nats/token",
) -> str:
    """Training losses, raw and smoothed, validation losses as points, and what happened on the way."""
    with canvas(1000, 360, left=56, bottom=40, top=28) as (figure, axes):
        for curve, colour, marker, width in ((reference, "reference", "D", 3.4), (run, "run", "o", 1.8)):
            if curve is not None:
                draw_curve(axes, curve, THEME[colour], marker, width, radius)
        curves = [curve for curve in (run, reference) if curve is not None]
        axes.set_ylim(*loss_limits(curves, unigram_entropy, radius))
        axes.set_xlim(*step_limits([step for curve in curves for step in curve.steps]))
        if unigram_entropy is not None:
            axes.axhline(unigram_entropy, color=THEME["muted"], linewidth=1.2, dashes=(1.2, 2.4))
            known = f"unigram entropy {unigram_entropy:.2f}: knowing only how often each token occurs"
            note(axes, known, (1, unigram_entropy), (-4, 4), axes.get_yaxis_transform(), ha="right")
        draw_marks(axes, marks)
        label_steps(axes)
        label_top(axes, f"loss, {unit.replace('/', ' per ')}")
        return svg(figure, "loss", "Training and validation loss over the steps")


def metric_curves(lines: dict[str, list[tuple[int, float]]], others: dict[str, list[tuple[int, float]]]) -> str:
    """Metrics of the evaluations by name, each with its name at its end; those of the reference thin and dashed."""
    with canvas(1000, 260, left=56, bottom=40, top=28, right=190) as (figure, axes):
        dashed: dict[str, Any] = {"linewidth": 1.2, "dashes": (3, 2)}
        for found, style in ((others, dashed), (lines, {"linewidth": 2.0, "marker": "o"})):
            for shade, points in enumerate(found.values()):
                colour = THEME["reference" if found is others else "run"]
                alpha = max(0.35, 1 - 0.22 * shade)
                shown = [(step, value) for step, value in points if math.isfinite(value)]
                axes.plot(*columns(thinned(shown)), color=colour, alpha=alpha, markersize=4, **style)
        ends = [(points[-1][1], name) for name, points in lines.items() if points and math.isfinite(points[-1][1])]
        axes.set_xlim(*step_limits([step for points in lines.values() for step, _ in points]))
        for place, (value, name) in zip(apart([value for value, _ in sorted(ends)], axes), sorted(ends), strict=True):
            note(axes, f"{name} {value:.4g}", (1, place), (8, -4), axes.get_yaxis_transform())
        label_steps(axes)
        label_top(axes, "on the validation data")
        return svg(figure, "metrics", "Metrics of the evaluations over the steps")


def apart(values: Sequence[float], axes: Axes) -> list[float]:
    """Ascending places for labels, each at its value or as far above the one before as a line of text is high."""
    low, high = axes.get_ylim()
    places: list[float] = []
    for value in values:
        places.append(max(value, places[-1] + 0.09 * (high - low)) if places else value)
    return places


def difference(curve: Sequence[tuple[int, Estimate]]) -> str:
    """The moving mean of the paired difference, with its noise band where there is one."""
    with canvas(1000, 230, left=56, bottom=40, top=28) as (figure, axes):
        steps = [step for step, _ in curve]
        means = [point.mean for _, point in curve]
        banded = [(step, point) for step, point in curve if point.half_width is not None]
        low, high = ([point.mean + side * (point.half_width or 0.0) for _, point in banded] for side in (-1, 1))
        axes.fill_between([step for step, _ in banded], low, high, color=THEME["run"], alpha=0.18, linewidth=0)
        axes.axhline(0.0, color=THEME["reference"], linewidth=1.6)
        axes.plot(steps, means, color=THEME["run"], linewidth=1.8, marker="o" if len(steps) == 1 else "")
        values = [*means, *low, *high, 0.0]
        margin = 0.08 * (max(values) - min(values)) or 0.001
        axes.set_ylim(min(values) - margin, max(values) + margin)
        axes.set_xlim(*step_limits(steps))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: true_minus(f"{value:+g}") if value else "0"))
        label_steps(axes)
        label_top(axes, "training loss minus the reference's, nats per token")
        return svg(figure, "difference", "Difference of the two training losses with its noise band")


def histogram(picture: TensorPicture, name: str) -> str:
    """Magnitudes over the range that the format holds at this scale. `name` keeps this figure's ids its own."""
    with canvas(620, 190, left=48, bottom=40, top=28) as (figure, axes):
        total = sum(picture.counts) or 1
        exponents = range(picture.lowest_exponent, picture.lowest_exponent + len(picture.counts))
        shares = [100 * count / total for count in picture.counts]
        axes.bar(exponents, shares, width=0.86, align="edge", color=THEME["run"], linewidth=0)
        left, right = drawn_exponents(picture)
        axes.set_xlim(left, right)
        axes.set_ylim(0, 1.3 * max(shares, default=1.0))
        draw_zones(axes, picture)
        label_exponents(axes.xaxis, right - left)
        axes.yaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.set_xlabel("magnitude |x|", loc="right", labelpad=2)
        return svg(figure, f"histogram-{name}", "Histogram of magnitudes over the range of the format")


def scale_history(history: History, name: str) -> str:
    """amax over the steps, and the scale, drawn as the largest magnitude that the format held at it."""
    with canvas(380, 190, left=48, bottom=40, top=28) as (figure, axes):
        amax = [math.log2(value) if value else math.nan for value in history.amax]
        marker = "o" if len(history.steps) < 30 else ""
        top = limits(history)
        seen = [value for value in [*amax, *top] if math.isfinite(value)] or [0.0]
        bottom, ceiling = math.floor(min(seen)) - 2, math.ceil(max(seen)) + 2
        axes.set_ylim(bottom, ceiling)
        if any(math.isfinite(value) for value in top):
            axes.fill_between(history.steps, top, ceiling, color=THEME["zone-saturated"], alpha=0.12, linewidth=0)
            (line,) = axes.plot(history.steps, top, color=THEME["zone-saturated"], linewidth=1.6, dashes=(4, 2))
            line.set(marker="o" if len(history.steps) == 1 else "", markersize=4, markerfacecolor=THEME["paper"])
            note(axes, "saturates", (1, 1), (-4, -4), "axes fraction", ha="right", va="top")
        axes.plot(history.steps, amax, color=THEME["run"], linewidth=1.8, marker=marker, markersize=4)
        axes.set_xlim(*step_limits(history.steps))
        label_exponents(axes.yaxis, ceiling - bottom, ticks=4)
        label_steps(axes, ticks=4)
        label_top(axes, f"largest |x|, and scale × {history.range.largest:,g}" if history.range else "largest |x|")
        return svg(figure, f"history-{name}", "Largest magnitude and the largest that fits over the steps")


@contextmanager
def canvas(
    width: int, height: int, *, left: int, bottom: int, top: int, right: int = 10
) -> Iterator[tuple[Figure, Axes]]:
    """A figure of width x height CSS pixels with one pair of axes inside these margins, in the report's style."""
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(width / UNITS_PER_INCH, height / UNITS_PER_INCH))
        box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
        yield figure, figure.add_axes(box)


def draw_curve(axes: Axes, curve: Curve, colour: str, marker: str, width: float, radius: int) -> None:
    """One run: the raw losses faint, the smoothed ones on top, validation as points."""
    raw = thinned(list(zip(curve.steps, curve.losses, strict=True)))
    axes.plot(*columns(raw), color=colour, linewidth=0.8, alpha=0.4)
    smoothed = [(curve.steps[i], loss) for i, loss in smooth(curve.losses, radius)]
    axes.plot(*columns(smoothed), color=colour, linewidth=width, marker="o" if len(smoothed) == 1 else "", markersize=4)
    points = [curve.evaluations[i] for i in spread(len(curve.evaluations), 40)]
    (outlined,) = axes.plot(*columns(points), color=colour, linewidth=0, marker=marker, markersize=6.5, zorder=5)
    outlined.set(markeredgewidth=1.6, markerfacecolor=THEME["paper"])


def columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def thinned(points: list[tuple[int, float]], limit: int = 1000) -> list[tuple[int, float]]:
    """At most about `limit` points: of each stretch the lowest and the highest, so that spikes stay visible."""
    if len(points) <= limit:
        return points
    length = math.ceil(2 * len(points) / limit)
    kept = [points[0], points[-1]]
    for first in range(0, len(points), length):
        stretch = points[first : first + length]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch[:1]
        kept += [min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])]
    return sorted(set(kept), key=lambda point: point[0])


def loss_limits(curves: Sequence[Curve], unigram_entropy: float | None, radius: int) -> tuple[float, float]:
    """Room for the smoothed curves after their `steep_start`, for the levels, and for spikes up to twice as high."""
    levels = [unigram_entropy] if unigram_entropy is not None else []
    for curve in curves:
        start = steep_start(len(curve.losses))
        levels += [value for place, value in smooth(curve.losses, radius) if place >= start and math.isfinite(value)]
        levels += [loss for _, loss in curve.evaluations if math.isfinite(loss)]
    top = 2 * max(levels, default=1.0)
    raw = [loss for curve in curves for loss in curve.losses[steep_start(len(curve.losses)) :] if loss < top]
    low, high = min([*levels, *raw], default=0.0), max([*levels, *raw], default=1.0)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def steep_start(count: int) -> int:
    """How many first steps of a long run may lie above the drawn range, lest the rest become a flat line under them."""
    return count // 50 if count >= 1000 else 0


def step_limits(steps: Sequence[int]) -> tuple[float, float]:
    """From the first to the last step, with room for the markers at either end."""
    first, last = min(steps, default=0), max(steps, default=1)
    margin = 0.012 * (last - first) or 0.5
    return first - margin, last + margin


def note(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], coordinates: Any, **style: Any
) -> None:
    """Small muted text, `offset` pixels away from a place."""
    muted: dict[str, Any] = {"color": THEME["muted"], "fontsize": 11}
    axes.annotate(text, place, offset, coordinates, "offset points", **muted | style)


def draw_marks(axes: Axes, marks: Marks) -> None:
    """Vertical lines, with words at the first of each kind."""
    left, right = axes.get_xlim()
    kinds = (("resumed", marks.resumed), ("switched", marks.switched), ("loss not finite", [marks.nonfinite]))
    for label, steps in kinds:
        for place, step in enumerate(step for step in steps if step is not None):
            axes.axvline(step, color=THEME["ink"], linewidth=1.0, dashes=(3, 2))
            if place == 0:
                side = -1 if step > (left + right) / 2 else 1
                style = {"color": THEME["ink"], "ha": "right" if side < 0 else "left", "va": "top"}
                note(axes, label, (step, 1), (4 * side, -3), axes.get_xaxis_transform(), **style)


def draw_zones(axes: Axes, picture: TensorPicture) -> None:
    """Tints and names for what becomes zero, is subnormal, or saturates; nothing where the range is not known."""
    if picture.range is None or not picture.scale:
        return
    held, scale = picture.range, picture.scale
    left, right = axes.get_xlim()
    zero, top = math.log2(scale * held.smallest / 2), math.log2(scale * held.largest)
    normal = math.log2(scale * held.smallest_normal) if held.smallest_normal else zero
    zones = [
        (left, zero, "zone-zero", "zero"),
        (zero, normal, "zone-subnormal", "subnormal"),
        (normal, top, None, "normal" if held.smallest_normal else "evenly spaced"),
        (top, right, "zone-saturated", "saturates"),
    ]
    for start, end, colour, label in zones:
        start, end = max(start, left), min(end, right)
        if colour is not None:
            axes.axvspan(start, end, color=THEME[colour], alpha=0.2, linewidth=0, zorder=0)
        pixels = (end - start) / (right - left) * 562
        if pixels > 6.2 * len(label):  # there is room for the words
            note(axes, label, ((start + end) / 2, 1), (0, 5), axes.get_xaxis_transform(), ha="center")


def drawn_exponents(picture: TensorPicture) -> tuple[float, float]:
    """The drawn part of the axis: the format's range and the values, but not more than ten octaves that become zero."""
    ends = [picture.lowest_exponent, picture.lowest_exponent + max(len(picture.counts), 1)]
    if picture.range is None or not picture.scale:
        return ends[0] - 1, ends[1] + 1
    zero, top = math.log2(picture.scale * picture.range.smallest / 2), math.log2(picture.scale * picture.range.largest)
    return max(min(ends[0] - 0.5, zero - 3), zero - 10), max(ends[1] + 0.5, top + 2.5)


def limits(history: History) -> list[float]:
    """log2 of the largest magnitude that fits at each step, NaN where the scale or the range is not known."""
    if history.range is None:
        return [math.nan] * len(history.steps)
    return [math.log2(scale * history.range.largest) if scale else math.nan for scale in history.scale]


def label_exponents(axis: Any, octaves: float, ticks: int = 9) -> None:
    """Powers of two, at most about `ticks` of them."""
    spacing = next((step for step in (1, 2, 4, 8, 16, 32) if octaves / step <= ticks), 64)
    axis.set_major_locator(MultipleLocator(spacing))
    axis.set_major_formatter(FuncFormatter(lambda value, _: "2" + superscript(round(value))))


def label_steps(axes: Axes, ticks: int = 9) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value == round(value) else ""))
    axes.set_xlabel("step", loc="right", labelpad=2)


def label_top(axes: Axes, text: str) -> None:
    """What the vertical axis counts, written level above its left end."""
    note(axes, text, (0, 1), (0, 12), ("figure fraction", "axes fraction"), va="bottom", fontsize=12)


def svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an SVG element for inline use: themed colours, short numbers, no id that two could share."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for pattern, replacement in CLEANING:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    used = set(re.findall(r"#([\w.-]+)[\")]", text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
    text = re.sub(
        r'(?<= )(?:d|x|y|transform|points)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text
    )
    for variable, colour in THEME.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()


CLEANING = (
    (r"<style.*?</style>", ""),
    (r"<defs>\s*</defs>", ""),
    (r' transform="rotate\(-0 [^"]*"', ""),
    (r"<!--.*?-->", ""),
    (r"<metadata>.*?</metadata>", ""),
    (r'(?<=<svg)([^>]*?) width="[^"]*"', r"\1"),
    (r'(?<=<svg)([^>]*?) height="[^"]*"', r"\1"),
    (r' xmlns(?::\w+)?="[^"]*"', ""),
    (r' version="1.1"', ""),
    ("xlink:href", "href"),
    (r"'DejaVu Sans'[^;\"]*", "var(--sans)"),
    (r"\n\s*", "\n"),
)
