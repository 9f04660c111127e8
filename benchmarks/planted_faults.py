"""Faults to plant into a model's narrow products: coarse formats, windows that saturate, wrong kernels, caches, scales and random numbers.

    plant(model, "int4")        converts the model to a healthy recipe or to a fault, by name

A fault acts on narrow products alone: `suspended(model)` is sound in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.conversion import convert
from narrowgauge.formats import E2M1, E4M3, E5M2, INT4
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.linear_context import LinearContext, RankOptions
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.nn.plan import PRODUCTS, LinearPlan, OperandPlan
from narrowgauge.ops.quantize import tile_amax
from narrowgauge.ops.random import Stream
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, DelayedScaling, Gemm, Recipe
from narrowgauge.scaling import WHOLE

HEALTHY = ("fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8")
FOUR_BITS = (
    "nvfp4",
    "int4-hq-bs",
)  # sound recipes, whose gap in so small a model is of the order of the margin
DROPPED = 16  # of the contracted axis, which has 64 elements or more
STALE = 16  # calls for which a cast of a weight is used


def uniform(name: str, cast: Cast) -> Recipe:
    """The same cast for all six operands."""
    gemm = Gemm(lhs=cast, rhs=cast)
    return Recipe(name=name, output=gemm, grad_input=gemm, grad_weight=gemm)


FORMATS = {
    "int4-tensor": uniform("int4-tensor", Cast(format=INT4)),
    "e2m1-tensor": uniform("e2m1-tensor", Cast(format=E2M1)),
    "e5m2-tensor": uniform("e5m2-tensor", Cast(format=E5M2)),
    # The window says a sixteenth of the largest magnitudes: whatever lies beyond saturates.
    "saturating": uniform(
        "saturating", Cast(format=E4M3, calibrate=DelayedScaling(length=16, margin=-4))
    ),
}


def plant(model: nn.Module, name: str) -> None:
    """Raises ConfigError if the name is neither a recipe nor a fault."""
    convert(
        model, FORMATS.get(name) or (OF_BROKEN.get(name, "fp8-current") if name in BROKEN else name)
    )
    if name in BROKEN:
        BROKEN[name](model)


def dead_layer(model: nn.Module) -> None:
    """One Linear in the middle gives zeros."""
    layers = _linears(model)
    next(
        layer for name, layer in layers if name.endswith("layers.1.mlp.down_proj")
    ).register_forward_hook(lambda layer, _, output: output if layer.is_suspended else output * 0)


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


def stale_codes(model: nn.Module) -> None:
    """The forward pass of every Linear multiplies by casts of its weight that are up to STALE calls old."""
    for _, layer in _linears(model):
        _wrap_context(layer, _StaleCasts().into)


class _StaleCasts:
    """A source of casts (caches.py) that makes them at every STALE-th call."""

    def __init__(self) -> None:
        self.calls, self.casts = 0, Casts()

    def into(self, context: LinearContext) -> None:
        context.sources.by_role["w"] = [self]

    def lookup(self, operand: Operand) -> Casts:
        if self.calls % STALE == 0:
            self.casts = Casts()  # which the operand fills
        self.calls += 1
        return self.casts


def stuck_noise(model: nn.Module) -> None:
    """Stochastic rounding of each Linear draws the same random numbers at every step."""
    for name, layer in _linears(model):
        ranks = RankOptions(stream=Stream(name, (1, 2)))
        _wrap_context(layer, lambda context, ranks=ranks: setattr(context, "ranks", ranks))


def lost_tokens(model: nn.Module) -> None:
    """The kernel of grad_weight leaves out the second half of the tokens, in every Linear."""
    for _, layer in _linears(model):
        _wrap_plan(layer, _without_half)


def _without_half(plan: LinearPlan) -> LinearPlan:
    own = plan.grad_weight
    kernel = own.choice.kernel

    def run(lhs: Any, *rest: Any) -> Tensor:
        data = (lhs.data if isinstance(lhs, QTensor) else lhs).clone()
        data[:, data.shape[1] // 2 :] = 0
        return kernel.run(replace(lhs, data=data) if isinstance(lhs, QTensor) else data, *rest)  # type: ignore[no-any-return]

    return replace(
        plan, grad_weight=replace(own, choice=replace(own.choice, kernel=replace(kernel, run=run)))
    )


def short_amax(model: nn.Module) -> None:
    """The scale of every output's gradient is that of the first half of its rows: larger elements of the others saturate."""
    for _, layer in _linears(model):
        _wrap_plan(layer, lambda plan: replace(plan, gy=_ShortAmax.of(plan.gy)))


