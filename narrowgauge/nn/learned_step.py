"""State of the layers that 4-bit recipes add: learned steps (parameters), and whether rows are sampled (a reading per product).

The parameter is not the step s but p = log(s) / RATE. Adam moves every number by about its learning rate: a weight's step of
0.007 by a third of itself, an activation's of 0.5 by a 250th, so that one jitters and the other lags behind. With logarithms all
move by the same ratio, RATE times the learning rate; positive they are by themselves. The gradient that p is given is LSQ's
gradient of s over s * RATE, which moves s under plain SGD as LSQ would.

`advance` ends a step for both: it counts the cold start down, keeps steps within their bounds, and lets each product sample
its rows or keep all of them by the variance that was predicted in the step. All of it is in state_dict.

An optimizer that was built before the steps existed never moves them, without an error. `warn_of_untrained` finds that out by
what happens, not by who holds what: some while after the cold start weights have moved visibly, and no step by a single bit. At
a learning rate of zero nothing moves, and the look is repeated later.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers, identity
from narrowgauge.recipe import LearnedStep

RATE = 64.0  # of 1, 4, 16, 64, 256 and 1024 the best in a language model, single runs (docs/log.md)
SMALLEST_STEP = 2.0**-100  # clips everything, which pushes a step up again
LARGEST_STEP = 2.0**100  # rounds everything to zero
WATCHED = 16  # optimizer steps after which `warn_of_untrained` looks; again after twice as many, and so on
VISIBLE = 2.0**-12  # of the largest weight: what moves it so far moves every step by more than its last bit


@dataclass
class Watch:
    """What the steps of a layer, and some weights beside them, were `age` optimizer steps ago.

    verdict  whether any step of all layers looked at has moved, and any weight visibly; None while nobody looks
    """

    steps: Tensor
    weights: Tensor
    age: int = 0
    verdict: Verdict | None = None


class Verdict:
    """Two truths on their way from the device, which nobody waits for."""

    def __init__(self, truths: Tensor) -> None:
        self._truths = truths.to("cpu", non_blocking=True)
        self._arrived = None
        if truths.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(truths.device))

    def read(self) -> tuple[bool, bool] | None:
        """(steps have moved, weights have), or None while the device is still computing it."""
        if self._arrived is not None and not self._arrived.query():
            return None
        steps, weights = self._truths.tolist()
        return steps, weights


class LearnedSteps(nn.Module):
    """The learned steps of a layer: parameters `x` and `w`, log(step) / RATE, [1] float32 each, those that its recipe has.

    cold_left  [1] int64, the steps of the cold start that are left; in them the steps are set from the data
    seen       [n] int64, 1 for each role that data has set since the last `advance`, else 0: only such a step counts, or a layer
               that is not used at first, such as an expert, would end its cold start with steps that mean nothing. No bool, for
               torch's AveragedModel subtracts buffers
    """

    cold_left: Tensor
    seen: Tensor

    def __init__(self, settings: dict[str, LearnedStep], device: torch.device) -> None:
        super().__init__()
        self.settings = settings
        for role in settings:
            self.register_parameter(role, nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device)))
        self._cold_steps = max(step.cold_steps for step in settings.values())
        self.register_buffer("cold_left", torch.tensor([self._cold_steps], device=device))
        self.register_buffer("seen", torch.zeros(len(settings), dtype=torch.int64, device=device), persistent=False)
        self._looked_at, self._is_cold = self._cold_version(), True
        self.is_watched = True
        self.watch: Watch | None = None

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
    def put(self, role: str, step: Tensor, writes: bool = True) -> Tensor:
        """Sets a step, [1], positive, if `writes`; returns it as `get` would give it, a rounding error away."""
        value = step.log() / RATE
        if writes:
            getattr(self, role).copy_(value)
        return _step(value)

    @torch.no_grad()
    def saw(self, role: str, data: Tensor) -> None:
        """Notes whether there was data to set the step of a role by; data: [1] bool on the device."""
        here = torch.arange(len(self.settings), device=self.seen.device) == list(self.settings).index(role)
        self.seen.logical_or_(here & data)

    @torch.no_grad()
    def advance(self) -> None:
        """Ends an optimizer step."""
        for role in self.settings:
            getattr(self, role).clamp_(min=math.log(SMALLEST_STEP) / RATE, max=math.log(LARGEST_STEP) / RATE)
        if self.is_cold:
            self.cold_left -= self.seen.all().to(self.cold_left.dtype)
            self.seen.zero_()
            self._look_at_cold()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begins anew; the name is the one by which frameworks initialize modules that were made on meta."""
        for role in self.settings:
            getattr(self, role).fill_(0.0)
        self.cold_left.fill_(self._cold_steps)
        self.seen.zero_()
        self._looked_at, self._is_cold = self._cold_version(), True
        self.is_watched, self.watch = True, None

    def values(self) -> Tensor:
        """[n] a copy of the parameters that require a gradient."""
        values = [_local(parameter) for parameter in self.parameters() if parameter.requires_grad]
        return torch.cat(values) if values else self.cold_left.new_empty(0, dtype=torch.float32)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self.watch = None
        if self.seen.is_meta and not self.cold_left.is_meta:  # it is in no state dict
            self.seen = torch.zeros_like(self.seen, device=self.cold_left.device)
        self._look_at_cold()

    def _apply(self, fn: Any, recurse: bool = True) -> LearnedSteps:
        """model.to(bfloat16) moves the steps but leaves their type: a step of 8 bits would jump."""
        was_meta, self.watch = self.cold_left.is_meta, None
        for role in self.settings:
            step = getattr(self, role)
            moved = fn(step.data)
            data = moved if moved.dtype == step.dtype else step.data.to(moved.device)
            if step.is_meta == data.is_meta:
                step.data = data
            else:  # a parameter cannot change from meta in place
                setattr(self, role, nn.Parameter(data, requires_grad=step.requires_grad))
        self.cold_left, self.seen = fn(self.cold_left), fn(self.seen)
        if was_meta and not self.cold_left.is_meta:
            self.reset_parameters()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What copy and pickle take: all but what a later look compares with."""
        return self.__dict__ | {"watch": None}

    def extra_repr(self) -> str:
        return ", ".join(self.settings)


def _step(parameter: Tensor) -> Tensor:
    return (parameter * RATE).exp().clamp(SMALLEST_STEP, LARGEST_STEP)


@torch.no_grad()
def warn_of_untrained(layers: Iterable[tuple[str, nn.Linear, LearnedSteps]]) -> None:
    """Ends an optimizer step: warns once of steps past their cold start that no optimizer moves. No host synchronisation.

    layers  name, layer and its steps. Left out: frozen layers and frozen steps; and layers whose steps were moved once, for good.
    """
    found = [each for each in layers if each[2].is_watched and not each[2].is_cold]
    _look([each for each in found if each[2].watch is not None and each[2].watch.verdict is None])
    for each in found:
        if each[2].watch is None:
            _begin(each)
    judged = [each for each in found if each[2].watch is not None and each[2].watch.verdict is not None]
    untrained = []
    for name, _, steps in judged:
        assert steps.watch is not None and steps.watch.verdict is not None
        if (truths := steps.watch.verdict.read()) is None:
            continue
        steps.watch.verdict = None
        steps.is_watched = truths == (False, False)
        if truths == (False, True):
            untrained.append((name, steps.watch.age))
    if untrained:
        warnings.warn(
            f"advance: in {untrained[0][1]} optimizer steps no learned step of {len(untrained)} layers, {untrained[0][0]!r} the first, has "
            "moved, though weights have: no optimizer holds them, as when it is built before convert. Build it after convert, or "
            "give it the steps: optimizer.add_param_group({'params': [p for n, p in model.named_parameters() if '.steps.' in n]}). "
            "If they shall stay as they are, let them not require a gradient.",
            stacklevel=4,
        )


def _begin(each: tuple[str, nn.Linear, LearnedSteps]) -> None:
    _, layer, steps = each
    if layer.weight.requires_grad:
        values, weights = steps.values(), _some(layer.weight)
        if values.numel() and weights.numel():
            steps.watch = Watch(values, weights)


def _look(watched: list[tuple[str, nn.Linear, LearnedSteps]]) -> None:
    """Counts a step, and compares where it is time to: all such layers of a device together."""
    due: dict[torch.device, list[tuple[nn.Linear, LearnedSteps, Watch]]] = {}
    for _, layer, steps in watched:
        assert steps.watch is not None
        steps.watch.age += 1
        if steps.watch.age >= WATCHED and not steps.watch.age & (steps.watch.age - 1):
            due.setdefault(layer.weight.device, []).append((layer, steps, steps.watch))
    for group in due.values():
        now = [(steps.values(), _some(layer.weight)) for layer, steps, _ in group]
        if any(a.shape != watch.steps.shape for (a, _), (_, _, watch) in zip(now, group, strict=True)):
            for _, steps, _ in group:  # some were frozen meanwhile
                steps.watch = None
            continue
        before = torch.cat([watch.weights for _, _, watch in group])
        moves = (torch.cat([weights for _, weights in now]) - before).abs()
        moved = torch.cat([values for values, _ in now]) != torch.cat([watch.steps for _, _, watch in group])
        verdict = Verdict(torch.stack((moved.any(), moves.amax() > VISIBLE * before.abs().amax())))
        for _, _, watch in group:
            watch.verdict = verdict


def _some(weight: Tensor) -> Tensor:
    """[up to 512] float32, a copy of weights spread over the rows."""
    weight = _local(weight)
    return weight[:: max(len(weight) // 64, 1), :4].to(torch.float32, copy=True).flatten()


def _local(x: Tensor) -> Tensor:
    """This rank's part, detached."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part.detach()
