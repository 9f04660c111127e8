"""For autograd functions: `no_double_backward`, `asked_for` and `column_sums` in backward, `alias_while_compiling` for a result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Any]


def no_double_backward(what: str, way_on: str) -> Callable[[Backward], Backward]:
    """For the `backward` of a function, called `what`: second derivatives and vmap raise TransformError, which says `way_on`.

    torch's own `once_differentiable` raises only where the gradient that comes in has a graph itself. `torch.autograd.grad(...,
    create_graph=True)` and `functional.hessian` begin with one that has none: the second derivative is zero, or None, without a word.
    A compiled backward pass has its own refusal.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            # create_graph=True alone leaves gradients enabled
            if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or _is_mapped(gradients)):
                from narrowgauge.nn.transforms import refuse_backward

                refuse_backward(what, way_on)
            return backward(ctx, *gradients)

        return run

    return decorate


def _is_mapped(gradients: tuple[Any, ...]) -> bool:  # by vmap: of torch.func, or the older one of is_grads_batched
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return torch._C._are_functorch_transforms_active() or any(map(is_batched, filter(torch.is_tensor, gradients)))


def asked_for(ctx: Any) -> tuple[bool, ...]:
    """Per input of a function, in its backward: whether this backward pass goes on to it.

    `ctx.needs_input_grad` is of the forward pass. A schedule of pipelines without bubbles runs the backward of a function twice, once
    for the gradient of its input and once for that of its weight, and each would compute both.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needs
    asked, node = [], 0
    nodes = ctx.next_functions
    for each in needs:
        while each and nodes[node][0] is None:
            node += 1
        asked.append(each and _goes_on_to(nodes[node][0]))
        node += each
    return tuple(asked)


def _goes_on_to(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # Of a leaf whose gradient `torch.autograd.grad` returns it does not say so: it asks for that one.
        return True


def alias_while_compiling(y: Tensor) -> Tensor:
    """y, as a view while torch.compile traces. In eager mode y itself: a view may not be changed in place by who receives it.

    Dynamo of torch 2.11, not of 2.13, passes zero to the backward of a function that returns the tensor that its forward wrote in place
    into, and says nothing: every gradient behind it is zero.
    """
    return y.view(y.shape) if torch.compiler.is_compiling() else y


def column_sums(gy: Tensor, dtype: torch.dtype) -> Tensor:
    """gy [T, N] -> [N], summed in float32 and rounded once; one kernel, as in torch's Linear, where no 16-bit type becomes another."""
    if dtype in (gy.dtype, torch.float32):
        return gy.sum(dim=0, dtype=dtype)  # torch sums 16 bits in float32
    return gy.sum(dim=0, dtype=torch.float32).to(dtype)
