"""norm_cast and norm_backward in plain torch: the definition. All in float32, rounded once but for n = x r of rms-norm.

rms-norm     y = w n          dx = r (w h - n mean(w h n)),                  dw = sum h n
layer-norm   y = w n + b      dx = r (w h - mean(w h) - n mean(w h n)),      dw = sum h n,   db = sum h
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.ops.norm_act.spec import CastRequest, CastResult, Kind, Requests, cast

Statistics = tuple[Tensor, ...]


def value(kind: Kind, tensors: Sequence[Tensor]) -> Tensor:
    """y [rows, columns], in the dtype that torch's promotion gives it."""
    x, wide = tensors[0], tensors[0].to(torch.float32)
    if kind.name == "rms-norm":
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + kind.eps)
        return tensors[1] * normal.to(x.dtype)
    mean, rate = statistics(kind, tensors)
    found = (wide - mean[:, None]) * rate[:, None] * tensors[1].to(torch.float32) + tensors[2].to(torch.float32)
    return found.to(x.dtype)


def statistics(kind: Kind, tensors: Sequence[Tensor]) -> Statistics:
    """(r [rows]) of rms-norm, (mean [rows], r [rows]) of layer-norm, float32."""
    wide = tensors[0].to(torch.float32)
    if kind.name == "rms-norm":
        return (torch.rsqrt(wide.square().mean(-1) + kind.eps),)
    mean = wide.mean(-1)
    return mean, torch.rsqrt((wide - mean[:, None]).square().mean(-1) + kind.eps)


def norm_cast(kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`."""
    return cast(value(kind, tensors), request), statistics(kind, tensors)


def norm_backward(
    kind: Kind, tensors: Sequence[Tensor], found: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    x, w, h = (each.to(torch.float32) for each in (*tensors[:2], gy))
    rate = found[-1][:, None]
    normal, wh = (x if kind.name == "rms-norm" else x - found[0][:, None]) * rate, w * h
    inner = wh - normal * (wh * normal).mean(-1, keepdim=True)
    if kind.name == "layer-norm":
        inner = inner - wh.mean(-1, keepdim=True)
    sums = [(h * normal).sum(0), h.sum(0)]
    made = cast((inner * rate).to(tensors[0].dtype), requests[0])
    return [made], [grad.to(each.dtype) for grad, each in zip(sums, tensors[1:], strict=False)]
