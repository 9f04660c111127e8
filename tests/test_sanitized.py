"""What compute-sanitizer is given to run does run, and what it finds is passed on (a stand-in takes its place)."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from narrowgauge import recipes
from tests import sanitized

STAND_IN = """#!/bin/sh
echo "$@" >> "$SEEN"
echo "caching $PYTORCH_NO_CUDA_MEMORY_CACHING" >> "$SEEN"
case "$*" in *racecheck*) exit 86;; *initcheck*) exit 3;; esac
"""


@pytest.mark.parametrize("part", ["casts", "products", "optimizers"])
def test_every_part_runs(part, capsys):
    assert sanitized.main(["--plain", "--only", part]) == 0
    lines = capsys.readouterr().out.splitlines()
    if part == "products":
        assert [line.removeprefix("products: ") for line in lines] == list(recipes.names())
    else:
        assert len(lines) >= 20 and not any("refused" in line for line in lines)


@pytest.mark.slow
def test_fused_models_run(capsys):
    pytest.importorskip("transformers")
    assert sanitized.main(["--plain", "--only", "fused"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 15


def test_what_a_tool_finds_is_the_exit_status(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(STAND_IN, encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sanitized.main(["--tools", "memcheck", "--only", "casts"]) == 0
    assert sanitized.main(["--tools", "memcheck", "racecheck", "initcheck", "--only", "casts"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "sanitize: memcheck: clean",
        "sanitize: memcheck: clean",
        "sanitize: racecheck: found something, see above",
        "sanitize: initcheck: the run failed with exit status 3",
    ]
    seen = (tmp_path / "seen").read_text(encoding="utf-8").splitlines()
    assert seen[0].endswith("-m tests.sanitized --plain --only casts") and seen[1] == "caching 1"
    assert "--tool memcheck --error-exitcode 86 --target-processes all" in seen[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_it_a_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert sanitized.main([]) == 2
    assert "no compute-sanitizer on the PATH" in capsys.readouterr().err
