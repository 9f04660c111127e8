"""`--recipe auto` in a run: chosen once, written down, and taken up by a resumed run without measuring (exact)."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.cli import main
from narrowgauge.conversion import auto
from narrowgauge.conversion.auto import Decision
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.ops.mm.spec import OTHER_GPUS
from narrowgauge.ops.registry import Device, Refusal
from narrowgauge.train import loop
from narrowgauge.train import run_metadata as machine
from narrowgauge.train.config.settings import replace
from tests.raising import raises
from tests.selection import needs_compiler
from tests.train import tiny


@pytest.fixture
def as_if_measured(monkeypatch):
    """Layers of 48 outputs take fp8-row, others fp8-current."""
    asked = []

    def decide(problem, device):
        asked.append(problem)
        name = "fp8-row" if problem.outputs == 48 else "fp8-current"
        return Decision(
            recipe=name, tokens=problem.tokens, how="measured", seconds={"bf16": 2.0, name: 1.0}
        )

    monkeypatch.setattr(auto, "decide", decide)
    return asked


def run_facts(folder):
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_resumed_run_computes_what_the_whole_run_did(
    text, tmp_path, as_if_measured, monkeypatch, capsys
):
    whole = tiny.settings(text, tmp_path / "whole", recipe="auto")
    assert loop.run(whole) == 0
    assert {problem.tokens for problem in as_if_measured} == {4 * 16}
    assert "fp8-row (auto, measured at 64 tokens: fp8-row 1 s, bf16 2 s)" in capsys.readouterr().err
    chosen = run_facts(tmp_path / "whole")["auto"]
    assert set(chosen.values()) == {"fp8-row", "fp8-current"} and len(chosen) == 14

    parts = replace(whole, output=str(tmp_path / "parts"))
    assert loop.run(replace(parts, steps=3)) == 0
    monkeypatch.setattr(auto, "decide", lambda *_: pytest.fail("measured again"))
    assert loop.run(replace(parts, resume=True)) == 0
    assert run_facts(tmp_path / "parts")["auto"] == chosen


def test_another_choice_than_the_checkpoints_is_refused(text, tmp_path, as_if_measured):
    config = tiny.settings(text, tmp_path / "run", recipe="auto", steps=2)
    assert loop.run(config) == 0
    facts = run_facts(tmp_path / "run")
    facts["auto"] = dict.fromkeys(facts["auto"], "bf16")
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    with raises(CheckpointError, "resume.other-settings", "auto"):
        loop.run(replace(config, steps=4, resume=True))


@pytest.mark.parametrize("bf16_gemm", [False, True])
def test_on_a_cpu_the_run_says_that_nothing_is_faster(
    text, tmp_path, capsys, device_is, monkeypatch, bf16_gemm
):
    refusal = Refusal("capability", "no units")
    monkeypatch.setattr("narrowgauge.ops.mm.int8_cpp.refuse", lambda spec: refusal)
    device_is(Device("cpu", bf16_gemm=bf16_gemm, int8_gemm=False))
    config = tiny.settings(text, tmp_path / "run", steps=1)
    assert main(["train", *tiny.flags(replace(config, recipe="auto"), text)]) == 0
    told = capsys.readouterr().err
    assert "bf16 (auto, no choice at 64 tokens)" in told
    assert "Not fp8-block, fp8-row, fp8-current: cpu has no FP8 units" in told
    head = {"none"} if bf16_gemm else set()  # as it is, where the units are fast
    assert {row["recipe"] for row in run_facts(tmp_path / "run")["describe"]} == {"bf16"} | head


@needs_compiler
@pytest.mark.parametrize(("int8", "recipe"), [(0.5, "int8"), (2.0, "bf16")])
def test_on_a_cpu_with_units_for_int8_a_run_measures_it(
    text, tmp_path, device_is, monkeypatch, int8, recipe
):
    """A resumed run takes its choices, whatever would be measured then."""
    device_is(Device("cpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seconds = {"bf16": 1.0, "int8": int8}
    measured = lambda workload, names, device: ({name: seconds[name] for name in names}, {})  # noqa: E731
    monkeypatch.setattr(auto, "decide", partial(auto.decide, measured=measured))
    config = replace(tiny.settings(text, tmp_path / "run", steps=1), recipe="auto")
    loop.run(config)
    assert set(run_facts(tmp_path / "run")["auto"].values()) == {recipe}
    monkeypatch.setattr(auto, "decide", lambda *_: pytest.fail("measured"))
    loop.run(replace(config, steps=2, resume=True))


def test_save_is_a_recipes_own(text, tmp_path):
    with pytest.raises(
        ConfigError, match=r"recipe.save = 'original': has no effect with recipe = 'auto'"
    ):
        tiny.settings(text, tmp_path / "run", recipe="auto", save="original")


# --- said before training starts -----------------------------------------------------------------------------------------------


def test_a_gpu_that_emulates_says_why(device_is):
    model = ng.convert(
        nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), {"*": "fp8-current", "1": "bf16"}
    )
    device_is(Device("cuda", (8, 0), cuda=(12, 9)), of="cpu")
    assert machine.emulated_on_gpu(model, torch.device("cpu")) == [], (
        "a CPU emulates all of them, and nobody expects else"
    )
    assert machine.emulated_on_gpu(model, torch.device("cuda")) == [
        "Not on narrow units, so no faster than bfloat16 (1 layer): fp8-current: emulated exactly in bfloat16 "
        "(native: compute capability 8.0, FP8 needs 8.9)."
    ]


def test_an_optimizer_without_its_kernel_says_why(triton_installed, device_is):
    """As on a GPU that Triton does not serve; torch's own optimizer is nobody's fallback."""
    model = nn.Linear(64, 128)
    optimizer = ng.optim.AdamW(model, states="8bit")
    device_is(Device("cuda", (7, 5)), of="cpu")
    assert machine.stepped_in_torch(optimizer) == [
        "The optimizer steps 2 tensors in plain torch, several times slower than its kernel: compute capability 7.5, needs 8.0."
    ]
    device_is(Device("cuda", (9, 0)), of="cpu")
    assert machine.stepped_in_torch(optimizer) == []
    assert machine.stepped_in_torch(torch.optim.AdamW(model.parameters())) == []


def test_a_driver_that_torch_cannot_use_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    assert machine.unused_gpu(torch.device("cpu")) == ""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  450.80\nGCC\n", encoding="utf-8"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = machine.unused_gpu(torch.device("cpu"))
    assert words.startswith(
        "This runs on the CPU although there is an NVIDIA driver (NVIDIA UNIX x86_64 Kernel Module  450.80)"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.unused_gpu(torch.device("cpu")) == "", "asked for by --device cpu"


def test_an_apple_gpu_beside_the_cpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    words = machine.unused_gpu(torch.device("cpu"))
    assert "'mps'" in words and OTHER_GPUS["mps"] in words
