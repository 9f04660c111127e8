"""Runs the optimizer's kernel under Triton's interpreter and says which results differ from the definition; a process of its own.

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick stepped      tests/ops/triton/cases.py says what is printed

Everything in the kernel is float32 and whole numbers, in which the interpreter is faithful, so all bits are compared: weights, masters,
codes and scales, after two steps of a matrix with ragged tiles of odd length, one with whole rows, and a vector; and that the
margins of their memory are as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.cuda_graphs import FORWARD_BACKWARD, GraphedStep
from narrowgauge.ops.registry import Kernel, KernelChoice
from narrowgauge.ops.selfcheck import examine
from narrowgauge.optim import (
    AdamW,
    base,
    param_groups,
    rules,
    selfcheck,
    skipped_steps,
)
from narrowgauge.optim.backends import CHECK
from narrowgauge.optim.masters import KINDS
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.states import FIRST, SECOND
from narrowgauge.optim.step import ParamStep, new_state
from narrowgauge.optim.triton import kernel, launch
from tests.compare import assert_same
from tests.ops.triton.cases import Case
from tests.optim.building import TRITON

MASTERS = [
    (None, torch.float32),
    *((master, torch.bfloat16) for master in KINDS if master),
    ("fp32", torch.float16),
    ("fp16-scaled", torch.float16),
    ("stochastic", torch.float16),
]
SHAPES = ((5, 557), (3, 512), (77,))
INTERPRETED: Kernel[Any] = Kernel("interpreted", lambda spec: None, launch.step)


def narrow(case: Callable[..., None]) -> Callable[..., None]:
    """The case with narrow states of tensors of any size: a run keeps those of the smallest in float32."""

    @wraps(case)
    def run(*given: Any, **named: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(param_groups, "SMALLEST", 1)
            case(*given, **named)

    return run


class Guards:
    """Memory with a margin on both sides, which must stay as it is: a kernel that writes beyond a tensor is seen."""

    MARGIN, FILL = 4096, 0x5A

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def home(self, x: torch.Tensor) -> torch.Tensor:
        """x in such memory."""
        size = x.numel() * x.element_size()
        buffer = torch.full((size + 2 * self.MARGIN,), self.FILL, dtype=torch.uint8)
        self.buffers.append(buffer)
        return buffer[self.MARGIN : self.MARGIN + size].view(x.dtype).view(x.shape).copy_(x)

    def new_state(self, *call: Any) -> dict[str, torch.Tensor]:
        return {
            name: x if x.is_meta or name == "step" else self.home(x)
            for name, x in new_state(*call).items()
        }

    def check(self) -> None:
        for buffer in self.buffers:
            margins = torch.cat((buffer[: self.MARGIN], buffer[-self.MARGIN :]))
            assert bool((margins == self.FILL).all()), "written beyond a tensor"


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(4)
    return [nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in SHAPES]


def gradients(parameters: list[nn.Parameter], step: int, poison: float | None = None) -> None:
    """Nine decades, a zero row, a zero column, subnormals; and what poisons a tile."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        shape = parameter.shape
        g = (
            torch.randn(shape, generator=generator)
            * torch.exp(3 * torch.randn(shape, generator=generator))
            * 1e-3
        )
        if g.ndim == 2 and len(g):
            g[2], g[:, 7], g[1, :5] = 0.0, 0.0, 1e-39
            g[:, 40:80] = 1e-3  # held, see `rules.bound`
            g[:, 80:120] *= step == 0  # only decays
            g[:, 120:140] *= 1e-6**step
            if poison is not None:
                g[-1, 300] = poison
        parameter.grad = g.to(parameter.dtype)


