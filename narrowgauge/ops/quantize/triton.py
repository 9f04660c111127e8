"""quantize on NVIDIA GPUs by Triton kernels: the reference's bits, in one or two launches.

    tile            launches                              reads of x, and what else is on offer
    tensor          maxima, cast                          2, the second from the cache where x fits; both orientations
    tensor, delayed cast with maxima, settle              1; both orientations
    row             one                                   1, a row longer than 8,192 elements 2, the second from the cache
    blocks          one                                   1; both orientations
    blocks, 2 level maxima, cast                          2, the second from the cache where x fits; both orientations

Refused, with the reason: what torch.compile fuses itself, table formats, scales from a root mean square.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Refusal, device_facts
from narrowgauge.ops.triton import refuse as refuse_device
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Current, Window
from narrowgauge.scaling import WHOLE, scale_shape

if TYPE_CHECKING:
    from narrowgauge.ops.random import DeviceKey, Key
    from narrowgauge.ops.triton.cast_constants import CastConstants

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_BLOCK = 128


def refuse(spec: Spec) -> Refusal | None:
    """Why these kernels do not quantize such a tensor, or None."""
    if (refusal := refuse_device(spec.device.type, spec.device.capability)) is not None:
        return refusal
    from narrowgauge.ops.triton import cast_constants

    if (refusal := cast_constants.refuse(spec.cast)) is not None:
        return refusal
    if spec.is_empty:
        return Refusal("shape", "there is nothing to round")
    if spec.dtype not in DTYPES:
        return Refusal("dtype", f"reads float32, bfloat16 and float16, not {spec.dtype}")
    if spec.noise == "tensor":
        return Refusal("noise", "makes its noise itself, from a key")
    return _refuse_tile(spec)


def _refuse_tile(spec: Spec) -> Refusal | None:
    cast = spec.cast
    if not spec.amax and not isinstance(cast.calibrate, Current | Window):
        return Refusal("calibration", f"takes the largest magnitude, not {cast.calibrate}")
    if WHOLE in cast.tile:
        if cast.tile in ((WHOLE, WHOLE), (1, WHOLE)):
            return None
        return Refusal("tile", f"scales tensors, rows and blocks, not tiles of {cast.tile}")
    if any(size & (size - 1) or size > LARGEST_BLOCK for size in cast.tile):
        sides = f"takes blocks whose sides are powers of two of at most {LARGEST_BLOCK}, not {cast.tile}"
        return Refusal("tile", sides)
    return Refusal("calibration", "takes the amax of a block from the block") if spec.amax else None


def run(
    x: Tensor,
    cast: Cast,
    amax: Tensor | None,
    noise: Key | DeviceKey | None,
    expand: torch.dtype | None,
) -> QTensor:
    """See `ops.quantize`."""
    constants = _constants(x, cast, expand)
    return _kernels().one(x.detach(), cast, constants, _spread(amax, x, cast), _words(noise, x), expand)


def pair(
    x: Tensor,
    cast: Cast,
    amax_state: Tensor | None,
    records: bool,
    cols: bool,
    noise: tuple[Key | DeviceKey | None, ...],
) -> tuple[QTensor, QTensor | None, Tensor | None]:
    """See `ops.quantize.quantize_pair`."""
    kernels, constants, x = _kernels(), _constants(x, cast, None), x.detach()
    if amax_state is None:
        return (*kernels.both(x, cast, constants, None, *(_words(each, x) for each in noise)), None)
    if cols:
        both: tuple[QTensor, QTensor, Tensor] = kernels.both_delayed(x, cast, constants, amax_state, records)
        return both
    rows, amax = kernels.delayed(x.contiguous(), cast, constants, amax_state, records, None)
    return rows, None, amax


def _kernels() -> Any:
    """Imports Triton, and is therefore called when a kernel is wanted and not before."""
    from narrowgauge.ops.quantize import triton_launch

    return triton_launch


def _constants(x: Tensor, cast: Cast, expand: torch.dtype | None) -> CastConstants:
    from narrowgauge.ops.triton.cast_constants import constants_of

    capability = device_facts(x.device.type, x.device.index).capability
    return constants_of(cast, capability, expand is not None)


def _spread(amax: Tensor | None, x: Tensor, cast: Cast) -> Tensor | None:
    if amax is None:
        return None
    return amax.to(torch.float32).expand(scale_shape((x.shape[0], x.shape[1]), cast.tile)).contiguous()


def _words(noise: Key | DeviceKey | None, x: Tensor) -> Tensor | None:
    return None if noise is None else noise.on_device(x.device)
