"""`first_order_only`: for the `backward` of an autograd function without second derivatives, so that asking for them raises.

torch's own `once_differentiable` raises only where the gradient that comes in has a graph itself. `torch.autograd.grad(...,
create_graph=True)` and `torch.autograd.functional.hessian` begin with one that has none, and there it gives results without a
graph: the second derivative is zero, or None, and nobody is told. A compiled backward pass has its own refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Backward = Callable[..., Any]


def first_order_only(what: str, way_on: str) -> Callable[[Backward], Backward]:
    """what: the function, in words; way_on: what a user does who wants second derivatives. Raises RuntimeError, as torch does."""

    def decorate(backward: Backward) -> Backward:
        once: Backward = once_differentiable(backward)

        @wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # only create_graph=True leaves it on
                raise RuntimeError(
                    f"backward: {what} has no second derivatives, and create_graph=True asks for them. {way_on}"
                )
            return once(ctx, *gradients)

        return run

    return decorate
