"""Norms and activations with a cast of their result in the same pass, and their gradients.

    rms-norm     y = w n,        n = x r rounded to x's dtype,  r = (mean x^2 + eps)^-1/2
                 Llama's order. With float32 weights in a 16-bit model (`Kind.wide`) n is not
                 rounded, and y is rounded to x's dtype
    gemma-norm   y = (1 + w) n,  n = x r;  Gemma's order: rounded once
    layer-norm   y = w n + b,    n = (x - mean x) r,            r = (mean (x - mean x)^2 + eps)^-1/2
    silu         y = x / (1 + e^-x)
    gelu         y = x P(x),        P the normal distribution
    gelu-tanh    y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    relu, relu2  y = max(x, 0), and its square
    swiglu, geglu, geglu-tanh, reglu
                 y = a u,  a = silu(g), gelu(g), gelu-tanh(g), relu(g), rounded to g's dtype

Contract of FORWARD, (kind, tensors, request), and BACKWARD, (kind, tensors, statistics, gy,
requests)

    tensors     (x, w), (x, w, b), (g, u) or (x,); x, g, u [rows, columns], w, b [columns]; float32,
                bfloat16 or float16. Tensors saved in 8 bits are `Kept`: x, or g and u, as codes; in
                BACKWARD of a norm, the codes of y.T in place of x
    statistics  (mean, r), [rows] float32, of layer-norm; (None, r) of other norms; (None, None) of
                activations
    request     the cast of y to compute, or None
    requests    the casts of the gradients of x, or of g and u
    ->          forward: y with its casts, and the statistics
                backward: the gradients of x, or of g and u, with their casts; then the gradients of
                w and b

Casts are computed from y after rounding to its dtype, and are bit-identical to `quantize(y)`. A
layer that reads them therefore computes the same result as from y. Sums are float32. The kernels
round once where the definition rounds between operations, except for n and a. A kernel casts no
gradient of a norm, because the residual stream reads it.

A cast in the same pass saves one read of y, 2 bytes per 16-bit element. y itself is written,
because the residual stream, hooks and 16-bit layers read it.

Triton kernels for NVIDIA GPUs (triton_launch.py):

    tile             launches of forward        reads of x
    tensor, delayed  values and cast, settle    1; norms a second time, from the cache
    tensor           values and maximum, cast   1, then y once, from the cache if it fits
    row              values and cast            1; a second time from the cache, norms a third
    blocks           values and cast            1; norms a second time, from the cache

"Norms" in this table are rms-norms; layer-norm reads x once more, for its mean.

They refuse, with a reason:

    - calls under torch.compile, which fuses them itself
    - stochastic rounding, and casts that `quantize` has no kernel for
    - row scales in both orientations
    - norms whose rows do not fit into registers in the backward pass
    - gradients that are cast with more than one scale

The C++ kernels for CPUs (cpp.py) write y and gradients alone, in float32 or bfloat16. They refuse
casts and inputs that are stored as codes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge.ops.norm_act import cpp, definition
from narrowgauge.ops.norm_act.definition import value
from narrowgauge.ops.norm_act.spec import KINDS, NARROW, CastRequest, CastResult, Kind, NormActSpec
from narrowgauge.ops.quantize import triton as quantizing
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Kernel, Refusal, Registry, imported
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

__all__ = [
    "BACKWARD",
    "FORWARD",
    "KINDS",
    "CastRequest",
    "CastResult",
    "Kind",
    "NormActSpec",
    "value",
]

# Longest row of a norm: its backward pass holds rows and the sums for the weight in registers.
LONGEST_ROW = 8192


def refuse(spec: NormActSpec) -> Refusal | None:
    """Return the reason why the Triton kernels do not compute this, or None."""
    if spec.kind.out is not None:
        return Refusal("dtype", f"writes y in the function's own dtype, not in {spec.kind.out}")
    if (refusal := refuse_tensors(spec.device, spec.dtypes, spec.is_empty)) is not None:
        return refusal
    if spec.kept is None and spec.kind.is_norm and spec.columns > LONGEST_ROW:
        return Refusal("shape", f"norms rows of at most {LONGEST_ROW} elements, not {spec.columns}")
    if spec.kept is not None and (refusal := _refuse_kept(spec, *spec.kept)) is not None:
        return refusal
    for cast, transposed in spec.casts:
        # One row stands for all: no kernel refuses a cast because of the number of rows.
        plain = Spec(spec.device, spec.dtypes[0], (1, spec.columns), cast)
        refusal = _refuse_cast(cast, transposed) or quantizing.refuse(plain)
        if refusal is not None:
            return refusal
    return None


def refuse_backward(spec: NormActSpec) -> Refusal | None:
    """Return the reason for the backward pass, or None."""
    refusal = refuse(spec)
    if refusal is None and any(cast.tile != (WHOLE, WHOLE) for cast, _ in spec.casts):
        # Gradients of gate and up in 1 x 128 both ways spilled 240 to 552 bytes in every form that
        # was tried (decisions/gpu.md).
        refusal = Refusal("tile", "casts gradients by one scale per tensor")
    return refusal


def _refuse_kept(spec: NormActSpec, cast: Cast, turned: bool) -> Refusal | None:
    """Return the reason why inputs that are stored as codes are not supported, or None."""
    if turned != spec.kind.is_norm:
        return Refusal(
            "operands",
            f"reads the codes of y.T of norms, and those of x of activations, not of {spec.kind.name}",
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
    """Return the reason why a cast needs a pass of its own, or None.

    `quantize` has a kernel for the cast.
    """
    if cast.rounding != "nearest":
        return Refusal("rounding", f"rounds to nearest, not {cast.rounding}")
    if cast.format.codes_per_byte > 1:
        return Refusal("format", f"writes a byte per element, and two {cast.format} share one")
    if cast.scale.two_level:
        return Refusal(
            "scale",
            f"knows the largest magnitude that {cast.scale} wants after a pass over all rows",
        )
    if cast.tile == (WHOLE, WHOLE):
        return None
    if cast.tile[0] != 1 or cast.tile[1] > 128:
        return Refusal("tile", f"casts tensors, rows and pieces of rows, not tiles of {cast.tile}")
    if not transposed:
        return None
    if cast.tile[1] == WHOLE:
        return Refusal("tile-transposed", "knows the maxima of columns after a pass over all rows")
    return Refusal(
        "tile-transposed",
        "pieces of columns as well as of rows do not stay in registers beside what computes them",
    )


def _check_of(which: str) -> Callable[[], Any]:
    """Return a function that loads a self-check, so that its module is imported only then."""
    return lambda: getattr(import_module("narrowgauge.ops.norm_act.selfcheck"), which)


_LAUNCH = "narrowgauge.ops.norm_act.triton_launch"  # this module imports Triton
FORWARD: Registry[NormActSpec] = Registry("norm_act")
FORWARD.register(Kernel("triton", refuse, imported(_LAUNCH, "forward"), check=_check_of("FORWARD")))
FORWARD.register(
    Kernel("native-cpp", cpp.refuse, cpp.forward, on="cpu"),
    Kernel("reference", lambda spec: None, definition.forward, by_torch=True),
)

BACKWARD: Registry[NormActSpec] = Registry("norm_act_backward")
BACKWARD.register(
    Kernel("triton", refuse_backward, imported(_LAUNCH, "backward"), check=_check_of("BACKWARD"))
)
BACKWARD.register(
    Kernel("native-cpp", cpp.refuse, cpp.backward, on="cpu"),
    Kernel("reference", lambda spec: None, definition.backward, by_torch=True),
)
