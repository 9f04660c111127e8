"""Finds where a non-finite number first appears: the module, the product and the operand.

The step's micro-batches are run again, forward and backward, with an eye on every Linear's operands, every module's output
and gradient, and every parameter's gradient. What is reported is the first non-finite tensor in the order of computation; what
came before it was finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.linear import Observer, QLinear
from narrowgauge.optim.clipping import gradient_norm
from narrowgauge.qtensor import QTensor

WORDS = {"x": "the input x", "w": "the weight w", "gy": "the gradient gy of its output"}


def first_nonfinite(model: nn.Module, compute: Callable[[], None], loss: float = math.nan) -> str:
    """Runs `compute` (a forward and backward pass of `model`) and says in a clause where a non-finite number appeared first.

    loss  of the step: where it is finite, and all gradients are, it is their norm that is not
    """
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            return f"the parameter {name!r} itself was not finite before the step"
    found: list[str] = []
    handles: list[Any] = []
    layers = [
        (name, each) for name, each in model.named_modules() if isinstance(each, QLinear) or not list(each.children())
    ]
    quantized = [(name, module) for name, module in model.named_modules() if isinstance(module, QLinear)]
    try:
        for name, layer in quantized:
            layer.observer = _operand_watch(name, found)
        for name, module in layers:
            handles.append(module.register_forward_hook(_output_watch(name, found)))
            if not isinstance(module, nn.Embedding):  # its input is no float, so it has no gradient
                handles.append(module.register_full_backward_hook(_gradient_watch(name, found)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(_parameter_watch(model, name, found)))
        compute()
    finally:
        for handle in handles:
            handle.remove()
        for _, layer in quantized:
            layer.observer = None
    if found:
        return found[0]
    return (
        _norm_words(model) if math.isfinite(loss) else "the loss itself: no module showed it when the step was repeated"
    )


def _norm_words(model: nn.Module) -> str:
    """Of finite gradients: their norm, and the largest of them."""
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None and each.grad.numel()
    }
    if not gradients:
        return "no module, and without a gradient, when the step was repeated"
    sizes = dict(
        zip(gradients, torch.stack(torch._foreach_norm([*gradients.values()], math.inf)).tolist(), strict=True)
    )
    name = max(sizes, key=sizes.__getitem__)
    finite = gradient_norm([*gradients.values()]).isfinite()
    why = (
        "and when the step was repeated it was finite"
        if finite
        else "which is beyond float32 though each of them is finite"
    )
    return f"the norm of the gradients, {why}: the largest, {sizes[name]:.4g}, is of the parameter {name!r}"


def _operand_watch(name: str, found: list[str]) -> Observer:
    def watch(gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
        if found:
            return
        if not original.isfinite().all():
            found.append(f"module {name!r}, product {gemm}: {WORDS[role]} was not finite")
        elif isinstance(operand, QTensor) and not operand.full_scale().isfinite().all():
            found.append(f"module {name!r}, product {gemm}: the scale of {WORDS[role]} was not finite")

    return watch


def _output_watch(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and any(not tensor.isfinite().all() for tensor in _floats(output)):
            what = "product output: the result" if isinstance(module, QLinear) else "the output"
            found.append(f"module {name!r} ({type(module).__name__}), {what} was not finite")

    return watch


def _gradient_watch(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def watch(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if not found and any(not tensor.isfinite().all() for tensor in _floats(grad_input)):
            what = "product grad_input: the result" if isinstance(module, QLinear) else "the gradient of the input"
            found.append(f"module {name!r} ({type(module).__name__}), {what} was not finite")

    return watch


def _parameter_watch(model: nn.Module, parameter: str, found: list[str]) -> Callable[[Tensor], None]:
    name, _, last = parameter.rpartition(".")
    module = model.get_submodule(name)
    in_product = isinstance(module, QLinear) and last == "weight"

    def watch(gradient: Tensor) -> None:
        if not found and not gradient.isfinite().all():
            what = "product grad_weight: the result" if in_product else f"the gradient of its {last}"
            found.append(f"module {name!r} ({type(module).__name__}), {what} was not finite")

    return watch


def _floats(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
