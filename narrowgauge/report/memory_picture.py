"""Stacked picture of memory over one optimizer step: live bytes by part at the peak of each phase.

A column is a phase of the step: each block forward, the head with the loss, each block backward,
and the optimizer. Beside the columns stands the largest one, part by part with sizes. A line marks
the memory that the card can give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from narrowgauge.errors import ConfigError
from narrowgauge.report.figures import STYLE, THEME, UNITS_PER_INCH

GIB = 2**30
WIDTH, HEIGHT = 1000, 440
DOTS_PER_INCH = 2 * UNITS_PER_INCH
FORMATS = (".png", ".svg", ".pdf")
# From the bottom: persistent parts, then temporary ones. Okabe and Ito's colours, paler for parts
# that are usually large.
PARTS: Mapping[str, tuple[str, str]] = {
    "weights": ("weights", "#4c6a85"),
    "states": ("optimizer's states", "#8fa9bf"),
    "codes": ("codes of weights", "#7b5aa6"),
    "gradients": ("gradients", "#cc79a7"),
    "batch": ("batch", "#1c2026"),
    "saved": ("saved for backward", "#56b4e9"),
    "head": ("logits and loss", "#009e73"),
    "transient": ("at work", "#e8b64c"),
}
STRETCHES = {"forward": "forward", "head": "loss", "backward": "backward", "step": "update"}
GAP = 0.055  # between two labels, as a fraction of the picture's height
WIDE = 0.035  # width of a column that is not a block, as a fraction of all columns
LEAST = 0.004  # fraction of the peak below which a part has no label


def refuse(path: Path) -> None:
    """Raise ConfigError for a file name that is not a picture.

    Called before tracing, which takes longer.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"picture = {str(path)!r}: end its name in {', '.join(FORMATS)}.", code="picture.suffix"
        )


def draw(answer: Mapping[str, Any], path: Path) -> None:
    """Write the picture of an answer of `narrowgauge plan`.

    Raises ConfigError for a file name that is not a picture, or that cannot be written.
    """
    refuse(path)
    with matplotlib.style.context(["default", STYLE]):
        try:
            figure_of(answer).savefig(path, dpi=DOTS_PER_INCH, facecolor=THEME["paper"])
        except OSError as error:
            raise ConfigError(
                f"picture = {str(path)!r}: cannot be written: {error.strerror or error}. Name a file in a folder that is there and yours.",
                code="picture.unwritable",
            ) from error


def figure_of(answer: Mapping[str, Any]) -> Figure:
    """Draw an answer of the planner.

    answer  "timeline": phases with `phase` and `parts` in bytes; "card" and "run" as `narrowgauge
            plan` returns them
    """
    columns, usable = merged(answer["timeline"]), answer["card"]["usable_bytes"]
    figure = Figure(figsize=(WIDTH / UNITS_PER_INCH, HEIGHT / UNITS_PER_INCH))
    axes = figure.add_axes((0.052, 0.09, 0.678, 0.73))
    most = max(columns, key=_total)
    # The card's limit is drawn only if it is less than twice the peak; else it is a line of text.
    top = 1.08 * max(_total(most), usable if usable < 2 * _total(most) else 0) / GIB
    for each in (axes, beside := figure.add_axes((0.755, 0.09, 0.24, 0.73), sharey=axes)):
        each.set_ylim(0, top)
    edges = _edges(columns)
    _stack(axes, columns, edges)
    _stretches(axes, columns, edges, top)
    _name_others(axes, columns, edges, most["parts"], top)
    _at_peak(beside, most["parts"], top)
    _limit(axes, beside, answer["card"], top)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    style: dict[str, Any] = {"va": "center", "color": THEME["ink"]}
    figure.text(0.012, 0.945, answer["run"], fontsize=13, weight="bold", **style)
    figure.text(0.755, 0.945, f"{_total(most) / GIB:.1f} GiB", fontsize=13, weight="bold", **style)
    muted = {**style, "color": THEME["muted"], "fontsize": 11}
    figure.text(0.012, 0.885, "GiB alive at the largest moment of each phase of a step", **muted)
    figure.text(0.755, 0.885, "at the largest moment", **muted)
    return figure


def _total(column: Mapping[str, Any]) -> int:
    return sum(column["parts"].values())


