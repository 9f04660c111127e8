"""Definition of norms and activations in plain torch.

Everything is float32 and rounded once, except for n of rms-norm and the results of torch's
activations.

With h the gradient of y:

rms-norm     dx = r (w h - n mean(w h n)),              dw = sum h n;   gemma-norm: 1 + w for w
layer-norm   dx = r (w h - mean(w h) - n mean(w h n)),  dw = sum h n,   db = sum h
a(g) u       dg = h u a'(g),  du = h a(g)
a(x)         dx = h a'(x)

silu         a' = p (1 + x (1 - p)),  p = 1 / (1 + e^-x)
gelu         a' = P(x) + x e^(-x^2 / 2) / sqrt(2 pi)
gelu-tanh    a' = p + x p (1 - p) t',  p = 1 / (1 + e^-t),  t = 2 sqrt(2 / pi) (x + 0.044715 x^3)
relu, relu2  a' = 1 or 2 x where x > 0, else 0

If a norm saves codes of y instead of x, n = y / w, or (y - b) / w, and 0 where w is 0: such a
weight gets no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.ops.norm_act.spec import (
    CastRequest,
    CastResult,
    Given,
    Kind,
    Requests,
    Statistics,
    StoredAsCodes,
)
from narrowgauge.ops.quantize import dequantize
from narrowgauge.ops.quantize.pair import quantize_pair

ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu-tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}  # fmt: skip


def forward(
    kind: Kind, tensors: Sequence[Given], request: CastRequest | None
) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`."""
    plain = [opened(each) for each in tensors]
    return cast(value(kind, plain), request), statistics(kind, plain)


def backward(
    kind: Kind, tensors: Sequence[Given], found: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    wide, h = [opened(each, torch.float32) for each in tensors], gy.to(torch.float32)
    if kind.name == "gemma-norm":
        wide[1] = 1 + wide[1]
    if kind.is_norm:
        gradients = _norm_gradients(
            kind, wide, _normal(wide, found, isinstance(tensors[0], StoredAsCodes)), found, h
        )
    else:
        gradients = _activation_gradients(kind, wide, h)
    # Gradients are rounded once, before the cast, so that casts see the values that PyTorch would
    # store.
    rounded = [gradient.to(each.dtype) for gradient, each in zip(gradients, tensors, strict=True)]
    count = len(requests)
    return [cast(*each) for each in zip(rounded[:count], requests, strict=True)], rounded[count:]


def value(kind: Kind, tensors: Sequence[Tensor]) -> Tensor:
    """Return y [rows, columns] without a cast; `Kind.result_dtype` has its dtype."""
    return _value(kind, tensors).to(kind.result_dtype([each.dtype for each in tensors]))


def _value(kind: Kind, tensors: Sequence[Tensor]) -> Tensor:
    x = tensors[0]
    if not kind.is_norm:
        y = ACTIVATIONS[kind.activation](x)
        return y * tensors[1] if kind.is_gated else y
    mean, rate = statistics(kind, tensors)
    assert rate is not None
    normal = _centered(x.to(torch.float32), mean) * rate[:, None]
    # Llama rounds n to x's dtype before it multiplies by the weight.
    if kind.name == "rms-norm":
        return (tensors[1] * normal).to(x.dtype) if kind.wide else tensors[1] * normal.to(x.dtype)
    if kind.name == "gemma-norm":
        return (normal * (1 + tensors[1].to(torch.float32))).to(x.dtype)
    return (normal * tensors[1].to(torch.float32) + tensors[2].to(torch.float32)).to(x.dtype)


def statistics(kind: Kind, tensors: Sequence[Tensor]) -> Statistics:
    """See `ops.norm_act`."""
    if not kind.is_norm:
        return None, None
    x = tensors[0].to(torch.float32)
    mean = x.mean(-1) if kind.name == "layer-norm" else None
    return mean, torch.rsqrt(_centered(x, mean).square().mean(-1) + kind.eps)


def _centered(x: Tensor, mean: Tensor | None) -> Tensor:
    return x if mean is None else x - mean[:, None]


def opened(x: Given, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values [rows, columns], in the tensor's own dtype unless another is given."""
    if isinstance(x, Tensor):
        return x if dtype is None else x.to(dtype)
    values = dequantize(x.codes, dtype or x.dtype)
    return values.T if x.turned else values


def _normal(tensors: Sequence[Tensor], found: Statistics, is_of_y: bool) -> Tensor:
    """Return n [rows, columns] float32, from x, or from y if codes of y were saved (is_of_y)."""
    (x, w, *bias), (mean, rate) = tensors, found
    assert rate is not None
    if not is_of_y:
        return _centered(x, mean) * rate[:, None]
    scaled = x - bias[0] if bias else x
    # The quotient by zero in the other branch is harmless: there is no autograd here.
    return torch.where(w == 0, 0.0, scaled / w)


def _norm_gradients(
    kind: Kind, tensors: Sequence[Tensor], normal: Tensor, found: Statistics, h: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x and w, or of x, w and b, float32."""
    rate, wh = found[1], tensors[1] * h
    assert rate is not None
    inner = wh - normal * (wh * normal).mean(-1, keepdim=True)
    if kind.name == "layer-norm":
        inner = inner - wh.mean(-1, keepdim=True)
    return (inner * rate[:, None], (h * normal).sum(0), h.sum(0))[: len(tensors)]


def _activation_gradients(kind: Kind, tensors: Sequence[Tensor], h: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of x, or of g and u, float32."""
    x = tensors[0]
    if kind.is_gated:
        return h * tensors[1] * _slope(kind.activation, x), h * ACTIVATIONS[kind.activation](x)
    return (h * _slope(kind.activation, x),)


def _slope(activation: str, x: Tensor) -> Tensor:
    """Return the derivative at x, float32."""
    if activation == "silu":
        p = torch.sigmoid(x)
        return p * (1 + x * (1 - p))
    if activation == "gelu":
        normal = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return normal + x * torch.exp(-0.5 * x.square()) * math.sqrt(0.5 / math.pi)
    if activation == "gelu-tanh":
        p = torch.sigmoid(2 * ROOT * (x + CUBE * x**3))
        return p + x * p * (1 - p) * 2 * ROOT * (1 + 3 * CUBE * x.square())
    return (x > 0).to(x.dtype) if activation == "relu" else 2 * F.relu(x)


def cast(y: Tensor, request: CastRequest | None) -> CastResult:
    """Return y with the casts that `quantize_pair` computes."""
    if request is None:
        return CastResult(y)
    cols, live = request.transposed, request.amax_state
    return CastResult(
        y, *quantize_pair(y, request.cast, amax_state=live, records=request.records, cols=cols)
    )
