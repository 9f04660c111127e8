"""The GPU benchmarks run from end to end at toy sizes, measure what they say, and survive what fails (exact, in words)."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from torch import nn

from benchmarks import environment
from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import alone, floor, gemms, largest, picture, sweep
from benchmarks.gpu.bench import Bench, rotating
from narrowgauge.conversion.measure import compiled_alone
from tests.processes import PYTHON, run

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]
CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path):
    return Bench(CPU, True, floor.Floor(copy=1e9, bf16=1e12, fp8=None), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence():
    done = run([PYTHON, "-m", "benchmarks.gpu"])
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.strip().splitlines() == [
        "bench-gpu: torch.cuda.is_available() is False, and these questions are about a GPU; --dry-run tries the code."
    ]


@pytest.mark.parametrize(
    "question",
    ["casts", "adamw", "step", "sweep", "layer", "integers", "growth", "largest", "graphs"],
)
def test_every_question_runs(question, capsys):
    """torchao and transformers included, where they are installed."""
    if question in ("step", "layer", "growth"):
        pytest.importorskip("torchao")
    if question in ("step", "integers", "largest", "graphs"):
        pytest.importorskip("transformers")
    code = suite.main(["--dry-run", "--only", question])
    out = capsys.readouterr()
    assert code == 0, out.err
    assert (
        out.out.startswith("floor: copy ")
        and f"-- {question}: " in out.out
        and "Left out" not in out.out
    )
    assert {
        "casts": "128x128",
        "adamw": "narrowgauge-8bit",
        "step": "fp8-delayed-fused",
        "sweep": "slowest shape",
        "layer": "torchao-rowwise",
        "integers": "int4-hq-bs",
        "growth": "torchao-rowwise",
        "largest": "narrowgauge-fp8-delayed",
        "graphs": "knows no CUDA graphs",
    }[question] in out.out


def test_the_budgets_leave_nine_minutes():
    assert sum(suite.BUDGETS_S.values()) <= 480, (
        "a minute for imports, the floor, and what began just before a budget ended"
    )


class Card:
    """A device of so many bytes, of which a step of `rows` sequences takes fixed + each * rows, and raises where it holds no more."""

    def __init__(self, holds: int, fixed: int, each: int, grows: int = 0) -> None:
        self.holds, self.fixed, self.each, self.grows = holds, fixed, each, grows
        self.most, self.tried = 0, []

    def step(self, rows: int) -> None:
        self.tried.append(rows)
        taken = self.fixed + self.each * rows + self.grows * rows**2
        if taken > self.holds:
            raise torch.OutOfMemoryError(f"{taken} of {self.holds}")
        self.most = max(self.most, taken)

    def peak(self) -> int:
        found, self.most = self.most, 0
        return found


@pytest.mark.parametrize(
    ("card", "rows"),
    [
        (Card(100, 20, 10), 8),
        (Card(100, 85, 10), 1),
        (Card(100, 20, 10, grows=1), 5),
        (Card(100, 20, 0), 2),
    ],
    ids=["foreseen", "one alone", "foreseen too many", "nothing grows"],
)
def test_the_largest_batch_is_found(card, rows):
    """The last sequence that fits, with its peak and that of one; what does not fit is tried, not assumed."""
    calls = []

    def clock(case, times):
        case()
        calls.append(times)
        return 0.5

    found = largest.largest(card.step, card.holds, card.peak, clock, most=100)
    assert found.rows == rows == card.tried[-1] and found.samples_s == (0.5,) * len(calls)
    assert found.one == card.fixed + card.each + card.grows
    assert found.peak == card.fixed + card.each * rows + card.grows * rows**2
    assert (
        card.fixed + card.each * (rows + 1) + card.grows * (rows + 1) ** 2 > card.holds
        or card.each == 0
    )


def test_a_step_that_never_fits_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        largest.largest(Card(100, 95, 10).step, 100, lambda: 0, lambda case, times: 1.0, most=100)


def test_lines_hold_the_floor_and_the_share_of_it(bench, tmp_path):
    x = torch.randn(64, 64)
    builds = {"a": lambda: lambda: x @ x, "b": lambda: lambda: x + x}
    timings = bench.compare(
        "probe",
        builds,
        "a",
        work={"a": (2.0 * 64**3, "bf16"), "b": (3.0 * x.nbytes, "copy")},
        facts={"n": 64},
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "gpu_probe.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert (
        [line["case"] for line in lines] == ["a", "b"]
        and lines[0]["n"] == 64
        and lines[0]["benchmark"] == "gpu-probe"
    )
    assert lines[0]["share_of_floor"] == pytest.approx(2.0 * 64**3 / timings["a"].median_s / 1e12)
    assert lines[1]["share_of_floor"] == pytest.approx(3.0 * x.nbytes / timings["b"].median_s / 1e9)
    assert {
        "floor_copy",
        "floor_bf16",
        "floor_fp8",
        "commit",
        "driver",
        "command",
        "triton",
    } <= lines[0].keys()


def test_a_case_that_fails_is_named_and_the_others_go_on(bench, tmp_path, capsys):
    def missing():
        raise ModuleNotFoundError("No module named 'peer'\nand more")

    timings = bench.compare("probe", {"bf16": lambda: lambda: None, "peer": missing}, "bf16")
    assert list(timings) == ["bf16"] and bench.failures == [
        "probe: peer: ModuleNotFoundError: No module named 'peer'"
    ]
    lines = [
        json.loads(line)
        for line in (tmp_path / "gpu_probe.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert lines[0]["error"] == "ModuleNotFoundError: No module named 'peer'"
    assert suite._ending(bench) == 1 and "Failed: probe: peer" in capsys.readouterr().err
    assert bench.compare("probe", {"bf16": missing, "x": lambda: lambda: None}, "bf16") == {}, (
        "no baseline, no figures"
    )


def test_what_a_budget_leaves_out_is_named(bench, capsys):
    bench.dry, bench.ends_at_s = False, time.monotonic() - 1
    sweep.main(bench)
    assert len(bench.left_out) == 7 * 5 * 5 and suite._ending(bench) == 0
    assert (
        "Left out for want of time: 175, the first sweep 512 x 1024 -> 1024"
        in capsys.readouterr().out
    )


def test_the_sweep_sees_the_corners_first():
    shapes = sweep.shapes(Bench(CPU, False, floor.Floor(1, 1, 1), None))
    assert len(set(shapes)) == 175 and {shape[0] for shape in shapes[:8]} == {512, 32768}


def test_inputs_take_turns():
    seen = []
    case = rotating(seen.append, [1, 2, 3])
    for _ in range(5):
        case()
    assert seen == [1, 2, 3, 1, 2]


def test_many_modules_compile_without_giving_up(monkeypatch):
    """More than Dynamo's eight recompilations of one code object."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch, "compile", lambda call, real=torch.compile: real(call, backend="eager")
    )
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for width in range(12):
            assert compiled_alone(nn.Linear(4, 2 + width))(torch.zeros(1, 4)).shape == (
                1,
                2 + width,
            )


