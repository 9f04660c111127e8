"""A count of memory launches no kernel, so it gives the same allocations where Triton is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.ops.registry import Device
from narrowgauge.plan import Step, count

HOPPER, BLACKWELL = Device("cuda", (9, 0), cuda=(12, 9)), Device("cuda", (10, 0), cuda=(12, 9))
CASES = [
    ("fp8-current", "8bit", HOPPER),
    ("fp8-delayed", "fp8", HOPPER),
    ("fp8-block", "4bit", HOPPER),
    ("fp8-row", "fp32", HOPPER),
    ("mxfp8", "8bit", BLACKWELL),
    ("nvfp4", "fp8", BLACKWELL),
    ("int4-hq-bs", "4bit", HOPPER),
    ("int8", "8bit", HOPPER),
]
# The metadata of the package goes as well: versions are read from it.
BLOCKED = """
import importlib.metadata as metadata, sys
sys.modules["triton"] = None
real = metadata.version
def version(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(128),
            nn.Linear(128, 256),
            nn.GELU(),
            nn.Linear(256, 128),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def counted(recipe: str, states: Any, device: Device) -> list[Any]:
    """Every allocation of two steps, in order, and every kernel and operator with its numbers of bytes."""

    def build() -> Step:
        model = ng.convert(nn.Sequential(Block(), Block()).to(torch.bfloat16), recipe)
        optimizer = ng.optim.AdamW(model, states=states, master="stochastic")
        x = torch.zeros(64, 128, dtype=torch.bfloat16)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)

        def kept() -> list[Tensor]:
            return [
                each
                for state in optimizer.state.values()
                for each in state.values()
                if torch.is_tensor(each)
            ]

        return Step(model, lambda: model(x).float().square().mean(), update, kept, x)

    trace = count(build, device).trace
    allocations = [
        [each.nbytes, each.phase, each.module, each.operation, each.part]
        for each in trace.allocations
    ]
    return [allocations, trace.events, [repr(each) for each in trace.work]]


def child(program: str, folder: Path) -> str:
    root = str(Path(ng.__file__).parents[1])
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *sys.path]),
        "XDG_CACHE_HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_triton_a_count_has_the_same_allocations(tmp_path):
    program = BLOCKED + (
        "import json\nfrom tests.plan.test_without_triton import CASES, counted\n"
        "print(json.dumps([counted(*case) for case in CASES]))"
    )
    found = json.loads(child(program, tmp_path).splitlines()[-1])
    for case, got in zip(CASES, found, strict=True):
        assert got == json.loads(json.dumps(counted(*case))), case


@pytest.mark.slow
def test_without_triton_plan_says_what_it_says_with_it(tmp_path):
    # One recipe: the search for the largest batch takes minutes in int4-hq-bs, whose allocations the test above compares.
    recipe = "fp8-delayed"
    settings = [
        "layers=4",
        "hidden_size=128",
        "heads=4",
        "intermediate_size=256",
        "vocab_size=512",
        "batch_size=4",
    ]
    words = [
        "plan",
        "--card=h100",
        f"--recipe={recipe}",
        "--optimizer.states=8bit",
        "--model.sequence-length=128",
    ]
    words += [
        f"--{name.replace('_', '-')}={value}"
        for name, _, value in (each.partition("=") for each in settings)
    ]
    call = f"\nfrom narrowgauge.cli import main\nsys.exit(main({words!r}))"
    without = child(BLOCKED + call, tmp_path / "without")
    assert child("import sys" + call, tmp_path / "with") == without
