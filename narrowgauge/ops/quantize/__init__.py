"""quantize: encode a float matrix as codes and scales, tile by tile. dequantize: decode it.

    amax[t]  = max |x| over tile t              (or an argument, or as cast.calibrate says)
    scale[t] = cast.scale(amax[t])
    codes    = encode(x * (1 / scale[t]))

Contract of `quantize(x, cast)`

    x       [outer, inner], any float dtype, any strides. Empty, ragged (a last tile may be short)
            and zero tensors are fine.
    amax    [1, 1] or the shape of the scales, float32: replaces the tensor's own amax; larger
            elements saturate
    noise   [outer, inner] in [0, 1), or the Key of such noise; required if cast.rounding is
            "stochastic". Of "eden" casts in the shape of the scales, if these are rounded (eden.py)
    expand  float32 or bfloat16: return decoded values of this dtype instead of codes, for a GEMM
            that computes in it. The values are the same: every value of every format is exact in
            bfloat16, except in tables, which need float32.
    ->      QTensor. NaN or infinity in a tile makes its scale NaN, and thereby the whole tile.

Cost in plain torch: one read for amax, then about eight elementwise passes; one read and one write
if a compiler fuses them. On a CPU with a C++ compiler (cpp.py) one read and one write too, and one
more read under two-level rules, with bit-identical results: for codes of integers and decoded
values, if noise is a Key. EDEN casts have a kernel of their own there, which also rotates
(eden_cpp.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.formats import E4M3, TableFormat
from narrowgauge.ops.quantize import cpp, definition
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Kernel, Registry, imported
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE, scale_shape

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key
    from narrowgauge.ops.selfcheck import KernelCheck


def check_of(op: str) -> Callable[[], KernelCheck[Spec]]:
    """Return a function that loads the self-check of `op`.

    The module of the check is imported only when a kernel is checked.
    """

    def load() -> KernelCheck[Spec]:
        from narrowgauge.ops.quantize.selfcheck import CHECKS

        return CHECKS[op]

    return load


TRITON, LAUNCHES = (f"narrowgauge.ops.quantize.{name}" for name in ("triton", "triton_launch"))
EDEN = "narrowgauge.ops.quantize.eden_cpp"
KERNELS: Registry[Spec] = Registry("quantize")
KERNELS.register(
    Kernel(
        "triton",
        imported(TRITON, "refuse"),
        imported(LAUNCHES, "run"),
        "cuda",
        check=check_of("quantize"),
        replays=True,
    ),
    Kernel(
        "triton-eden",
        imported(TRITON, "refuse_eden"),
        imported(LAUNCHES, "eden"),
        "cuda",
        check=check_of("quantize"),
    ),
    Kernel("native-cpp", cpp.refuse, cpp.run, check=check_of("quantize")),
    Kernel(
        "native-eden",
        imported(EDEN, "refuse"),
        imported(EDEN, "run"),
        "cpu",
        check=check_of("quantize"),
    ),
    Kernel("reference", lambda spec: None, definition.quantize, by_torch=True),
)

_WHOLE = Cast(format=E4M3)
calibrated_amax = definition.calibrated_amax
row_squares, spread = definition.row_squares, definition.spread


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """`definition.tile_amax`; for a whole tensor one launch, if the Triton kernel supports x."""
    if tile == (WHOLE, WHOLE) and x.ndim == 2:
        return plan_amax(x)(x)
    return definition.tile_amax(x, tile)


def plan_amax(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Choose the kernel for the largest magnitude [1, 1] of a whole matrix like x.

    The result is valid for tensors that agree with x as in `plan`.
    """
    is_launched = (
        not torch.compiler.is_compiling()
        and KERNELS.choose(Spec.of(x, _WHOLE)).kernel.name == "triton"
    )
    return imported(LAUNCHES, "amax") if is_launched else definition.whole_amax


