"""Self-check of the optimizer's Triton kernel before its first step on a device.

The kernel must be bit-identical to the definition on two small tensors. The first has 5 rows of two
tiles and 48 elements (53 if row lengths are not multiples of 16). The second has 3 rows of one
tile. They cover several programs, a short tile, and two lines of the table. The second tensor is a
shard of a larger one.

Three steps start from the same weights and gradients, over nine decades. The gradients contain a
row of zeros, subnormal numbers and constant columns (to clamp first moments). From the second step
on they contain a NaN and columns of zeros (so that moments only decay). After each step, weights,
masters, codes, scales and expansions must equal plain torch on the CPU. A wrong random number, a
square root or quotient off by a bit, a swapped scale, or a wrong rounding direction shows in a
single element.

If the step also writes the cast of the weight, its amax and codes are compared. The tensors then
have 35 (48) and 9 (16) rows: more than a band of programs, and less than a program. The codes under
a NaN scale are compared too.

LARGE, for `KernelCheck.large`, has more programs than a device holds at once.

Runs once per process, device and `StepKind`. Cost: about ten milliseconds of CPU time, a compilation
that the step needs anyway, and one sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.ops.quantize import precast_weight
from narrowgauge.ops.quantize.precast_weight import PrecastWeight
from narrowgauge.ops.selfcheck import OutputComparison
from narrowgauge.optim import masters, moments, noise, rules
from narrowgauge.optim.moments import Moment, States
from narrowgauge.optim.shards import Part
from narrowgauge.optim.step import ParamStep, new_state, step_in_torch
from narrowgauge.recipe import Cast, DelayedScaling

STEPS, SEED = 3, 20260614
LARGE = 512  # times the rows of both tensors
GROUP = {"lr": 1e-2, "weight_decay": 0.1}

Run = Callable[[Sequence[ParamStep], dict[Any, Any]], None]


@dataclass(frozen=True)
class StepKind:
    """Compile-time facts of one parameter's step; numbers and sizes are not part of the kind.

        cast           cast that the step also writes, or None
        turns_aligned  True if codes of w.T can be stored 16 bytes at a time
        shift          elements of the first random block (16 elements) that lie before the shard

    See `step.ParamStep` for the other fields.
    """

    rule: rules.Rule
    nesterov: bool
    first: Moment
    second: Moment
    weight: torch.dtype
    gradient: torch.dtype
    master: masters.Master
    tile: int
    aligned: bool
    cast: Cast | None = None
    turns_aligned: bool = False
    shift: int = 0

    def __str__(self) -> str:
        """The kind in words, the same in every process: the repr of a rule has addresses."""
        weight, gradient = (
            str(dtype).removeprefix("torch.") for dtype in (self.weight, self.gradient)
        )
        return (
            f"{self.rule.name}{' nesterov' if self.nesterov else ''} {self.first.name} {self.second.name}, "
            f"{weight} by {gradient}, master {self.master}, tile {self.tile}, shift {self.shift}"
            f"{', aligned' if self.aligned else ''}{f', {self.cast}' if self.cast else ''}"
            f"{', aligned turns' if self.turns_aligned else ''}"
        )


# States, masters, alignments and shards of the kinds that training uses most.
EXAMPLES = {
    "8bit": StepKind(
        rules.ADAMW, False, moments.E5M2, moments.TAPERED8, torch.float32, torch.bfloat16, None, 256, aligned=True
    ),
    "4bit": StepKind(
        rules.ADAMW, False, moments.DYNAMIC4, moments.LINEAR4, torch.bfloat16, torch.bfloat16, "stochastic", 128, aligned=False
    ),
    "shard": StepKind(
        rules.LION, False, moments.WIDE, moments.NONE, torch.bfloat16, torch.bfloat16, "stochastic", 256, aligned=False, shift=13
    ),
    "scaled shard": StepKind(
        rules.SGD, False, moments.WIDE, moments.NONE, torch.bfloat16, torch.float32, "fp16-scaled", 256, aligned=True, shift=9
    ),
}  # fmt: skip


def compare(
    run: Run, kinds: tuple[StepKind], device: torch.device, times: int = 1
) -> Iterator[OutputComparison]:
    """Yield comparisons of all tensors that a step writes, after each step, with the definition."""
    [kind] = kinds
    expected, found = (_samples(kind, there, times) for there in (torch.device("cpu"), device))
    for step in range(1, STEPS + 1):
        for each in (*expected, *found):
            group = {**kind.rule.options, **GROUP, "nesterov": kind.nesterov}
            each.constants = kind.rule.constants(group, step)
            each.step_key = noise.step_key(SEED, step)
            each.gradient = _gradient(each, step, kind.gradient).to(each.weight.device)
        step_in_torch(expected)
        for each in expected:
            if each.stepped is not None:
                precast_weight.write(each.stepped, each.weight)
        run(found, {})
        for place, (wanted, got) in enumerate(zip(expected, found, strict=True)):
            computed = _left(got)
            for name, truth in _left(wanted).items():
                yield OutputComparison(
                    f"{name} of tensor {place} after step {step}", computed[name], truth
                )


def _samples(kind: StepKind, device: torch.device, times: int) -> list[ParamStep]:
    generator = torch.Generator().manual_seed(SEED)
    odd = 0 if kind.aligned else 5
    heights = (5, 3) if kind.cast is None else (48, 16) if kind.turns_aligned else (35, 9)
    states = States(first=kind.first, second=kind.second, tile=kind.tile)
    found = []
    for number, (rows, columns) in enumerate(
        zip(heights, (2 * kind.tile + 48 + odd, kind.tile + odd), strict=True)
    ):
        rows *= times
        weight = (torch.randn(rows, columns, generator=generator) * 0.02).to(kind.weight).to(device)
        stepped = None if kind.cast is None else _stepped(weight, kind.cast, number)
        state = new_state(weight, kind.rule, states, kind.master, device)
        found.append(
            ParamStep.of(
                weight, kind.rule, states, kind.master, state, number=number, stepped=stepped
            )
        )
        # Casts are written only for whole parameters, so a cast excludes a shard.
        if kind.cast is None:
            # The second tensor is a shard from the middle of a matrix. Both begin inside a random
            # block at the kind's shift.
            before = number * kind.tile
            found[-1].part = Part(
                columns=columns + 2 * before, row=3 * number, column=before + kind.shift
            )
    return found


def _stepped(weight: Tensor, cast: Cast, number: int) -> PrecastWeight:
    """Cast buffers for the weight of a tensor.

    The first tensor (number 0) has an amax of this step in its history, the second only earlier
    ones.
    """
    history = None
    if isinstance(cast.calibrate, DelayedScaling):
        history = AmaxHistory(cast.calibrate, weight.device)
        history.live.copy_(torch.tensor([0.04, 0.0 if number else 0.05, 0.0]))
        history.history[:1] = 0.06
    found = PrecastWeight.of(weight, cast, history)
    for codes in found.codes or ():
        # A kernel that writes no codes must not pass by a lucky initial value.
        codes.view(torch.uint8).fill_(1)
    return found


def _left(param_step: ParamStep) -> dict[str, Tensor]:
    """All tensors that a step writes, by name, including the cast of the weight."""
    found = {"weight": param_step.weight, **param_step.state}
    if (stepped := param_step.stepped) is not None:
        found["amax"] = stepped.maxima.amax().view(torch.float32).reshape(1)
        cast = {
            "expected amax": stepped.expected,
            "codes": stepped.plain,
            "codes of the transpose": stepped.turned,
        }
        found |= {name: x for name, x in cast.items() if x is not None}
    return found


def _gradient(param_step: ParamStep, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + 10 * step + param_step.number)
    shape = param_step.weight.shape
    g = (
        torch.randn(shape, generator=generator)
        * torch.exp(3 * torch.randn(shape, generator=generator))
        * 1e-3
    )
    # A row of zeros, subnormal numbers, and constant columns that reach the bound of m.
    g[1], g[2, :4], g[:, 40:60] = 0.0, 1e-39, 1e-3
    if step > 1:
        g[:, 60:80] = 0.0
        g[0, 7] = float("nan")
    return g.to(dtype)