@narrow
def compare(
    rule: str,
    states: str,
    master: str | None,
    dtype: torch.dtype,
    poison: float | None = None,
    steps: int = 2,
) -> None:
    found = []
    for interpreted in (True, False):
        parameters, guards = weights(dtype), Guards()
        with pytest.MonkeyPatch.context() as patch:
            if interpreted:
                parameters = [nn.Parameter(guards.home(p.detach())) for p in parameters]
                patch.setattr(base, "new_state", guards.new_state)
            optimizer = TRITON[rule](parameters, states=states, master=master, backend="torch")
            if interpreted:
                optimizer._kernel = lambda param_step: INTERPRETED
            for step in range(steps):
                gradients(parameters, step, poison)
                optimizer.step()
        guards.check()
        found.append(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
    assert_same(*found, any_nan=poison is not None)


@narrow
def compare_groups() -> None:
    """Groups of other rates and states, a tensor that comes later, and one of another layout: several launches, the same numbers."""
    found = []
    for interpreted in (True, False):
        parameters = [
            *weights(torch.float32),
            nn.Parameter(torch.randn(512, 12).T),
            nn.Parameter(torch.zeros(0, 5)),
        ]
        groups = [
            {"params": parameters[:1], "lr": 1e-3},
            {"params": parameters[1:], "states": "4bit", "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, states="8bit", seed=7, backend="torch")
        if interpreted:
            optimizer._kernel = lambda param_step: INTERPRETED  # type: ignore[method-assign]
        for step in range(3):
            gradients(parameters if step else parameters[:2], step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
        if interpreted:
            launches = len({id(batch) for batch in optimizer._kept.values()})
            assert 2 <= launches <= 6, launches
    assert_same(*found)


@narrow
def compare_replayed() -> None:
    """Launches whose numbers come from memory. There is no graph here: capturing would launch as well, which is undone."""
    found = []
    launched: list[Any] = []
    for replays in (True, False):
        parameters = weights(torch.bfloat16)
        optimizer = AdamW(parameters, states="8bit", master="stochastic", lr=1e-2, backend="torch")
        optimizer._kernel = lambda param_step: INTERPRETED  # type: ignore[method-assign]
        gradients(parameters, 0)
        optimizer.step()
        if replays:
            replayed = optimizer.replayable()
            replayed.refuse = lambda: ""  # type: ignore[method-assign]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "run", lambda *call: launched.append(call))
                replayed.capture()
        for step in (1, 2):
            fresh = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
            gradients(fresh, step)
            for parameter, other in zip(parameters, fresh, strict=True):
                parameter.grad.copy_(other.grad)
            optimizer.param_groups[0]["lr"] *= 0.5
            if replays:
                replayed.before_replay()
                for call in launched:
                    launch.run(*call)
            else:
                optimizer.step()
        found.append(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
    assert_same(*found)


@narrow
def compare_skipped(
    rule: str, states: str, master: str | None, dtype: torch.dtype, halts: bool = False
) -> None:
    """Steps that a flag on the device leaves out, beside those of an optimizer that is never called for them.

    The interpreter's host may look, as on a CPU it would: it is told that it may not. A parameter comes later, one stays away for a step.
    """
    flags = (0.0, 1.0, 0.0, math.inf, math.nan, 0.0, 0.0)
    found = []
    for interpreted in (True, False):
        parameters, guards = weights(dtype), Guards()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(skipped_steps.SkippedSteps, "seen_by_host", lambda self, flag: False)
            if interpreted:
                parameters = [nn.Parameter(guards.home(p.detach())) for p in parameters]
                patch.setattr(base, "new_state", guards.new_state)
            optimizer = TRITON[rule](parameters, states=states, master=master, backend="torch")
            if interpreted:
                optimizer._kernel = lambda param_step: choose_interpreted(param_step)
            for step, flag in enumerate(flags):
                gradients(parameters, step)
                if step == 0 and not halts:
                    parameters[2].grad = None
                if step == 4:
                    parameters[0].grad = None
                optimizer.param_groups[0]["lr"] *= 0.9
                if interpreted:
                    name = "halted" if halts else "found_inf"
                    setattr(
                        optimizer, name, torch.tensor(max(flags[: step + 1]) if halts else flag)
                    )
                    optimizer.step()
                elif not (any(flags[: step + 1]) if halts else flag):
                    optimizer.step()
                else:
                    optimizer.param_groups[0]["previous_lr"] = optimizer.param_groups[0]["lr"]
        guards.check()
        state = optimizer.state_dict()["state"]
        if halts:  # of a run that has ended nobody counts on
            state = {
                place: {name: x for name, x in each.items() if name != "step"}
                for place, each in state.items()
            }
        found.append(([p.detach() for p in parameters], state))
    assert_same(*found)


class Undone:
    """Stands in for CUDA's graphs: a capture changes nothing, a replay makes the calls again."""

    step: GraphedStep

    def warm(self, call: Callable[[], None]) -> None:
        call()

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        written = [
            self.step._loss,
            *(p.grad for p in self.step.model.parameters() if p.grad is not None),
        ]
        before = [x.clone() for x in written]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "run", lambda *call: None)
            call()
        for x, value in zip(written, before, strict=True):
            x.copy_(value)
        return call


@narrow
def compare_graphed() -> None:
    """Whole steps of `GraphedStep`: the optimizer's launches read what the host sent ahead of the replay."""
    found = []
    for warmup in (1, 99):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(77, 64), nn.GELU(), nn.Linear(64, 5)).to(torch.bfloat16)
        optimizer = AdamW(model.parameters(), states="8bit", master="stochastic", lr=1e-2)
        optimizer._kernel = lambda param_step: choose_interpreted(param_step)  # type: ignore[method-assign]

        def backward(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        recorder = Undone()
        step = recorder.step = GraphedStep(
            model, optimizer, backward, clip=1.0, warmup=warmup, recorder=recorder
        )
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
            generator = torch.Generator().manual_seed(number)
            step.accumulate({"x": torch.randn(4, 77, generator=generator).bfloat16()})
            found.append([step.readings().clone()])
            step.update()
        assert step.graphs.captured == (
            {FORWARD_BACKWARD: 1, "clipping": 1, "update": 1} if warmup == 1 else {}
        )
        found.append([p.detach() for p in model.parameters()] + list(state_tensors(optimizer)))
    for eager, replayed in zip(found[5:], found[:5], strict=True):
        assert_same(replayed, eager)


def choose_interpreted(param_step: ParamStep) -> Kernel[Any]:
    param_step.backend = None, KernelChoice(replace(INTERPRETED, name="triton"), ())
    return param_step.backend[1].kernel  # type: ignore[no-any-return]


def state_tensors(optimizer: AdamW) -> Iterator[torch.Tensor]:
    for state in optimizer.state_dict()["state"].values():
        yield from state.values()


# Rules whose cases are not chosen by hand below.
OTHERS = [rule for rule in TRITON if rule not in ("adamw", "lion", "sgd")]
STEPS = (
    *(("adamw", states, None, torch.float32) for states in STATES),
    *(("adamw", "8bit", master, dtype) for master, dtype in MASTERS[1:]),
    ("adamw", "fp8", "stochastic", torch.bfloat16),
    ("adamw", "fp8-lm", "fp16-scaled", torch.bfloat16),
    ("adamw", "4bit", "bf16-remainder", torch.bfloat16),
    ("lion", "8bit", None, torch.float32),
    ("lion", "fp32", "bf16-remainder", torch.bfloat16),
    ("sgd", "4bit", "stochastic", torch.bfloat16),
    ("sgd", "fp8", None, torch.float32),
    ("adamw", "fp16/e4m3", "fp16-scaled", torch.bfloat16),
    ("lion", "fp16", None, torch.float32),
    *((rule, states, None, torch.float32) for rule in OTHERS for states in STATES),
    *(
        ("adamw", f"{first}/{second}", *MASTERS[(row + column) % len(MASTERS)])
        for row, first in enumerate(FIRST)
        for column, second in enumerate(SECOND)
        if first != second
    ),
)
POISONS = (
    *((states, "fp16-scaled", float("nan")) for states in STATES),
    ("8bit", "stochastic", float("inf")),
    ("8bit", "bf16-remainder", 1e38),
)


LEFT_OUT = (
    ("adamw", "8bit", None, torch.float32),
    ("adamw", "4bit", "stochastic", torch.bfloat16),
    ("lion", "fp32", "fp16-scaled", torch.float16),
    ("sgd", "fp8", "bf16-remainder", torch.bfloat16),
    ("adamw", "fp32", "fp32", torch.bfloat16),
)

KINDS = (
    "left out ",
    "halted",
    *(f"{rule} " for rule in TRITON),
    "poison ",
    "groups",
    "replayed",
    "graphed",
    "check ",
    "broken",
    "unknown rule",
)  # what a case begins with
SLOW = (
    "graphed",
    *(f"left out {rule}" for rule in ("lion", "sgd")),
    "left out adamw fp32",
    *(
        f"adamw {first}/{second} "
        for first in FIRST
        for second in SECOND
        if (first, second) != ("fp16", "e4m3")
    ),
    "lion fp16",
    "adamw 8bit fp32 float16",
    "adamw 8bit fp16-scaled float16",
    "adamw fp8-lm None",
    "poison nan fp",
    "poison nan 4bit",
    "poison inf",
    "poison 1e+38",
    "replayed",
    "left out adamw 4bit",
    "adamw 8bit fp16-scaled bfloat16",
    "adamw 8bit bf16-remainder",
    "adamw fp8 None",
    "adamw 4bit None",
    "adamw fp16/e4m3 fp32",
    "sgd fp8",
    "check 4bit",
    "check scaled shard",
    "adamw 8bit stochastic bfloat16",
)


def is_quick(name: str) -> bool:
    """Every rule, state, master and dtype occurs; those left out are more pairs of them."""
    return not name.startswith(SLOW)


def cases() -> Iterator[Case]:
    for rule, states, master, dtype in STEPS:
        name = f"{rule} {states} {master} {str(dtype).removeprefix('torch.')}"
        yield name, lambda call=(rule, states, master, dtype): compare(*call)
    for states, master, value in POISONS:
        yield (
            f"poison {value} {states}",
            lambda call=("adamw", states, master, torch.bfloat16, value): compare(*call),
        )
    for rule, states, master, dtype in LEFT_OUT:
        yield (
            f"left out {rule} {states} {master}",
            lambda call=(rule, states, master, dtype): compare_skipped(*call),
        )
    yield (
        "halted",
        lambda: compare_skipped("adamw", "8bit", "stochastic", torch.bfloat16, halts=True),
    )
    yield "groups", compare_groups
    yield "replayed", compare_replayed
    yield "graphed", compare_graphed
    for name, kind in selfcheck.EXAMPLES.items():
        yield f"check {name}", lambda kind=kind: prove(kind)
    yield "broken", find_the_broken_kernel
    yield "unknown rule", refuse_an_unknown_rule


def failure(kind: selfcheck.StepKind) -> str:
    """Why the kernel fails its check, or ''."""
    return examine("optim", launch.step, CHECK, (kind,), torch.device("cpu")).reason or ""


def prove(kind: selfcheck.StepKind) -> None:
    assert not failure(kind), failure(kind)


def refuse_an_unknown_rule() -> None:
    """A number without a branch in the kernel computed SGD."""
    unknown = replace(rules.LION, kernel=77)
    reason = failure(replace(selfcheck.EXAMPLES["shard"], rule=unknown))
    assert "no branch for this rule" in reason, reason


def find_the_broken_kernel() -> None:
    """A kernel that rounds with half the noise passes no check, and the same with its noise back does."""
    from narrowgauge.optim.triton import moment_codes

    whole = moment_codes.noise_bits
    kernel.noise_bits = lambda key, first, column: whole(key, first, column) >> 1
    try:
        reason = failure(selfcheck.EXAMPLES["8bit"])
    finally:
        kernel.noise_bits = whole
    # The first moment is rounded with noise too, and the weight is compared before the moments.
    assert reason.startswith("its weight of tensor 0 after step 1 is wrong"), reason
