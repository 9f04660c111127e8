"""Attention in 16 bits in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from narrowgauge.ops.dropout import Dropout


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.attention16`. Memory: float32 scores of all queries and keys."""
    s = _scores(q, k, mask, is_causal, scale)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    p = torch.exp(s - top.masked_fill(top == -math.inf, 0.0))
    total = p.sum(-1, keepdim=True)
    # Not torch.logsumexp, which hides that a score is infinite.
    lse = (top + total.log()).squeeze(-1)
    kept, grown = _kept(p, dropout)
    y = torch.where(kept, p, 0.0).to(q.dtype).float() @ _of_heads(v, q)
    y = torch.where(total == 0, 0.0, y * (grown / total))
    return _in_order(y.to(q.dtype)), lse


def backward(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, y: Tensor, lse: Tensor,
    is_causal: bool, scale: float, dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `ops.attention16`."""
    keys, values, gy = _of_heads(k, q), _of_heads(v, q), grad_y.float()
    s = _scores(q, k, mask, is_causal, scale)
    # A query that attends to nothing has lse -inf, and exp(-inf - inf) is 0.
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, math.inf)[..., None])
    delta = (y.float() * gy).sum(-1, keepdim=True)
    kept, grown = _kept(p, dropout)
    ds = (p * (torch.where(kept, gy @ values.mT, 0.0) * grown - delta)).to(q.dtype).float()
    grad_v = torch.where(kept, p, 0.0).to(q.dtype).float().mT @ gy * grown
    grad_q, grad_k = scale * (ds @ keys), scale * (ds.mT @ q.float())
    group = q.shape[1] // k.shape[1]
    grad_k, grad_v = (each.unflatten(1, (-1, group)).sum(2) for each in (grad_k, grad_v))
    return tuple(_in_order(each.to(q.dtype)) for each in (grad_q, grad_k, grad_v))  # type: ignore[return-value]


def _kept(p: Tensor, dropout: Dropout | None) -> tuple[Tensor, float]:
    """Return where weights stay, and their factor."""
    if dropout is None:
        return p.new_ones((), dtype=torch.bool), 1.0
    batch, heads, queries, keys = p.shape
    return dropout.kept((batch, heads, keys, queries), p.device).mT, dropout.scale


def _of_heads(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values in float32, one head for each head of queries."""
    return k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    s = scale * (q.float() @ _of_heads(k, q).mT)
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask
    elif mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    if is_causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~seen, -math.inf)
    return s


def _in_order(x: Tensor) -> Tensor:
    """The same tensor [batch, heads, tokens, width], in memory as [batch, tokens, heads, width]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
