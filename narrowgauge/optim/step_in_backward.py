"""Optimizer steps inside backward: each parameter steps when its gradient is complete.

The gradient is freed after the step, so one tensor's gradient exists at a time instead of 2 or 4
bytes for every parameter. Clipping by the norm of the whole gradient needs all gradients at once.
Three alternatives exist:

    clip="previous"    clip by the larger of two norms: the norm of the previous step, and the norm
                       of the gradients that this pass has computed so far. No extra computation. A
                       spike is clipped too little at first: its first gradients are limited to
                       `clip_norm` each, all together to clip_norm sqrt(1 + 2 ln(norm / first
                       part)). The first step has no previous norm. The norm so far depends on the
                       order of gradients, which differs between FSDP2 and one process
    clip="two-pass"    a first forward and backward pass computes the norm and frees gradients, and
                       a second pass steps. Bit-identical to an ordinary clipped step, for one more
                       forward and backward pass
    clip="parameter"   clip each parameter by its own norm: another rule, which changes the
                       direction of the step

With `accumulation`, the sums of matrices stay in FP8 until the last backward pass
(held_gradients.py): 1.01 bytes a parameter. A GradScaler is not supported, because it inspects all
gradients.

All ranks of FSDP2 get the same norm: "previous" communicates 8 bytes per parameter, "two-pass" per
mesh. DDP is not supported, because its hooks see gradients before the all-reduce. Use FSDP2, or
step after backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from narrowgauge.errors import ConfigError, warn
from narrowgauge.ops import rng
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.clipping import NormInParts, clip_gradients, scale_gradients
from narrowgauge.optim.held_gradients import HeldGradients

Clip = Literal["previous", "two-pass", "parameter"]


class InBackward:
    """Handle returned by `in_backward`; `remove()` returns the gradients to the training loop.

    norm          norm of the last finished step before clipping, 0-d float32; None before the
                  first step, and if neither clipping nor `knows_norm` needs it
    accumulation  backward passes per step
    """

    def __init__(
        self,
        optimizer: LowPrecisionOptimizer,
        clip: Clip | None,
        largest: float,
        knows_norm: bool,
        accumulation: int,
    ) -> None:
        self._optimizer, self._clip, self._largest = optimizer, clip, largest
        self._knows_norm = knows_norm or clip == "previous"
        self.accumulation, self._sums = accumulation, HeldGradients(optimizer, None)
        # Unfinished accumulation, by position of the parameter: passes so far, group, noise number,
        # parameter.
        self._waiting: dict[int, tuple[int, int, int, Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        # Positions of parameters that have a hook.
        self._hooked: set[int] = set()
        self.norm: Tensor | None = None
        self._parts = NormInParts()
        # "measures" and "steps" are the passes of clip="two-pass".
        self._pass: Literal["none", "measures", "steps"] = "none"
        # Positions of parameters that have stepped in the second pass, to detect a second gradient.
        self._stepped: set[int] = set()
        # Steps of each parameter since `optimizer.step()`, by position; None after the warning.
        self._times: dict[int, int] | None = {}

    def hook_group(self, place: int) -> None:
        """Register backward hooks on trainable parameters of one group that have none yet."""
        numbers = {id(parameter): number for parameter, _, number in self._optimizer._indexed()}
        first = sum(len(group["params"]) for group in self._optimizer.param_groups[:place])
        # Weak reference: Python's garbage collector does not see the hooks of a tensor. Hooks that
        # held the optimizer, which holds the tensor, would keep weights and states alive for ever.
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
        """Handle one backward pass's gradient of a parameter."""
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
        """Step parameters that received fewer gradients than `accumulation`."""
        for order, (_, place, number, parameter) in list(self._waiting.items()):
            self._sums.give_back(parameter)
            self._whole(place, order, number, parameter)
        self._waiting.clear()

    def _whole(self, place: int, order: int, number: int, parameter: Tensor) -> None:
        """Handle a complete gradient: measure, or clip and step."""
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
            # Both norms stay on the device: no host sync inside backward.
            norm, before = self._parts.so_far(order), self._optimizer.norm_before
            if before is not None:
                norm = torch.maximum(
                    norm, torch.as_tensor(before, dtype=torch.float32, device=norm.device)
                )
            scale_gradients([parameter], self._largest, norm)
        elif self.takes_two_passes:
            assert self.norm is not None
            scale_gradients([parameter], self._largest, self.norm)
        if self._times is not None:
            self._times[order] = self._times.get(order, 0) + 1
        # Looked up now, because load_state_dict replaces the group dictionaries.
        group = self._optimizer.param_groups[place]
        # _step and not step: torch's step hooks run once, in `optimizer.step()`.
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
        """`optimizer.step(closure)`: call the closure once, or twice with clip="two-pass".

        Returns the last result of the closure.
        """
        if self.takes_two_passes:
            self.measure(closure)
            return self.step_measured(closure)
        return closure()

    def measure(self, closure: Callable[[], Any]) -> Any:
        """Run the closure to compute `norm` alone; no parameter steps.

        Returns the closure's result. torch's random generators are restored afterwards. Parameters
        unfrozen since the last step get hooks first: otherwise `optimizer.step()` would see the sum
        of both passes.
        """
        for place in range(len(self._optimizer.param_groups)):
            self.hook_group(place)
        with self._generators_put_back(), self._passing("measures"):
            found = closure()
            self._finish()
            self.norm = self._parts.norm()
        # Stochastic casts of weights are cached by version. A new version makes the second pass
        # draw them again; otherwise the random numbers after them would differ between the passes.
        torch.autograd.graph.increment_version([each for each, _, _ in self._optimizer._indexed()])
        return found

    def step_measured(self, closure: Callable[[], Any]) -> Any:
        """Run the second of two passes, which clips by `norm` and steps."""
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
        """Restore torch's random generators of the CPU and of the parameters' GPUs."""
        devices = {each.device.index for each, _, _ in self._optimizer._indexed() if each.is_cuda}
        with rng.preserved(sorted(devices)):
            yield

    @torch.no_grad()
    def end_step(self) -> None:
        """Finish a step after its last backward pass, and store its norm for the next step.

        A non-finite norm is stored as 0, so that one bad step does not stop all later steps.
        """
        self._finish()
        self._tell_of_more_than_one()
        if not len(self._parts):
            return
        self.norm, self._parts = self._parts.norm(), NormInParts()
        if self._clip == "previous":
            self._optimizer.norm_before = torch.where(self.norm.isfinite(), self.norm, 0.0)

    def _tell_of_more_than_one(self) -> None:
        """Warn once if parameters stepped several times before one `optimizer.step()`.

        The loop may have wanted one step by the sum of the passes.
        """
        if self._times is None:
            return
        times, self._times = max(self._times.values(), default=0), {}
        if times > 1:
            self._times = None
            warn(
                f"in_backward: parameters have stepped {times} times before this optimizer.step(). Give accumulation="
                f"{times * self.accumulation} for one step by the sum of these passes; for {times} steps call optimizer.step() after each.",
                code="in-backward.accumulation",
                stacklevel=4,
            )

    def clear(self) -> None:
        """Drop the sums of an unfinished step; its next pass counts as the first."""
        self._waiting.clear()
        self._sums.clear()

    @torch.no_grad()
    def remove(self) -> None:
        """Return the gradients, including the sums so far, to the training loop."""
        for _, _, _, parameter in self._waiting.values():
            self._sums.give_back(parameter)
        self._waiting.clear()
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._optimizer.stepping = None
        self._handles.clear()


