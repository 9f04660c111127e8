"""The commands of the first hour on a card: lists that fit their time, pieces that cannot take the others' (exact, in words)."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import environment
from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import alone, caches, first_hour, floor, gemms
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.first_hour import COMMANDS, LIMIT_S, SPARE_S, Piece
from tests.gpu_dry_run import runtime

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]
EMPTY = pytest.mark.skipif(bool(runtime.refusal()), reason=runtime.refusal() or "it can be run")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_pieces_of_a_command_fit_nine_minutes(name):
    assert LIMIT_S <= 540 and sum(piece.seconds for piece in COMMANDS[name]) <= LIMIT_S - SPARE_S
    assert len({piece.name for piece in COMMANDS[name]}) == len(COMMANDS[name])


def test_the_questions_are_those_of_the_suite_without_the_long_ones():
    asked = [
        piece.arguments[list(piece.arguments).index("--only") + 1]
        for pieces in COMMANDS.values()
        for piece in pieces
        if tuple(piece.arguments[:2]) == first_hour.SUITE
    ]
    assert set(asked) <= set(suite.BUDGETS_S) and not {"largest", "sweep"} & set(asked)
    first = [piece.name for pieces in COMMANDS.values() for piece in pieces if "step" in piece.name]
    assert first == ["step, compiled", "step, eager and fused"]
    mib = [
        piece.variables.get("CUBLASLT_WORKSPACE_SIZE")
        for piece in COMMANDS["truth"]
        if "gemms" in piece.name
    ]
    assert mib == ["1024", "32768"]


def test_a_piece_takes_no_other_ones_time(tmp_path):
    """One that needs too long is ended with what it started; one that fails is told; the others run; each has a line at once."""
    child = f"import subprocess, sys, time; subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    pieces = [
        Piece("slow", 2.0, ("-c", child)),
        Piece("wrong", 20.0, ("-c", "import sys; print('words'); sys.exit(3)")),
        Piece("absent", 20.0, ("no-such-program",), needs="no-such-program"),
        Piece(
            "right",
            20.0,
            (
                "-c",
                "import os, sys; print(os.environ['OWN'], os.environ['GIVEN'], sys.argv[1])",
                "OUT",
            ),
            {"OWN": "1"},
        ),
    ]
    began_at_s = time.monotonic()
    found = first_hour.run(pieces, tmp_path, 60.0, {"GIVEN": "2"})
    assert time.monotonic() - began_at_s < 40
    words = [
        "ended for want of time",
        "ended with 3",
        "left out: no no-such-program on the PATH",
        "done",
    ]
    assert (
        [line["outcome"] for line in found]
        == words
        == [line["outcome"] for line in lines(tmp_path / "pieces.jsonl")]
    )
    assert (tmp_path / "wrong.txt").read_text(encoding="utf-8") == "words\n"
    assert (tmp_path / "right.txt").read_text(encoding="utf-8") == f"1 2 {tmp_path}\n"
    assert {line["device"] for line in found} == {environment.environment()["device"]}
    late = first_hour.run([replace(pieces[3])], tmp_path / "late", 0.0, {})
    assert [line["outcome"] for line in late] == ["left out for want of time"]


def test_no_line_of_the_empty_runtime_can_be_taken_for_a_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.delenv("EMPTY_CUDA_GPU", raising=False)
    assert environment._device_name() == "NVIDIA H100"
    monkeypatch.setenv("EMPTY_CUDA_GPU", "h100")
    assert environment._device_name() == "no device: empty CUDA runtime that plays NVIDIA H100"


def test_compiled_code_is_carried_without_what_was_found_by_timing(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    for name in (
        "triton/ab/kernel.cubin",
        "inductor/fx/graph",
        "inductor/a.best_config",
        "triton/locks/x",
        "triton/ab/y.lock",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    assert caches.entries(folder) == {"triton/ab/kernel.cubin", "inductor/fx/graph"}
    count, size = caches.pack(folder, tmp_path / "packed.tar.xz")
    assert count == 2 and size == (tmp_path / "packed.tar.xz").stat().st_size
    caches.unpack(tmp_path / "packed.tar.xz", tmp_path / "there")
    assert caches.entries(tmp_path / "there") == caches.entries(folder)
    assert (tmp_path / "there/inductor/fx/graph").read_text(encoding="utf-8") == "inductor/fx/graph"
    monkeypatch.setattr(caches, "MOST_BYTES", 10)
    with pytest.raises(SystemExit, match="MiB packed, and 0 can be carried"):
        caches.pack(folder, tmp_path / "large.tar.xz")
    assert not (tmp_path / "large.tar.xz").exists()
    with pytest.raises(SystemExit, match="holds no compiled code"):
        caches.pack(tmp_path / "nothing", tmp_path / "none.tar.xz")


def test_new_entries_are_a_failure(tmp_path, monkeypatch, capsys):
    """What a command adds in the other place is named."""
    (tmp_path / "here/triton").mkdir(parents=True)
    (tmp_path / "here/triton/a.cubin").write_bytes(b"1")
    caches.pack(tmp_path / "here", tmp_path / "p.tar.xz")
    for adds, code in ((False, 0), (True, 1)):

        def warm(folder: Path, command: list[str], gpu: str, adds: bool = adds) -> int:
            assert command == ["-m", "x"] and caches.entries(folder) == {"triton/a.cubin"}
            if adds:
                (folder / "triton/b.cubin").write_bytes(b"2")
            return 0

        monkeypatch.setattr(caches, "warm", warm)
        assert caches.main(["prove", str(tmp_path / "p.tar.xz"), "--", "-m", "x"]) == code
    assert capsys.readouterr().out.splitlines() == [
        "0 new entries",
        "1 new entries: triton/b.cubin",
    ]


def test_a_baseline_that_is_kept_is_built_once(tmp_path, capsys):
    bench = Bench(torch.device("cpu"), True, floor.Floor(1.0, 1.0, None), tmp_path)
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


@EMPTY
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_to_its_end_over_the_empty_runtime(tmp_path, name):
    """With tiny budgets; every line says that there was no device. Its tests are left out: they look at numbers."""
    pieces = [piece.name for piece in COMMANDS[name] if piece.name not in ("tests", "profile")]
    limits = ["--budget-s", "1", "--piece-s", "240", "--limit-s", "1200"]
    done = runtime.python(
        [
            "-m",
            "benchmarks.gpu.first_hour",
            name,
            "--out",
            str(tmp_path),
            *limits,
            "--only",
            *pieces,
        ]
    )
    found = lines(tmp_path / name / "pieces.jsonl")
    assert [line["piece"] for line in found] == pieces, done.stderr
    assert all(
        line["outcome"].startswith(("done", "left out: no ", "ended with 1")) for line in found
    ), done.stdout
    rows = [line for path in (tmp_path / name).glob("gpu_*.jsonl") for line in lines(path)]
    assert rows and not [
        line
        for line in [*rows, *found]
        if not line["device"].startswith("no device: empty CUDA runtime")
    ]
    assert all(
        line["error"].startswith("ModuleNotFoundError") for line in rows if "error" in line
    ), "a peer that is not installed"
