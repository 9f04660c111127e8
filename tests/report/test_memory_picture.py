"""The picture of memory over a step: columns, their edges, what is named (exact), and files that are written."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from narrowgauge.errors import ConfigError
from narrowgauge.report.memory_picture import draw, merged, stretches
from tests.raising import raises

GIB = 2**30


def column(phase: str, **parts: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "parts": {"weights": 4 * GIB} | {part: int(size * GIB) for part, size in parts.items()},
    }


TIMELINE = [
    column("forward"),
    column("forward 0", transient=2.0),
    column("forward 0 end", saved=1.0),
    column("forward 1", saved=2.0, transient=0.5),
    column("head", saved=2.0, head=3.0),
    column("backward", saved=2.0, head=3.0, transient=1.0),
    column("backward 1", saved=1.0, gradients=1.0),
    column("backward 0", gradients=2.0),
    column("step", gradients=2.0),
]


def answer(usable: float = 9.0, timeline: list[dict[str, Any]] = TIMELINE) -> dict[str, Any]:
    return {
        "run": "fp8-current <run>",
        "card": {"name": "L4", "usable_bytes": int(usable * GIB)},
        "timeline": timeline,
    }


def test_a_block_is_one_column():
    assert [each["phase"] for each in merged(TIMELINE)][:3] == ["forward", "forward 0", "forward 1"]


def test_stretches_of_a_step_and_of_two_micro_batches():
    columns = merged(TIMELINE)
    assert [name for name, _, _ in stretches(columns)] == ["forward", "head", "backward", "step"]
    twice = [*columns[:-1], *columns]
    found = list(stretches(twice))
    assert [name for name, _, _ in found] == ["forward", "head", "backward"] * 2 + ["step"]
    assert [end for _, _, end in found[:-1]] == [start for _, start, _ in found[1:]]


def test_a_model_without_blocks_goes_forward_and_backward():
    plain = [column("forward"), column("backward"), column("step")]
    assert [name for name, _, _ in stretches(plain)] == ["forward", "backward", "step"]


def test_it_names_parts_sizes_and_the_card(tmp_path):
    draw(answer(), tmp_path / "step.svg")
    found = (tmp_path / "step.svg").read_text()
    for each in (
        "10.0 GiB",
        "4.0  weights",
        "3.0  logits and loss",
        "2.0  saved for backward",
        "gradients 2.0",
        "L4: 9.0 GiB can be used",
    ):
        assert each in found, each
    assert "codes" not in found  # there are none


@pytest.mark.parametrize("usable", [30.0, 0.0])
def test_a_card_that_is_far_above_or_not_known(tmp_path, usable):
    draw(answer(usable), tmp_path / "step.svg")
    found = (tmp_path / "step.svg").read_text()
    assert ("twice" in found) == ("can be used" in found) == bool(usable)


def test_files(tmp_path):
    draw(answer(), tmp_path / "step.PNG")
    assert (tmp_path / "step.PNG").read_bytes().startswith(b"\x89PNG")
    with raises(ConfigError, "picture.suffix"):
        draw(answer(), tmp_path / "step.txt")
    with raises(ConfigError, "picture.unwritable"):
        draw(answer(), tmp_path / "missing" / "step.svg")
