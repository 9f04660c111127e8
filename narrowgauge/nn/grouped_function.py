"""The three products of a stack of experts as one autograd function, one launch each for all experts.

    S rows sorted by expert, E experts; x [S, K], w [E, N, K], gy [S, N]

`why_looped` says why a stack is multiplied expert by expert instead (`grouped_linear`); both have
the same codes. The kernels are those of `ops.grouped`.

The weight is an operand like a Linear's: the stack as one matrix [E N, K]. Its casts are cached in
its first expert. A transposed stack [E, K, N] is one matrix [E K, N], whose `cols` `output` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling, wrapper
from narrowgauge.errors import Reason
from narrowgauge.nn.autograd_rules import asked_for, no_double_backward
from narrowgauge.nn.keep_policy import KEEPER, SavedInput
from narrowgauge.nn.operands import find
from narrowgauge.nn.rotation import NONE
from narrowgauge.ops.grouped import GroupSpec, choose
from narrowgauge.ops.registry import facts_of, imported

if TYPE_CHECKING:
    from narrowgauge.nn.grouped_linear import ExpertLinear
    from narrowgauge.nn.linear_context import LinearContext
    from narrowgauge.qtensor import QTensor

_KERNELS = "narrowgauge.ops.grouped.launches"
_operand, _product, _gradient, _sums = (
    imported(_KERNELS, name) for name in ("operand", "product", "gradient", "sums")
)
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def why_looped(
    layers: Sequence[ExpertLinear], stack: Tensor, x: Tensor | None = None
) -> Reason | None:
    """Return why the experts of a stack are multiplied one after another; None if they are not.

    x  their rows; None: rows like the stack
    """
    first = layers[0].state
    recipe = first.recipe
    if recipe is None or any(
        each.state.recipe is not recipe or each.state.is_suspended for each in layers
    ):
        return Reason("experts-recipes", "its experts have no recipe in common")
    if recipe.has_state or recipe.backward != "recast" or _rotates(layers[0]):
        return Reason("experts-state", f"{recipe.name} keeps state or rotates for each expert")
    if type(stack).__name__ == "DTensor" or not stack.is_contiguous():
        return Reason("experts-memory", "its memory is sharded or strided")
    facts = facts_of(stack.device, wrapper(stack, x))
    casts = recipe.output.lhs, recipe.output.rhs
    dtype = stack.dtype if x is None else x.dtype
    choice = choose(GroupSpec(*casts, facts, dtype, stack.shape[0], stack.shape[1]))
    if choice.kernel.name == "loop":
        return Reason("experts-loop", "; ".join(choice.reasons))
    for each in layers:
        state = each.state
        watched = state.observer is not None or any(each.__dict__[name] for name in _HOOKS)
        if watched or each.code_source is not None:
            return Reason("experts-watched", "an expert is observed, hooked or frozen as codes")
    return None


def _rotates(layer: ExpertLinear) -> bool:
    recipe = layer.state.recipe
    assert recipe is not None
    return any(gemm.rotate is not None for gemm in recipe.gemms().values())


def grouped_products(
    layers: Sequence[ExpertLinear], x: Tensor, counts: Tensor, stack: Tensor, biases: Tensor | None
) -> Tensor | None:
    """x [S, K] times the matrix of each row's expert -> [S, N]; None if `why_looped` has a reason.

    counts  int32 [E + 1] on the device, rows of each expert and rows without one
    """
    fits = not is_compiling() and x.ndim == 2 and 0 not in (*x.shape, *stack.shape)
    if not fits or why_looped(layers, stack, x) is not None:
        return None
    first = layers[0]
    reads = torch.is_grad_enabled()
    context = first.context(x, first.state.cache if reads else None)
    plan = context.plan
    if plan.w.rows_expand is not None or plan.w.cols_expand is not None:
        return None  # the products of a single expert are emulated here
    found: Tensor = GroupedFunction.apply(
        x, stack.flatten(0, 1), biases, counts, context, first.place.is_transposed
    )
    return found


class GroupedFunction(torch.autograd.Function):
    """The autograd function; see the module. weight: the stack as one matrix."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, biases: Tensor | None, counts: Tensor,
        context: LinearContext, is_transposed: bool,
    ) -> Tensor:  # fmt: skip
        needs, plan = ctx.needs_input_grad, context.plan
        wants = needs[0], needs[1]
        keeper = KEEPER.get()
        y: Tensor | None = None if keeper is None else keeper.begin()
        form = context.keep.of_input(wants[1], False)
        cols = form is SavedInput.CODES and context.keep.grads
        codes = None
        if y is None or cols:
            codes = _operand(x, plan.x.rows, counts, y is None, cols)
        w = find("w", weight, context, wants, None)
        if y is None:
            matrix = w.cols(NONE, w) if is_transposed else w.rows(NONE)
            y = _product(
                codes.rows, matrix, counts, biases, context.out_dtype, not is_transposed
            )  # fmt: skip
        if keeper is not None:
            keeper.end(y)
        kept = (codes.cols, codes.scales) if cols else (x if wants[1] else None, None)
        ctx.context, ctx.wants, ctx.is_transposed = context, wants, is_transposed
        ctx.x_dtype, ctx.saves_codes = x.dtype, cols
        ctx.bias_dtype = None if biases is None or not needs[2] else biases.dtype
        ctx.save_for_backward(counts, *kept, *w.saved())
        return y

    @staticmethod
    @no_double_backward(
        "a stack of experts with a recipe", "Compute inside `with narrowgauge.suspended(model):`."
    )
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        context, asked = ctx.context, asked_for(ctx)
        counts, x, x_scales, *saved = ctx.saved_tensors
        plan, weight = context.plan, saved[1]
        w = plan.w.kind(None, plan.w, context, ctx.wants, None).restore(saved, weight.shape, gy)
        wants = ctx.wants[0] and asked[0], ctx.wants[1] and asked[1]
        grads = _operand(gy, plan.gy.rows, counts, *wants)
        grad_input = grad_weight = None
        if wants[0]:
            matrix: QTensor = w.rows(NONE) if ctx.is_transposed else w.cols(NONE, w)
            grad_input = _product(
                grads.rows, matrix, counts, None, ctx.x_dtype, ctx.is_transposed
            )  # fmt: skip
        if wants[1]:
            if not ctx.saves_codes:
                made = _operand(x, plan.x.cols, counts, False, True)
                x, x_scales = made.cols, made.scales
            of_x, of_gy = (x, x_scales), (grads.cols, grads.scales)
            sides = (*of_x, *of_gy) if ctx.is_transposed else (*of_gy, *of_x)
            dtype = gy.dtype if weight.dtype == torch.float16 else weight.dtype
            grad_weight = _gradient(*sides, counts, dtype).flatten(0, 1)
        grad_bias = (
            _sums(gy, counts, ctx.bias_dtype) if ctx.bias_dtype is not None and asked[2] else None
        )
        return grad_input, grad_weight, grad_bias, None, None, None
