"""The three matrix products of a Linear as one autograd function.

    T tokens, K in_features, N out_features; x [T, K], w [N, K], gy [T, N]

    output       = mm(x.rows,  w.rows)  + bias     [T, N]      x    @ w.T
    grad_input   = mm(gy.rows, w.cols)             [T, K]      gy   @ w
    grad_weight  = mm(gy.cols, x.cols)             [N, K]      gy.T @ x

Each operand is rotated along its contracted axis, if the product says so, and then cast; how, and where its casts come from, is the
business of `operands` and `caches`. With backward="straight-through" (straight_through.py) the operands of the backward products are
the codes of the forward one: their results are gradients of the decoded operands, which `gradient` turns into those of x and w.

What is left out: second derivatives (asking for them raises; `suspended` has them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling, type_of
from narrowgauge.nn.autograd_rules import alias_while_compiling, asked_for, column_sums, no_double_backward
from narrowgauge.nn.kept_products import KEEPER
from narrowgauge.nn.operands import KINDS, Casts, find
from narrowgauge.nn.plan import LinearContext, LinearPlan
from narrowgauge.nn.rotation import NONE, Rotation
from narrowgauge.recipe import Recipe


class LinearFunction(torch.autograd.Function):
    """x_state, w_state, gy_state: their amax windows; straight-through the learned steps of x and w, and the sampler's readings."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, context: LinearContext,
        x_state: Tensor | None, w_state: Tensor | None, gy_state: Tensor | None,
    ) -> Tensor:  # fmt: skip
        needs, plan = ctx.needs_input_grad, context.plan
        wants = needs[0] or needs[4], needs[1] or needs[5]  # the gradient of x or its step, of w or its step
        keeper = None if is_compiling() else KEEPER.get()
        y: Tensor | None = None if keeper is None else keeper.begin()  # kept of the pass that is repeated
        rotation = NONE if (h := plan.recipe.output.rotate) is None else Rotation.draw(h, x, context.stream, "output")
        x_operand = find("x", x, context, wants, x_state)
        lhs = x_operand.rows(rotation) if y is None or x_operand.rows_matter else x
        kept = x_operand.saved()
        w_operand = find("w", weight, context, wants, w_state)
        rhs = w_operand.rows(rotation) if y is None or w_operand.rows_matter else weight
        if y is None:
            y = plan.output.choice.kernel.run(lhs, rhs, bias, context.out_dtype, plan.recipe.output.fast_accumulate)
            if context.shows_results:
                context.observer.multiplied("output", bias, y)  # type: ignore[union-attr]
        if keeper is not None:
            keeper.end(y)
        ctx.context, ctx.wants, ctx.x_kept, ctx.again = context, wants, len(kept), x_operand.again
        ctx.x_dtype, ctx.bias_dtype = x.dtype, bias.dtype if bias is not None and needs[2] else None
        ctx.gy_state = gy_state  # an attribute: saved tensors may not change before backward, and this one does
        ctx.save_for_backward(*kept, *w_operand.saved())
        return alias_while_compiling(y)

    @staticmethod
    @no_double_backward("a Linear with a recipe", "Compute inside `with narrowgauge.suspended(model):`.")
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        context, wants, saved, asked = ctx.context, ctx.wants, ctx.saved_tensors, asked_for(ctx)
        plan: LinearPlan = context.plan
        recipe, weight, stream = plan.recipe, saved[ctx.x_kept + 1], context.stream
        x = plan.x.kind(None, plan.x, context, wants, None)
        x = x.restore(saved[: ctx.x_kept], (gy.shape[0], weight.shape[1]), gy, ctx.again)
        w = plan.w.kind(None, plan.w, context, wants, None).restore(saved[ctx.x_kept :], weight.shape, gy)
        wants = wants[0] and (asked[0] or asked[4]), wants[1] and (asked[1] or asked[5])
        g = find("gy", gy, context, wants, ctx.gy_state)
        grad_input = grad_weight = x_step = w_step = None
        turns = recipe.grad_input.rotate if wants[0] else None, recipe.grad_weight.rotate
        rotation = NONE if turns[0] is None else Rotation.draw(turns[0], gy, stream, "grad_input")
        is_last = wants[0] and wants[1] and not g.plan.transposes and g.lets_wait(w)
        for product in ("grad_weight", "grad_input") if is_last else ("grad_input", "grad_weight"):
            if product == "grad_input" and wants[0]:
                d = _gradient("grad_input", g.rows(rotation), w.cols(rotation, g), context, ctx.x_dtype)
                d, x_step = x.gradient(g.finished("grad_input", d))
                grad_input = d if d.dtype == ctx.x_dtype else d.to(ctx.x_dtype)
            elif product == "grad_weight" and wants[1]:
                turn = NONE if turns[1] is None else Rotation.draw(turns[1], gy.T, stream, "grad_weight")
                dtype = gy.dtype if weight.dtype == torch.float16 else weight.dtype  # float16 has none below 6e-8
                d = _gradient("grad_weight", g.cols(turn, x), x.cols(turn, g), context, dtype)
                d, w_step = w.gradient(g.finished("grad_weight", d))
                grad_weight = d if d.dtype == dtype else d.to(dtype)
                if is_last:  # then what backward keeps of x goes, unless the graph is kept for another one
                    x.tensor, x.casts, saved = None, Casts(), ctx.maybe_clear_saved_tensors()
        grad_bias = column_sums(gy, ctx.bias_dtype) if ctx.bias_dtype is not None and asked[2] else None
        # The gradients of learned steps are zero in their cold start, and where a product in 16 bits leaves none.
        if ctx.needs_input_grad[4] and (x_step is None or context.is_cold):
            x_step = torch.zeros(1, device=gy.device)
        if ctx.needs_input_grad[5] and (w_step is None or context.is_cold):
            w_step = torch.zeros(1, device=gy.device)
        return grad_input, grad_weight, grad_bias, None, x_step, w_step, None


def _gradient(product: str, lhs: Any, rhs: Any, context: LinearContext, dtype: torch.dtype) -> Tensor:
    """A product whose result becomes a gradient of type `dtype`; in float32 where an epilogue works on it first.

    Under bfloat16 autocast, on a CPU that multiplies bfloat16, it is rounded to that on its way, as in torch's own Linear there.
    """
    plan, gemm = getattr(context.plan, product), getattr(context.plan.recipe, product)
    if context.plan.recipe.backward == "straight-through":
        dtype = torch.float32
    elif plan.expand == context.out_dtype == torch.bfloat16 and type_of(lhs.device) == "cpu":
        dtype = torch.bfloat16
    d: Tensor = plan.choice.kernel.run(lhs, rhs, None, dtype, gemm.fast_accumulate)
    if context.shows_results:
        context.observer.multiplied(product, None, d)  # type: ignore[union-attr]
    return d


def plan_of(recipe: Recipe, device: torch.device, hidden_by: str = "", wide: bool = False) -> LinearPlan:
    """What the recipe means on the device; see `LinearPlan.of`."""
    kinds = KINDS
    if recipe.backward == "straight-through":
        from narrowgauge.nn.straight_through import KINDS as kinds
    return LinearPlan.of(recipe, device, kinds, hidden_by, wide)
