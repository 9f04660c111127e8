"""Faults to plant into a model's narrow products: formats that are too coarse, windows that saturate, a dead layer, a kernel that is wrong.

    plant(model, "int4")        converts the model to a healthy recipe or to a fault, by name

A fault acts on narrow products alone: `suspended(model)` is sound in each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from narrowgauge.conversion import convert
from narrowgauge.formats import E2M1, E4M3, E5M2, INT4
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Cast, Gemm, Recipe, Window

HEALTHY = ("fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8")
FOUR_BITS = ("nvfp4", "int4-hq-bs")  # sound recipes, whose gap in so small a model is of the order of the margin
DROPPED = 16  # of the contracted axis, which has 64 elements or more


def uniform(name: str, cast: Cast) -> Recipe:
    """The same cast for all six operands."""
    gemm = Gemm(lhs=cast, rhs=cast)
    return Recipe(name=name, output=gemm, grad_input=gemm, grad_weight=gemm)


FORMATS = {
    "int4-tensor": uniform("int4-tensor", Cast(format=INT4)),
    "e2m1-tensor": uniform("e2m1-tensor", Cast(format=E2M1)),
    "e5m2-tensor": uniform("e5m2-tensor", Cast(format=E5M2)),
    # The window says a sixteenth of the largest magnitudes: whatever lies beyond saturates.
    "saturating": uniform("saturating", Cast(format=E4M3, calibrate=Window(length=16, margin=-4))),
}


def plant(model: nn.Module, name: str) -> None:
    """Raises ConfigError if the name is neither a recipe nor a fault."""
    convert(model, FORMATS.get(name) or ("fp8-current" if name in BROKEN else name))
    if name in BROKEN:
        BROKEN[name](model)


def dead_layer(model: nn.Module) -> None:
    """One Linear in the middle gives zeros."""
    layers = _linears(model)
    next(layer for name, layer in layers if name.endswith("layers.1.mlp.down_proj")).register_forward_hook(
        lambda layer, _, output: output if layer.is_suspended else output * 0
    )


def dropped_columns(model: nn.Module) -> None:
    """A kernel that leaves out the last DROPPED elements of the contracted axis, in all three products of every Linear."""
    for _, layer in _linears(model):
        narrow = layer.forward
        layer.forward = _Dropping(layer, narrow)  # type: ignore[method-assign]


class _Dropping:
    def __init__(self, layer: QLinear, narrow: Callable[[Tensor], Tensor]) -> None:
        self.layer, self.narrow = layer, narrow

    def __call__(self, x: Tensor) -> Tensor:
        if self.layer.is_suspended:
            return self.narrow(x)
        return _DroppedProducts.apply(x, self.layer.weight)


class _DroppedProducts(torch.autograd.Function):
    """x @ w.T, gy @ w and gy.T @ x, each without the end of its contracted axis; bfloat16 operands."""

    @staticmethod
    def forward(context, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        context.save_for_backward(x, weight)
        return _product(x, weight.T)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def, override]
        x, weight = context.saved_tensors
        flat, rows = gradient.flatten(0, -2), x.flatten(0, -2)
        return _product(gradient, weight).to(x.dtype), _product(flat.T, rows).to(weight.dtype)


def _product(lhs: Tensor, rhs: Tensor) -> Tensor:
    kept = rhs.shape[0] - DROPPED
    return lhs[..., :kept].bfloat16() @ rhs[:kept].bfloat16()


def _linears(model: nn.Module) -> list[tuple[str, QLinear]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, QLinear) and layer.recipe]


BROKEN: dict[str, Callable[[nn.Module], None]] = {"dead-layer": dead_layer, "dropped-columns": dropped_columns}
SICK = (*FORMATS, *BROKEN)
