"""Rules shared by the autograd functions of this package.

no_double_backward      raises on second derivatives and vmap over backward
asked_for               inputs whose gradient this backward pass computes
column_sums             gradient of a bias
alias_while_compiling   works around a Dynamo bug for functions that return a buffer
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling, type_of, wrapper

Backward = Callable[..., Any]


def no_double_backward(what: str, way_on: str) -> Callable[[Backward], Backward]:
    """Decorate a `backward`: second derivatives and vmap raise TransformError.

    what    name of the function in the message
    way_on  next step in the message

    torch's `once_differentiable` raises only if the incoming gradient has a
    graph. The gradients that `torch.autograd.grad(..., create_graph=True)`
    and `functional.hessian` start from have none, so the second derivative
    would be zero or None without an error. Compiled code has its own check.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            # Gradients are enabled inside a backward pass only under create_graph=True.
            if not torch.compiler.is_compiling() and (
                torch.is_grad_enabled() or _is_mapped(gradients)
            ):
                from narrowgauge.nn.transforms import refuse_backward

                refuse_backward(what, way_on)
            return backward(ctx, *gradients)

        return run

    return decorate


def _is_mapped(gradients: tuple[Any, ...]) -> bool:
    # is_grads_batched=True still uses the vmap before torch.func, with batched tensors of its own.
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return torch._C._are_functorch_transforms_active() or any(
        map(is_batched, filter(torch.is_tensor, gradients))
    )


def asked_for(ctx: Any) -> tuple[bool, ...]:
    """For each input of a function, return True if this backward pass computes its gradient.

    `ctx.needs_input_grad` describes the forward pass. Zero-bubble pipeline schedules call the
    backward of one function twice, first for the gradient of its input, then for the gradient of
    its weight. Without this test each call would compute both.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needs
    asked, node = [], 0
    nodes = ctx.next_functions
    for each in needs:
        # next_functions has one entry per tensor input, without a node if the tensor requires no
        # gradient. Skip those entries, and the inputs that are no tensors.
        while each and nodes[node][0] is None:
            node += 1
        asked.append(each and _goes_on_to(nodes[node][0]))
        node += each
    return tuple(asked)


def _goes_on_to(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # The engine raises for leaves whose gradient `torch.autograd.grad`
        # returns. They are wanted.
        return True


def alias_while_compiling(y: Tensor) -> Tensor:
    """Return a view of y under torch.compile, and y itself in eager mode.

    In eager mode a view would forbid the caller to change the result in place.
    """
    # Dynamo of torch 2.11 (fixed in 2.13) passes a zero gradient to the backward of a function that
    # returns a buffer that its forward wrote. Every gradient behind it is zero, without an error.
    # Returning a view avoids that.
    return y.view(y.shape) if torch.compiler.is_compiling() else y


def column_sums(gy: Tensor, dtype: torch.dtype) -> Tensor:
    """gy [T, N] -> [N]: sum over T in float32, rounded once to `dtype`.

    One kernel, as in nn.Linear, unless one 16-bit dtype is converted to the other.
    """
    # Under autocast gy is bfloat16 and the bias float32, which torch sums on a CPU from a copy of gy.
    is_copied = gy.dtype == torch.bfloat16 and dtype == torch.float32 and gy.numel() > 0
    if is_copied and not is_compiling() and type_of(gy.device) == "cpu" and not wrapper(gy):
        from narrowgauge.ops.norm_act import cpp  # only on a CPU

        if not cpp.LIBRARY.missing:
            return cpp.summed_rows(gy)
    if dtype in (gy.dtype, torch.float32):
        return gy.sum(dim=0, dtype=dtype)  # torch accumulates 16-bit inputs in float32
    return gy.sum(dim=0, dtype=torch.float32).to(dtype)
