"""produce: what a norm or an activation computes, and its cast in the same pass; backward the gradient, and its casts.

    rms-norm     y = w n,           n = x r rounded to x's dtype,  r = (mean x^2 + eps)^-1/2        Llama's order of roundings
    layer-norm   y = w x^ + b,      x^ = (x - mean x) r,           r = (mean (x - mean x)^2 + eps)^-1/2
    swiglu       y = s u,           s = silu(g) = g / (1 + e^-g), rounded to g's dtype
    gelu         y = x P(x),        P the normal distribution
    gelu-tanh    y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

Contract of `forward(kind, tensors, order)` and `gradients(kind, tensors, statistics, gy, orders)`

    tensors     (x, w) · (x, w, b) · (g, u) · (x,); x, g, u [rows, columns], w, b [columns]; float32, bfloat16 or float16
    order       the cast that is wanted of y, or None; `orders` those of the gradients of x, or of g and u
    ->          forward: y with its casts, and what backward wants to know besides the tensors
                gradients: those of x, or of g and u, with their casts; then those of w and b

Casts are of y as it is rounded to its dtype, to the bit what `quantize` gives of it, so a layer that reads them computes what it
would from y. Sums are float32; the kernels round once where the definition rounds between operations, but for n and s.

Bytes per 16-bit element and read of x that a cast in the same pass saves: 2. y itself is written, since the residual stream, hooks and
layers in 16 bits read it.
"""

from __future__ import annotations

from narrowgauge.ops.norm_act import definition, triton
from narrowgauge.ops.norm_act.spec import KINDS, Kind, Made, Order, ProduceSpec
from narrowgauge.ops.registry import Kernel, Registry

__all__ = ["FORWARD", "GRADIENTS", "KINDS", "Kind", "Made", "Order", "ProduceSpec"]

FORWARD: Registry[ProduceSpec] = Registry("produce")
FORWARD.register(Kernel("triton", triton.refuse, triton.forward))
FORWARD.register(Kernel("reference", lambda spec: None, definition.forward, by_torch=True))

GRADIENTS: Registry[ProduceSpec] = Registry("produce's gradients")
GRADIENTS.register(Kernel("triton", triton.refuse, triton.gradients))
GRADIENTS.register(Kernel("reference", lambda spec: None, definition.gradients, by_torch=True))
