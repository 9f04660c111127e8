"""The definition of `produce` in plain torch: the functions, their gradients, and the casts of both by `quantize`.

With h the gradient of y, all in float32 and rounded once:

    rms-norm     dx = r (w h - n mean(w h n)),                dw = sum h n
    layer-norm   dx = r (w h - mean(w h) - x^ mean(w h x^)),  dw = sum h x^,   db = sum h
    swiglu       dg = h u p (1 + g (1 - p)),  du = h g p,     p = 1 / (1 + e^-g)
    gelu         dx = h (P(x) + x e^(-x^2 / 2) / sqrt(2 pi))
    gelu-tanh    dx = h (p + x p (1 - p) t'),  p = 1 / (1 + e^-t),  t = 2 sqrt(2 / pi) (x + 0.044715 x^3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.ops.norm_act.spec import Kind, Made, Order
from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.quantize.pair import quantize_pair

Statistics = tuple[Tensor, ...]
ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715


def value(kind: Kind, tensors: Sequence[Tensor]) -> Tensor:
    """y [rows, columns], in the dtype that torch's promotion gives it."""
    x = tensors[0]
    if kind.name == "rms-norm":
        wide = x.to(torch.float32)
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + kind.eps)
        return tensors[1] * normal.to(x.dtype)
    if kind.name == "layer-norm":
        wide, (mean, rate) = x.to(torch.float32), statistics(kind, tensors)
        found = (wide - mean[:, None]) * rate[:, None] * tensors[1].to(torch.float32) + tensors[2].to(torch.float32)
        return found.to(x.dtype)
    if kind.name == "swiglu":
        return torch.nn.functional.silu(x) * tensors[1]
    return torch.nn.functional.gelu(x, approximate="tanh" if kind.name == "gelu-tanh" else "none")


def statistics(kind: Kind, tensors: Sequence[Tensor]) -> Statistics:
    """(r [rows]) of rms-norm, (mean [rows], r [rows]) of layer-norm, float32; nothing of the others."""
    if not kind.is_norm:
        return ()
    wide = tensors[0].to(torch.float32)
    if kind.name == "rms-norm":
        return (torch.rsqrt(wide.square().mean(-1) + kind.eps),)
    mean = wide.mean(-1)
    return mean, torch.rsqrt((wide - mean[:, None]).square().mean(-1) + kind.eps)


def forward(kind: Kind, tensors: Sequence[Tensor], order: Order | None) -> tuple[Made, Statistics]:
    """See `ops.norm_act`."""
    return cast(value(kind, tensors), order), statistics(kind, tensors)


def cast(y: Tensor, order: Order | None) -> Made:
    """y with the casts that are wanted of it."""
    if order is None:
        return Made(y)
    if order.live is None:
        plain, amax = quantize(y, order.cast), None
    else:
        plain, _, amax = quantize_pair(y, order.cast, amax_state=order.live, records=order.records, cols=False)
    return Made(y, plain, quantize(y.T, order.cast, amax=amax) if order.turned else None, amax)


def gradients(
    kind: Kind, tensors: Sequence[Tensor], found: Statistics, gy: Tensor, orders: Sequence[Order | None]
) -> tuple[list[Made], list[Tensor]]:
    """See `ops.norm_act`."""
    h = gy.to(torch.float32)
    if kind.is_norm:
        x, w = tensors[0].to(torch.float32), tensors[1].to(torch.float32)
        centred = x if kind.name == "rms-norm" else x - found[0][:, None]
        rate = found[-1]
        normal, wh = centred * rate[:, None], w * h
        inner = wh - normal * (wh * normal).mean(-1, keepdim=True)
        if kind.name == "layer-norm":
            inner = inner - wh.mean(-1, keepdim=True)
        of_inputs = [inner * rate[:, None]]
        of_parameters = [(h * normal).sum(0), h.sum(0)][: len(tensors) - 1]
    else:
        of_inputs, of_parameters = list(_elementwise(kind, tensors, h)), []
    made = [
        cast(grad.to(x.dtype), order) for grad, x, order in zip(of_inputs, tensors, orders, strict=False)
    ]  # fmt: skip
    return made, [grad.to(w.dtype) for grad, w in zip(of_parameters, tensors[1:], strict=False)]


def _elementwise(kind: Kind, tensors: Sequence[Tensor], h: Tensor) -> tuple[Tensor, ...]:
    x = tensors[0].to(torch.float32)
    if kind.name == "swiglu":
        p, u = torch.sigmoid(x), tensors[1].to(torch.float32)
        return h * u * p * (1 + x * (1 - p)), h * x * p
    if kind.name == "gelu":
        normal = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return (h * (normal + x * torch.exp(-0.5 * x.square()) * math.sqrt(0.5 / math.pi)),)
    p = torch.sigmoid(2 * ROOT * (x + CUBE * x**3))
    return (h * (p + x * p * (1 - p) * 2 * ROOT * (1 + 3 * CUBE * x.square())),)
