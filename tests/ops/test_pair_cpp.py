"""Integer codes of x and x.T from one pass on a CPU (ops/quantize/cpp.py): those of two casts by the definition, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import E4M3, INT4, INT8
from narrowgauge.ops.quantize import cpp, pair
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E8M0_CEIL, E8M0_FLOOR, FP32, POW2, WHOLE
from tests.compare import assert_same
from tests.selection import needs_compiler

ROW = Cast(format=INT8, tile=(1, WHOLE))
RULES = {"fp32": FP32, "pow2": POW2, "ceil": E8M0_CEIL, "floor": E8M0_FLOOR}
SPECIAL = (0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 3e38, -3.4e38, np.inf, -np.inf, np.nan)


def drawn(draw: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Magnitudes over many decades, ties of codes, and special values in some rows and columns."""
    x = draw.standard_normal((rows, columns)) * 10.0 ** draw.uniform(-6, 6, (rows, 1))
    if draw.random() < 0.3:
        x = draw.integers(-254, 255, (rows, columns)) / 2.0  # codes and halves between them
    for _ in range(draw.integers(0, 4)):
        x[draw.integers(rows), draw.integers(columns)] = draw.choice(SPECIAL)
    if draw.random() < 0.2:
        x[draw.integers(rows)] = 0.0
    return x.astype(np.float32)


@needs_compiler
@pytest.mark.parametrize("seed", range(120))
def test_codes_and_scales_are_those_of_two_casts(seed):
    draw = np.random.default_rng(seed)
    rows, columns = (int(each) for each in draw.integers(1, (100, 150)))
    x = torch.from_numpy(drawn(draw, rows, columns))
    x = x.to((torch.float32, torch.bfloat16, torch.float16)[draw.integers(3)])
    if draw.random() < 0.3:  # rows of a larger matrix
        x = torch.cat([x, x], 1)[:, :columns]
    if draw.random() < 0.3:
        x = x.T.contiguous().T
    cast = replace(ROW, scale=list(RULES.values())[draw.integers(len(RULES))])
    assert cpp.refuse_pair(Spec.of(x, cast, cols=True)) is None
    found = cpp.run_pair(x, cast, None, False, True, (None, None))
    expected = pair.reference_pair(x, cast, None, False, True, (None, None), backend="reference")
    for each, other in zip(found[:2], expected[:2], strict=True):
        assert_same(each.data, other.data)
        assert_same(each.scale, other.scale)
        assert each.shape == other.shape


@needs_compiler
def test_threads_change_nothing():
    x = torch.randn(301, 517) * torch.logspace(-3, 3, 517)
    one = cpp.run_pair(x, ROW, None, False, True, (None, None))
    torch.set_num_threads(3)
    three = cpp.run_pair(x, ROW, None, False, True, (None, None))
    torch.set_num_threads(1)
    for each, other in zip(one[:2], three[:2], strict=True):
        assert_same(each.data, other.data)
        assert_same(each.scale, other.scale)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tile": (1, 128)}, "operands"),
        ({"tile": (WHOLE, WHOLE)}, "operands"),
        ({"format": INT4}, "format"),
        ({"format": E4M3}, "format"),
        ({"rounding": "stochastic"}, "rounding"),
    ],
)
def test_other_casts_are_refused(change, code):
    cast = replace(ROW, **change)
    spec = Spec(Device("cpu"), torch.float32, (4, 4), cast, cols=True)
    assert cpp.refuse_pair(spec).code == code
    refused = cpp.refuse_pair(replace(spec, cast=ROW, cols=False))
    assert refused is not None and refused.code == "operands"


@needs_compiler
def test_a_layer_by_int8_reads_each_operand_once(monkeypatch, device_is):
    device_is(Device("cpu", int8_gemm=True))
    calls = []
    run = type(cpp.LIBRARY).call
    monkeypatch.setattr(
        type(cpp.LIBRARY),
        "call",
        lambda self, name, *given: (calls.append(name), run(self, name, *given))[1],
    )
    layer = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 48)), "int8")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):  # from the first step of the optimizer on, casts of the weight are kept
        calls.clear()
        layer(torch.randn(32, 64, requires_grad=True)).sum().backward()
        optimizer.step()
    assert calls.count("pair") == 3 and "cast" not in calls  # x, w and the gradient
