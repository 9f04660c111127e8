"""Figures of the report: each function draws numbers as one inline SVG string.

The SVG contains no user text (the page escapes names and samples) and no external reference. Its
colours are the CSS variables of `THEME`, which the page defines for light, dark and print. One unit
is one CSS pixel at full width. Equal numbers give an equal string.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec

from narrowgauge import formats
from narrowgauge.diagnose.band import Estimate, spread
from narrowgauge.diagnose.compare import Event, smooth
from narrowgauge.diagnose.format_text import superscript, true_minus
from narrowgauge.errors import ConfigError


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silence the warnings of the logger `name`."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# matplotlib warns at import if the home folder is not writable and its font cache is temporary.
# Figures use matplotlib's objects without pyplot, so that neither a display nor a user's
# matplotlibrc changes them.
with quiet("matplotlib"):
    import matplotlib.style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

# CSS variable -> the colour that stands for it while drawing, replaced in `svg`. All colours
# differ, so the replacement is unambiguous. Okabe and Ito's palette, for colour-blind readers.
THEME = {
    "ink": "#1c2026", "muted": "#5c6672", "rule": "#dfe3e8", "paper": "#fefefe", "run": "#0072b2", "reference": "#d55e00",
    "zone-zero": "#cc79a7", "zone-subnormal": "#e69f00", "zone-saturated": "#d55e01",
}  # fmt: skip
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 12, "text.color": THEME["ink"], "text.parse_math": False,
    "axes.edgecolor": THEME["rule"], "axes.labelcolor": THEME["muted"], "axes.facecolor": "none", "axes.axisbelow": True,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": THEME["rule"], "grid.linewidth": 1.0,
    "xtick.color": THEME["rule"], "xtick.labelcolor": THEME["muted"],
    "ytick.color": THEME["rule"], "ytick.labelcolor": THEME["muted"], "ytick.major.size": 0,
    "figure.facecolor": "none", "lines.solid_capstyle": "round", "lines.solid_joinstyle": "round", "svg.fonttype": "none",
}  # fmt: skip
UNITS_PER_INCH = 72  # matplotlib writes SVG at 72 units per inch

Points = Sequence[tuple[int, float]]  # (step, value)


P = ParamSpec("P")
_ON_PHONE: ContextVar[bool] = ContextVar("_ON_PHONE", default=False)
PHONE_WIDTH = 480  # units over the width of a phone, about 360 pixels: letters of 12 are read as 9


def for_desk_and_phone(draw: Callable[P, str]) -> Callable[P, str]:
    """Draw a figure twice, wide and narrow; page.css shows the one that fits the screen."""

    @functools.wraps(draw)
    def draw_both(*given: P.args, **named: P.kwargs) -> str:
        wide = draw(*given, **named)
        token = _ON_PHONE.set(True)
        try:
            narrow = draw(*given, **named)
        finally:
            _ON_PHONE.reset(token)
        both = f'<div class="desk">{wide}</div><div class="phone">{narrow}</div>'
        return both if wide else ""

    return draw_both


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Losses of one run."""

    training: Points  # one point per step; not finite where the run diverged
    validation: Points = ()


# --- Losses and metrics ---


@for_desk_and_phone
def loss_curves(
    runs: Sequence[Curve],
    unigram_entropy: float | None,
    marks: Mapping[str, Sequence[int]],
    radius: int,
    unit: str = "nats/token",
) -> str:
    """Draw training losses (raw and smoothed), validation losses, and vertical lines at `marks`.

    runs    the run, preceded by its reference if it has one
    marks   label -> steps
    radius  smoothing radius in steps
    unit    unit of the loss
    """
    with canvas(1000, 360) as (figure, axes):
        curves = [(curve, smooth(curve.training, radius)) for curve in runs]
        for curve, line in curves:
            draw_curve(axes, curve, line, is_run=curve is runs[-1])
        axes.set_ylim(*loss_limits(curves, unigram_entropy))
        axes.set_xlim(*step_limits(step for curve, _ in curves for step, _ in curve.training))
        if unigram_entropy is not None:
            axes.axhline(unigram_entropy, color=THEME["muted"], linewidth=1.2, dashes=(1.2, 2.4))
            known = f"unigram entropy of the training tokens {unigram_entropy:.2f}: knowing only how often each occurs"
            note(axes, known, (1, unigram_entropy), (-4, 4), axes.get_yaxis_transform(), ha="right")
        draw_marks(axes, marks)
        label_axes(axes, f"loss, {unit.replace('/', ' per ')}")
        return svg(figure, "loss", "Training and validation loss over the steps")


