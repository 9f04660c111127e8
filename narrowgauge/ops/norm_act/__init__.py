"""Three ops: what a norm or an activation computes, or the gradient of an activation, with its cast in the same pass.

    norm_cast           rms-norm     y = w n,           n = x r rounded to x's dtype,  r = (mean x^2 + eps)^-1/2     Llama's order
                        layer-norm   y = w n + b,       n = (x - mean x) r,            r = (mean (x - mean x)^2 + eps)^-1/2
    act_cast            swiglu       y = s u,           s = silu(g) = g / (1 + e^-g), rounded to g's dtype
                        gelu         y = x P(x),        P the normal distribution
                        gelu-tanh    y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    act_backward_cast   the gradients of these, of g and u or of x
    norm_backward       those of the norms, of which nothing is cast: the residual stream reads them

Contract of `forward_of(kind)`, (kind, tensors, request), and `backward_of(kind)`, (kind, tensors, statistics, gy, requests)

    tensors     (x, w) · (x, w, b) · (g, u) · (x,); x, g, u [rows, columns], w, b [columns]; float32, bfloat16 or float16
    request     the cast that is wanted of y, or None; `requests` those of the gradients of x, or of g and u
    ->          forward: y with its casts, and what backward wants to know besides the tensors
                backward: the gradients of x, or of g and u, with their casts; then those of w and b

Casts are of y as it is rounded to its dtype, to the bit what `quantize` gives of it, so a layer that reads them computes what it
would from y. Sums are float32; the kernels round once where the definition rounds between operations, but for n and s.

Bytes per 16-bit element and read of x that a cast in the same pass saves: 2. y itself is written, since the residual stream, hooks and
layers in 16 bits read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from narrowgauge.ops.norm_act import act_backward_cast, act_cast, norm_cast, triton
from narrowgauge.ops.norm_act.spec import KINDS, CastRequest, CastResult, Kind, NormActSpec
from narrowgauge.ops.registry import Kernel, Refusal, Registry

__all__ = ["KINDS", "CastRequest", "CastResult", "Kind", "NormActSpec", "backward_of", "forward_of", "value"]


def _op(
    name: str,
    refuse: Callable[[NormActSpec], Refusal | None],
    kernel: Callable[..., Any],
    definition: Callable[..., Any],
) -> Registry[NormActSpec]:
    op: Registry[NormActSpec] = Registry(name)
    op.register(Kernel("triton", refuse, kernel))
    op.register(Kernel("reference", lambda spec: None, definition, by_torch=True))
    return op


NORM_CAST = _op("norm_cast", triton.refuse, triton.norm_cast, norm_cast.norm_cast)
NORM_BACKWARD = _op("norm_backward", triton.refuse_backward, triton.norm_backward, norm_cast.norm_backward)
ACT_CAST = _op("act_cast", triton.refuse, triton.act_cast, act_cast.act_cast)
ACT_BACKWARD_CAST = _op(
    "act_backward_cast", triton.refuse_backward, triton.act_backward_cast, act_backward_cast.act_backward_cast
)  # fmt: skip


def forward_of(kind: Kind) -> Registry[NormActSpec]:
    """The op that computes y."""
    return NORM_CAST if kind.is_norm else ACT_CAST


def backward_of(kind: Kind) -> Registry[NormActSpec]:
    """The op that computes the gradients."""
    return NORM_BACKWARD if kind.is_norm else ACT_BACKWARD_CAST


def value(kind: Kind, tensors: Sequence[Tensor]) -> Tensor:
    """y by its definition, without a cast."""
    return (norm_cast if kind.is_norm else act_cast).value(kind, tensors)
