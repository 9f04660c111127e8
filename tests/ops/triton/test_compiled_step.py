"""The optimizer's kernel compiled for the GPUs it is for, without one: instructions in the ptx, spills in the binary (exact)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowgauge.ops.registry import Kernel
from narrowgauge.optim import AdamW, Lion
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.skipped_steps import SkippedSteps
from narrowgauge.optim.triton import launch
from tests.ops.triton.compiling import TARGETS, Compiled, compiled
from tests.selection import quick

KERNEL = Kernel("compiled", lambda spec: None, launch.step)
QUICK = [
    ("8bit", None, torch.float32, 90),
    ("8bit", "stochastic", torch.bfloat16, 90),
    ("fp8", None, torch.float32, 90),
]
MASTERS = [
    (None, torch.float32), ("stochastic", torch.bfloat16), ("bf16-remainder", torch.bfloat16), ("fp16-scaled", torch.bfloat16),
    ("fp32", torch.bfloat16),
]  # fmt: skip
# On each GPU every state with two of the masters, in turn, so that all pairs occur on one or another.
MATRIX = [
    (states, *MASTERS[(row + column + 2 * turn) % len(MASTERS)], sm)
    for row, sm in enumerate(TARGETS)
    for column, states in enumerate(STATES)
    for turn in range(2)
]
# Others on sm_90 that the turns leave out, and the slowest to compile.
MATRIX += [
    ("fp8-lm", "fp16-scaled", torch.bfloat16, 90),
    ("4bit", "bf16-remainder", torch.bfloat16, 90),
    ("fp32", "fp32", torch.float16, 90),
    ("fp32", "stochastic", torch.float16, 90),
    ("fp16/e4m3", "fp16-scaled", torch.bfloat16, 90),
    ("8bit/fp16", "bf16-remainder", torch.bfloat16, 90),
    ("fp8-lm", "stochastic", torch.float16, 90),
    ("fp32/4bit", None, torch.float32, 80),
    ("4bit/fp8", "stochastic", torch.bfloat16, 90),
]
MATRIX = [each for each in dict.fromkeys(MATRIX) if each not in QUICK]
# Form -> bytes of stack. ptxas stays at 128 registers, with which four programs fit on a
# multiprocessor. If the second moment is written first, nothing spills, but a thread takes 145
# registers (and `fp8` in float32 177 in place of 140), and three programs fit.
SPILLED = {("fp8", "stochastic", torch.bfloat16, 90): 8}


def kernel(
    states: str,
    master: str | None,
    dtype: torch.dtype,
    sm: int,
    columns: int = 512,
    build=AdamW,
    found_inf=None,
) -> Compiled:
    parameter = nn.Parameter(torch.zeros(16, columns, dtype=dtype))
    optimizer = build([parameter], states=states, master=master, backend="torch")
    optimizer._kernel = lambda param_step: KERNEL
    parameter.grad, optimizer.found_inf = torch.zeros_like(parameter), found_inf
    return compiled([launch], sm, optimizer.step)["step"]


@pytest.mark.slow
@pytest.mark.parametrize(("states", "master", "dtype", "sm"), QUICK, ids=str)
def test_it_compiles_without_spills_where_a_flag_leaves_it_out(
    monkeypatch, states, master, dtype, sm
):
    monkeypatch.setattr(SkippedSteps, "seen_by_host", lambda self, flag: False)
    check(kernel(states, master, dtype, sm, found_inf=torch.zeros(())))


def check(found: Compiled, most: int = 0) -> None:
    instructions = found.instructions()
    assert found.spills <= most and (not most or found.usage["REG"] == 128), found.usage
    assert {"sqrt.rn.f32", "div.rn.f32"} <= instructions, "correctly rounded"
    wrong = ("fma", "div.full", "div.approx", "sqrt.approx", "mad.rn.f32")
    flushing = {name for name in instructions if ".ftz" in name} - {
        "cvt.rmi.ftz.f32.f32"
    }  # floor: 0 for them anyway
    assert not flushing and not [
        name for name in instructions if name.startswith(wrong) or ".NaN" in name
    ]
    assert any(name.startswith("ld.global") and ".v4" in name for name in instructions), (
        "16 bytes per load"
    )
    assert any(name.startswith("st.global") and ".v4" in name for name in instructions), (
        "16 bytes per store"
    )


# The second stands in test_compiled_casting, with a cast beside the step.
@pytest.mark.parametrize(("states", "master", "dtype", "sm"), quick([QUICK[0]], QUICK), ids=str)
def test_it_compiles_without_spills(states, master, dtype, sm):
    """Roots and quotients correctly rounded, nothing contracted, subnormal numbers kept, accesses of 16 bytes."""
    check(kernel(states, master, dtype, sm))


@pytest.mark.slow
@pytest.mark.parametrize(("states", "master", "dtype", "sm"), MATRIX, ids=str)
def test_more_forms_compile_without_spills(states, master, dtype, sm):
    found = kernel(states, master, dtype, sm)
    check(found, SPILLED.get((states, master, dtype, sm), 0))


@pytest.mark.slow
@pytest.mark.parametrize("states", ["8bit", "fp8-lm", "4bit"])
@pytest.mark.parametrize(
    ("master", "dtype"), [(None, torch.float32), ("stochastic", torch.bfloat16)], ids=str
)
def test_odd_rows_compile_without_spills(states, master, dtype):
    """A thread that takes 16 elements of such rows, as of others, has no register for their rounding errors."""
    found = kernel(states, master, dtype, 90, columns=511)
    assert found.spills == 0, found.usage


def test_a_rule_without_a_second_moment_compiles():
    found = kernel("8bit", None, torch.float32, 90, build=Lion)
    assert found.spills == 0, found.usage
