"""Learned step sizes (LSQ): the state of layers whose scales are parameters.

The parameter is p = log(s) / RATE instead of the step size s. Adam moves every parameter by about
its learning rate: a weight's step of 0.007 by a third of itself, an activation's step of 0.5 by a
250th. The first then jitters and the second lags behind. Logarithms all move by the same ratio,
RATE times the learning rate, and s stays positive. p receives LSQ's gradient of s divided by s *
RATE, so plain SGD moves s as in LSQ.

The gradient of a step is mostly noise, and a step is a gain of its layer too. Unbounded, steps
wandered from 0.60 to 0.04 and 3.7 rms in 120 steps of Adam at 2e-3. So `advance` bounds what an
optimizer step has done: no step size moves by more than MOST_MOVED. It begins at its optimum (the
cold start), which `off` shows beside it.

An optimizer that was built before the steps existed never updates them, without an error.
`step_end` reports each step of torch's optimizers, and a warning follows if WATCHED steps moved a
layer's weight and no optimizer held its learned steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers, identity
from narrowgauge.errors import warn
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.scaling import least_error_clip

if TYPE_CHECKING:
    from narrowgauge.recipe import LearnedStep

# Best of 1, 4, 16, 64, 256 and 1024 in a language model, single runs (decisions/four-bit.md). With 1, Adam
# moves a step by 0.2 % per update, too slow for scales that grow severalfold within 200 steps.
RATE = 64.0
# Bounds of 2^-20 and 2^20 turned weights of 1e-6 into zeros.
SMALLEST_STEP = 2.0**-100  # clips every element; the gradient then increases the step
LARGEST_STEP = 2.0**100  # rounds every element to zero
WATCHED = 16  # optimizer steps before the warning
MOST_MOVED = 1e-3  # largest relative motion of a step size in one optimizer step
NOTED_ROWS = 64  # rows of x whose spread is noted


class LearnedSteps(LayerState):
    """The learned steps of a layer: parameters `x` and `w`, as its recipe requires.

    x, w       [1] float32 parameters, log(step) / RATE
    cold_left  [1] int64, remaining steps of the cold start, in which data set the learned steps
    found      [n, 2] float64, for each role the sum of the parameters that data gave since the last
               `advance`, and their count. A cold start sets the parameter to their mean, which does
               not depend on the order of micro-batches or on ranks. A role without data keeps its
               parameter
    last       [n] float32, the parameters after the last `advance`: the bound counts from there. A
               parameter that was loaded or set from data starts anew
    noted      [n] float32, root mean square of the tensor of each role (of x, of NOTED_ROWS of its
               rows), 0 before it was seen
    is_held    True if an optimizer that stepped holds a learned step of the layer
    missed     optimizer steps since the cold start that moved the weight but no learned step
    """

    cold_left: Tensor
    found: Tensor
    last: Tensor
    noted: Tensor

    def __init__(self, settings: dict[str, LearnedStep], device: torch.device) -> None:
        super().__init__()
        self.settings = settings
        for role in settings:
            self.register_parameter(
                role, nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
            )
        self._cold_steps = max(step.cold_steps for step in settings.values())
        self.register_buffer("cold_left", torch.tensor([self._cold_steps], device=device))
        # Zero between steps, so no state dict needs it.
        self.register_buffer(
            "found",
            torch.zeros(len(settings), 2, dtype=torch.float64, device=device),
            persistent=False,
        )
        for name in ("last", "noted"):
            none = torch.zeros(len(settings), dtype=torch.float32, device=device)
            self.register_buffer(name, none, persistent=False)
        self._looked_at, self._is_cold = self._cold_version(), True
        self.is_held, self.missed = False, 0

    @property
    def is_cold(self) -> bool:
        """True while steps of the cold start remain.

        During the cold start `cold_left` is read whenever other code wrote it.
        Afterwards it is never read: DistributedDataParallel writes buffers at
        every forward pass, and each read would wait for the device.
        """
        if (
            self._is_cold
            and not torch.compiler.is_compiling()
            and self._looked_at != self._cold_version()
        ):
            self._look_at_cold()
        return self._is_cold

    def _look_at_cold(self) -> None:
        self._looked_at = self._cold_version()
        self._is_cold = not holds_numbers(self.cold_left) or int(self.cold_left) > 0

    def _cold_version(self) -> tuple[int, ...]:
        """Version and address of `cold_left`. Averaged copies (EMA) change it by a write alone."""
        left = self.cold_left
        return () if left.is_inference() or left.is_meta else (left._version, identity(left))

    def get(self, role: str) -> Tensor | None:
        """The step of "x" or "w", [1] float32 with LSQ's gradient; None if it is not learned."""
        if role not in self.settings:
            return None
        parameter = getattr(self, role)
        step = _step(parameter.detach())
        # The second term is zero. Its derivative is d p / d s = 1 / (s RATE), by which p receives
        # LSQ's gradient of s. The chain rule of _step would give d s / d p, its reciprocal.
        return step + (parameter - parameter.detach()) / (step * RATE)

    def version(self) -> tuple[int, ...]:
        """Differs from an earlier version if the parameters were replaced or written since."""
        found: list[int] = []
        for role in self.settings:
            if not (step := getattr(self, role)).is_inference():
                found += (step._version, identity(step))
        return tuple(found)

    @torch.no_grad()
    def put(self, role: str, step: Tensor, data: Tensor, writes: bool) -> Tensor:
        """Set the step of a role from data until the next call, and return it.

        step    [1] float32, positive
        data    [1] bool on the device, True if the tensor had data to set it by
        writes  False: leave the parameter unchanged
        ->      the step as `get` would return it, up to a rounding error
        """
        value = step.log() / RATE
        if writes:
            getattr(self, role).copy_(value)
            # A mask instead of an index: `data` is on the device, and an `if` would wait for it.
            here = torch.arange(len(self.settings), device=data.device) == list(
                self.settings
            ).index(role)
            self.found += torch.where(
                (here & data)[:, None], torch.cat((value, torch.ones_like(value))), 0.0
            )
        return _step(value)

    @torch.no_grad()
    def note(self, role: str, x: Tensor) -> None:
        """Note the root mean square of some rows of the tensor of a role, x [outer, inner]."""
        if role not in self.settings or x.numel() == 0:
            return
        some = x.detach()[:: -(-len(x) // NOTED_ROWS)].to(torch.float32)
        here = torch.arange(len(self.settings), device=x.device) == list(self.settings).index(role)
        self.noted.copy_(torch.where(here, some.square().mean().sqrt(), self.noted))

    @torch.no_grad()
    def over_best(self, role: str, largest: float, filled: float) -> float | None:
        """A step over the one with the least squared error of normal numbers; None if unknown.

        largest  code of the format
        filled   share of the rotated axis that is no padding
        """
        own = _own_part(getattr(self, role))
        rms = self.noted[list(self.settings).index(role)]
        if not holds_numbers(rms) or not len(own) or not 0 < float(rms) < math.inf:
            return None
        best = least_error_clip(largest) / largest * float(rms) * filled**0.5
        return float(_step(own)) / best

    @torch.no_grad()
    def advance(self) -> None:
        """End an optimizer step: apply the cold start's mean, bound the motion, count down."""
        most = math.log1p(MOST_MOVED) / RATE
        for (total, count), last, role in zip(self.found, self.last, self.settings, strict=True):
            parameter = _own_part(getattr(self, role))
            if self.is_cold:
                parameter.copy_(torch.where(count > 0, total / count, parameter))
            else:
                parameter.clamp_(min=last - most, max=last + most)
            parameter.clamp_(min=math.log(SMALLEST_STEP) / RATE, max=math.log(LARGEST_STEP) / RATE)
        if self.is_cold:
            # Count only steps in which every role had data. An expert or head that is unused at
            # first would otherwise end its cold start with steps of 1, and return zeros.
            self.cold_left -= (self.found[:, 1] > 0).all().to(self.cold_left.dtype)
            self.found.zero_()
            self._look_at_cold()
        self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        """Bound later motion from the parameters as they are."""
        for place, role in enumerate(self.settings):
            # Under FSDP2 ranks without the parameter have nothing to bound.
            if len(own := _own_part(getattr(self, role))):
                self.last[place : place + 1] = own

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for role in self.settings:
            getattr(self, role).fill_(0.0)
        self.cold_left.fill_(self._cold_steps)
        self.found.zero_()
        self.last.zero_()
        self.noted.zero_()
        self._looked_at, self._is_cold = self._cold_version(), True
        self.is_held, self.missed = False, 0

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.found.is_meta and not self.cold_left.is_meta:  # `found` is in no state dict
            for name in ("found", "last", "noted"):
                there = torch.zeros_like(getattr(self, name), device=self.cold_left.device)
                setattr(self, name, there)
        self.reread()

    def reread(self) -> None:
        self._look_at_cold()
        if not self.last.is_meta:
            self._remember()

    def saw_optimizer(self, weight: Tensor, held: set[int]) -> None:
        """Record a step of an optimizer.

        weight  weight of the layer
        held    ids of the tensors in the optimizer's parameter groups
        """
        if any(id(step) in held for step in self.parameters()):
            self.is_held = True
        elif id(weight) in held and weight.requires_grad and not self.is_cold:
            self.missed += any(step.requires_grad for step in self.parameters())

    def extra_repr(self) -> str:
        return ", ".join(self.settings)


def _own_part(parameter: Tensor) -> Tensor:
    """Return the parameter, or this rank's part under FSDP2: [1] on the first rank, else [0]."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _step(parameter: Tensor) -> Tensor:
    return (parameter * RATE).exp().clamp(SMALLEST_STEP, LARGEST_STEP)


def warn_of_untrained(layers: list[tuple[str, LearnedSteps]]) -> None:
    """Warn once of learned steps that no optimizer updates, at the end of an optimizer step.

    layers  (name, learned steps) of each layer
    """
    untrained = [
        (name, steps) for name, steps in layers if steps.missed >= WATCHED and not steps.is_held
    ]
    for _, steps in untrained:
        steps.is_held = True  # suppresses further warnings
    if untrained:
        warn(
            f"advance: in {WATCHED} optimizer steps no learned step of {len(untrained)} layers, {untrained[0][0]!r} the first, was held "
            "by an optimizer, though the weights were, as when it is built before convert. Build it after convert, or "
            "give it the steps: optimizer.add_param_group({'params': [p for n, p in model.named_parameters() if '.steps.' in n]}). "
            "If they shall stay as they are, let them not require a gradient.",
            code="advance.untrained-steps",
            stacklevel=4,
        )