def plan(
    x: Tensor,
    cast: Cast,
    amax: Tensor | None,
    noise: Tensor | Key | None,
    expand: torch.dtype | None,
) -> Callable[..., QTensor]:
    """Choose the kernel of `quantize` for such arguments: run(x, cast, amax, noise, expand).

    run checks no arguments. It is valid for tensors that agree with x in device, dtype, emptiness
    and the number of columns modulo 2, and for noise of the same kind.
    """
    kernel = KERNELS.choose(Spec.of(x, cast, amax, noise, expand)).kernel
    if noise is not None or not kernel.replays:
        return kernel.run
    from narrowgauge.ops.triton.replay import Replays  # imported only where kernels are launched

    replays = Replays(lambda x, amax: kernel.run(x, cast, amax, None, expand))
    return lambda x, cast, amax, noise, expand: replays(x, amax)


@torch.no_grad()
def quantize(
    x: Tensor, cast: Cast, *, amax: Tensor | None = None, noise: Tensor | Key | None = None, expand: torch.dtype | None = None,
    backend: str | None = None,
) -> QTensor:  # fmt: skip
    """Quantize x [outer, inner]; see the module for the contract.

    backend  name of the kernel: "triton", "triton-eden", "native-cpp", "native-eden" or "reference";
             None: the first one that does not refuse
    """
    if not isinstance(x, Tensor) or not isinstance(cast, Cast):
        raise ConfigError(
            f"quantize: x is a {type(x).__name__} and cast a {type(cast).__name__}; give a torch.Tensor and a Cast.",
            code="quantize.types",
        )
    if x.ndim != 2 or not x.is_floating_point():
        raise ShapeError(
            f"quantize: x is {list(x.shape)} {x.dtype}; it must be a two-dimensional float tensor. "
            "Flatten the leading axes with x.flatten(0, -2).",
            code="quantize.shape",
        )
    if amax is not None and tuple(amax.shape) not in (
        (1, 1),
        scale_shape(tuple(x.shape), cast.tile),
    ):
        raise ShapeError(
            f"quantize: amax is {list(amax.shape)}; tiles of {cast.tile} on {list(x.shape)} need "
            f"{list(scale_shape(tuple(x.shape), cast.tile))}, or [1, 1] for all.",
            code="quantize.amax",
        )
    if bool(cast.draws) != (noise is not None):
        raise ConfigError(
            f"quantize: cast '{cast}' draws {'' if cast.draws else 'no '}random numbers, but noise was "
            f"{'not ' if noise is None else ''}given. Give noise in [0, 1), of the shape cast.noise_shape(x.shape), exactly "
            "when cast.draws.",
            code="quantize.noise",
        )
    if isinstance(noise, Tensor) and noise.shape != cast.noise_shape(tuple(x.shape)):
        raise ShapeError(
            f"quantize: noise is {list(noise.shape)}, x {list(x.shape)}; '{cast}' takes one number for each of its {cast.draws}, "
            f"{list(cast.noise_shape(tuple(x.shape)))}.",
            code="quantize.noise-shape",
        )
    if expand not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(
            f"quantize: expand is {expand}; values are kept in torch.float32 or torch.bfloat16.",
            code="quantize.expand",
        )
    if expand == torch.bfloat16 and isinstance(cast.format, TableFormat):
        raise ConfigError(
            f"quantize: levels of {cast.format} are not exact in {expand}. Use expand=torch.float32.",
            code="quantize.expand-levels",
        )
    # All kernels but the reference refuse then, and their refusals need not be traced.
    if backend is None and torch.compiler.is_compiling():
        from narrowgauge.ops.quantize import compiled

        # The operator takes one amax for the tensor, in float32; other amax arguments go to the
        # definition.
        of_one = amax is None or (cast.is_per_tensor and amax.dtype == torch.float32)
        if of_one and compiled.takes(x, cast, noise, expand):
            return compiled.quantize(x, cast, amax)[0]
        return definition.quantize(x, cast, amax, noise, expand)
    return KERNELS.choose(Spec.of(x, cast, amax, noise, expand), backend).kernel.run(
        x, cast, amax, noise, expand
    )


@torch.no_grad()
def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of q, [outer, inner] of `dtype`; computed in float32 and rounded once."""
    if (
        not isinstance(q, QTensor)
        or not isinstance(dtype, torch.dtype)
        or not dtype.is_floating_point
    ):
        raise ConfigError(
            f"dequantize: q is a {type(q).__name__} and dtype {dtype!r}; give a QTensor and a float dtype of torch.",
            code="dequantize.types",
        )
    return definition.dequantize(q).to(dtype)
