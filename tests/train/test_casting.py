"""Runs whose optimizer step leaves the casts of the weights: asked for by itself, told, and without a trace in the numbers (exact)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from narrowgauge.nn import plan as layer_settings
from narrowgauge.ops.mm import plan
from narrowgauge.ops.registry import KernelChoice
from narrowgauge.optim import AdamW, precast_weights
from narrowgauge.train import loop
from tests.optim.test_precast_weights import WRITING
from tests.train.tiny import losses, settings


def told(folder) -> list[str]:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))["weight_casts"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_a_run_whose_step_casts_learns_what_one_without_does(
    text, tmp_path, monkeypatch, cpu, recipe
):
    """Micro-batches, evaluation on the way, a recipe that is switched; the definition in the kernels' place."""
    monkeypatch.setattr(
        layer_settings, "plan", lambda gemm, device: replace(plan(gemm, device), expand=None)
    )
    changes = {
        "recipe": recipe, "micro_batches": 2, "states": "8bit", "steps": 6, "eval_every": 2, "switch": "layers.0.*=bf16@5:forward",
    }  # fmt: skip
    loop.run(settings(text, tmp_path / "without", **changes))

    def writing(optimizer, task):
        task.backend = None, KernelChoice(WRITING, ())
        return WRITING

    monkeypatch.setattr(precast_weights, "refuse_here", lambda weight, cast: "")
    monkeypatch.setattr(AdamW, "_kernel", writing)
    loop.run(settings(text, tmp_path / "with", **changes))
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    what = "codes" if recipe == "fp8-delayed" else "amax"
    wide, cast = told(tmp_path / "with")
    assert wide.endswith(f" in 16 bits: {7 + (not cpu.bf16_gemm)} layers")
    assert cast.startswith(what) and cast.endswith(": 7 layers")
    assert told(tmp_path / "without")[1] == "needs a CUDA device, the tensor is on cpu: 7 layers"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "fp8-current"}, ["none: AdamW of torch writes the weights alone"]),
        (
            {"recipe": "bf16", "states": "8bit"},
            ["its output takes the weight in 16 bits: {} layers"],
        ),
    ],
    ids=str,
)
def test_a_run_says_what_the_step_casts_and_why_not(text, tmp_path, cpu, changes, words):
    """A CPU without bfloat16 units takes the head by the recipe bf16 too."""
    loop.run(settings(text, tmp_path / "run", steps=1, **changes))
    assert told(tmp_path / "run") == [line.format(14 + (not cpu.bf16_gemm)) for line in words]
