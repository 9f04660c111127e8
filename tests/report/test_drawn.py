"""What figures draw, read from their axes (exact)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from narrowgauge.report import figures, guard, memory_picture
from tests.report.test_guard import check, recorded

GIB = memory_picture.GIB


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of each figure of the report, in the order in which they are begun; not those for a phone."""
    found: list[Axes] = []
    plain = figures.canvas

    @contextmanager
    def watched(*sizes: int, **sides: int) -> Iterator[tuple[Figure, Axes]]:
        with plain(*sizes, **sides) as (figure, axes):
            if not figures._ON_PHONE.get():
                found.append(axes)
            yield figure, axes

    for module in (figures, guard):
        monkeypatch.setattr(module, "canvas", watched)
    return found


def test_a_check_of_the_guard_has_a_bar_of_its_noise_and_a_band_of_its_margin(drawn):
    """The bar ends WIDTH standard deviations below and above the difference; the band has no edge."""
    checks = [check(8, 0.02, "unknown"), check(16, -0.01, "unknown")]
    guard.section(recorded(*(each | {"same": 0.005} for each in checks)))
    [axes] = drawn
    [crosses] = [line for line in axes.lines if line.get_marker() == "x"]
    assert crosses.get_linewidth() == 0 and list(crosses.get_ydata()) == [0.005, 0.005]
    bars = [
        list(line.get_ydata())
        for line in axes.lines
        if len(line.get_xdata()) == 2 and len(set(line.get_xdata())) == 1
    ]
    width = guard.WIDTH * 0.004
    assert [0.02 - width, 0.02 + width] in bars and [-0.01 - width, -0.01 + width] in bars
    [band] = [patch for patch in axes.patches if patch.get_fill()]
    assert band.get_linewidth() == 0


def test_a_look_at_a_single_step_is_a_point_and_several_are_a_line(drawn):
    def look(step: int) -> dict[str, Any]:
        return {"step": step, "format": "e4m3", "amax": 3.0, "scale": 3.0 / 448}

    figures.scale_history([look(3)], "one")
    figures.scale_history([look(3), look(5)], "two")
    marked = [{line.get_marker() for line in axes.lines} for axes in drawn]
    assert "" not in marked[0] and "" in marked[1]


def test_losses_lie_within_the_limits_of_their_figure():
    """With a margin of a twentieth on both sides."""
    points = [(step, 3.0 - 0.1 * step) for step in range(1, 11)]
    curve = figures.Curve(training=points, validation=[])
    assert figures.loss_limits([(curve, points)], None) == pytest.approx((1.955, 2.945))


def test_each_part_of_the_peak_is_named_at_its_middle(monkeypatch):
    places: dict[str, float] = {}

    def text(axes: Axes, x: float, y: float, words: str, **style: Any) -> None:
        places[words] = y

    figure = Figure()
    axes = figure.subplots()
    monkeypatch.setattr(Axes, "text", text)
    memory_picture._at_peak(axes, {"weights": 4 * GIB, "saved": 6 * GIB}, 10.0)
    assert sorted(places.values()) == [2.0, 7.0]