def row(
    case: str, tokens: int, inputs: int, outputs: int, ratio: float, device: str = "H", **more
) -> dict:
    sizes = {
        "tokens": tokens,
        "inputs": inputs,
        "outputs": outputs,
        "device": device,
        "baseline": "bf16",
    }
    return {
        "case": case,
        "of_baseline": [ratio, ratio, ratio],
        "chosen": "fp8-row",
        **sizes,
        **more,
    }


def test_the_sweep_is_drawn_where_it_was_measured(tmp_path):
    """The last line of a case counts, those of another device do not, and a shape without a line stays empty."""
    rows = [
        row("auto", 512, 1024, 1024, 0.5, device="old"), row("auto", 512, 2048, 1024, 9.0), row("bf16", 512, 2048, 1024, 1.0),
        row("auto", 512, 2048, 1024, 0.8), row("auto", 8192, 1024, 4096, 0.5), {"case": "auto", "error": "no memory"},
    ]  # fmt: skip
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    (tmp_path / "gpu_sweep.jsonl").write_text(lines, encoding="utf-8")
    found = picture.measured(picture.read(tmp_path / "gpu_sweep.jsonl"))
    maps = picture.grids(found)
    assert list(maps) == [512, 8192] and maps[512][:2] == ([1024, 2048], [1024, 4096])
    assert maps[512][2][0][1] == pytest.approx(1.25) and maps[8192][2][1][0] == pytest.approx(2.0)
    empty = [
        value
        for _, _, grid in maps.values()
        for line in grid
        for value in line
        if math.isnan(value)
    ]
    assert len(empty) == 6
    figure = picture.sweep(found)
    images = [axes.images[0] for axes in figure.axes if axes.images and axes.get_title()]
    assert [image.get_array()[0, 1] for image in images[:1]] == [pytest.approx(1.25)]
    assert {text.get_text() for axes in figure.axes for text in axes.texts} == {
        "1.25\nrow",
        "2.00\nrow",
    }
    red, white, blue = (images[0].cmap(images[0].norm(value))[:3] for value in (0.75, 1.0, 1.8))
    assert red[0] > red[2] and blue[2] > blue[0] and min(white) > 0.9, (
        "slower than BF16 is red, faster is blue"
    )


