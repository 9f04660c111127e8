"""The optimizer's kernel with the casts of the weights compiled for the GPUs it is for, without one (exact)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowgauge.formats import E4M3, E5M2, INT8
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.ops.quantize import triton_launch as casting
from narrowgauge.ops.quantize.precast_weight import PrecastWeight
from narrowgauge.ops.triton.cast_constants import constants_of
from narrowgauge.optim import AdamW
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.triton import launch
from narrowgauge.recipe import Cast, DelayedScaling
from tests.ops.triton.compiling import BEFORE_39, TARGETS, Compiled, compiled
from tests.ops.triton.test_compiled_step import KERNEL, MASTERS, check
from tests.selection import quick

DELAYED, CURRENT = Cast(format=E4M3, calibrate=DelayedScaling()), Cast(format=E4M3)
QUICK = [
    ("8bit", "stochastic", torch.bfloat16, 90, DELAYED),
    ("8bit", "stochastic", torch.bfloat16, 90, CURRENT),
]
# On each GPU every state with one of the masters for either cast, in turn, so that all pairs occur on one or another.
MATRIX = [
    (states, *MASTERS[(row + column + 2 * turn) % len(MASTERS)], sm, cast)
    for row, sm in enumerate(TARGETS)
    for column, states in enumerate(STATES)
    for turn, cast in enumerate((DELAYED, CURRENT))
]
# Others on sm_90 that the turns leave out.
MATRIX += [
    ("8bit", None, torch.float32, 90, DELAYED), ("4bit", "bf16-remainder", torch.bfloat16, 90, DELAYED),
    ("fp8", "fp16-scaled", torch.bfloat16, 90, DELAYED),
]  # fmt: skip
MATRIX = [each for each in dict.fromkeys(MATRIX) if each not in QUICK]


class Left:
    """Stands in for `optim.precast_weights.WeightCasts`."""

    def __init__(self, weight: torch.Tensor, cast: Cast) -> None:
        window = (
            AmaxHistory(cast.calibrate, weight.device)
            if isinstance(cast.calibrate, DelayedScaling)
            else None
        )
        self.stepped = PrecastWeight.of(weight.detach(), cast, window)

    def of(self, parameter: torch.Tensor) -> PrecastWeight:
        return self.stepped


def kernels(
    states: str, master: str | None, dtype: torch.dtype, sm: int, cast: Cast, shape=(256, 512)
) -> dict[str, Compiled]:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = AdamW([parameter], states=states, master=master, backend="torch")
    optimizer._kernel, optimizer.casting = (lambda param_step: KERNEL), Left(parameter, cast)
    parameter.grad = torch.zeros_like(parameter)
    return compiled([launch], sm, optimizer.step)


def check_both(states, master, dtype, sm, cast) -> None:
    found = kernels(states, master, dtype, sm, cast)
    assert found["foresee"].spills == 0 and found["step"].spills == 0, found
    instructions = found["step"].instructions()
    conversions = {name for name in instructions if "satfinite" in name}
    in_hardware = cast is DELAYED and constants_of(cast, TARGETS[sm]).hardware
    assert conversions == ({"cvt.rn.satfinite.e4m3x2.f32"} if in_hardware else set())
    assert any(name.startswith("atom.") or name.startswith("red.") for name in instructions), "amax"
    if cast is CURRENT:  # nothing is contracted; a cast divides by multiplications that are fused
        check(found["step"])
    # The codes of w.T leave in runs, not byte by byte; the expansions of fp8 are a byte for each tile.
    assert states == "fp8" or not any(name.startswith("st.global.b8") for name in instructions)


@pytest.mark.slow
@pytest.mark.parametrize(("states", "master", "dtype", "sm", "cast"), QUICK, ids=str)
def test_it_compiles_without_spills(states, master, dtype, sm, cast):
    check_both(states, master, dtype, sm, cast)


@pytest.mark.slow
@pytest.mark.parametrize(("states", "master", "dtype", "sm", "cast"), MATRIX, ids=str)
def test_more_forms_compile_without_spills(states, master, dtype, sm, cast):
    check_both(states, master, dtype, sm, cast)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "states"), [((67, 512), "8bit"), ((64, 511), "8bit"), ((67, 511), "4bit")], ids=str
)
def test_odd_sizes_compile_without_spills(shape, states):
    found = kernels(states, "stochastic", torch.bfloat16, 90, DELAYED, shape)
    assert found["step"].spills == 0, found["step"].usage


ODD = [
    (shape, states, *MASTERS[(row + column + turn) % len(MASTERS)], sm)
    for row, sm in enumerate(TARGETS)
    for column, states in enumerate(STATES)
    for turn, shape in enumerate(((67, 512), (64, 511)))
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "states", "master", "dtype", "sm"), ODD, ids=str)
def test_more_odd_sizes_compile_without_spills(shape, states, master, dtype, sm):
    found = kernels(states, master, dtype, sm, DELAYED, shape)
    assert found["step"].spills <= 8 * BEFORE_39, found["step"].usage


@pytest.mark.slow
@pytest.mark.parametrize("format", [E5M2, INT8], ids=str)
def test_other_formats_compile_without_spills(format):
    cast = Cast(format=format, calibrate=DelayedScaling())
    found = kernels("8bit", "stochastic", torch.bfloat16, 90, cast)
    assert found["step"].spills == 0, found["step"].usage


@pytest.mark.parametrize("sm", quick([90], [80, 90]))
def test_what_takes_it_up_compiles_without_spills(sm):
    x = torch.zeros(512, 1024, dtype=torch.bfloat16)
    left = Left(x, DELAYED).stepped
    found = compiled([casting], sm, lambda: casting.precast(x, left, torch.zeros(3), True))[
        "settle_both"
    ]
    assert found.spills == 0, found.usage
    assert not any(".NaN" in name for name in found.instructions()), (
        "see narrowgauge/ops/triton: maxima are integers"
    )
    assert any(name.startswith("ld.global.v4") for name in found.instructions()), (
        "16 bytes per load"
    )