class _ShortAmax(OperandPlan):
    """Of a cast with one scale per tensor."""

    @classmethod
    def of(cls, plan: OperandPlan) -> _ShortAmax:
        return cls(
            **{each.name: getattr(plan, each.name) for each in fields(plan)}
            | {"pairs": False, "kernels": {}}
        )

    def quantize(
        self, x: Tensor, cast: Cast, amax: Tensor | None, noise: Any, expand: torch.dtype | None
    ) -> QTensor:
        return super().quantize(x, cast, tile_amax(x[: len(x) // 2], (WHOLE, WHOLE)), noise, expand)


@contextmanager
def shrinking(layer: QLinear, product: str, role: str, factor: float) -> Iterator[set[str]]:
    """Inside the block this operand of the product is multiplied by the factor before its cast; gives the products that read its codes."""
    plan_of, which = layer.plan, ("rows", "cols")[PRODUCTS[role].index(product)]
    own: OperandPlan = getattr(plan_of(layer.weight.device), role)

    class Shrunk(own.kind):  # type: ignore[misc, name-defined]
        def cast(
            self, x: Tensor, cast: Cast | None, expand: torch.dtype | None, made: str
        ) -> QTensor | Tensor:
            is_at_fault = made == which or own.transposes
            return super().cast(
                x.to(torch.float32) * factor if is_at_fault else x, cast, expand, made
            )  # type: ignore[no-any-return]

    class Apart(OperandPlan):
        """Every cast passes by `Shrunk.cast`."""

        def one_read(self, *given: Any) -> None:
            return None

    changed: dict[LinearPlan, LinearPlan] = {}

    def plan(*given: Any) -> LinearPlan:
        whole = plan_of(*given)
        if whole not in changed:
            known = {
                each.name: getattr(getattr(whole, role), each.name) for each in fields(OperandPlan)
            }
            changed[whole] = replace(
                whole, **{role: Apart(**known | {"kind": Shrunk, "pairs": False, "kernels": {}})}
            )
        return changed[whole]

    layer.plan = plan  # type: ignore[method-assign]
    layer.empty_cache()
    try:
        yield set(PRODUCTS[role]) if own.transposes else {product}
    finally:
        del layer.plan
        layer.empty_cache()


def _wrap_context(layer: QLinear, change: Callable[[LinearContext], None]) -> None:
    context_of = layer.context

    def context(*given: Any) -> LinearContext:
        found = context_of(*given)
        change(found)
        return found

    layer.context = context  # type: ignore[method-assign]


def _wrap_plan(layer: QLinear, change: Callable[[LinearPlan], LinearPlan]) -> None:
    """Once per plan, which layers compare by identity."""
    plan_of, changed = layer.plan, dict[LinearPlan, LinearPlan]()

    def plan(*given: Any) -> LinearPlan:
        whole = plan_of(*given)
        if whole not in changed:
            changed[whole] = change(whole)
        return changed[whole]

    layer.plan = plan  # type: ignore[method-assign]


def _linears(model: nn.Module) -> list[tuple[str, QLinear]]:
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, QLinear) and layer.recipe
    ]


BROKEN: dict[str, Callable[[nn.Module], None]] = {
    "dead-layer": dead_layer, "dropped-columns": dropped_columns, "stale-codes": stale_codes, "stuck-noise": stuck_noise,
    "lost-tokens": lost_tokens, "short-amax": short_amax,
}  # fmt: skip
OF_BROKEN = {"stuck-noise": "int4-row-sr"}  # the recipe that is broken, where it is not fp8-current
SICK = (*FORMATS, *BROKEN)
