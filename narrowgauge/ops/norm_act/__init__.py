"""What a norm or an activation computes, with its cast in the same pass; and the gradients of both, an activation's with their casts.

    rms-norm     y = w n,           n = x r rounded to x's dtype,  r = (mean x^2 + eps)^-1/2     Llama's order
    layer-norm   y = w n + b,       n = (x - mean x) r,            r = (mean (x - mean x)^2 + eps)^-1/2
    swiglu       y = s u,           s = silu(g) = g / (1 + e^-g), rounded to g's dtype
    gelu         y = x P(x),        P the normal distribution
    gelu-tanh    y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

Contract of FORWARD, (kind, tensors, request), and BACKWARD, (kind, tensors, statistics, gy, requests)

    tensors     (x, w) · (x, w, b) · (g, u) · (x,); x, g, u [rows, columns], w, b [columns]; float32, bfloat16 or float16
    statistics  (mean, r), [rows] float32, of layer-norm; (None, r) of rms-norm; (None, None) of activations
    request     the cast that is wanted of y, or None; `requests` those of the gradients of x, or of g and u
    ->          forward: y with its casts, and the statistics
                backward: the gradients of x, or of g and u, with their casts; then those of w and b

Casts are of y as it is rounded to its dtype, to the bit what `quantize` gives of it, so a layer that reads them computes what it
would from y. Sums are float32; the kernels round once where the definition rounds between operations, but for n and s. The residual
stream reads the gradient of a norm, so a kernel casts nothing of it.

Bytes per 16-bit element and read of x that a cast in the same pass saves: 2. y itself is written, since the residual stream, hooks and
layers in 16 bits read it.
"""

from __future__ import annotations

from narrowgauge.ops.norm_act import definition, triton
from narrowgauge.ops.norm_act.definition import value
from narrowgauge.ops.norm_act.spec import KINDS, CastRequest, CastResult, Kind, NormActSpec
from narrowgauge.ops.registry import Kernel, Registry

__all__ = ["BACKWARD", "FORWARD", "KINDS", "CastRequest", "CastResult", "Kind", "NormActSpec", "value"]

FORWARD: Registry[NormActSpec] = Registry("norm_act")
FORWARD.register(Kernel("triton", triton.refuse, triton.forward))
FORWARD.register(Kernel("reference", lambda spec: None, definition.forward, by_torch=True))

BACKWARD: Registry[NormActSpec] = Registry("norm_act_backward")
BACKWARD.register(Kernel("triton", triton.refuse_backward, triton.backward))
BACKWARD.register(Kernel("reference", lambda spec: None, definition.backward, by_torch=True))
