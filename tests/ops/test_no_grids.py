"""Where casts launch no cooperative grid, or a smaller one on request (exact: names and sizes of launches; codes)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from narrowgauge.conversion.description import _of_grids
from narrowgauge.conversion.measure import LinearWorkload
from narrowgauge.conversion.predict import counted
from narrowgauge.errors import ConfigError, SlowerWarning
from narrowgauge.formats import E4M3
from narrowgauge.ops.quantize import triton_launch
from narrowgauge.ops.timing.cards import CARDS
from narrowgauge.ops.triton import grids, replay
from narrowgauge.ops.triton.grids import (
    launched_as_grid,
    leave_multiprocessors_free,
    why_no_grids,
)
from narrowgauge.recipe import Cast
from narrowgauge.train.device import leave_free
from tests.raising import raises

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


@pytest.mark.parametrize("words", grids._GRID_REFUSALS)
def test_a_refused_grid_is_tried_once_and_warned_of(words, monkeypatch):
    monkeypatch.setattr(grids, "_NO_GRIDS", {})
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
    monkeypatch.setattr(grids, "_NO_GRIDS", {})

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


@pytest.fixture
def card(monkeypatch):
    """An H100 as device 0 and one as device 1: their multiprocessors, no more."""
    monkeypatch.setattr(grids, "_FREE", grids.MappingProxyType({}))
    monkeypatch.setattr(grids, "_NO_GRIDS", {})
    card = SimpleNamespace(multi_processor_count=CARDS["h100"].processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    grids.multiprocessors.cache_clear()
    yield torch.device("cuda", 0)
    grids.multiprocessors.cache_clear()


def grid_of(x: torch.Tensor, dense: bool, card: torch.device) -> tuple[int, int, dict[str, int]]:
    """(programs, slots for their maxima, sizes of a piece) of a cast of x on the card."""
    free = grids.free_multiprocessors(card.index)
    _, pieces, sizes = triton_launch._pieces(x, constants(), dense, fills=free > 0)
    sizes = {name: size for name, size in sizes.items() if name != "C"}
    return *triton_launch._cooperative_grid(pieces, sizes["warps"], card), sizes


def constants():
    return triton_launch.cast_constants.constants_of(Cast(format=E4M3), (9, 0), False)


@pytest.mark.parametrize(
    ("dense", "warps", "sides", "before"),
    [(True, 4, (1, 4096), 1056), (False, 8, (64, 64), 528)],
    ids=["runs", "squares"],
)
def test_a_grid_leaves_multiprocessors_free(dense, warps, sides, before, card):
    """132 multiprocessors: 1,024 threads on each, or one program of 1,024 threads on each of the others."""
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    today = {"ROWS": sides[0], "COLUMNS": sides[1], "warps": warps}
    assert grid_of(x, dense, card) == (before, 2048 if dense else 1024, today)
    leave_multiprocessors_free(0, card)
    assert grid_of(x, dense, card) == (before, 2048 if dense else 1024, today)
    leave_multiprocessors_free(8, card)
    programs, slots, sizes = grid_of(x, dense, card)
    assert (programs, slots, sizes["warps"]) == (124, 128, 32)
    elements = sizes["ROWS"] * sizes["COLUMNS"] // (32 * sizes["warps"])
    assert elements == sides[0] * sides[1] // (32 * warps), "elements per thread"
    assert grid_of(x, dense, torch.device("cuda", 1))[0] == before, "another device"
    leave_multiprocessors_free(131)
    assert grid_of(x, dense, card)[:2] == (1, triton_launch.FEW)


def test_a_grid_that_leaves_some_free_runs_in_a_group(group, card):
    group(2)
    assert "2 ranks" in why_no_grids(0) and "2 ranks" in _of_grids(0).words
    leave_multiprocessors_free(16, "cuda:0")
    assert not why_no_grids(0) and why_no_grids(1)
    note = _of_grids(0)
    assert note.code == "free-multiprocessors" and "16 of 132" in note.words
    leave_multiprocessors_free(0, "cuda:0")
    assert "2 ranks" in why_no_grids(0)
    group(1)
    assert _of_grids(0) is None


def test_a_refused_grid_is_tried_again_with_fewer_multiprocessors(card):
    """In a green context, say: the rest may fit."""
    grids._NO_GRIDS.update({0: "too many blocks in cooperative launch", 1: "the same"})
    leave_multiprocessors_free(66, 0)
    assert not why_no_grids(0) and why_no_grids(1)


@pytest.mark.parametrize("count", [-1, True, 2.0, "8", None])
def test_only_a_number_of_multiprocessors_can_be_left_free(count, card):
    with raises(ConfigError, "grids.count", repr(count)):
        leave_multiprocessors_free(count, card)
    assert not grids.free_by_device()


def test_casts_keep_a_multiprocessor(card):
    with raises(ConfigError, "grids.too-many", 132, 131):
        leave_multiprocessors_free(132, card)
    with raises(ConfigError, "device.free-multiprocessors", 132, 131):
        leave_free(132, card)
    leave_free(131, card)
    assert grids.free_multiprocessors(0) == 131
    leave_free(0, card)
    assert grids.free_multiprocessors(0) == 0, "the setting of the next run of a process"


@pytest.mark.parametrize("device", ["cpu", "cuda:2"])
def test_only_a_gpu_that_is_there_has_multiprocessors(device, card):
    with raises(ConfigError, "grids.device", device, 2):
        leave_multiprocessors_free(8, device)


def test_a_run_on_a_cpu_leaves_no_multiprocessor_free():
    leave_free(0, torch.device("cpu"))
    with raises(ConfigError, "device.free-multiprocessors", 8, "cpu"):
        leave_free(8, torch.device("cpu"))


def test_a_recorded_cast_is_recorded_anew_with_another_grid(card):
    calls = []
    replays = replay.Replays(lambda x: calls.append("called"))
    x = torch.zeros(4)
    replays(x)
    [form] = replays._found
    replays._found[form] = lambda x: calls.append("replayed")
    replays(x)
    leave_multiprocessors_free(8, card)
    replays(x)
    replays._found[form] = lambda x: calls.append("replayed anew")
    replays(x)
    assert calls == ["called", "replayed", "called", "replayed anew"]
