"""The definition in plain torch. All in float32 and rounded once, but for n of rms-norm and what torch's activations round.

With h the gradient of y:

rms-norm     dx = r (w h - n mean(w h n)),                  dw = sum h n
layer-norm   dx = r (w h - mean(w h) - n mean(w h n)),      dw = sum h n,   db = sum h
swiglu       dg = h u p (1 + g (1 - p)),  du = h g p,       p = 1 / (1 + e^-g)
gelu         dx = h (P(x) + x e^(-x^2 / 2) / sqrt(2 pi))
gelu-tanh    dx = h (p + x p (1 - p) t'),  p = 1 / (1 + e^-t),  t = 2 sqrt(2 / pi) (x + 0.044715 x^3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.ops.norm_act.spec import CastRequest, CastResult, Kind, Requests, Statistics
from narrowgauge.ops.quantize.pair import quantize_pair

ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715


def forward(kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`."""
    return cast(value(kind, tensors), request), statistics(kind, tensors)


def backward(
    kind: Kind, tensors: Sequence[Tensor], found: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    wide, h = [each.to(torch.float32) for each in tensors], gy.to(torch.float32)
    gradients = _norm_gradients(wide, found, h) if kind.is_norm else _activation_gradients(kind, wide, h)
    rounded = [gradient.to(each.dtype) for gradient, each in zip(gradients, tensors, strict=True)]
    count = len(requests)
    return [cast(*each) for each in zip(rounded[:count], requests, strict=True)], rounded[count:]


def value(kind: Kind, tensors: Sequence[Tensor]) -> Tensor:
    """y [rows, columns] without a cast, in the dtype that torch's promotion gives it; layer-norm's and a wide norm's in that of x."""
    x = tensors[0]
    if kind.name == "swiglu":
        return torch.nn.functional.silu(x) * tensors[1]
    if not kind.is_norm:
        return torch.nn.functional.gelu(x, approximate="tanh" if kind.name == "gelu-tanh" else "none")
    mean, rate = statistics(kind, tensors)
    assert rate is not None
    normal = _centered(x.to(torch.float32), mean) * rate[:, None]
    if kind.name == "rms-norm":
        return (tensors[1] * normal).to(x.dtype) if kind.wide else tensors[1] * normal.to(x.dtype)
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


def _norm_gradients(tensors: Sequence[Tensor], found: Statistics, h: Tensor) -> tuple[Tensor, ...]:
    """Of x and w, or of x, w and b; all float32."""
    (x, w, *_), (mean, rate) = tensors, found
    assert rate is not None
    normal, wh = _centered(x, mean) * rate[:, None], w * h
    inner = wh - normal * (wh * normal).mean(-1, keepdim=True)
    if mean is not None:
        inner = inner - wh.mean(-1, keepdim=True)
    return (inner * rate[:, None], (h * normal).sum(0), h.sum(0))[: len(tensors)]


def _activation_gradients(kind: Kind, tensors: Sequence[Tensor], h: Tensor) -> tuple[Tensor, ...]:
    """Of x, or of g and u; all float32."""
    x = tensors[0]
    if kind.name == "swiglu":
        p, u = torch.sigmoid(x), tensors[1]
        return h * u * p * (1 + x * (1 - p)), h * x * p
    if kind.name == "gelu":
        normal = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return (h * (normal + x * torch.exp(-0.5 * x.square()) * math.sqrt(0.5 / math.pi)),)
    p = torch.sigmoid(2 * ROOT * (x + CUBE * x**3))
    return (h * (p + x * p * (1 - p) * 2 * ROOT * (1 + 3 * CUBE * x.square())),)


def cast(y: Tensor, request: CastRequest | None) -> CastResult:
    """y with what `quantize` gives of it."""
    if request is None:
        return CastResult(y)
    cols, live = request.transposed, request.live
    return CastResult(y, *quantize_pair(y, request.cast, amax_state=live, records=request.records, cols=cols))