def test_growth_has_a_line_for_each_recipe_and_pictures_lie_beside_their_lines(tmp_path, capsys):
    rows = [row(case, 64, width, width, ratio)
            for case, ratio in (("bf16", 1.0), ("fp8-row", 0.5), ("torchao-rowwise", 0.8)) for width in (1024, 256)]  # fmt: skip
    for question in ("sweep", "growth"):
        cases = [{**each, "case": "auto"} for each in rows] if question == "sweep" else rows
        text = "".join(json.dumps(each) + "\n" for each in cases)
        (tmp_path / f"gpu_{question}.jsonl").write_text(text, encoding="utf-8")
    [axes] = picture.growth(rows).axes
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()), line.get_linestyle())
        for line in axes.lines[:2]
    }
    assert lines == {
        "fp8-row": ([256, 1024], [2.0, 2.0], "-"),
        "torchao-rowwise": ([256, 1024], [1.25, 1.25], "--"),
    }
    assert picture.main(["--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "gpu_sweep.png"),
        str(tmp_path / "gpu_growth.png"),
    ]
    assert all(
        (tmp_path / f"gpu_{name}.png").read_bytes().startswith(b"\x89PNG")
        for name in ("sweep", "growth")
    )


def test_without_lines_there_is_no_picture(tmp_path, capsys):
    assert picture.main(["--results", str(tmp_path)]) == 1
    assert "Run make bench-gpu first" in capsys.readouterr().err


def test_a_peer_in_triton_is_no_contender_on_a_cpu(bench):
    assert (
        not bench.has_peer("bf16-liger")
        and bench.has_peer("fp8-row")
        and bench.has_peer("torchao-rowwise")
    )


def test_a_question_that_breaks_off_is_named_and_the_others_are_answered(monkeypatch, capsys):
    def broken(bench):
        raise RuntimeError("no such kernel")

    answered = []
    monkeypatch.setattr("benchmarks.gpu.casts.main", broken)
    monkeypatch.setattr("benchmarks.gpu.growth.main", answered.append)
    assert suite.main(["--dry-run", "--only", "casts", "growth"]) == 1 and len(answered) == 1
    assert "Failed: casts: all of it: RuntimeError: no such kernel" in capsys.readouterr().err


def test_no_line_of_the_empty_runtime_can_be_taken_for_a_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.delenv("EMPTY_CUDA_GPU", raising=False)
    assert environment._device_name() == "NVIDIA H100"
    monkeypatch.setenv("EMPTY_CUDA_GPU", "h100")
    assert environment._device_name() == "no device: empty CUDA runtime that plays NVIDIA H100"


def test_a_baseline_that_is_kept_is_built_once(bench):
    built = []

    def build(name: str):
        built.append(name)
        return lambda: None

    for keeps, expected in ((True, ["bf16", "a"]), (False, ["bf16", "a", "bf16"])):
        built.clear()
        found = alone.compared(bench, "probe", ["a"], build, {"n": 1}, keeps=keeps)
        assert built == expected and [line["case"] for line in found] == ["bf16", "a", "bf16"]


def test_the_twelve_products_are_those_of_the_layer():
    flop = sum(
        2 * m * n * k
        for shape in gemms.SHAPES
        for m, n, k in gemms.products(gemms.TOKENS, *shape).values()
    )
    assert (
        flop
        == 6 * 15_872 * 4096 * (3 * 4096 + 4096 + 2 * 16_384)
        == pytest.approx(1.917e13, rel=1e-3)
    )


def test_a_device_that_answers_no_more_does_not_hide_the_failure(bench, monkeypatch, capsys):
    """empty_cache raises the fault again; the case is named all the same."""

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    bench.device = torch.device("cuda", 0)
    bench.fail("probe", "a", RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert bench.failures == [
        "probe: a: RuntimeError: CUDA error: an illegal memory access was encountered"
    ]
    assert "probe" in capsys.readouterr().out
