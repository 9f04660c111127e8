"""Compiled kernels, interpreted from their PTX, against their definitions (exact; sums bounded, see `proof`).

Quick: a cooperative cast of both orientations and a delayed one for sm_90. Slow: some cases of each
family and GPU, drawn so that every kernel and every GPU occurs. The whole matrix:

    python -m benchmarks.ptx_proof
"""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops.hadamard import casting
from narrowgauge.ops.mm import cublas
from narrowgauge.ops.quantize import definition, triton_launch
from narrowgauge.ops.quantize.spec import Turn
from narrowgauge.ops.triton import grids
from tests.ops.triton.test_compiled import CASTS
from tests.ptx import launching
from tests.ptx.launching import CAPABILITIES, execute
from tests.ptx.machine import Schedule
from tests.ptx.proof import Case, cases, outcome, sample
from tests.selection import quick

GPUS = tuple(CAPABILITIES)
QUICK = ("tensor 80x144 and x.T", "e4m3 later and x.T")
# Family -> one case in so many, on each GPU; the cases differ from GPU to GPU.
SHARES = {
    "casts": 9, "corrected": 7, "rotated": 6, "delayed": 5, "strided": 10, "precast": 2, "norms": 24, "rotary": 8, "optimizer": 4,
    "hadamard": 9, "block mm": 4, "attention": 4, "groups": 15,
}  # fmt: skip
# Programs that wait for each other, count their ends, or share maxima.
RANDOM = ("tensor 80x144", "row 80x144 and x.T", "e4m3 first", "e4m3 later and x.T")


def named(name: str, sm: int = 90) -> Case:
    return next(each for each in cases(sm) if each.name == name)


@pytest.mark.parametrize("name", QUICK)
def test_compiled_casts_have_the_bits_of_their_definition(name):
    found = outcome(named(name), 90)
    assert not found.words and found.instructions > 400, found


def swizzled_case(cast: str, cols: bool) -> Case:
    """The bytes of scales that Blackwell reads, those of the padding too, against the definition's."""

    def call() -> str:
        x = sample((67, 131))
        made = triton_launch.cast_pair(x, CASTS[cast], cols=cols)
        for name, ours, theirs in zip(("x", "x.T"), made, (x, x.T), strict=True):
            if ours is None:
                continue
            truth = definition.quantize(theirs, CASTS[cast], None, None, None)
            wanted = cublas.mx_operand(truth).scales[0].view(torch.uint8)
            if ours.units is None or not torch.equal(ours.units, wanted):
                return f"scales of {name} differ"
        return ""

    return Case("casts", f"{cast} for tensor cores", call)


@pytest.mark.parametrize("sm", quick([100], [100, 120]))
def test_scales_of_rotated_casts_are_written_so_too(sm):
    """Of x and of x.T under a rotation, whose ragged rows end in a block of zeros."""
    cast, x, turn = CASTS["nv"], sample((67, 131)), Turn(16)

    def call() -> str:
        given = x.T, cast, turn, (None, None), None, True
        for name, ours, truth in zip(
            ("x.T", "x"), triton_launch.rotated(*given), casting.reference(*given), strict=True
        ):
            wanted = cublas.mx_operand(truth).scales[0].view(torch.uint8)
            if ours.units is None or not torch.equal(ours.units, wanted):
                return f"scales of {name} differ"
        return ""

    found = outcome(Case("rotated", "for tensor cores", call), sm)
    assert not found.words and found.kernels == ("maxima_rotated", "cast_rotated"), found


def test_scales_are_written_as_tensor_cores_read_them():
    assert not outcome(swizzled_case("mx", cols=False), 100).words


@pytest.mark.slow
@pytest.mark.parametrize(("cast", "sm"), [("mx", 120), ("nv", 100), ("nv-square", 100)])
def test_scales_of_every_cast_are(cast, sm):
    found = outcome(swizzled_case(cast, cols=True), sm)
    assert not found.words, found


def test_one_changed_instruction_is_noticed():
    """Control: the largest magnitude by a minimum."""
    changed = []

    def mutate(kernel: str, ptx: str) -> str:
        changed.append(ptx.count("max.s32"))
        return ptx.replace("max.s32", "min.s32", 1)

    found = outcome(named(QUICK[0]), 90, mutate=mutate)
    assert changed[0] > 10 and "wrong" in found.words, found


# Kernel forms that wait for each other, and the casts by maxima and counters that replace them.
GRIDS = ("tensor 80x144 and x.T", "row 80x144 and x.T")


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("late", [False, True], ids=["in turn", "the last first"])
def test_two_launches_need_no_other_program(name, late, monkeypatch):
    """As beside a collective: one program at a time, from either end, and the definition's bits."""
    monkeypatch.setattr(triton_launch, "launched_as_grid", lambda start, index: False)
    found = outcome(named(name), 90, resident=1, late=late)
    assert not found.words and "amax_and_cast" not in found.kernels, found


