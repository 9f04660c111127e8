"""The GPU benchmarks run from end to end at toy sizes, measure what they say, and survive what fails (exact, in words)."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import floor, sweep
from benchmarks.gpu.bench import Bench, rotating
from narrowgauge.auto.measure import compiled_alone
from tests.processes import PYTHON, run

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


@pytest.mark.parametrize("question", ["casts", "adamw", "step", "sweep", "layer"])
def test_every_question_runs(question, capsys):
    """torchao and transformers included, where they are installed."""
    if question in ("step", "layer"):
        pytest.importorskip("torchao")
        pytest.importorskip("transformers")
    code = suite.main(["--dry-run", "--only", question])
    out = capsys.readouterr()
    assert code == 0, out.err
    assert out.out.startswith("floor: copy ") and f"-- {question}: " in out.out and "Left out" not in out.out
    assert {
        "casts": "128x128",
        "adamw": "narrowgauge-8bit",
        "step": "auto",
        "sweep": "slowest shape",
        "layer": "torchao-rowwise",
    }[question] in out.out


def test_the_budgets_leave_nine_minutes():
    assert sum(suite.BUDGETS_S.values()) <= 480, (
        "a minute for imports, the floor, and what began just before a budget ended"
    )


def test_lines_hold_the_floor_and_the_share_of_it(bench, tmp_path):
    x = torch.randn(64, 64)
    builds = {"a": lambda: lambda: x @ x, "b": lambda: lambda: x + x}
    timings = bench.compare(
        "probe", builds, "a", work={"a": (2.0 * 64**3, "bf16"), "b": (3.0 * x.nbytes, "copy")}, facts={"n": 64}
    )
    lines = [json.loads(line) for line in (tmp_path / "gpu_probe.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (
        [line["case"] for line in lines] == ["a", "b"] and lines[0]["n"] == 64 and lines[0]["benchmark"] == "gpu-probe"
    )
    assert lines[0]["share_of_floor"] == pytest.approx(2.0 * 64**3 / timings["a"].median_s / 1e12)
    assert lines[1]["share_of_floor"] == pytest.approx(3.0 * x.nbytes / timings["b"].median_s / 1e9)
    assert {"floor_copy", "floor_bf16", "floor_fp8", "commit", "driver", "command", "triton"} <= lines[0].keys()


def test_a_case_that_fails_is_named_and_the_others_go_on(bench, tmp_path, capsys):
    def missing():
        raise ModuleNotFoundError("No module named 'peer'\nand more")

    timings = bench.compare("probe", {"bf16": lambda: lambda: None, "peer": missing}, "bf16")
    assert list(timings) == ["bf16"] and bench.failures == ["probe: peer: ModuleNotFoundError: No module named 'peer'"]
    lines = [json.loads(line) for line in (tmp_path / "gpu_probe.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0]["error"] == "ModuleNotFoundError: No module named 'peer'"
    assert suite._ending(bench) == 1 and "Failed: probe: peer" in capsys.readouterr().err
    assert bench.compare("probe", {"bf16": missing, "x": lambda: lambda: None}, "bf16") == {}, "no baseline, no figures"


def test_what_a_budget_leaves_out_is_named(bench, capsys):
    bench.dry, bench.ends_at_s = False, time.monotonic() - 1
    sweep.main(bench)
    assert len(bench.left_out) == 7 * 5 * 5 and suite._ending(bench) == 0
    assert "Left out for want of time: 175, the first sweep 512 x 1024 -> 1024" in capsys.readouterr().out


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
    monkeypatch.setattr(torch, "compile", lambda call, real=torch.compile: real(call, backend="eager"))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for width in range(12):
            assert compiled_alone(nn.Linear(4, 2 + width))(torch.zeros(1, 4)).shape == (1, 2 + width)
