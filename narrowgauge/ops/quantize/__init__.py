"""quantize: a float matrix into codes and scales, tile by tile. dequantize: back.

    amax[t]  = max |x| over tile t              (or given, or as cast.calibrate says)
    scale[t] = cast.scale(amax[t])
    codes    = encode(x * (1 / scale[t]))

Contract of `quantize(x, cast)`

    x       [outer, inner], any float dtype, any strides. Empty, ragged (a last tile may be short) and zero tensors are fine.
    amax    [1, 1] or the shape of the scales, float32: used instead of the tensor's own; larger elements saturate
    noise   [outer, inner] in [0, 1), or the Key of such noise, needed when cast.rounding is "stochastic"
    expand  float32 or bfloat16: keep the decoded values in it instead of codes, for a GEMM that computes in it. The numbers
            are the same: every value of every format is exact in bfloat16, except in tables, which need float32.
    ->      QTensor. NaN or infinity in a tile makes its scale NaN, and with it the whole tile.

Cost on plain torch: one read for amax, then about eight element-wise passes; one read and one write when a compiler fuses them. On a
CPU with a C++ compiler one read and one write as well (cpp.py), the same bits: values rounded to nearest, and integers with one
scale per tensor or row whose noise comes as a Key.
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
    from narrowgauge.ops.selfcheck import Check


def check_of(op: str) -> Callable[[], Check[Spec]]:
    """Loads how kernels of `op` are examined; its module is imported where a kernel is checked alone."""

    def load() -> Check[Spec]:
        from narrowgauge.ops.quantize.selfcheck import CHECKS

        return CHECKS[op]

    return load


TRITON, LAUNCHES = (f"narrowgauge.ops.quantize.{name}" for name in ("triton", "triton_launch"))
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
    Kernel("native-cpp", cpp.refuse, cpp.run, check=check_of("quantize")),
    Kernel("reference", lambda spec: None, definition.quantize, by_torch=True),
)

_WHOLE = Cast(format=E4M3)
calibrated_amax = definition.calibrated_amax
row_squares, spread = definition.row_squares, definition.spread


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """`definition.tile_amax`; of a whole tensor in one launch where the kernel that casts by it serves x."""
    whole = tile == (WHOLE, WHOLE) and x.ndim == 2 and not torch.compiler.is_compiling()
    if not whole or KERNELS.choose(Spec.of(x, _WHOLE)).kernel.name != "triton":
        return definition.tile_amax(x, tile)
    found: Tensor = imported(LAUNCHES, "amax")(x)
    return found


def plan(
    x: Tensor, cast: Cast, amax: Tensor | None, noise: Tensor | Key | None, expand: torch.dtype | None
) -> Callable[..., QTensor]:
    """What computes `quantize` for such arguments: run(x, cast, amax, noise, expand), without a check of them.

    It serves other tensors of the same device and type, as empty and with as many columns modulo 2, and noise of the same kind.
    """
    kernel = KERNELS.choose(Spec.of(x, cast, amax, noise, expand)).kernel
    if noise is not None or not kernel.replays:
        return kernel.run
    from narrowgauge.ops.triton.replay import Replays  # where there are launches

    replays = Replays(lambda x, amax: kernel.run(x, cast, amax, None, expand))
    return lambda x, cast, amax, noise, expand: replays(x, amax)


@torch.no_grad()
def quantize(
    x: Tensor, cast: Cast, *, amax: Tensor | None = None, noise: Tensor | Key | None = None, expand: torch.dtype | None = None,
    backend: str | None = None,
) -> QTensor:  # fmt: skip
    """x [outer, inner] -> QTensor of the same shape; see the module for the contract.

    backend  the kernel to take: "triton", "native-cpp" or "reference"; None: the first of them that does not refuse
    """
    if not isinstance(x, Tensor) or not isinstance(cast, Cast):
        raise ConfigError(
            f"quantize: x is a {type(x).__name__} and cast a {type(cast).__name__}; give a torch.Tensor and a Cast."
        )
    if x.ndim != 2 or not x.is_floating_point():
        raise ShapeError(
            f"quantize: x is {list(x.shape)} {x.dtype}; it must be a two-dimensional float tensor. "
            "Flatten the leading axes with x.flatten(0, -2)."
        )
    if amax is not None and tuple(amax.shape) not in ((1, 1), scale_shape(tuple(x.shape), cast.tile)):
        raise ShapeError(
            f"quantize: amax is {list(amax.shape)}; tiles of {cast.tile} on {list(x.shape)} need "
            f"{list(scale_shape(tuple(x.shape), cast.tile))}, or [1, 1] for all."
        )
    if (cast.rounding == "stochastic") != (noise is not None):
        raise ConfigError(
            f"quantize: cast '{cast}' rounds {cast.rounding}, but noise was {'not ' if noise is None else ''}given. "
            "Give noise in [0, 1) of x's shape exactly when the cast rounds stochastically."
        )
    if isinstance(noise, Tensor) and noise.shape != x.shape:
        raise ShapeError(f"quantize: noise is {list(noise.shape)}, x {list(x.shape)}; both must have the same shape.")
    if expand not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(f"quantize: expand is {expand}; values are kept in torch.float32 or torch.bfloat16.")
    if expand == torch.bfloat16 and isinstance(cast.format, TableFormat):
        raise ConfigError(f"quantize: levels of {cast.format} are not exact in {expand}. Use expand=torch.float32.")
    if backend is None and torch.compiler.is_compiling():  # all others refuse, which need not be traced
        from narrowgauge.ops.quantize import compiled

        of_one = amax is None or (cast.is_per_tensor and amax.dtype == torch.float32)
        if of_one and compiled.takes(x, cast, noise, expand):
            return compiled.quantize(x, cast, amax)[0]
        return definition.quantize(x, cast, amax, noise, expand)
    return KERNELS.choose(Spec.of(x, cast, amax, noise, expand), backend).kernel.run(x, cast, amax, noise, expand)


@torch.no_grad()
def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q -> [outer, inner] of `dtype`; computed in float32 and rounded once."""
    if not isinstance(q, QTensor) or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dequantize: q is a {type(q).__name__} and dtype {dtype!r}; give a QTensor and a float dtype of torch."
        )
    return definition.dequantize(q).to(dtype)
