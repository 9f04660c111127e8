"""The three GEMMs of a Linear as one autograd function.

    T tokens, K in_features, N out_features; x [T, K], w [N, K], gy [T, N]

    output       = mm(x.rows,  w.rows)  + bias     [T, N]      x    @ w.T
    grad_input   = mm(gy.rows, w.cols)             [T, K]      gy   @ w
    grad_weight  = mm(gy.cols, x.cols)             [N, K]      gy.T @ x

Each operand is rotated along its contracted axis, if the recipe rotates, and then quantized.
`operands` implements the casts and `cast_sources` finds existing ones. With backward="straight-through"
(straight_through.py) the backward GEMMs read the codes of the forward pass. Their results are
gradients of the dequantized operands, which `gradient` converts to gradients of x and w.

Backward runs grad_input only if x needs a gradient, and grad_weight only if w does. So for a weight
with requires_grad=False, gy.rows and w.cols are cast, and gy.cols and x.cols are not. The gradient
of the bias sums the incoming gy itself, not its codes.

Left out: second derivatives, which raise an error. `suspended` computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling, type_of
from narrowgauge.nn.autograd_rules import (
    alias_while_compiling,
    asked_for,
    column_sums,
    no_double_backward,
)
from narrowgauge.nn.keep_policy import KEEPER
from narrowgauge.nn.operands import KINDS, Casts, find
from narrowgauge.nn.plan import LinearPlan
from narrowgauge.nn.rotation import NONE, Rotation

if TYPE_CHECKING:
    from narrowgauge.nn.linear_context import LinearContext
    from narrowgauge.recipe import Recipe


class LinearFunction(torch.autograd.Function):
    """The autograd function.

    x_state, w_state, gy_state are the amax states of delayed scaling. Under
    backward="straight-through" they are the learned steps of x and w, and
    the readings of the row sampler.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, context: LinearContext,
        x_state: Tensor | None, w_state: Tensor | None, gy_state: Tensor | None,
    ) -> Tensor:  # fmt: skip
        needs, plan = ctx.needs_input_grad, context.plan
        # (grad_input is needed, grad_weight is needed): for the tensor or for its learned step.
        wants = needs[0] or needs[4], needs[1] or needs[5]
        keeper = None if is_compiling() else KEEPER.get()
        # Under selective checkpointing: the result of the first pass, during recomputation.
        y: Tensor | None = None if keeper is None else keeper.begin()
        rotation = (
            NONE
            if (h := plan.recipe.output.rotate) is None
            else Rotation.draw(h, x, context.ranks.stream, "output", plan.hadamard)
        )
        x_operand = find("x", x, context, wants, x_state)
        # With y at hand, make only casts that backward reads or that draw random numbers.
        lhs = x_operand.rows(rotation) if y is None or x_operand.rows_matter else x
        kept = x_operand.saved()
        w_operand = find("w", weight, context, wants, w_state)
        rhs = w_operand.rows(rotation) if y is None or w_operand.rows_matter else weight
        if y is None:
            y = plan.output.choice.kernel.run(
                lhs, rhs, bias, context.out_dtype, plan.recipe.output.fast_accumulate
            )
            if context.observation is not None:
                context.observation.result("output", bias, y)
        if keeper is not None:
            keeper.end(y)
        ctx.context, ctx.wants, ctx.x_kept, ctx.recompute = (
            context,
            wants,
            len(kept),
            x_operand.recompute,
        )
        ctx.x_dtype, ctx.bias_dtype = x.dtype, bias.dtype if bias is not None and needs[2] else None
        # Not in save_for_backward, which raises if a saved tensor was written before backward:
        # other micro-batches update this one.
        ctx.gy_state = gy_state
        ctx.save_for_backward(*kept, *w_operand.saved())
        return alias_while_compiling(y)

    @staticmethod
    @no_double_backward(
        "a Linear with a recipe", "Compute inside `with narrowgauge.suspended(model):`."
    )
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        context, wants, saved, asked = ctx.context, ctx.wants, ctx.saved_tensors, asked_for(ctx)
        plan: LinearPlan = context.plan
        # The tensors saved for x come first. The weight is the second tensor saved for w.
        recipe, weight, stream = plan.recipe, saved[ctx.x_kept + 1], context.ranks.stream
        x = plan.x.kind(None, plan.x, context, wants, None)
        x = x.restore(saved[: ctx.x_kept], (gy.shape[0], weight.shape[1]), gy, ctx.recompute)
        w = plan.w.kind(None, plan.w, context, wants, None).restore(
            saved[ctx.x_kept :], weight.shape, gy
        )
        # A zero-bubble schedule calls backward once per gradient.
        wants = wants[0] and (asked[0] or asked[4]), wants[1] and (asked[1] or asked[5])
        g = find("gy", gy, context, wants, ctx.gy_state)
        grad_input = grad_weight = x_step = w_step = None
        turns = recipe.grad_input.rotate if wants[0] else None, recipe.grad_weight.rotate
        rotation = (
            NONE
            if turns[0] is None
            else Rotation.draw(turns[0], gy, stream, "grad_input", plan.hadamard)
        )
        # Compute grad_weight first where possible: x and its codes are then
        # freed before grad_input is allocated. In the other order mxfp4 needed
        # 2.3 % more memory than bfloat16 for a ViT (decisions/memory.md). `lets_wait`
        # draws the noise of grad_input now, so results are bit-identical.
        is_last = wants[0] and wants[1] and not g.plan.transposes and g.lets_wait(w)
        for product in ("grad_weight", "grad_input") if is_last else ("grad_input", "grad_weight"):
            if product == "grad_input" and wants[0]:
                d = _gradient(
                    "grad_input", g.rows(rotation), w.cols(rotation, g), context, ctx.x_dtype
                )
                d, x_step = x.gradient(g.finished("grad_input", d))
                grad_input = d if d.dtype == ctx.x_dtype else d.to(ctx.x_dtype)
            elif product == "grad_weight" and wants[1]:
                turn = (
                    NONE
                    if turns[1] is None
                    else Rotation.draw(turns[1], gy.T, stream, "grad_weight", plan.hadamard)
                )
                # float16 has no numbers below 6e-8, so a float16 weight gets
                # its gradient in gy's dtype.
                dtype = gy.dtype if weight.dtype == torch.float16 else weight.dtype
                d = _gradient("grad_weight", g.cols(turn, x), x.cols(turn, g), context, dtype)
                d, w_step = w.gradient(g.finished("grad_weight", d))
                grad_weight = d if d.dtype == dtype else d.to(dtype)
                if is_last:  # frees x and its codes; does nothing under retain_graph=True
                    x.tensor, x.casts, saved = None, Casts(), ctx.maybe_clear_saved_tensors()
        grad_bias = (
            column_sums(gy, ctx.bias_dtype) if ctx.bias_dtype is not None and asked[2] else None
        )
        # The gradient of a learned step is zero in its cold start, and if
        # the other operand of the GEMM is not quantized.
        if ctx.needs_input_grad[4] and (x_step is None or context.progress.is_cold):
            x_step = torch.zeros(1, device=gy.device)
        if ctx.needs_input_grad[5] and (w_step is None or context.progress.is_cold):
            w_step = torch.zeros(1, device=gy.device)
        return grad_input, grad_weight, grad_bias, None, x_step, w_step, None


