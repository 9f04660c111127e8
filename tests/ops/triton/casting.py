"""Runs the optimizer's kernel with the casts of the weights under Triton's interpreter; a process of its own, as tests.ops.triton.stepped.

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick casting      tests/ops/triton/cases.py says what is printed

Codes are rounded in integer arithmetic as on compute capability (0, 0); all bits are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.formats import E4M3, E5M2, INT8
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.ops.mm import plan
from narrowgauge.ops.quantize import precast_weight, triton, triton_launch, triton_transpose
from narrowgauge.ops.quantize import selfcheck as of_casts
from narrowgauge.ops.quantize.precast_weight import PrecastWeight
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.selfcheck import examine as examined
from narrowgauge.optim import AdamW, Lion, moments, rules, selfcheck
from narrowgauge.optim.skipped_steps import SkippedSteps
from narrowgauge.optim.triton import kernel as triton_kernel
from narrowgauge.recipe import Cast, DelayedScaling
from narrowgauge.scaling import POW2
from tests.compare import assert_same
from tests.ops.triton.cases import Case
from tests.ops.triton.stepped import (
    INTERPRETED,
    Guards,
    choose_interpreted,
    failure,
    gradients,
    narrow,
    prove,
)

DELAYED, CURRENT = Cast(format=E4M3, calibrate=DelayedScaling()), Cast(format=E4M3)
POW = Cast(format=E5M2, calibrate=DelayedScaling(length=3, margin=1), scale=POW2)
INTEGER = Cast(format=INT8, calibrate=DelayedScaling(length=1, algorithm="most_recent"))
# Rows that are no multiple of a band, of a program, of 16; rows of an odd number of elements, and of one tile.
SHAPES = {"ragged": (35, 141), "low": (5, 271), "even": (16, 144), "wide": (5, 304)}
STEPS = (
    ("8bit", None, torch.float32, DELAYED, "low"),
    ("8bit", "stochastic", torch.bfloat16, DELAYED, "ragged"),
    ("8bit", "bf16-remainder", torch.bfloat16, CURRENT, "ragged"),
    ("fp32", "fp32", torch.float16, POW, "even"),
    ("fp8", "fp16-scaled", torch.bfloat16, DELAYED, "even"),
    ("fp8-lm", "fp16-scaled", torch.float16, INTEGER, "wide"),
    ("4bit", None, torch.float32, POW, "ragged"),
    ("4bit", "stochastic", torch.bfloat16, CURRENT, "even"),
)


class Casting:
    """Stands in for `optim.precast_weights.WeightCasts`: one weight, its cast in guarded memory."""

    def __init__(self, weight: torch.Tensor, cast: Cast, guards: Guards) -> None:
        window = (
            AmaxHistory(cast.calibrate, weight.device)
            if isinstance(cast.calibrate, DelayedScaling)
            else None
        )
        self.stepped = PrecastWeight.of(weight, cast, window)
        if self.stepped.codes is not None:
            for name in ("plain", "turned"):
                codes = getattr(self.stepped, name)
                codes.view(torch.uint8).fill_(0x77)
                setattr(self.stepped, name, guards.home(codes))

    def of(self, parameter: torch.Tensor) -> PrecastWeight:
        return self.stepped

    def pass_step(self, step: int, seen: float) -> None:
        """What happens to the window between steps, and an amax of the next one."""
        window = self.stepped.buffers
        if window is not None:
            window.live.copy_(torch.tensor([0.1 * step, seen, 0.0]))
            window.history[:2] = torch.tensor([0.05, 0.03])[: len(window.history)]


def weight(shape: tuple[int, int], dtype: torch.dtype) -> nn.Parameter:
    torch.manual_seed(4)
    return nn.Parameter((torch.randn(shape) * 0.02).to(dtype))


@narrow
def compare(
    states: str, master: str | None, dtype: torch.dtype, cast: Cast, shape: str, poison: float | None = None, leaves_out: bool = False
) -> None:  # fmt: skip
    """Weight, states and what is left of the cast, after two steps; the second makes the weight smaller.

    leaves_out: after a third that the device leaves out, but for the cast of the weight as it is
    """
    found = []
    for interpreted in (True, False):
        parameter, guards = weight(SHAPES[shape], dtype), Guards()
        build = Lion if states == "fp32" else AdamW
        optimizer: Any = build(
            [parameter], states=states, master=master, lr=1e-2, weight_decay=20.0, backend="torch"
        )
        casting = Casting(parameter.detach(), cast, guards)
        if interpreted:
            optimizer._kernel = lambda param_step: INTERPRETED
            optimizer.casting = casting
        for step, seen in enumerate((0.06, 0.0, 0.03) if leaves_out else (0.06, 0.0)):
            casting.pass_step(step, seen)
            gradients([parameter], step, poison)
            if step == 2:
                casting.stepped.maxima.fill_(2**30)
            if step == 2 and interpreted:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(SkippedSteps, "seen_by_host", lambda self, flag: False)
                    optimizer.found_inf = torch.tensor(1.0)
                    optimizer.step()
            elif step < 2:
                optimizer.step()
            if not interpreted:
                precast_weight.write(casting.stepped, parameter.detach())
        guards.check()
        kept = casting.stepped
        left = [kept.maxima.amax().view(torch.float32), kept.expected, kept.plain, kept.turned]
        found.append((parameter.detach(), optimizer.state_dict()["state"], left))
    assert_same(*found, any_nan=poison is not None)


def examine(cast: Cast, dtype: torch.dtype) -> None:
    """What a GPU is asked for before it takes up what a step left."""
    spec = Spec.of(torch.zeros(2, 2, dtype=dtype), cast)
    check = of_casts.CHECKS["quantize_precast"]
    verdict = examined(
        "quantize_precast", triton.precast, check, check.kind(spec), torch.device("cpu")
    )
    assert verdict.reason is None, verdict.reason


SMALL = selfcheck.StepKind(
    rules.ADAMW, False, moments.DYNAMIC4, moments.LINEAR4, torch.bfloat16, torch.bfloat16, "stochastic", 128, aligned=True,
)  # fmt: skip


def find_the_broken_kernel() -> None:
    """One that counts a bit more for every magnitude, and one whose reciprocals are off, pass no check."""
    for name, cast, change, words in (
        ("magnitude_bits", CURRENT, lambda whole: lambda x: whole(x) + 65536, "its amax of tensor"),
        (
            "reciprocal_of",
            DELAYED,
            lambda whole: lambda scale, shared, C: whole(scale, shared, C) * 1.03125,
            "its codes of tensor 0 after step 1 is wrong",
        ),
    ):
        whole = getattr(triton_kernel, name)
        setattr(triton_kernel, name, change(whole))
        try:
            reason = failure(replace(SMALL, cast=cast))
        finally:
            setattr(triton_kernel, name, whole)
        assert reason.startswith(words), reason


def train(
    recipe: str, micro_batches: int, casts: bool, dtype: torch.dtype
) -> tuple[list[Any], Any]:
    """Losses, and what is there after three steps; and the optimizer's WeightCasts."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype)
    model = ng.convert(layers, recipe)
    master = None if dtype == torch.float32 else "stochastic"
    optimizer: Any = AdamW(
        model.parameters(),
        states="8bit",
        master=master,
        lr=3e-2,
        backend="auto" if casts else "torch",
    )
    linked = None
    if casts:
        optimizer._kernel = choose_interpreted
        linked = optimizer.cast_weights(model)
    ng.advance(model)
    losses = []
    for _ in range(3):
        for _ in range(micro_batches):
            loss = model(torch.randn(8, 24).to(dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return [losses, dict(model.state_dict()), optimizer.state_dict()["state"]], linked


@narrow
def compare_training(recipe: str, micro_batches: int, dtype: torch.dtype) -> None:
    """Losses, weights, states and windows with what the step leaves are those without."""
    launched = []
    whole = triton_launch.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "narrowgauge.nn.plan.plan",
            lambda gemm, device: replace(plan(gemm, device), expand=None),
        )
        expected, _ = train(recipe, micro_batches, False, dtype)
        # The kernel that takes up what was left, and no other: all else has the same bits, and takes long to interpret.
        patch.setattr(
            precast_weight.KERNELS,
            "kernels",
            [replace(precast_weight.KERNELS.kernels[0], refuse=lambda spec: None)],
        )
        patch.setattr(
            triton_launch,
            "launch",
            lambda kernel, *a, **o: launched.append(kernel) or whole(kernel, *a, **o),
        )
        got, casts = train(recipe, micro_batches, True, dtype)
    assert_same(got, expected)
    what = "codes" if recipe == "fp8-delayed" else "amax"
    assert [(name, each.code) for name, each in casts.items()] == [("0", what), ("2", what)]
    assert all("2 of 3 steps" in each for each in casts.values()), str(casts)
    kernel = triton_transpose.settle_both if recipe == "fp8-delayed" else triton_transpose.cast_both
    assert launched == [kernel] * 4, launched


KINDS = (
    "step ",
    "left out ",
    "poison ",
    "take ",
    "check ",
    "broken",
    "training ",
)  # what a case begins with
SLOW = (
    "check delayed", "left out e4m3 tensor fp32 delayed", "left out e5m2", "take int8", "broken",
    "step 8bit stochastic bfloat16", "step 4bit None", "poison e4m3 tensor fp32 delayed", "take e4m3 tensor fp32 delayed",
    "training fp8-delayed", "training fp8-current 1", "step fp8-lm", "step fp8 fp16-scaled",
)  # fmt: skip


def is_quick(name: str) -> bool:
    """Every master and shape occurs, scales of the step and of earlier ones; the others are more pairs of them."""
    return not name.startswith(SLOW)


def cases() -> Iterator[Case]:
    for states, master, dtype, cast, shape in STEPS:
        name = f"step {states} {master} {str(dtype).removeprefix('torch.')} {cast} {shape}"
        yield name, lambda call=(states, master, dtype, cast, shape): compare(*call)
    for cast in (DELAYED, CURRENT):
        call = ("8bit", "stochastic", torch.bfloat16, cast, "wide", float("nan"))
        yield f"poison {cast}", lambda call=call: compare(*call)
    for cast in (DELAYED, POW, CURRENT):
        call = ("8bit", "stochastic", torch.bfloat16, cast, "wide", None, True)
        yield f"left out {cast}", lambda call=call: compare(*call)
    for cast, dtype in (
        (DELAYED, torch.bfloat16),
        (CURRENT, torch.float32),
        (INTEGER, torch.float32),
    ):
        yield f"take {cast}", lambda cast=cast, dtype=dtype: examine(cast, dtype)
    yield "check delayed", lambda: prove(replace(SMALL, cast=DELAYED))
    yield "broken", find_the_broken_kernel
    for recipe in ("fp8-delayed", "fp8-current"):
        for micro_batches, dtype in ((1, torch.bfloat16), (2, torch.float32)):
            call = (recipe, micro_batches, dtype)
            yield f"training {recipe} {micro_batches}", lambda call=call: compare_training(*call)
