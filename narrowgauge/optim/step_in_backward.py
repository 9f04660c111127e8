"""The optimizer inside the backward pass: each parameter steps as soon as its gradient is whole, and the gradient is freed.

So gradients are never all in memory at once: one tensor's at a time instead of 2 or 4 bytes for every parameter. Clipping by the norm of
the whole gradient needs them all together, and there are three ways without:

    clip="previous"    by the larger of two norms: of the step before, and of the gradients that this pass has shown so far. Nothing is
                       computed twice. A step is clipped less than it would be where its norm is larger than that of the step before
                       and shows late: the first gradients of a spike are limited to `clip_norm` each, all together to
                       clip_norm sqrt(1 + 2 ln(norm / first part)). The first step knows no norm before it. What a pass has shown
                       depends on the order in which gradients come: FSDP2 has another than one process
    clip="two-pass"    a first forward and backward pass for the norm, which frees gradients as they come, and a second one that steps: the
                       numbers of an ordinary clipped step, to the bit, for a forward and backward pass more
    clip="parameter"   each parameter by the norm of its own gradient: another rule, which turns the direction of the step

Over several backward passes (`accumulation`) the sums of matrices are held in FP8 until the last one (held_gradients.py): 1.01 bytes a
parameter. Loss scaling by a GradScaler, which looks at all gradients, cannot be had.

Every rank of FSDP2 has the same norm: for "previous" 8 bytes travel for each parameter, for "two-pass" for each mesh. Under DDP hooks see
gradients before they travel: use FSDP2, or step after backward.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from narrowgauge.errors import ConfigError
from narrowgauge.ops import rng
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.optim.clipping import NormInParts, clip_gradients, scale_gradients
from narrowgauge.optim.held_gradients import HeldGradients

Clip = Literal["previous", "two-pass", "parameter"]


class InBackward:
    """What `in_backward` returns: `remove()` gives the gradients back to the loop.

    norm  0-d float32: of the gradient of the last step that ended, before clipping; None before the first, and where nobody asked for it
    """

    def __init__(
        self, optimizer: NarrowOptimizer, clip: Clip | None, largest: float, knows_norm: bool, accumulation: int
    ) -> None:
        self._optimizer, self._clip, self._largest = optimizer, clip, largest
        self._knows_norm = knows_norm or clip == "previous"
        self.accumulation, self._sums = accumulation, HeldGradients(optimizer, None)
        # By place, what came so far: passes, group, number, parameter.
        self._waiting: dict[int, tuple[int, int, int, Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()  # places
        self.norm: Tensor | None = None
        self._parts = NormInParts()
        self._pass: Literal["none", "measures", "steps"] = "none"  # of two
        self._stepped: set[int] = set()  # places, in the second of them
        # How often each parameter has stepped since `optimizer.step()`, by place; None: it was told of more than once.
        self._times: dict[int, int] | None = {}

    def hook_group(self, place: int) -> None:
        """Hooks the parameters of one group that train and have no hook yet."""
        numbers = {id(parameter): number for parameter, _, number in self._optimizer._numbered()}
        first = sum(len(group["params"]) for group in self._optimizer.param_groups[:place])
        # A tensor's hooks lie where Python's collector does not see them: holding the optimizer, which holds the tensor, they would
        # keep weights and states for ever.
        reference = weakref.ref(self)
        if self.accumulation > 1:
            self._sums.take_group(place)

        @torch.no_grad()
        def came(order: int, number: int, parameter: Tensor) -> None:
            stepping = reference()
            if stepping is None:
                raise ConfigError(
                    f"in_backward: the optimizer that steps this parameter of {list(parameter.shape)} is gone, nothing held it. Keep it, "
                    "or what in_backward returned, for as long as the model trains.",
                    code="in-backward.no-optimizer",
                )
            stepping._came(place, order, number, parameter)

        for order, parameter in enumerate(self._optimizer.param_groups[place]["params"], first):
            if parameter.requires_grad and order not in self._hooked:
                self._hooked.add(order)
                hook = partial(came, order, numbers[id(parameter)])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _came(self, place: int, order: int, number: int, parameter: Tensor) -> None:
        """The gradient of a pass."""
        if self.accumulation > 1:
            passes = self._waiting[order][0] + 1 if order in self._waiting else 1
            if passes < self.accumulation:
                self._waiting[order] = passes, place, number, parameter
                self._sums.hold(parameter)
                return
            self._waiting.pop(order, None)
            self._sums.give_back(parameter)
        self._whole(place, order, number, parameter)

    def _finish(self) -> None:
        """Of parameters that took part in fewer passes than the others."""
        for order, (_, place, number, parameter) in list(self._waiting.items()):
            self._sums.give_back(parameter)
            self._whole(place, order, number, parameter)
        self._waiting.clear()

    def _whole(self, place: int, order: int, number: int, parameter: Tensor) -> None:
        """A gradient is whole."""
        assert parameter.grad is not None
        if self.takes_two_passes and self._pass == "none":
            raise ConfigError(
                'in_backward: clip = "two-pass": a backward pass outside optimizer.step(closure), which is to run it twice. Call '
                "optimizer.step(closure) with a function that computes the loss, calls backward() and returns the loss.",
                code="in-backward.two-pass",
            )
        if self._pass == "steps":
            self._refuse_second(order in self._stepped, parameter)
            self._stepped.add(order)
        elif self._pass == "measures" or self._knows_norm:
            self._refuse_second(order in self._parts, parameter)
            self._parts.add(order, parameter.grad)
        if self._pass == "measures":
            parameter.grad = None
            return
        if self._clip == "parameter":
            clip_gradients([parameter], self._largest)
        elif self._clip == "previous":
            norm, before = self._parts.so_far(order), self._optimizer.norm_before
            if before is not None:
                norm = torch.maximum(norm, torch.as_tensor(before, dtype=torch.float32, device=norm.device))
            scale_gradients([parameter], self._largest, norm)
        elif self.takes_two_passes:
            assert self.norm is not None
            scale_gradients([parameter], self._largest, self.norm)
        if self._times is not None:
            self._times[order] = self._times.get(order, 0) + 1
        group = self._optimizer.param_groups[place]  # looked up now: load_state_dict brings new ones
        self._optimizer._step([(parameter, group, number)])
        parameter.grad = None

    @property
    def takes_two_passes(self) -> bool:
        return self._clip == "two-pass"

    def _refuse_second(self, is_second: bool, parameter: Tensor) -> None:
        if is_second:
            raise ConfigError(
                f"in_backward: another gradient of a parameter of {list(parameter.shape)} after the {self.accumulation} of its step. Call "
                "optimizer.step() after each step's last backward pass, or give the passes of a step as accumulation.",
                code="in-backward.too-many",
            )

    def run(self, closure: Callable[[], Any]) -> Any:
        """`optimizer.step(closure)`: the closure once, or twice with clip = "two-pass"; returns what it returned last."""
        if self.takes_two_passes:
            self.measure(closure)
            return self.step_measured(closure)
        return closure()

    def measure(self, closure: Callable[[], Any]) -> Any:
        """A pass for `norm` alone, the first of two or one to look at: no parameter steps, whatever clips. Returns what closure did.

        Generators are put back. Parameters that were unfrozen since take part: left to `optimizer.step()` they would hold both passes'
        gradients.
        """
        for place in range(len(self._optimizer.param_groups)):
            self.hook_group(place)
        with self._generators_put_back(), self._passing("measures"):
            found = closure()
            self._finish()
            self.norm = self._parts.norm()
        # Casts of weights that were drawn in this pass must be drawn again in the next, or what is drawn after them would differ.
        torch.autograd.graph.increment_version([each for each, _, _ in self._optimizer._numbered()])
        return found

    def step_measured(self, closure: Callable[[], Any]) -> Any:
        """The second of two passes, which steps with gradients clipped by `norm`."""
        with self._passing("steps"):
            found = closure()
            self._finish()
            return found

    @contextmanager
    def _passing(self, name: Literal["measures", "steps"]) -> Iterator[None]:
        self._pass = name
        try:
            yield
        finally:
            self._pass, self._parts = "none", NormInParts()
            self._waiting.clear()
            self._sums.clear()
            self._stepped.clear()

    @contextmanager
    def _generators_put_back(self) -> Iterator[None]:
        """Torch's, of the CPU and of the parameters' GPUs."""
        devices = {each.device.index for each, _, _ in self._optimizer._numbered() if each.is_cuda}
        with rng.preserved(sorted(devices)):
            yield

    @torch.no_grad()
    def end_step(self) -> None:
        """After the last backward pass: what the next step is clipped by. A norm that is not finite says nothing of it, and is not kept."""
        self._finish()
        self._tell_of_more_than_one()
        if not len(self._parts):
            return
        self.norm, self._parts = self._parts.norm(), NormInParts()
        if self._clip == "previous":
            self._optimizer.norm_before = torch.where(self.norm.isfinite(), self.norm, 0.0)

    def _tell_of_more_than_one(self) -> None:
        """Once: between two `optimizer.step()` every pass has stepped, where the loop may have wanted their sum."""
        if self._times is None:
            return
        times, self._times = max(self._times.values(), default=0), {}
        if times > 1:
            self._times = None
            warnings.warn(
                f"in_backward: parameters have stepped {times} times before this optimizer.step(). Give accumulation="
                f"{times * self.accumulation} for one step by the sum of these passes; for {times} steps call optimizer.step() after each.",
                stacklevel=4,
            )

    def clear(self) -> None:
        """Drops the sums of a step whose last pass has not come: its next pass is the first one again."""
        self._waiting.clear()
        self._sums.clear()

    @torch.no_grad()
    def remove(self) -> None:
        """Gives the gradients back to the loop, those of the passes so far too."""
        for _, _, _, parameter in self._waiting.values():
            self._sums.give_back(parameter)
        self._waiting.clear()
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._optimizer.stepping = None
        self._handles.clear()


def in_backward(
    optimizer: NarrowOptimizer,
    *,
    accumulation: int = 1,
    clip_norm: float | None = None,
    clip: Clip | None = None,
    clip_parameter_norm: float | None = None,
    knows_norm: bool = False,
) -> InBackward:
    """From now on `loss.backward()` also steps. Call `optimizer.step()` after it as ever: it finds no gradients, and ends the step.

    accumulation         backward passes of a step; the last one steps. Above 1 the others' sums are held in FP8
    clip_norm, clip      the largest 2-norm, and of what: see the module. "previous" needs `optimizer.step()` after each backward pass, and
                         the norm is part of state_dict(). "two-pass" needs `optimizer.step(closure)`, with a closure that computes the
                         loss, calls backward() and returns the loss; torch's generators are put back between its passes, other state
                         that forward changes (running statistics of BatchNorm, generators of numpy) is not
    clip_parameter_norm  the same as clip_norm with clip="parameter"
    knows_norm           find the norm of every step, for a log, which then needs `optimizer.step()` after each backward pass
    Raises ConfigError for what needs all gradients at once. Schedulers work as ever: they change lr between the passes.
    Another backward pass is another step. A converted model whose loop has no `optimizer.step()` needs `advance` after backward. Keep
    the optimizer, or what is returned, as long as the model trains: the model does not hold it, and backward raises ConfigError once it
    is gone. A group that add_param_group brings later steps in backward too. A parameter that does not require a gradient when it comes
    is left to `optimizer.step()`, but with "two-pass", which takes what was unfrozen since. `optimizer.zero_grad()` drops the passes of a
    step whose last one has not come; `model.zero_grad()` does not know of them.
    """
    if not isinstance(optimizer, NarrowOptimizer):
        raise ConfigError(
            f"in_backward: {type(optimizer).__name__} cannot step one parameter. Use narrowgauge.optim.AdamW, Lion or SGD; "
            'states="fp32" is torch\'s AdamW.',
            code="in-backward.optimizer",
        )
    if type(accumulation) is not int or accumulation < 1:
        raise ConfigError(
            f"in_backward: accumulation = {accumulation!r}: it is the backward passes of a step, at least 1.",
            code="in-backward.accumulation",
        )
    if optimizer.holding is not None:
        raise ConfigError(
            f"in_backward: this {type(optimizer).__name__} holds gradients in FP8 until its step. Call remove() on what hold_gradients "
            "returned, or step after backward.",
            code="in-backward.holds-gradients",
        )
    clip, largest = _clip_of(clip_norm, clip, clip_parameter_norm)
    if optimizer.stepping is not None:
        raise ConfigError(
            f"in_backward: this {type(optimizer).__name__} steps in backward already. Call remove() on what the first call returned.",
            code="in-backward.twice",
        )
    stepping = InBackward(optimizer, clip, largest, knows_norm, accumulation)
    for place in range(len(optimizer.param_groups)):
        stepping.hook_group(place)
    if not stepping._handles:
        raise ConfigError(
            "in_backward: no parameter of the optimizer requires a gradient. Unfreeze one.", code="in-backward.nothing"
        )
    optimizer.stepping = stepping
    return stepping


def _clip_of(norm: float | None, clip: Clip | None, parameter_norm: float | None) -> tuple[Clip | None, float]:
    if clip is not None and clip not in get_args(Clip):
        raise ConfigError(
            f"in_backward: clip = {clip!r}; it is one of {', '.join(map(repr, get_args(Clip)))}.",
            code="in-backward.clip",
        )
    if parameter_norm is not None:
        if norm is not None or clip not in (None, "parameter"):
            raise ConfigError(
                f"in_backward: clip_parameter_norm = {parameter_norm} beside clip_norm = {norm} and clip = {clip!r}. Give one of the two "
                "norms.",
                code="in-backward.two-norms",
            )
        norm, clip = parameter_norm, "parameter"
    if norm is None and clip is not None:
        raise ConfigError(
            f"in_backward: clip = {clip!r} without clip_norm, the largest norm. Give it, as clip_norm=1.0.",
            code="in-backward.no-norm",
        )
    if norm is not None and not (isinstance(norm, int | float) and norm > 0):
        raise ConfigError(
            f"in_backward: clip_norm = {norm!r}: must be above 0. Leave it out for no clipping.",
            code="in-backward.norm",
        )
    if norm is not None and clip is None:
        raise ConfigError(
            f"in_backward: clip_norm = {norm}: the norm of the whole gradient is known only after the last layer has "
            'stepped. Choose clip="previous" (by the norm of the step before), clip="two-pass" (a forward and backward pass more), or '
            'clip="parameter" (each by its own norm), or step after backward.',
            code="in-backward.whole-norm",
        )
    return clip, 0.0 if norm is None else norm
