"""The seams of a Linear: its size, what it imports and calls, and that a source of casts is all that a new one needs (exact)."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from benchmarks.linear_overhead import IMPORTED, counted, python_calls, statements, trip
from narrowgauge import recipes
from narrowgauge.addresses import validity
from narrowgauge.nn import linear_function
from narrowgauge.nn.keep_policy import KeepPolicy
from narrowgauge.nn.linear_context import CastSources, LinearContext
from narrowgauge.nn.linear_function import LinearFunction, plan_of
from narrowgauge.nn.operands import Casts, Operand
from tests.compare import assert_same


def test_the_three_products_stand_on_one_page():
    """85 statements, the guard of imports for annotations included; docstrings may grow."""
    assert statements(Path(linear_function.__file__).read_text(encoding="utf-8")) <= 85


# Recipe -> the most calls, and moves between files, of one forward and backward pass.
CALLS = {
    "bf16": (116, 49),
    "fp8-delayed": (193, 88),
    "fp8-current": (140, 57),
    "fp8-current-fast": (140, 57),
    "fp8-row": (158, 74),
    # Values times their scales: a call more for each product, and no pass of its own for scales.
    "fp8-block": (151, 69),
    # Scales of a transposed matrix multiply it as rows: a call more, and a fifth of the time.
    "mxfp8": (183, 76),
    # The packing of left operands is a call of C++: on CPUs without VNNI, of each product. It is
    # counted in `int8` and `int4-lsq-luq`.
    "int8": (145, 75),
    "int4-hq-bs": (236, 142),
    # Eight of them measure x and w, beside whose best step `describe` shows the learned one.
    "int4-hq-lss": (296, 172),
    "int4-lsq-luq": (239, 125),
    "int4-minmax-sr": (250, 147),
    "int4-row-sr": (246, 140),
    "nvfp4": (243, 103),
    "nvfp4-46": (243, 103),
    "quartet2": (605, 293),
    "quartet2-46": (733, 357),
    "tetrajet2": (327, 147),
    "int4-eden": (492, 264),
    "mxfp4": (268, 138),
}


@pytest.mark.parametrize("recipe", recipes.names())
def test_one_linear_calls_little_and_stays_in_few_files(recipe):
    """Forward and backward, the cast of the weight included."""
    layer = ng.QLinear(64, 64, recipe=recipe)
    run = trip(layer)
    for _ in range(2):
        run()
        ng.advance(layer)
    found = counted(run)
    # A recipe without a row may take as many as the longest.
    most_calls, most_moves = CALLS.get(recipe, max(CALLS.values()))
    assert found["calls"] <= most_calls and found["moves"] <= most_moves, found


@pytest.mark.parametrize("recipe, most", [("fp8-current", 20), ("fp8-delayed", 70)])
def test_the_end_of_a_step_calls_little_for_each_layer(recipe, most):
    """Python calls of `advance`, torch's own included: setting an attribute of a module takes eight."""
    calls = {}
    for count in (2, 10):
        model = ng.convert(
            torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(count))), recipe
        )
        for _ in range(3):
            model(torch.randn(4, 16)).sum().backward()
            calls[count] = python_calls(partial(ng.advance, model))
    assert (calls[10] - calls[2]) / 8 <= most, calls


def test_importing_the_linear_brings_few_statements():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, encoding="utf-8", check=True
    )
    # 2,700 before the state, the context and the policy of a call were objects with named fields.
    # 2,950 before the plan chose the kernels of rotations and of the amax. 3,120 before a cast could
    # correct its scales, and a recipe cast decoded operands. 3,195 before kernels of casts rotated, and
    # wrote scales in cuBLAS' layout. 3,290 before C++ kernels ran on torch's threads and multiplied INT8.
    # 3,345 before a CPU's GEMM added a bias, rotations were vectors, and `tetrajet2`, two statements.
    # 3,358 before sums for biases. 3,370 before codes were read from tables. 3,391 before a GPU's kernels
    # rotated and cast in one, 3,426 before FP8 codes of one orientation, 3,439 before casts of a CPU
    # multiplied by their scales. Docstrings and comments may grow.
    assert int(done.stdout) <= 3540


class Gathered:
    """Codes of a weight that somebody else has cast, as a collective would bring them."""

    def __init__(self, weight: torch.Tensor, **casts: object) -> None:
        self.weight, self.casts, self.asked = weight, casts, []

    def lookup(self, operand: Operand) -> Casts | None:
        self.asked.append(operand.plan.role)
        return Casts(**self.casts) if operand.tensor is self.weight else None


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row", "mxfp8"])
def test_a_source_of_casts_is_one_object(recipe):
    """What it has is multiplied; what it lacks, and the other operands, are cast as ever."""
    recipe = recipes.get(recipe)
    x, shown = torch.randn(8, 64), torch.randn(32, 64, requires_grad=True)
    real = (2 * shown.detach()).requires_grad_()
    plan = plan_of(recipe, x.device)
    rows = ng.quantize(real, recipe.output.rhs, expand=plan.w.rows_expand)
    source = Gathered(shown, rows=rows)
    sources = CastSources(by_role={role: (source,) for role in ("x", "w", "gy")})
    context = LinearContext(plan=plan, out_dtype=x.dtype, keep=KeepPolicy(), sources=sources)
    y = LinearFunction.apply(x, shown, None, context, None, None, None)
    assert_same(y, ng.linear(x, real, None, recipe))
    assert source.asked == ["x", "w"]
    y.backward(torch.ones_like(y))
    assert source.asked == ["x", "w", "gy"] and shown.grad is not None


def test_the_key_of_everything_that_is_kept():
    """One for all caches: version, place, type, shape, strides, inference mode; none for a tensor without a version."""
    x = torch.randn(4, 4)
    before = validity(x)
    assert before == validity(x) and before is not None
    changed = [x.T, x[:2], x.to(torch.float64), x.clone()]
    assert all(validity(each) != before for each in changed)
    with torch.inference_mode():
        assert validity(x) != before and validity(torch.ones(2)) is None
    x.add_(1)
    assert validity(x) != before
