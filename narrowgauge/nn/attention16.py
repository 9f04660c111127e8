"""Attention in 16 bits with gradients, by a kernel of `ops.attention16`.

`fuse.attention` switches the attention of a model to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.nn.autograd_rules import no_double_backward

if TYPE_CHECKING:
    from narrowgauge.ops.attention16 import AttentionFunctions
    from narrowgauge.ops.dropout import Dropout


def attention16(
    functions: AttentionFunctions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    dropout: Dropout | None = None,
) -> Tensor:
    """Attention with gradients for q, k and v; arguments as `ops.attention16`.

    functions  of the kernel that accepted the call
    dropout    of the attention weights, drawn for this call
    ->         y [batch, heads, queries, value width], in memory as [batch, queries, heads, ...]

    Saved for backward: q, k, v, y, one float32 number for each query and head, and a bit for each
    element of a boolean mask.
    """
    found: Tensor = _Attention16.apply(functions, q, k, v, mask, is_causal, scale, dropout)
    return found


class _Attention16(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, functions: AttentionFunctions, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        is_causal: bool, scale: float, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        prepared = functions.prepare(mask)
        y, lse = functions.forward(q, k, v, prepared, is_causal, scale, dropout)
        # The mask is saved as the kernel reads it: no tensor of the graph, so no hook sees it.
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.functions, ctx.mask, ctx.given = functions, prepared, (is_causal, scale, dropout)
        return y

    @staticmethod
    @no_double_backward("fused attention", "Convert the model to None, and again without fuse.")
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        grads = ctx.functions.backward(grad_y, q, k, v, ctx.mask, y, lse, *ctx.given)
        # All three come from one pass over the scores; one that is not wanted saves no time.
        wanted = ctx.needs_input_grad[1:4]
        chosen = (each if needs else None for each, needs in zip(grads, wanted, strict=True))
        return None, *chosen, None, None, None, None
