"""The three products of a stack of experts as one autograd function, one launch each for all experts.

    S rows sorted by expert, E experts; x [S, K], w [E, N, K], gy [S, N]

`kernel_of` says why a stack is multiplied expert by expert instead (`grouped_linear`); both have
the same codes. The kernels are those of `ops.grouped`.

The weight is an operand like a Linear's: the stack as one matrix [E N, K]. Casts in square
tiles are cached in its first expert; others are made in each pass. A transposed stack [E, K, N] is one
matrix [E K, N], whose columns `output` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling, wrapper
from narrowgauge.errors import Reason
from narrowgauge.nn.autograd_rules import asked_for, no_double_backward
from narrowgauge.nn.coded_weight import codes_of, plain
from narrowgauge.nn.keep_policy import KEEPER, SavedInput
from narrowgauge.nn.linear_context import CastSources
from narrowgauge.nn.operands import Casts, Operand, find
from narrowgauge.nn.rotation import NONE
from narrowgauge.ops.grouped import TILE, GroupSpec, choose, slots_for
from narrowgauge.ops.registry import facts_of, imported
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.nn.frozen_experts import FrozenExpert, StackCodes
    from narrowgauge.nn.linear import QLinear
    from narrowgauge.nn.linear_context import LinearContext
    from narrowgauge.ops.grouped.launches import GroupedCodes, Matrices
    from narrowgauge.recipe import Recipe

_MODULES = {
    "native": "native",
    "native-mx": "native",
    "triton": "launches",
}  # kernel -> its module in ops/grouped
_operand, _turned_stack, _sums, _below, _beside = (
    imported("narrowgauge.ops.grouped.launches", name)
    for name in ("operand", "turned_stack", "sums", "below", "beside")
)
_PRODUCTS, _GRADIENTS = (
    {kernel: imported(f"narrowgauge.ops.grouped.{name}", own) for kernel, name in _MODULES.items()}
    for own in ("product", "gradient")
)
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def kernel_of(
    layers: Sequence[QLinear], stack: Tensor, biases: Tensor | None, x: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> str | Reason:  # fmt: skip
    """Return the name of the kernel, or why the experts of a stack are multiplied one after another.

    x      their rows; None: rows like the stack
    dtype  of the result; None: the stack's
    """
    recipe = layers[0].state.recipe
    if recipe is None:
        return Reason("experts-recipes", "its experts have no recipe")
    if recipe.has_state or recipe.backward != "recast" or _rotates(recipe):
        return Reason("experts-state", f"{recipe.name} keeps state or rotates for each expert")
    x_cast, w_cast = recipe.output.lhs, recipe.output.rhs
    backward = recipe.grad_input.lhs, recipe.grad_weight.lhs, recipe.grad_weight.rhs
    if any(each != x_cast for each in backward) or recipe.grad_input.rhs != w_cast:
        return Reason("experts-formats", f"{recipe.name} casts otherwise in its three products")
    if type(stack).__name__ == "DTensor":
        return Reason("experts-sharded", "ranks share it: decided when it is gathered")
    if not stack.is_contiguous():
        return Reason("experts-memory", "its memory is strided")
    facts = facts_of(stack.device, wrapper(stack, x))
    dtypes = stack.dtype if x is None else x.dtype, dtype or stack.dtype, stack.dtype
    sizes, biased = (stack.shape[1], stack.shape[2]), biases is not None
    choice = choose(GroupSpec(x_cast, w_cast, facts, dtypes, stack.shape[0], sizes, biased))
    if choice.kernel.name == "reference":
        return Reason("experts-loop", "; ".join(choice.reasons))
    w = layers[0].plan(stack.device, facts.wrapper).w
    if w.rows_expand is not None or w.cols_expand is not None:
        return Reason("experts-emulated", "the products of one expert are emulated here")
    codes: StackCodes | None = codes_of(stack)  # type: ignore[assignment]
    if codes is not None and not codes.may_join:
        return Reason("experts-codes", f"codes by the cast {w_cast} are not those of w.T too")
    # Last, since it asks every expert: hooks and observers expect a call for each.
    own = [None] * len(layers) if codes is None else codes.experts
    differ = (_differs(each, recipe, held) for each, held in zip(layers, own, strict=True))
    return next(filter(None, differ), choice.kernel.name)


def _differs(layer: QLinear, recipe: Recipe, held: FrozenExpert | None) -> Reason | None:
    """Why this expert is not multiplied as the others of its stack.

    recipe  of the stack; held: the expert's codes in it, or None
    """
    state, own = layer.state, layer.__dict__
    if state.is_suspended or (state.recipe is not recipe and state.recipe != recipe):
        return Reason("experts-recipes", "its experts have no recipe in common")
    if state.observer is not None or any(own[name] for name in _HOOKS):
        return Reason("experts-watched", "an expert is observed or has a hook")
    source = layer.code_source
    if source is None or source is held:
        return None
    return Reason("experts-codes", "its weights are codes of their own")


def _rotates(recipe: Recipe) -> bool:
    return any(gemm.rotate is not None for gemm in recipe.gemms().values())


def grouped_products(
    layers: Sequence[QLinear], x: Tensor, counts: Tensor, stack: Tensor, biases: Tensor | None,
    is_transposed: bool,
) -> Tensor | None:  # fmt: skip
    """x [S, K] times the matrix of each row's expert -> [S, N]; None if `kernel_of` has a reason.

    layers  the experts, whose weights are the matrices of `stack`
    counts  int32 [E + 1] on the device, rows of each expert and rows without one
    """
    first = layers[0]
    # The loop has the words for wrong shapes, and empty tensors are rare.
    inner = stack.shape[1 if is_transposed else 2]
    fits = x.ndim == 2 and x.shape[1] == inner and x.device == stack.device
    if is_compiling() or not fits or 0 in (*x.shape, *stack.shape) or _is_wide(first):
        return None
    # One expert's options are those of all: they have one recipe.
    context = first.context(x, first.state.cache if torch.is_grad_enabled() else None)
    kernel = kernel_of(layers, stack, biases, x, context.out_dtype)
    if isinstance(kernel, Reason):
        return None
    codes: StackCodes | None = codes_of(stack)  # type: ignore[assignment]
    if codes is None:
        weight = stack.flatten(0, 1)
    else:  # as its experts' codes lie, whatever the order of the parameter
        source, is_transposed = codes.joined(), False
        weight = plain(stack).flatten()[:1].expand(source.codes.shape[0], source.columns)
        context.sources = CastSources(by_role={"w": [source]}, weight_cache=source)
    how = _Stack(kernel, stack.shape[0], is_transposed)
    found: Tensor = GroupedFunction.apply(x, weight, biases, counts, context, how)
    return found


def _is_wide(layer: QLinear) -> bool:
    return layer.state.recipe is None or layer.state.is_suspended


@dataclass(frozen=True)
class _Stack:
    """How a stack is multiplied: by which kernel, and how its matrices lie in memory."""

    kernel: str
    experts: int
    is_transposed: bool

    def matrices(self, w: Operand, reads_rows: bool) -> Matrices:
        """The experts' matrices as rows [E N, K] of the stack, or as columns.

        w  the stack as an operand. Only square tiles have codes of its columns: a row of the
           transposed stack holds all experts.
        """
        cast = w.plan.rows
        assert cast is not None
        found: Matrices
        if reads_rows:  # each row belongs to one expert, whatever its scale covers
            found = _below(w.rows(NONE), self.experts)
        elif not cast.is_symmetric:
            found = _turned_stack(w.tensor, cast, self.experts)
        else:
            found = _beside(w.cols(NONE, w), self.experts)
        return found


class GroupedFunction(torch.autograd.Function):
    """The autograd function; see the module. weight: the stack as one matrix."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, biases: Tensor | None, counts: Tensor,
        context: LinearContext, how: _Stack,
    ) -> Tensor:  # fmt: skip
        needs, plan = ctx.needs_input_grad, context.plan
        wants = needs[0], needs[1]
        keeper = KEEPER.get()
        y: Tensor | None = None if keeper is None else keeper.begin()
        form = context.keep.of_input(wants[1], False)
        cols = form is SavedInput.CODES and context.keep.grads and _saves_memory(x, how.experts)
        # A repeated pass that has its result casts only what backward reads.
        codes: GroupedCodes = _operand(x, plan.x.rows, counts, y is None, cols)
        w = _weight(weight, context, wants)
        if y is None:
            matrices = how.matrices(w, not how.is_transposed)
            fast = plan.recipe.output.fast_accumulate
            y = _PRODUCTS[how.kernel](
                codes, matrices, counts, biases, context.out_dtype, fast
            )  # fmt: skip
        if keeper is not None:
            keeper.end(y)
        if not w.plan.transposes:  # backward turns the stack anew, and reads no codes of its rows
            w.casts = Casts()
        kept = (codes.cols, codes.col_scales) if cols else (x if wants[1] else None, None)
        ctx.context, ctx.wants, ctx.how = context, wants, how
        ctx.x_dtype, ctx.saves_codes = x.dtype, cols
        ctx.bias_dtype = None if biases is None or not needs[2] else biases.dtype
        ctx.save_for_backward(counts, *kept, *w.saved())
        return y

    @staticmethod
    @no_double_backward(
        "a stack of experts with a recipe", "Compute inside `with narrowgauge.suspended(model):`."
    )
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        context, asked, how = ctx.context, asked_for(ctx), ctx.how
        counts, x, x_scales, *saved = ctx.saved_tensors
        plan, weight = context.plan, saved[1]
        w = plan.w.kind(None, plan.w, context, ctx.wants, None).restore(saved, weight.shape, gy)
        wants = ctx.wants[0] and asked[0], ctx.wants[1] and asked[1]
        of_gy = _operand(gy, plan.gy.rows, counts, *wants)
        grad_input = grad_weight = None
        if wants[0]:
            matrices = how.matrices(w, how.is_transposed)
            fast = plan.recipe.grad_input.fast_accumulate
            grad_input = _PRODUCTS[how.kernel](
                of_gy, matrices, counts, None, ctx.x_dtype, fast
            )  # fmt: skip
        if wants[1]:
            of_x = (
                of_gy._replace(cols=x, col_scales=x_scales)
                if ctx.saves_codes
                else _operand(x, plan.x.cols, counts, False, True)
            )
            # A transposed stack [E, K, N] has a transposed gradient.
            sides = (of_x, of_gy) if how.is_transposed else (of_gy, of_x)
            # float16 has no numbers below 6e-8, see `LinearFunction`.
            dtype = gy.dtype if weight.dtype == torch.float16 else weight.dtype
            fast, by_row = plan.recipe.grad_weight.fast_accumulate, plan.x.cols.tile == (1, WHOLE)
            grad_weight = _GRADIENTS[how.kernel](*sides, counts, dtype, by_row, fast).flatten(0, 1)
        grad_bias = (
            _sums(gy, counts, ctx.bias_dtype) if ctx.bias_dtype is not None and asked[2] else None
        )
        return grad_input, grad_weight, grad_bias, None, None, None


def _saves_memory(x: Tensor, experts: int) -> bool:
    """True if the codes of x.T, in whole tiles for each expert, take less than x."""
    return slots_for(x.shape[0], experts) * TILE < x.element_size() * x.shape[0]


def _weight(weight: Tensor, context: LinearContext, wants: tuple[bool, bool]) -> Operand:
    """The stack as an operand, with casts that its first expert's cache holds, of square tiles."""
    plan = context.plan.w
    # The cache would cast the columns of the stack too, whose rows hold all experts.
    if plan.rows is not None and not plan.rows.is_symmetric:
        made: Operand = plan.kind(weight, plan, context, wants, None)
        return made
    return find("w", weight, context, wants, None)
