"""Attention whose two products multiply E4M3 numbers, with gradients in 16 bits.

Only the forward pass is in E4M3 (`ops.attention` has its definition and its kernels). Backward
computes the gradients of 16-bit attention at the same Q, K and V: it runs torch's kernel forward and
backward.

Left out: dropout, learned sinks and biases, and soft-capped scores.

`conversion.attention_precision` switches the attention of a model to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from narrowgauge.errors import ShapeError
from narrowgauge.ops.attention import KERNELS, AttentionSpec

STATE = "_narrowgauge_attention"  # in the `__dict__` of an attention module: its Fp8State


@dataclass
class Fp8State:
    """State of an attention module in a model that was converted with `attention="fp8"`.

    before        name of the attention that it had, as transformers' interface knows it
    reason        why it stays in 16 bits, or ''
    is_suspended  True: compute in 16 bits
    """

    before: str | None
    reason: str = ""
    is_suspended: bool = False

    @property
    def is_narrow(self) -> bool:
        return not self.reason and not self.is_suspended


def state_of(module: nn.Module) -> Fp8State | None:
    found: Fp8State | None = module.__dict__.get(STATE)
    return found


def fp8_states(model: nn.Module) -> Iterator[Fp8State]:
    """Of every attention module that computes in E4M3, suspended ones included."""
    found = (state_of(module) for module in model.modules())
    return (each for each in found if each is not None and not each.reason)


def fp8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention with both products in E4M3; arguments as F.scaled_dot_product_attention.

    query      [batch, heads, queries, width], in 16 bits or float32
    key        [batch, key heads, keys, width]; value [..., value width]. Heads of queries in
               groups share one head of keys
    mask       [batch or 1, heads or 1, queries, keys]: bool, True attends, or added to the scores.
               Causal, windowed and packed masks are such masks
    is_causal  query i attends to keys 0 to i; skips blocks above the diagonal
    scale      of the scores; 1 / sqrt(width) by default
    ->         [batch, heads, queries, value width] in the dtype of query, autocast's under
               autocast. A query that attends to nothing gets zeros

    For normal numbers the signal to noise is 25 to 26 dB, where E4M3 alone has 32 (docs/recipes.md).
    Raises ShapeError for operands that do not fit, and for a mask that requires a gradient.
    """
    _refuse_shapes(query, key, value, mask)
    # Models with a cache of fixed length bring a mask of that length.
    mask = None if mask is None else mask[..., : key.shape[2]]
    if mask is not None and mask.requires_grad:
        raise ShapeError(
            "fp8_attention: the mask requires a gradient, and only query, key and value get one. "
            "Use attention in 16 bits for a learned bias.",
            code="fp8-attention.learned-mask",
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (
            each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value)
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    found: Tensor = _eagerly(query, key, value, mask, is_causal, scale)
    return found


def _refuse_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raises ShapeError for operands or a mask that do not fit."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
    if {query.ndim, key.ndim, value.ndim} != {4} or 0 in (query.shape[-1], value.shape[-1]):
        raise ShapeError(
            f"fp8_attention: {shapes}: each must be [batch, heads, tokens, width], and no width 0.",
            code="fp8-attention.axes",
        )
    if (
        query.shape[1] % max(key.shape[1], 1)
        or key.shape[:3] != value.shape[:3]
        or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3])
    ):
        raise ShapeError(
            f"fp8_attention: {shapes} do not fit. Keys and values have equal heads and tokens, queries and keys equal widths, and the "
            "heads of queries are a multiple of theirs.",
            code="fp8-attention.heads",
        )
    if mask is None:
        return
    whole = (*query.shape[:3], key.shape[2])
    fits = mask.ndim == 4 and mask.shape[2] == whole[2] and mask.shape[3] >= whole[3]
    fits = fits and all(mask.shape[axis] in (1, whole[axis]) for axis in (0, 1))
    if not fits or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise ShapeError(
            f"fp8_attention: the mask is {list(mask.shape)} in {mask.dtype}. It must be [batch or 1, heads or 1, {whole[2]}, "
            f"{whole[3]}] of bool, where True attends, or of floats that are added.",
            code="fp8-attention.mask",
        )


@_disable_dynamo
def _eagerly(*given: Any) -> Any:
    """Compute between two compiled graphs: backward differentiates another function."""
    return _Fp8Attention.apply(*given)


class _Fp8Attention(torch.autograd.Function):
    """E4M3 forward, and the gradients of torch's attention in the operands' dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.is_causal, ctx.scale = is_causal, scale
        with torch.autocast(q.device.type, enabled=False):
            kernel = KERNELS.choose(AttentionSpec.of(q, k, v, mask, is_causal)).kernel
            found: Tensor = kernel.run(q, k, v, mask, is_causal, scale)
            return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        *operands, mask = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        with torch.enable_grad(), torch.autocast(grad_output.device.type, enabled=False):
            leaves = [
                each.detach().requires_grad_(needs)
                for each, needs in zip(operands, wanted, strict=True)
            ]
            q, k, v = leaves
            y = attention_in_16_bits(q, k, v, mask, ctx.is_causal, ctx.scale)
            found = torch.autograd.grad(
                y, [each for each in leaves if each.requires_grad], grad_output
            )
        grads = iter(found)
        return *(next(grads) if needs else None for needs in wanted), None, None, None


def attention_in_16_bits(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """The same attention by a kernel of torch, whose gradients `fp8_attention` has."""
    group = q.shape[1] // k.shape[1]
    if mask is not None:
        # With a mask and shared heads, torch has only its slowest kernel on a GPU.
        k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    is_shared = mask is None and group > 1
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=is_shared
    )
