"""What a norm or an activation computes, with its cast in the same pass; and the gradients of both, an activation's with their casts.

    rms-norm     y = w n,           n = x r rounded to x's dtype,  r = (mean x^2 + eps)^-1/2     Llama's order
                 n is not rounded, and y once, to x's dtype, where weights are float32 in a 16-bit model (`Kind.wide`)
    gemma-norm   y = (1 + w) n,     n = x r                                                      Gemma's: rounded once
    layer-norm   y = w n + b,       n = (x - mean x) r,            r = (mean (x - mean x)^2 + eps)^-1/2
    silu         y = x / (1 + e^-x)
    gelu         y = x P(x),        P the normal distribution
    gelu-tanh    y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    relu, relu2  y = max(x, 0), and its square
    swiglu, geglu, geglu-tanh, reglu     y = a u,  a = silu(g), gelu(g), gelu-tanh(g), relu(g), rounded to g's dtype

Contract of FORWARD, (kind, tensors, request), and BACKWARD, (kind, tensors, statistics, gy, requests)

    tensors     (x, w) · (x, w, b) · (g, u) · (x,); x, g, u [rows, columns], w, b [columns]; float32, bfloat16 or float16
                kept in 8 bits (`Kept`): x, or g and u, as codes; in BACKWARD in the place of a norm's x the codes of y.T
    statistics  (mean, r), [rows] float32, of layer-norm; (None, r) of other norms; (None, None) of activations
    request     the cast that is wanted of y, or None; `requests` those of the gradients of x, or of g and u
    ->          forward: y with its casts, and the statistics
                backward: the gradients of x, or of g and u, with their casts; then those of w and b

Casts are of y as it is rounded to its dtype, to the bit what `quantize` gives of it, so a layer that reads them computes what it
would from y. Sums are float32; the kernels round once where the definition rounds between operations, but for n and s. The residual
stream reads the gradient of a norm, so a kernel casts nothing of it.

Bytes per 16-bit element and read of x that a cast in the same pass saves: 2. y itself is written, since the residual stream, hooks and
layers in 16 bits read it.

On NVIDIA GPUs by Triton kernels (triton_launch.py):

    tile            launches of forward                                   reads of x
    tensor, delayed values and cast, settle                               1; a norm a second time, out of the cache
    tensor          values and maximum, cast                              1, then y once, out of the cache where it fits
    row             values and cast                                       1; a second time out of the cache, of a norm a third
    blocks          values and cast                                       1; a norm a second time, out of the cache

A norm in this table is rms-norm; layer-norm reads x once more, for its mean.

Refused, with the reason: what torch.compile fuses itself, casts that round stochastically or that `quantize` has no kernel for, rows
of both orientations, norms of rows that do not stay in registers in their backward pass, gradients cast by more than one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from narrowgauge.ops.norm_act import definition
from narrowgauge.ops.norm_act.definition import value
from narrowgauge.ops.norm_act.spec import KINDS, NARROW, CastRequest, CastResult, Kind, NormActSpec
from narrowgauge.ops.quantize import triton as quantizing
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Kernel, Refusal, Registry, imported
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE

__all__ = ["BACKWARD", "FORWARD", "KINDS", "CastRequest", "CastResult", "Kind", "NormActSpec", "value"]

LONGEST_ROW = 8192  # of a norm, whose backward pass keeps rows and the sums for the weight in registers


def refuse(spec: NormActSpec) -> Refusal | None:
    """Why the Triton kernels do not compute that, or None."""
    if (refusal := refuse_tensors(spec.device, spec.dtypes, spec.is_empty)) is not None:
        return refusal
    if spec.kept is None and spec.kind.is_norm and spec.columns > LONGEST_ROW:
        return Refusal("shape", f"norms rows of at most {LONGEST_ROW} elements, not {spec.columns}")
    if spec.kept is not None and (refusal := _refuse_kept(spec, *spec.kept)) is not None:
        return refusal
    for cast, transposed in spec.casts:
        plain = Spec(spec.device, spec.dtypes[0], (1, spec.columns), cast)
        refusal = _refuse_cast(cast, transposed) or quantizing.refuse(plain)
        if refusal is not None:
            return refusal
    return None


def refuse_backward(spec: NormActSpec) -> Refusal | None:
    """As `refuse`, of gradients."""
    refusal = refuse(spec)
    if refusal is None and any(cast.tile != (WHOLE, WHOLE) for cast, _ in spec.casts):
        refusal = Refusal("tile", "casts gradients by one scale per tensor")
    return refusal


def _refuse_kept(spec: NormActSpec, cast: Cast, turned: bool) -> Refusal | None:
    """Why tensors that are there as codes are not read, or None."""
    if turned != spec.kind.is_norm:
        return Refusal(
            "operands", f"reads the codes of y.T of norms, and those of x of activations, not of {spec.kind.name}"
        )
    if turned and (cast.tile != (WHOLE, WHOLE) or cast.format.codes_per_byte > 1):
        return Refusal("operands", f"reads codes of y.T by one scale, a byte each, not {cast}")
    if not turned and (cast not in NARROW.values() or len(set(spec.dtypes)) > 1):
        return Refusal(
            "operands",
            f"reads inputs of one type as {' or '.join(map(str, NARROW.values()))}, not {spec.dtypes} as {cast}",
        )
    return quantizing.refuse(Spec(spec.device, spec.dtypes[0], (1, spec.columns), cast))


def _refuse_cast(cast: Cast, transposed: bool) -> Refusal | None:
    """Why a cast that `quantize` has a kernel for is not made in the pass that computes, or None."""
    if cast.rounding != "nearest":
        return Refusal("rounding", f"rounds to nearest, not {cast.rounding}")
    if cast.format.codes_per_byte > 1:
        return Refusal("format", f"writes a byte per element, and two {cast.format} share one")
    if cast.scale.two_level:
        return Refusal("scale", f"knows the largest magnitude that {cast.scale} wants after a pass over all rows")
    if cast.tile == (WHOLE, WHOLE):
        return None
    if cast.tile[0] != 1 or cast.tile[1] > 128:
        return Refusal("tile", f"casts tensors, rows and pieces of rows, not tiles of {cast.tile}")
    if not transposed:
        return None
    if cast.tile[1] == WHOLE:
        return Refusal("tile", "knows the maxima of columns after a pass over all rows")
    return Refusal("tile", "pieces of columns as well as of rows do not stay in registers beside what computes them")


def _check_of(which: str) -> Callable[[], Any]:
    """Loads how kernels are examined; its module is imported where a kernel is checked alone."""
    return lambda: getattr(import_module("narrowgauge.ops.norm_act.selfcheck"), which)


_LAUNCH = "narrowgauge.ops.norm_act.triton_launch"  # which imports Triton
FORWARD: Registry[NormActSpec] = Registry("norm_act")
FORWARD.register(Kernel("triton", refuse, imported(_LAUNCH, "forward"), check=_check_of("FORWARD")))
FORWARD.register(Kernel("reference", lambda spec: None, definition.forward, by_torch=True))

BACKWARD: Registry[NormActSpec] = Registry("norm_act_backward")
BACKWARD.register(Kernel("triton", refuse_backward, imported(_LAUNCH, "backward"), check=_check_of("BACKWARD")))
BACKWARD.register(Kernel("reference", lambda spec: None, definition.backward, by_torch=True))