def draw_curve(axes: Axes, curve: Curve, line: Points, is_run: bool) -> None:
    """Draw one run: raw losses faint, smoothed losses strong, validation losses as points."""
    colour, marker, width = (THEME["run"], "o", 1.8) if is_run else (THEME["reference"], "D", 3.4)
    plot(axes, thinned(curve.training), color=colour, linewidth=0.8, alpha=0.4)
    plot(
        axes,
        line,
        color=colour,
        linewidth=width,
        marker="o" if len(line) == 1 else "",
        markersize=4,
    )
    points = [curve.validation[i] for i in spread(len(curve.validation), 40)]
    outline = {"markeredgewidth": 1.6, "markerfacecolor": THEME["paper"]}
    plot(
        axes, points, color=colour, linewidth=0, marker=marker, markersize=6.5, zorder=5, **outline
    )


def loss_limits(
    curves: Sequence[tuple[Curve, Points]], unigram_entropy: float | None
) -> tuple[float, float]:
    """Vertical limits: smoothed curves after `steep_start`, levels, spikes up to twice as high."""
    levels = [unigram_entropy] if unigram_entropy is not None else []
    raw: list[float] = []
    for curve, line in curves:
        late = curve.training[steep_start(len(curve.training)) :]
        first = late[0][0] if late else 0
        raw += [loss for _, loss in late]
        levels += [
            loss
            for step, loss in [*line, *curve.validation]
            if step >= first and math.isfinite(loss)
        ]
    top = 2 * max(levels, default=1.0)
    values = [*levels, *(loss for loss in raw if loss < top)] or [0.0, 1.0]
    margin = 0.05 * (max(values) - min(values)) or 0.5
    return min(values) - margin, max(values) + margin


def steep_start(count: int) -> int:
    """Number of first steps of a long run that may leave the drawn range.

    Their high losses would flatten the rest of the curve.
    """
    return count // 50 if count >= 1000 else 0


@for_desk_and_phone
def metric_curves(lines: Mapping[str, Points], others: Mapping[str, Points]) -> str:
    """Draw metrics of the evaluations, labelled at their ends.

    The reference's are thin and dashed.
    """
    with canvas(1000, 260, right=190) as (figure, axes):
        dashed: dict[str, Any] = {"linewidth": 1.2, "dashes": (3, 2)}
        for found, style in ((others, dashed), (lines, {"linewidth": 2.0, "marker": "o"})):
            for shade, points in enumerate(found.values()):
                colour = THEME["reference" if found is others else "run"]
                shown = thinned([point for point in points if math.isfinite(point[1])])
                plot(
                    axes,
                    shown,
                    color=colour,
                    alpha=max(0.35, 1 - 0.22 * shade),
                    markersize=4,
                    **style,
                )
        axes.set_xlim(*step_limits(step for points in lines.values() for step, _ in points))
        low, high = axes.get_ylim()
        place = -math.inf
        for value, name in sorted(
            (points[-1][1], name) for name, points in lines.items() if points
        ):
            if math.isfinite(value):
                # At least one line of text above the previous label.
                place = max(value, place + 0.09 * (high - low))
                note(axes, f"{name} {value:.4g}", (1, place), (8, -4), axes.get_yaxis_transform())
        label_axes(axes, "on the validation data")
        return svg(figure, "metrics", "Metrics of the evaluations over the steps")


@for_desk_and_phone
def difference(curve: Sequence[tuple[int, Estimate]], loss_unit: str = "nats per token") -> str:
    """Draw the moving mean of the paired difference with its band."""
    with canvas(1000, 230) as (figure, axes):
        banded = [(step, point) for step, point in curve if point.half_width is not None]
        low, high = (
            [point.mean + side * (point.half_width or 0.0) for _, point in banded]
            for side in (-1, 1)
        )
        axes.fill_between(
            [step for step, _ in banded], low, high, color=THEME["run"], alpha=0.18, linewidth=0
        )
        axes.axhline(0.0, color=THEME["reference"], linewidth=1.6)
        plot(axes, [(step, point.mean) for step, point in curve], color=THEME["run"], linewidth=1.8)
        values = [*(point.mean for _, point in curve), *low, *high, 0.0]
        margin = 0.08 * (max(values) - min(values)) or 0.001
        axes.set_ylim(min(values) - margin, max(values) + margin)
        axes.set_xlim(*step_limits(step for step, _ in curve))
        signed_values(axes)
        label_axes(axes, f"training loss minus the reference's, {loss_unit}")
        return svg(
            figure, "difference", "Difference of the two training losses with the band of its mean"
        )


# --- Tensors against their format ---


def format_of(event: Event) -> formats.Format | None:
    """Format of a `tensor` event; None if this version does not have it."""
    try:
        return formats.get(event.get("format", ""))
    except ConfigError:
        return None