def merged(timeline: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One column per block: the larger of the block itself and the moment after it."""
    groups = groupby(timeline, key=lambda each: each["phase"].removesuffix(" end"))
    return [max(group, key=_total) for _, group in groups]


def _edges(columns: Sequence[Mapping[str, Any]]) -> list[float]:
    """Edges of the columns; columns that are not blocks are wider, so that they stay visible."""
    places = [0.0]
    for each in columns:
        is_block = each["phase"][-1].isdigit()
        places.append(places[-1] + (1.0 if is_block else max(1.0, WIDE * len(columns))))
    return places


def _stack(axes: Axes, columns: Sequence[Mapping[str, Any]], edges: Sequence[float]) -> None:
    """Draw one step-shaped area for each part."""
    base = [0.0] * len(columns)
    for part, (_, colour) in PARTS.items():
        above = [
            low + each["parts"].get(part, 0) / GIB for low, each in zip(base, columns, strict=True)
        ]
        axes.fill_between(
            edges, [*base, base[-1]], [*above, above[-1]], step="post", color=colour, linewidth=0
        )
        base = above
    axes.step(edges, [*base, base[-1]], where="post", color=THEME["ink"], linewidth=1.0)
    axes.set_xlim(0, edges[-1])


def _stretches(
    axes: Axes, columns: Sequence[Mapping[str, Any]], edges: Sequence[float], top: float
) -> None:
    """Label forward, loss, backward and update below the columns, with a line between them."""
    axes.set_xticks([])
    for name, start, end in stretches(columns):
        if start:
            axes.axvline(
                edges[start], color=THEME["ink"], linewidth=0.9, dashes=(1.2, 2.4), zorder=3
            )
        middle = (edges[start] + edges[end]) / 2
        axes.text(
            middle,
            -0.025 * top,
            STRETCHES[name],
            ha="center",
            va="top",
            fontsize=11,
            color=THEME["muted"],
        )


def stretches(columns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Yield (kind of phase, first column, end column); backward of the head counts as the loss."""
    # Backward of the head is "backward" without a block number.
    kinds = [
        "head" if each["phase"] in ("head", "backward") else each["phase"].split()[0]
        for each in columns
    ]
    if (
        "head" not in kinds or kinds.count("backward") == 0
    ):  # a model without blocks has one phase backward
        kinds = [each["phase"].split()[0] for each in columns]
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(kinds), 1) if a != b), len(kinds)]
    for start, end in pairwise(starts):
        yield kinds[start], start, end


def _name_others(
    axes: Axes, columns: Sequence[Mapping[str, Any]], edges: Sequence[float], named: Mapping[str, int], top: float
) -> None:  # fmt: skip
    """Label the parts that are absent at the peak, such as gradients, inside their own area."""
    for part, (words, _) in PARTS.items():
        at = max(range(len(columns)), key=lambda place: columns[place]["parts"].get(part, 0))
        size = columns[at]["parts"].get(part, 0) / GIB
        if named.get(part, 0) / GIB > 0.01 * top or size < 0.06 * top:
            continue
        below = (
            sum(
                columns[at]["parts"].get(other, 0)
                for other in list(PARTS)[: list(PARTS).index(part)]
            )
            / GIB
        )
        style: dict[str, Any] = {
            "color": THEME["ink"],
            "fontsize": 11,
            "va": "center",
            "ha": "right",
        }
        axes.text(
            edges[at + 1] - 0.008 * edges[-1], below + size / 2, f"{words} {size:.1f}", **style
        )


def _at_peak(axes: Axes, parts: Mapping[str, int], top: float) -> None:
    """Draw the peak as a bar with its parts named beside it."""
    axes.axis("off")
    axes.set_xlim(0, 10)
    total, base, labels = sum(parts.values()), 0.0, list[tuple[float, str]]()
    axes.plot([0.0, 0.9], [0.0, 0.0], color=THEME["rule"])
    for part, (words, colour) in PARTS.items():
        size = parts.get(part, 0) / GIB
        axes.bar(0.45, size, bottom=base, width=0.9, color=colour, linewidth=0)
        if size > LEAST * total / GIB:
            labels.append((base + size / 2, f"{size:.1f}  {words}"))
        base += size
    place = -1.0
    for middle, words in labels:
        # Pushes a label up until it no longer overlaps the one below.
        place = max(middle, place + GAP * top)
        axes.plot([1.0, 1.35], [middle, place], color=THEME["muted"], linewidth=0.8)
        axes.text(1.5, place, words, fontsize=11, color=THEME["ink"], va="center")


def _limit(axes: Axes, beside: Axes, card: Mapping[str, Any], top: float) -> None:
    usable = card["usable_bytes"] / GIB
    if not usable:
        return
    words = f"{card['name']}: {usable:.1f} GiB can be used"
    style: dict[str, Any] = {"color": THEME["reference"], "fontsize": 11, "weight": "bold"}
    if usable > top:
        axes.text(
            0.012,
            0.97,
            f"{words}, more than twice as much",
            va="top",
            transform=axes.transAxes,
            **style,
        )
        return
    axes.axhline(usable, color=THEME["reference"], linewidth=1.6, zorder=4)
    beside.plot([0, 0.9], [usable, usable], color=THEME["reference"], linewidth=1.6, zorder=4)
    box = {"facecolor": THEME["paper"], "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    axes.text(
        0.012 * axes.get_xlim()[1],
        usable + 0.012 * top,
        words,
        va="bottom",
        zorder=5,
        bbox=box,
        **style,
    )
