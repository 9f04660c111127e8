"""Find the first non-finite number of a step: its module, GEMM and operand.

Repeats forward and backward of the step's micro-batches with hooks. Checks every operand of a
Linear, every module's output and gradient, and every parameter's gradient. Reports the first
non-finite tensor in the order of computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.linear import QLinear
from narrowgauge.optim import shards
from narrowgauge.optim.clipping import gradient_norm
from narrowgauge.qtensor import QTensor

NOTHING = "the loss itself: no module showed it when the step was repeated"
ROLES = {"x": "the input x", "w": "the weight w", "gy": "the gradient gy of its output"}


def first_nonfinite(model: nn.Module, compute: Callable[[], None], loss: float = math.nan) -> str:
    """Run `compute` (forward and backward) and return a clause on the first non-finite number.

    loss  loss of the original step. If it and all gradients are finite, the gradient norm was not
          finite
    """
    return first_seen(model, compute, loss)[0]


def first_seen(
    model: nn.Module, compute: Callable[[], None], loss: float = math.nan
) -> tuple[str, int]:
    """`first_nonfinite`, plus the number of tensors checked before it.

    Ranks that compute one model together check tensors in one order, so the smallest number among
    ranks identifies the first faulty tensor.
    """
    if words := nonfinite_parameter(model):
        return words, 0
    watch = _Watch()
    handles: list[Any] = []
    quantized = {
        name: module for name, module in model.named_modules() if isinstance(module, QLinear)
    }
    try:
        for name, layer in quantized.items():
            layer.observer = partial(watch.operand, name)
        for name, module in model.named_modules():
            title = f"module {name!r} ({type(module).__name__})"
            product = f"{title}, product {{}}: the result" if isinstance(module, QLinear) else ""
            if isinstance(module, QLinear) or not list(module.children()):
                clause = product.format("output") or f"{title}, the output"
                # Index of the checked argument: a forward hook gets (module, inputs, output), a
                # full backward hook (module, grad_input, grad_output), a tensor hook (grad).
                handles.append(module.register_forward_hook(watch.hook(clause, 2)))
                if not isinstance(module, nn.Embedding):  # its input is integer and has no gradient
                    clause = product.format("grad_input") or f"{title}, the gradient of the input"
                    handles.append(module.register_full_backward_hook(watch.hook(clause, 1)))
            for last, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    of_product = product.format("grad_weight") if last == "weight" else ""
                    clause = of_product or f"{title}, the gradient of its {last}"
                    # A parameter's hook fires when its gradient is computed, in the order of
                    # backward; .grad after the pass would not show the order.
                    handles.append(parameter.register_hook(watch.hook(clause, 0)))
        compute()
    finally:
        for handle in handles:
            handle.remove()
        for layer in quantized.values():
            layer.observer = None
    if watch.found or not math.isfinite(loss):
        return watch.found or NOTHING, watch.count
    return _describe_norm(model), watch.count


def nonfinite_parameter(model: nn.Module) -> str:
    """Clause on the first parameter, or local shard, that is not finite; '' if all are finite."""
    for name, parameter in model.named_parameters():
        if not shards.local(parameter.detach()).isfinite().all():
            return f"the parameter {name!r} itself was not finite before the step"
    return ""


class _Watch:
    """Collects the first non-finite tensor.

    found  clause on that tensor, or ''
    count  number of checks up to it
    """

    def __init__(self) -> None:
        self.found, self.count = "", 0

    def check(self, clause: str, tensors: Any) -> None:
        if self.found:
            return
        self.count += 1
        each = tensors if isinstance(tensors, (tuple, list)) else [tensors]
        floats = [
            shards.local(one) for one in each if isinstance(one, Tensor) and one.is_floating_point()
        ]
        # Synchronizes with the device at every tensor; this runs only after a step has failed.
        if any(not tensor.isfinite().all() for tensor in floats):
            self.found = f"{clause} was not finite"

    def hook(self, clause: str, place: int) -> Callable[..., None]:
        """A torch hook that checks its argument number `place`."""
        return lambda *given: self.check(clause, given[place])

    def operand(
        self, name: str, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor
    ) -> None:
        title = f"module {name!r}, product {gemm}:"
        self.check(f"{title} {ROLES[role]}", original)
        if isinstance(operand, QTensor):
            self.check(f"{title} the scale of {ROLES[role]}", operand.full_scale())


def _describe_norm(model: nn.Module) -> str:
    """Clause on the norm of finite gradients, and on the largest gradient."""
    gradients = {
        name: each.grad
        for name, each in model.named_parameters()
        if each.grad is not None and each.grad.numel()
    }
    if not gradients:
        return "no module, and without a gradient, when the step was repeated"
    largest = torch.stack(torch._foreach_norm([*gradients.values()], math.inf))
    place = int(largest.argmax())
    # Each gradient is finite here, so the sum of squares overflowed float32.
    why = "which is beyond float32 though each of them is finite"
    if gradient_norm([*gradients.values()]).isfinite():
        why = "and when the step was repeated it was finite"
    size, name = float(largest[place]), list(gradients)[place]
    return (
        f"the norm of the gradients, {why}: the largest, {size:.4g}, is of the parameter {name!r}"
    )