def log2(value: float | None) -> float:
    """log2, or NaN if it is undefined."""
    return (
        math.log2(value) if value is not None and math.isfinite(value) and value > 0 else math.nan
    )


def histogram(event: Event, name: str) -> str:
    """Draw a histogram of magnitudes over the range of the format at this scale; '' if it is empty.

    name  makes the ids in the SVG unique on the page
    """
    counted = event.get("histogram") or {}
    counts, lowest = counted.get("counts"), counted.get("lowest_exponent", 0)
    if not counts:
        return ""
    with canvas(620, 190, left=48) as (figure, axes):
        shares = [100 * count / (sum(counts) or 1) for count in counts]
        axes.bar(
            range(lowest, lowest + len(counts)),
            shares,
            width=0.86,
            align="edge",
            color=THEME["run"],
            linewidth=0,
        )
        axes.set_ylim(0, 1.3 * max(shares))
        left, right = lowest - 1.0, lowest + len(counts) + 1.0
        format, scale = format_of(event), log2(event.get("scale"))
        if format is not None and math.isfinite(scale):
            zero, top = scale + log2(format.smallest / 2), scale + log2(format.max)
            normal = scale + log2(getattr(format, "smallest_normal", format.smallest / 2))
            # At most ten octaves of the zone that rounds to zero.
            left, right = max(min(left + 0.5, zero - 3), zero - 10), max(right - 0.5, top + 2.5)
            axes.set_xlim(left, right)
            inner = "evenly spaced" if isinstance(format, formats.IntFormat) else "normal"
            zones = {
                "zero": (left, zero),
                "subnormal": (zero, normal),
                inner: (normal, top),
                "saturated": (top, right),
            }
            draw_zones(axes, zones)
        axes.set_xlim(left, right)
        label_exponents(axes.xaxis, right - left)
        axes.yaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.set_xlabel("magnitude |x|", loc="right", labelpad=2)
        return svg(
            figure, f"histogram-{name}", "Histogram of magnitudes over the range of the format"
        )


def draw_zones(axes: Axes, zones: dict[str, tuple[float, float]]) -> None:
    """Tint the zones that have a colour and label the zones that are wide enough."""
    left, right = axes.get_xlim()
    for label, (start, end) in zones.items():
        start, end = max(start, left), min(end, right)
        colour = THEME.get(f"zone-{label}")
        if colour is not None and end > start:
            axes.axvspan(start, end, color=colour, alpha=0.2, linewidth=0, zorder=0)
        # 562 is the width of the axes in pixels, 6.2 the mean width of a letter.
        if (end - start) / (right - left) * 562 > 6.2 * len(label):
            note(
                axes, label, ((start + end) / 2, 1), (0, 5), axes.get_xaxis_transform(), ha="center"
            )


def scale_history(events: Sequence[Event], name: str) -> str:
    """Draw amax over the steps, and the largest magnitude that the scale can represent."""
    format = format_of(events[-1])
    steps, amax = [event["step"] for event in events], [log2(event.get("amax")) for event in events]
    top = [
        log2(event.get("scale")) + (log2(format.max) if format else math.nan) for event in events
    ]
    seen = [value for value in [*amax, *top] if math.isfinite(value)] or [0.0]
    bottom, ceiling = math.floor(min(seen)) - 2, math.ceil(max(seen)) + 2
    with canvas(380, 190, left=48) as (figure, axes):
        axes.set_ylim(bottom, ceiling)
        if any(math.isfinite(value) for value in top):
            limit = THEME["zone-saturated"]
            axes.fill_between(steps, top, ceiling, color=limit, alpha=0.12, linewidth=0)
            marker = "o" if len(steps) == 1 else ""
            single: dict[str, Any] = {
                "marker": marker,
                "markersize": 4,
                "markerfacecolor": THEME["paper"],
            }
            axes.plot(steps, top, color=limit, linewidth=1.6, dashes=(4, 2), **single)
            note(axes, "saturates", (1, 1), (-4, -4), "axes fraction", ha="right", va="top")
        axes.plot(
            steps,
            amax,
            color=THEME["run"],
            linewidth=1.8,
            marker="o" if len(steps) < 30 else "",
            markersize=4,
        )
        axes.set_xlim(*step_limits(steps))
        label_exponents(axes.yaxis, ceiling - bottom, ticks=4)
        label_axes(
            axes, f"largest |x|, and scale × {format.max:,g}" if format else "largest |x|", ticks=4
        )
        return svg(
            figure, f"history-{name}", "Largest magnitude and the largest that fits over the steps"
        )


# --- Parts of all figures ---


