"""The optimizer inside the backward pass: each parameter steps as soon as its gradient is whole, and the gradient is freed.

So gradients are never all in memory at once: one tensor's at a time instead of 2 or 4 bytes for every parameter. Two things
need all gradients together and cannot be had with it: accumulation over several backward passes, and clipping by the norm of
the whole gradient. Loss scaling by a GradScaler, which looks at all gradients before the step, cannot either.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from narrowgauge.errors import ConfigError
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.optim.clipping import clip_gradients


class InBackward:
    """What `in_backward` returns: `remove()` gives the gradients back to the loop."""

    def __init__(self, optimizer: NarrowOptimizer, clip: float | None) -> None:
        self._optimizer, self._clip = optimizer, clip
        self._handles: list[RemovableHandle] = []

    def _hook(self, place: int) -> None:
        """Hooks the parameters of one group that train."""
        groups, clip = self._optimizer.param_groups, self._clip
        numbers = {id(parameter): number for parameter, _, number in self._optimizer._numbered()}
        # A tensor's hooks lie where Python's collector does not see them: holding the optimizer, which holds the tensor, they would
        # keep weights and states for ever.
        reference = weakref.ref(self._optimizer)

        @torch.no_grad()
        def step(number: int, parameter: Tensor) -> None:
            optimizer = reference()
            if optimizer is None:
                raise ConfigError(
                    f"in_backward: the optimizer that steps this parameter of {list(parameter.shape)} is gone, nothing held it. Keep it, "
                    "or what in_backward returned, for as long as the model trains."
                )
            if clip is not None:
                clip_gradients([parameter], clip)
            group = optimizer.param_groups[place]  # looked up now: load_state_dict brings new ones
            optimizer._step([(parameter, group, number)])
            parameter.grad = None

        for parameter in groups[place]["params"]:
            if parameter.requires_grad:
                hook = partial(step, numbers[id(parameter)])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._optimizer.steps_in_backward = False
            self._optimizer._hook_group = None
        self._handles.clear()


def in_backward(
    optimizer: NarrowOptimizer,
    *,
    accumulation: int = 1,
    clip_norm: float | None = None,
    clip_parameter_norm: float | None = None,
) -> InBackward:
    """From now on `loss.backward()` also steps. `optimizer.step()` finds no gradients. A converted model needs `advance` after backward.

    clip_parameter_norm  scales each parameter's own gradient down to this 2-norm; not the same as clip_norm
    Raises ConfigError for what needs all gradients at once. Schedulers work as ever: they change lr between the passes.
    A second backward pass is a second step. Keep the optimizer, or what is returned, as long as the model trains: the model does not
    hold it, and backward raises ConfigError once it is gone. A group that add_param_group brings later steps in backward too. A
    parameter that does not require a gradient when it comes is left to `optimizer.step()`.
    """
    if not isinstance(optimizer, NarrowOptimizer):
        raise ConfigError(
            f"in_backward: {type(optimizer).__name__} cannot step one parameter. Use narrowgauge.optim.AdamW, Lion or SGD; "
            'states="fp32" is torch\'s AdamW.'
        )
    if accumulation != 1:
        raise ConfigError(
            f"in_backward: accumulation = {accumulation}: each backward pass steps at once, so gradients of several cannot be "
            "summed. Use accumulation 1, with activation checkpointing if the batch does not fit."
        )
    if clip_norm is not None:
        raise ConfigError(
            f"in_backward: clip_norm = {clip_norm}: the norm of the whole gradient is known only after the last layer has "
            "stepped. Use clip_parameter_norm, or step after backward."
        )
    if optimizer.steps_in_backward:
        raise ConfigError(
            f"in_backward: this {type(optimizer).__name__} steps in backward already. Call remove() on what the first call returned."
        )
    stepping = InBackward(optimizer, clip_parameter_norm)
    for place in range(len(optimizer.param_groups)):
        stepping._hook(place)
    if not stepping._handles:
        raise ConfigError("in_backward: no parameter of the optimizer requires a gradient. Unfreeze one.")
    optimizer.steps_in_backward = True
    optimizer._hook_group = stepping._hook
    return stepping