def in_backward(
    optimizer: LowPrecisionOptimizer,
    *,
    accumulation: int = 1,
    clip_norm: float | None = None,
    clip: Clip | None = None,
    clip_parameter_norm: float | None = None,
    knows_norm: bool = False,
) -> InBackward:
    """From now on, let `loss.backward()` also step the parameters.

        accumulation         backward passes per step; the last one steps. Above 1, the sums of
                             matrices stay in FP8
        clip_norm, clip      largest 2-norm, and the kind of clipping (see the module). "previous"
                             needs `optimizer.step()` after each backward pass, and stores its norm
                             in state_dict(). "two-pass" needs `optimizer.step(closure)`, with a
                             closure that computes the loss, calls backward() and returns the loss.
                             torch's generators are restored between its passes; other state that
                             forward changes (running statistics of BatchNorm, numpy generators) is
                             not
        clip_parameter_norm  the same as clip_norm with clip="parameter"
        knows_norm           compute the norm of every step, for a log; needs `optimizer.step()`
                             after each backward pass

    Call `optimizer.step()` after backward as usual: it finds no gradients and ends the step. A
    converted model whose loop has no `optimizer.step()` needs `advance` after backward.
    Learning-rate schedulers work as usual. A further backward pass is a further step.

    Keep a reference to the optimizer or to the returned handle while the model trains. The model
    does not hold them, and backward raises ConfigError once they are gone.

    Groups of a later `add_param_group` step in backward too. A parameter that is frozen when its
    group is added is left to `optimizer.step()`; "two-pass" also steps parameters unfrozen later.
    `optimizer.zero_grad()` drops the passes of an unfinished step; `model.zero_grad()` cannot reach
    them.

    Raises ConfigError for options that need all gradients at once.
    """
    if not isinstance(optimizer, LowPrecisionOptimizer):
        raise ConfigError(
            f"in_backward: {type(optimizer).__name__} cannot step one parameter. Use an optimizer of narrowgauge.optim; AdamW with "
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
            "in_backward: no parameter of the optimizer requires a gradient. Unfreeze one.",
            code="in-backward.nothing",
        )
    optimizer.stepping = stepping
    return stepping


def _clip_of(
    norm: float | None, clip: Clip | None, parameter_norm: float | None
) -> tuple[Clip | None, float]:
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