@pytest.mark.parametrize(
    ("name", "sm", "programs"),
    quick(
        [(GRIDS[0], 90, 1)],
        [(name, sm, count) for name in GRIDS for sm in GPUS for count in (1, 2)],
    ),
)
def test_a_grid_that_leaves_multiprocessors_free_casts_every_piece(name, sm, programs, monkeypatch):
    """In programs of 1,024 threads, by one program or as many as there are pieces."""
    monkeypatch.setattr(grids, "_FREE", {None: 8})
    threads = []
    monkeypatch.setattr(
        launching, "execute", lambda ptx, values, launch, *given: threads.append(launch.threads)
        or execute(ptx, values, launch, *given)
    )  # fmt: skip
    found = outcome(named(name, sm), sm, programs=programs)
    assert not found.words and found.kernels == ("amax_and_cast",), found
    assert set(threads) == {1024}


@pytest.mark.parametrize(
    ("name", "late"),
    quick(
        [("e4m3 first and x.T", True)],
        [
            (name, late)
            for name in ("e4m3 first and x.T", "e4m3 later and x.T")
            for late in (True, False)
        ],
    ),
)
def test_a_delayed_cast_needs_no_other_program(name, late):
    """It counts programs that have ended, and the last settles: whichever that is, and alone."""
    found = outcome(named(name), 90, resident=1, late=late)
    assert not found.words and found.kernels == ("both_delayed",), found


def test_the_last_programs_share_the_cast_of_an_empty_history(monkeypatch):
    """Six pieces: cast by the last program alone they take as long as six."""
    steps = {}
    for helpers in (1, 2, 64):
        monkeypatch.setattr(triton_launch, "HELPERS", helpers)
        found = outcome(named("e4m3 first and x.T"), 90, resident=6)
        assert not found.words, found
        steps[helpers] = found.instructions
    once = outcome(named("e4m3 later and x.T"), 90, resident=6).instructions
    alone, pair, all_of_six = (steps[helpers] - once for helpers in (1, 2, 64))
    assert alone > 1.6 * pair and alone > 4 * all_of_six - 400, (once, steps)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=repr)
def test_a_cast_after_one_that_raised_has_the_bits_of_its_definition(error, monkeypatch):
    """Maxima of large rows are found, and their cast raises; the next x is small, and of the same shape."""
    monkeypatch.setattr(triton_launch, "launched_as_grid", lambda start, index: False)
    cast, x = CASTS["row"], sample((80, 144))
    launch, raises = triton_launch.launch, [True]

    def failing(kernel, *given, **named):
        if kernel.__name__ == "cast_both" and raises:
            raise raises.pop() and error
        launch(kernel, *given, **named)

    monkeypatch.setattr(triton_launch, "launch", failing)
    with launching.interpreted(90) as found, torch.no_grad():
        with pytest.raises(type(error)):
            triton_launch.cast_pair(x * 1024, cast, cols=True)
        made = triton_launch.cast_pair(x, cast, cols=True)
    assert [run.kernel for run in found.runs] == ["maxima", "maxima", "cast_both"]
    for ours, theirs in zip(made, (x, x.T), strict=True):
        truth = definition.quantize(theirs, cast, None, None, None)
        assert torch.equal(ours.scale, truth.scale)
        assert torch.equal(ours.data.view(torch.uint8), truth.data.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARES)
@pytest.mark.parametrize("sm", GPUS)
def test_a_share_of_the_matrix_agrees(family, sm):
    """Every n-th case, from another one on each GPU."""
    step = SHARES[family]
    chosen = [each for each in cases(sm) if each.family == family][GPUS.index(sm) % step :: step]
    if sm == 80 and family in ("block mm", "attention"):  # no FP8 units
        assert not chosen
        return
    assert chosen
    wrong = {each.name: found.words for each in chosen if (found := outcome(each, sm)).words}
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_warps_of_all_programs_in_any_order(name):
    for seed in range(2):
        found = outcome(named(name), 90, schedule=Schedule.RANDOM, seed=seed)
        assert not found.words, (seed, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor 80x144 and x.T", "vector 131x259"])
def test_reciprocals_that_are_off_by_a_unit_are_repaired(name, monkeypatch):
    """PTX allows rcp.approx one unit of error; the scales take a Newton step, so no code changes."""
    from tests.ptx.opcodes import APPROXIMATION

    monkeypatch.setattr(APPROXIMATION, "units", 1)
    found = outcome(named(name), 90)
    assert not found.words, found
