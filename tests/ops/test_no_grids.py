"""No cooperative grid beside collectives, nor where the driver refuses one (exact: names of launches; in codes)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.conversion.measure import LinearWorkload
from narrowgauge.conversion.predict import counted
from narrowgauge.errors import SlowerWarning
from narrowgauge.ops import triton
from narrowgauge.ops.timing.cards import CARDS
from narrowgauge.ops.triton import launched_as_grid, replay, why_no_grids

WORKLOAD = LinearWorkload(tokens=256, inputs=128, outputs=384, dtype=torch.bfloat16)
GRID = "amax_and_cast"


@pytest.fixture
def group(monkeypatch):
    """A process group of so many ranks."""

    def exists(ranks: int) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)

    return exists


def launches(recipe: str) -> list[str]:
    """Names of the kernels; counters that are filled once are no launches of a training step."""
    names = [each.operation for each in counted(WORKLOAD, recipe, CARDS["h100"])]
    return [name for name in names if name != "zeros"]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row", "int8"])
def test_a_linear_launches_no_grid_in_a_group(recipe, group):
    """Forward and backward of an eager Linear: maxima and cast in the place of each grid."""
    alone = launches(recipe)
    group(2)
    beside = launches(recipe)
    assert GRID in alone and GRID not in beside
    more = alone.count(GRID)
    assert len(beside) == len(alone) + more and beside.count("cast_both") == alone.count("cast_both") + more  # fmt: skip
    group(1)
    assert launches(recipe) == alone


def test_recipes_without_grids_launch_the_same_in_a_group(group):
    before = {recipe: launches(recipe) for recipe in ("fp8-delayed", "fp8-block")}
    group(8)
    assert before == {recipe: launches(recipe) for recipe in before}
    assert not any(GRID in found for found in before.values())


@pytest.mark.parametrize("words", triton._GRID_REFUSALS)
def test_a_refused_grid_is_tried_once_and_warned_of(words, monkeypatch):
    monkeypatch.setattr(triton, "_NO_GRIDS", {})
    tried = []

    def start() -> None:
        tried.append(1)
        raise RuntimeError(f"Triton Error [CUDA]: {words}")

    with pytest.warns(SlowerWarning) as seen:
        assert not launched_as_grid(start, 0)
    assert [each.message.code for each in seen] == ["cast.no-grids"]
    assert not launched_as_grid(start, 0) and len(tried) == 1 and words in why_no_grids(0)
    assert not why_no_grids(1), "another device"


def test_another_error_is_raised(monkeypatch):
    monkeypatch.setattr(triton, "_NO_GRIDS", {})

    def start() -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        launched_as_grid(start, 0)
    assert not why_no_grids(0)


def test_a_recorded_grid_is_recorded_anew_in_a_group(group, monkeypatch):
    """A cast that was recorded before init_process_group."""
    calls = []
    replays = replay.Replays(lambda x: calls.append("called"))
    recorded = object.__new__(replay.Replay)
    recorded.has_grid, recorded._device = True, torch.device("cuda", 0)
    monkeypatch.setattr(replay.Replay, "__call__", lambda self, x: calls.append("replayed"))
    monkeypatch.setattr(replay.Replays, "_recorded", lambda self, form, x: calls.append("recorded"))
    x = torch.zeros(4)
    replays(x)
    [form] = replays._found
    replays._found[form] = recorded
    replays(x)
    group(2)
    replays(x)
    recorded.has_grid = False
    replays(x)
    assert calls == ["called", "replayed", "recorded", "replayed"]
