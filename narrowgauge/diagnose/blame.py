"""Finds where a non-finite number first appears: the module, the product and the operand.

Repeats the micro-batches of the step, forward and backward, and checks every operand of a Linear, every module's output and
gradient, and every parameter's gradient. Reports the first non-finite tensor in the order of computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.linear import Observer, QLinear
from narrowgauge.optim.clipping import gradient_norm
from narrowgauge.qtensor import QTensor

ROLES = {"x": "the input x", "w": "the weight w", "gy": "the gradient gy of its output"}


def first_nonfinite(model: nn.Module, compute: Callable[[], None], loss: float = math.nan) -> str:
    """Calls `compute` (forward and backward of `model`) and returns a clause: where a non-finite number appeared first.

    loss  of the step; if it and all gradients are finite, the norm of the gradients was not
    """
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            return f"the parameter {name!r} itself was not finite before the step"
    found: list[str] = []
    handles: list[Any] = []
    quantized = [(name, module) for name, module in model.named_modules() if isinstance(module, QLinear)]
    try:
        for name, layer in quantized:
            layer.observer = _operand_watch(name, found)
        for name, module in model.named_modules():
            check = _checker(module, name, found)
            if isinstance(module, QLinear) or not list(module.children()):
                handles.append(module.register_forward_hook(partial(_check_output, check)))
                if not isinstance(module, nn.Embedding):  # its input is integer and has no gradient
                    handles.append(module.register_full_backward_hook(partial(_check_grad_input, check)))
            for last, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    product = "grad_weight" if last == "weight" else None
                    handles.append(parameter.register_hook(partial(check, product, f"the gradient of its {last}")))
        compute()
    finally:
        for handle in handles:
            handle.remove()
        for _, layer in quantized:
            layer.observer = None
    if found:
        return found[0]
    if math.isfinite(loss):
        return _describe_norm(model)
    return "the loss itself: no module showed it when the step was repeated"


def _describe_norm(model: nn.Module) -> str:
    """A clause on the norm of finite gradients and on the largest gradient."""
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None and each.grad.numel()
    }
    if not gradients:
        return "no module, and without a gradient, when the step was repeated"
    largest = torch.stack(torch._foreach_norm([*gradients.values()], math.inf))
    place = int(largest.argmax())
    why = "which is beyond float32 though each of them is finite"
    if gradient_norm([*gradients.values()]).isfinite():
        why = "and when the step was repeated it was finite"
    size, name = float(largest[place]), list(gradients)[place]
    return f"the norm of the gradients, {why}: the largest, {size:.4g}, is of the parameter {name!r}"


def _operand_watch(name: str, found: list[str]) -> Observer:
    def watch(gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
        if found:
            return
        if not original.isfinite().all():
            found.append(f"module {name!r}, product {gemm}: {ROLES[role]} was not finite")
        elif isinstance(operand, QTensor) and not operand.full_scale().isfinite().all():
            found.append(f"module {name!r}, product {gemm}: the scale of {ROLES[role]} was not finite")

    return watch


def _checker(module: nn.Module, name: str, found: list[str]) -> Callable[[str | None, str, Any], None]:
    """check(product, what, tensors) records the module, and the product if it is a QLinear, where a tensor is not finite."""

    def check(product: str | None, what: str, tensors: Any) -> None:
        each = tensors if isinstance(tensors, (tuple, list)) else [tensors]
        floats = [tensor for tensor in each if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        if not found and any(not tensor.isfinite().all() for tensor in floats):
            what = f"product {product}: the result" if product and isinstance(module, QLinear) else what
            found.append(f"module {name!r} ({type(module).__name__}), {what} was not finite")

    return check


def _check_output(check: Callable[..., None], module: nn.Module, inputs: Any, output: Any) -> None:
    check("output", "the output", output)


def _check_grad_input(check: Callable[..., None], module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    check("grad_input", "the gradient of the input", grad_input)