@contextmanager
def canvas(
    width: int, height: int, *, left: int = 56, right: int = 10
) -> Iterator[tuple[Figure, Axes]]:
    """A figure of width x height CSS pixels with one pair of axes, in the report's style."""
    top, bottom = 28, 40
    width = min(width, PHONE_WIDTH) if _ON_PHONE.get() else width
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(width / UNITS_PER_INCH, height / UNITS_PER_INCH))
        box = (
            left / width,
            bottom / height,
            (width - left - right) / width,
            (height - top - bottom) / height,
        )
        yield figure, figure.add_axes(box)


def plot(axes: Axes, points: Points, **style: Any) -> None:
    axes.plot([step for step, _ in points], [value for _, value in points], **style)


def thinned(points: Points, limit: int = 1000) -> Points:
    """Reduce to about `limit` points.

    Takes the lowest and highest point of each interval, so that spikes stay visible.
    """
    if len(points) <= limit:
        return points
    length = math.ceil(2 * len(points) / limit)
    kept = {points[0], points[-1]}
    for first in range(0, len(points), length):
        stretch = points[first : first + length]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch[:1]
        kept |= {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
    return sorted(kept, key=lambda point: point[0])


def step_limits(steps: Iterable[int]) -> tuple[float, float]:
    """From the first to the last step, with a margin for markers."""
    steps = list(steps) or [0, 1]
    margin = 0.012 * (max(steps) - min(steps)) or 0.5
    return min(steps) - margin, max(steps) + margin


def note(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    coordinates: Any,
    **style: Any,
) -> None:
    """Draw small muted text, `offset` pixels away from a point."""
    muted: dict[str, Any] = {"color": THEME["muted"], "fontsize": 11}
    axes.annotate(text, place, offset, coordinates, "offset points", **muted | style)


def draw_marks(axes: Axes, marks: Mapping[str, Sequence[int]]) -> None:
    """Draw vertical lines; the first of each kind has its label."""
    middle = sum(axes.get_xlim()) / 2
    for label, steps in marks.items():
        for step in steps:
            axes.axvline(step, color=THEME["ink"], linewidth=1.0, dashes=(3, 2))
        for step in steps[:1]:
            side, align = (-4, "right") if step > middle else (4, "left")
            style = {"color": THEME["ink"], "ha": align, "va": "top"}
            note(axes, label, (step, 1), (side, -3), axes.get_xaxis_transform(), **style)


def label_exponents(axis: Any, octaves: float, ticks: int = 9) -> None:
    """Label an axis with powers of two, at most about `ticks`."""
    spacing = next((step for step in (1, 2, 4, 8, 16, 32) if octaves / step <= ticks), 64)
    axis.set_major_locator(MultipleLocator(spacing))
    axis.set_major_formatter(FuncFormatter(lambda value, _: "2" + superscript(round(value))))


def signed_values(axes: Axes) -> None:
    """Label the vertical axis with signed differences."""
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: true_minus(f"{value:+g}") if value else "0")
    )


def label_axes(axes: Axes, top: str, ticks: int = 9) -> None:
    """Label the steps, and write the vertical axis's label horizontally above its left end."""
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value == round(value) else "")
    )
    axes.set_xlabel("step", loc="right", labelpad=2)
    note(axes, top, (0, 1), (0, 12), ("figure fraction", "axes fraction"), va="bottom", fontsize=12)


# Removes matplotlib's own style, metadata, no-op rotations and sizes; the page sets font and width.
CLEANING = (
    (r"<style.*?</style>|<defs>\s*</defs>|<!--.*?-->|<metadata>.*?</metadata>", ""),
    (r' transform="rotate\(-0 [^"]*"| xmlns(?::\w+)?="[^"]*"| version="1.1"', ""),
    (r'(?<=<svg)([^>]*?) width="[^"]*"', r"\1"),
    (r'(?<=<svg)([^>]*?) height="[^"]*"', r"\1"),
    ("xlink:href", "href"),
    (r"'DejaVu Sans'[^;\"]*", "var(--sans)"),
    (r"\n\s*", "\n"),
)


def svg(figure: Figure, name: str, title: str) -> str:
    """Render the figure as inline SVG with themed colours, short numbers and unique ids."""
    buffer = io.StringIO()
    name += "-phone" if _ON_PHONE.get() else ""
    # matplotlib derives element ids from this salt; without it the ids are random and pages differ.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for pattern, replacement in CLEANING:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    # Drops ids that no href or url() refers to: they would collide between figures of one page.
    used = set(re.findall(r"#([\w.-]+)[\")]", text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
    numbers = r'(?<= )(?:d|x|y|transform|points)="[^"]*"'
    text = re.sub(numbers, lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
    for variable, colour in THEME.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()
