"""What every autograd function here needs: `no_double_backward` for its backward, `alias_while_compiling` for its result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Backward = Callable[..., Any]


def no_double_backward(what: str, way_on: str) -> Callable[[Backward], Backward]:
    """For the `backward` of a function without second derivatives: asking for them raises RuntimeError, as in torch.

    what    the function, in words
    way_on  what a user does who wants second derivatives

    torch's own `once_differentiable` raises only where the gradient that comes in has a graph itself. `torch.autograd.grad(...,
    create_graph=True)` and `torch.autograd.functional.hessian` begin with one that has none, and there it gives results without a
    graph: the second derivative is zero, or None, without a word. A compiled backward pass has its own refusal.
    """

    def decorate(backward: Backward) -> Backward:
        once: Backward = once_differentiable(backward)

        @wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            if torch.compiler.is_compiling():
                return once(ctx, *gradients)
            raise RuntimeError(  # only create_graph=True leaves it on
                f"backward: {what} has no second derivatives, and create_graph=True asks for them. {way_on}"
            )

        return run

    return decorate


def alias_while_compiling(y: Tensor) -> Tensor:
    """y, as a view while torch.compile traces. In eager mode y itself: a view may not be changed in place by who receives it.

    Dynamo of torch 2.11 passes zero to the backward of a function whose forward wrote in place into the very tensor that it returns,
    and says nothing: every gradient behind it is zero. 2.13 does not. A view of that tensor is another one for it, and costs nothing.
    """
    return y.view(y.shape) if torch.compiler.is_compiling() else y
