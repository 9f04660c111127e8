"""Attention whose two products multiply E4M3 numbers, with gradients in 16 bits.

    S = scale * (Q @ K.T) + mask        Q, K in E4M3
    P = exp(S - row maximum)            float32
    y = (P @ V) / sum of P              P, V in E4M3; the sum is of P before its cast

Q, K and V have a float32 scale for each head and block of BLOCK tokens. P is at most 1 and needs no
amax: it is multiplied by LARGEST, a power of two, which uses 17 of E4M3's 18 binades.

Keys come in blocks, as in FlashAttention-2. A block may raise the running row maximum. The sums of
earlier blocks are then multiplied by exp(old - new). So the largest tensor in memory is
[queries, BLOCK] and not [queries, keys]. Products of two E4M3 numbers are exact in float32.

Only the forward pass is in E4M3. Backward computes the gradients of 16-bit attention at the same Q,
K and V: it runs torch's kernel forward and backward. FlashAttention-3 (arXiv 2407.08608,
section 3.3) scales blocks and keeps the softmax in float32 likewise.

Left out: dropout, learned sinks and biases, soft-capped scores, and a kernel for GPUs. This
definition in torch runs there too, slower than flash attention in 16 bits.

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
from narrowgauge.formats import E4M3
from narrowgauge.ops.quantize import quantize
from narrowgauge.recipe import WHOLE, Cast

BLOCK = 128  # tokens of a scale, and keys of a step: FlashAttention-3's for heads of 128
STATE = "_narrowgauge_attention"  # in the `__dict__` of an attention module: its Fp8State
LARGEST = 256.0  # of P in E4M3, the largest power of two below 448: scaling by it rounds nothing


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

    Memory: float32 copies of the operands and [batch, heads, queries, BLOCK] scores. For normal
    numbers the signal to noise is 25 to 26 dB, where E4M3 alone has 32 (docs/recipes.md).
    Raises ShapeError for heads that no group divides, and for a mask that requires a gradient.
    """
    if query.shape[1] % max(key.shape[1], 1) or key.shape[:3] != value.shape[:3]:
        raise ShapeError(
            f"fp8_attention: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit. Keys and values "
            "have equal heads and tokens, and the heads of queries are a multiple of theirs.",
            code="fp8-attention.heads",
        )
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


@_disable_dynamo
def _eagerly(*given: Any) -> Any:
    """Compute between two compiled graphs: backward differentiates another function."""
    return _Fp8Attention.apply(*given)


class _Fp8Attention(torch.autograd.Function):
    """The definition forward, and the gradients of torch's attention in the operands' dtype."""

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
            return definition(q, k, v, mask, is_causal, scale).to(q.dtype)

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


def definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """y in float32, without gradients. Arguments as `fp8_attention`."""
    batch, heads, queries, _ = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    if not (q.numel() and k.numel()):
        return q.new_zeros(batch, heads, queries, v.shape[-1], dtype=torch.float32)
    q, q_scale = block_cast(q)
    k, k_scale = block_cast(k)
    v, v_scale = block_cast(v)
    # G heads of queries share a head of keys: [B, key heads, G, queries, ...]. Nothing is copied.
    shape = (batch, key_heads, heads // key_heads)
    q, q_scale = (each.reshape(*shape, *each.shape[2:]) for each in (q, q_scale))
    largest = q.new_full((*shape, queries, 1), -math.inf)
    total = torch.zeros_like(largest)
    y = q.new_zeros(*shape, queries, v.shape[-1])
    for begin in range(0, keys, BLOCK):
        end = min(begin + BLOCK, keys)
        first = begin if is_causal else 0  # earlier queries attend to none of these keys
        if first >= queries:
            break
        rows = slice(first, queries)
        # [B, key heads, 1, keys of the block, ...]
        block, block_scale = k[:, :, None, begin:end], k_scale[:, :, None, begin : begin + 1]
        scores = q[..., rows, :] @ block.transpose(-2, -1)
        scores = scores * (q_scale[..., rows, :] * block_scale * scale)
        scores = _masked(scores, mask, is_causal, shape, (first, queries), (begin, end))
        before = largest[..., rows, :]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        shift = now.masked_fill(now == -math.inf, 0.0)  # no key so far: exp(-inf) and not NaN
        p, kept = torch.exp(scores - shift), torch.exp(before - shift)
        codes = E4M3.round(p * LARGEST)
        product = codes @ v[:, :, None, begin:end]
        product = product * (v_scale[:, :, None, begin : begin + 1] / LARGEST)
        y[..., rows, :] = y[..., rows, :] * kept + product
        total[..., rows, :] = total[..., rows, :] * kept + p.sum(-1, keepdim=True)
        largest[..., rows, :] = now
    y = torch.where(total == 0, 0.0, y / total)
    return y.reshape(batch, heads, queries, v.shape[-1])


def block_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x [B, H, T, d] to E4M3, with a scale for each head and BLOCK tokens.

    -> decoded codes [B, H, T, d] and the scale of each token [B, H, T, 1], both float32
    """
    batch, heads, tokens, width = x.shape
    block = min(BLOCK, tokens)
    # Zeros fill the last block of each head, so that no tile spans two heads. They raise no amax.
    missing = -tokens % block
    rows = F.pad(x, (0, 0, 0, missing)) if missing else x
    cast = Cast(format=E4M3, tile=(block, WHOLE))
    found = quantize(rows.reshape(-1, width), cast, expand=torch.float32)
    values = found.data.view(batch, heads, -1, width)[:, :, :tokens]
    scales = found.scale.view(batch, heads, -1, 1).repeat_interleave(block, 2)[:, :, :tokens]
    return values, scales


def _masked(
    scores: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    shape: tuple[int, int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> Tensor:
    """Scores [B, key heads, G, rows, columns] of a block, with -inf where nothing is attended to."""
    (first, last), (begin, end) = rows, columns
    if is_causal:
        index = torch.arange(max(last, end), device=scores.device)
        hidden = index[first:last, None] < index[None, begin:end]
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is None:
        return scores
    part = mask[..., first:last, begin:end]
    per_head = part.shape[1] > 1
    part = part.unflatten(1, shape[1:]) if per_head else part.unsqueeze(1)
    if part.dtype == torch.bool:
        return scores.masked_fill(~part, -math.inf)
    return scores + part
