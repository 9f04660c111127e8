"""quantize on NVIDIA GPUs by Triton kernels: the reference's bits, in one or two launches.

    tile             launches                             reads of x; x.T comes with it where it is wanted
    tensor           maxima, cast                         2, the second from the cache where x fits
    tensor, delayed  cast with maxima, settle             1
    row              one                                  1, of a row longer than 8,192 elements 2, the second from the cache
    row, with x.T    maxima, cast                         2, as of a tensor
    blocks           one                                  1
    blocks, 2 level  maxima, cast                         2, as of a tensor

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
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight
    from narrowgauge.ops.random import Key

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


def run(x: Tensor, cast: Cast, amax: Tensor | None, noise: Key | None, expand: torch.dtype | None) -> QTensor:
    """See `ops.quantize`."""
    if amax is not None:
        amax = amax.to(torch.float32).expand(scale_shape((x.shape[0], x.shape[1]), cast.tile)).contiguous()
    rows: QTensor = _launch("cast_pair", x, cast, amax=amax, keys=(_words(noise, x), None), expand=expand)[0]
    return rows


def pair(
    x: Tensor, cast: Cast, amax_state: Tensor | None, records: bool, cols: bool, noise: tuple[Key | None, ...]
) -> tuple[QTensor, QTensor | None, Tensor | None]:
    """See `ops.quantize.quantize_pair`."""
    if amax_state is None:
        keys = tuple(_words(each, x) for each in noise)
        return (*_launch("cast_pair", x, cast, cols=True, keys=keys), None)
    return _launch("cast_delayed", x, cast, amax_state, records, cols)


def precast(
    x: Tensor, precast: PrecastWeight, amax_state: Tensor | None, records: bool
) -> tuple[QTensor, QTensor, Tensor | None]:
    """See `ops.quantize.quantize_precast`."""
    if amax_state is None or precast.codes is None:
        return (*_launch("cast_pair", x, precast.cast, cols=True, amax=precast.maxima.view(torch.float32)), None)
    given = (precast.codes, precast.maxima, precast.expected, amax_state, records)
    return _launch("take_up_delayed", x, precast.cast, *given)


def _launch(function: str, x: Tensor, cast: Cast, *given: Any, **named: Any) -> Any:
    """A function of triton_launch, which is imported here: it imports Triton."""
    from narrowgauge.ops.quantize import triton_launch
    from narrowgauge.ops.triton.cast_constants import constants_of

    capability = device_facts(x.device.type, x.device.index).capability
    constants = constants_of(cast, capability, named.get("expand") is not None)
    return getattr(triton_launch, function)(x.detach(), cast, constants, *given, **named)


def _words(noise: Key | None, x: Tensor) -> Tensor | None:
    return None if noise is None else noise.on_device(x.device)
