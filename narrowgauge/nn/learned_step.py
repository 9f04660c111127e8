"""Learned steps: the state of layers whose scales are parameters.

The parameter is not the step s but p = log(s) / RATE. Adam moves every number by about its learning rate: a weight's step of 0.007 by a
third of itself, an activation's of 0.5 by a 250th, so that one jitters and the other lags behind. Logarithms all move by the same ratio,
RATE times the learning rate, and s stays positive. The gradient that p is given is LSQ's gradient of s over s * RATE, which moves s under
plain SGD as LSQ would.

An optimizer that was built before the steps existed never moves them, without an error. So each optimizer step that torch tells of
(`step_end`) is looked at: a layer is warned of when WATCHED of them moved its weight, and none had its learned steps.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers, identity
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.recipe import LearnedStep

RATE = 64.0  # of 1, 4, 16, 64, 256 and 1024 the best in a language model, single runs (docs/log.md)
SMALLEST_STEP = 2.0**-100  # clips everything, which pushes a step up again
LARGEST_STEP = 2.0**100  # rounds everything to zero
WATCHED = 16  # optimizer steps without the learned ones before a warning


class LearnedSteps(LayerState):
    """The learned steps of a layer: parameters `x` and `w`, log(step) / RATE, [1] float32 each, those that its recipe has.

    cold_left  [1] int64, the steps of the cold start that are left; in them the steps are set from the data
    found      [n, 2] float64 of each role: the sum of the parameters that data gave since the last `advance`, and their count. The step
               that a cold start leaves is their mean, whatever their order and the rank that saw them. A role without any keeps its own,
               or an expert that is not used at first would end its cold start with steps that mean nothing
    is_held    whether an optimizer that stepped had one of them
    missed     optimizer steps that moved the weight, and none of these, since the cold start
    """

    cold_left: Tensor
    found: Tensor

    def __init__(self, settings: dict[str, LearnedStep], device: torch.device) -> None:
        super().__init__()
        self.settings = settings
        for role in settings:
            self.register_parameter(role, nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device)))
        self._cold_steps = max(step.cold_steps for step in settings.values())
        self.register_buffer("cold_left", torch.tensor([self._cold_steps], device=device))
        self.register_buffer(
            "found", torch.zeros(len(settings), 2, dtype=torch.float64, device=device), persistent=False
        )
        self._looked_at, self._is_cold = self._cold_version(), True
        self.is_held, self.missed = False, 0

    @property
    def is_cold(self) -> bool:
        """Whether steps of the cold start are left. While they are, reads `cold_left` from its device if somebody wrote it.

        Not afterwards: under DistributedDataParallel buffers are written at every forward pass, and each look waits for the device.
        """
        if self._is_cold and not torch.compiler.is_compiling() and self._looked_at != self._cold_version():
            self._look_at_cold()
        return self._is_cold

    def _look_at_cold(self) -> None:
        self._looked_at = self._cold_version()
        self._is_cold = not holds_numbers(self.cold_left) or int(self.cold_left) > 0

    def _cold_version(self) -> tuple[int, ...]:
        """An averaged copy is written by others: its own `advance` is never called."""
        left = self.cold_left
        return () if left.is_inference() or left.is_meta else (left._version, identity(left))

    def get(self, role: str) -> Tensor | None:
        """The step of "x" or "w", [1] float32, whose gradient reaches the parameter as LSQ's would; None if not learned."""
        if role not in self.settings:
            return None
        parameter = getattr(self, role)
        step = _step(parameter.detach())
        return step + (parameter - parameter.detach()) / (step * RATE)

    def version(self) -> tuple[int, ...]:
        """Differs from an earlier one if the parameters were replaced or written since."""
        steps = [getattr(self, role) for role in self.settings]
        return tuple(part for step in steps if not step.is_inference() for part in (step._version, identity(step)))

    @torch.no_grad()
    def put(self, role: str, step: Tensor, data: Tensor, writes: bool) -> Tensor:
        """Sets a step, [1], positive, until the next one, if `writes`; returns it as `get` would give it, a rounding error away.

        data  [1] bool on the device, whether there was data to set it by
        """
        value = step.log() / RATE
        if writes:
            getattr(self, role).copy_(value)
            here = torch.arange(len(self.settings), device=data.device) == list(self.settings).index(role)
            self.found += torch.where((here & data)[:, None], torch.cat((value, torch.ones_like(value))), 0.0)
        return _step(value)

    @torch.no_grad()
    def advance(self) -> None:
        """Ends an optimizer step."""
        for (total, count), role in zip(self.found, self.settings, strict=True):
            parameter = _own_part(getattr(self, role))
            if self.is_cold:
                parameter.copy_(torch.where(count > 0, total / count, parameter))
            parameter.clamp_(min=math.log(SMALLEST_STEP) / RATE, max=math.log(LARGEST_STEP) / RATE)
        if self.is_cold:
            self.cold_left -= (self.found[:, 1] > 0).all().to(self.cold_left.dtype)
            self.found.zero_()
            self._look_at_cold()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for role in self.settings:
            getattr(self, role).fill_(0.0)
        self.cold_left.fill_(self._cold_steps)
        self.found.zero_()
        self._looked_at, self._is_cold = self._cold_version(), True
        self.is_held, self.missed = False, 0

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.found.is_meta and not self.cold_left.is_meta:  # it is in no state dict
            self.found = torch.zeros_like(self.found, device=self.cold_left.device)
        self.reread()

    def reread(self) -> None:
        self._look_at_cold()

    def saw_optimizer(self, weight: Tensor, held: set[int]) -> None:
        """Notes a step of an optimizer that has the tensors with these ids. weight: of the layer."""
        if any(id(step) in held for step in self.parameters()):
            self.is_held = True
        elif id(weight) in held and weight.requires_grad and not self.is_cold:
            self.missed += any(step.requires_grad for step in self.parameters())

    def extra_repr(self) -> str:
        return ", ".join(self.settings)


def _own_part(parameter: Tensor) -> Tensor:
    """The parameter, or what this rank has of one that FSDP2 shards: [1] or, on all ranks but the first, [0]."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _step(parameter: Tensor) -> Tensor:
    return (parameter * RATE).exp().clamp(SMALLEST_STEP, LARGEST_STEP)


def warn_of_untrained(layers: list[tuple[str, LearnedSteps]]) -> None:
    """Ends an optimizer step: warns, once, of learned steps that no optimizer moves. layers: (name, the steps of a layer)."""
    untrained = [(name, steps) for name, steps in layers if steps.missed >= WATCHED and not steps.is_held]
    for _, steps in untrained:
        steps.is_held = True  # said once
    if untrained:
        warnings.warn(
            f"advance: in {WATCHED} optimizer steps no learned step of {len(untrained)} layers, {untrained[0][0]!r} the first, was held "
            "by an optimizer, though the weights were, as when it is built before convert. Build it after convert, or "
            "give it the steps: optimizer.add_param_group({'params': [p for n, p in model.named_parameters() if '.steps.' in n]}). "
            "If they shall stay as they are, let them not require a gradient.",
            stacklevel=4,
        )