def _gradient(
    product: str, lhs: Any, rhs: Any, context: LinearContext, dtype: torch.dtype
) -> Tensor:
    """Compute grad_input or grad_weight.

    dtype  dtype of the gradient; straight-through results stay float32 for their epilogue

    Under bfloat16 autocast, on a CPU with bfloat16 instructions, the result is rounded to bfloat16,
    as in torch's own Linear there.
    """
    plan, gemm = getattr(context.plan, product), getattr(context.plan.recipe, product)
    if context.plan.recipe.backward == "straight-through":
        dtype = torch.float32
    elif plan.expand == context.out_dtype == torch.bfloat16 and type_of(lhs.device) == "cpu":
        dtype = torch.bfloat16
    d: Tensor = plan.choice.kernel.run(lhs, rhs, None, dtype, gemm.fast_accumulate)
    if context.observation is not None:
        context.observation.result(product, None, d)
    return d


def plan_of(
    recipe: Recipe, device: torch.device, hidden_by: str = "", wide: bool = False
) -> LinearPlan:
    """Return the plan of a recipe on a device; arguments as in `LinearPlan.of`."""
    kinds = KINDS
    if recipe.backward == "straight-through":
        from narrowgauge.nn.straight_through import KINDS as kinds
    elif recipe.backward == "recast-codes":
        from narrowgauge.nn.recast_codes import KINDS as kinds
    return LinearPlan.of(recipe, device, kinds, hidden_by, wide)
