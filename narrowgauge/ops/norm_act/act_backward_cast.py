"""act_backward_cast in plain torch: the definition. With h the gradient of y, all in float32 and rounded once:

swiglu       dg = h u p (1 + g (1 - p)),  du = h g p,     p = 1 / (1 + e^-g)
gelu         dx = h (P(x) + x e^(-x^2 / 2) / sqrt(2 pi))
gelu-tanh    dx = h (p + x p (1 - p) t'),  p = 1 / (1 + e^-t),  t = 2 sqrt(2 / pi) (x + 0.044715 x^3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.ops.norm_act.spec import CastResult, Kind, Requests, cast

ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715


def act_backward_cast(
    kind: Kind, tensors: Sequence[Tensor], statistics: tuple[()], gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    found = gradients(kind, [each.to(torch.float32) for each in tensors], gy.to(torch.float32))
    return [cast(g.to(x.dtype), request) for g, x, request in zip(found, tensors, requests, strict=True)], []


def gradients(kind: Kind, tensors: Sequence[Tensor], h: Tensor) -> tuple[Tensor, ...]:
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
