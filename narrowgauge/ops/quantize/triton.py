"""Refusals of the Triton kernels of `ops.quantize`.

The launching module, and with it Triton, is imported at the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.formats import FloatFormat, IntFormat
from narrowgauge.ops.registry import Refusal, imported
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.recipe import CurrentScaling, DelayedScaling
from narrowgauge.scaling import FP32, WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.spec import Spec

LARGEST_TILE = 128
EDEN_WIDTHS = (16, 32, 64, 128)  # elements of a tile whose scale is corrected
LAUNCHES = "narrowgauge.ops.quantize.triton_launch"


def refuse(spec: Spec) -> Refusal | None:
    """Return the reason why these kernels do not quantize such a tensor, or None."""
    if (
        refusal := refuse_tensors(spec.device, (spec.dtype,), 0 in spec.shape, spec.in_operator)
    ) is not None:
        return refusal
    from narrowgauge.ops.triton import cast_constants

    cast = spec.cast
    if (refusal := cast_constants.refuse(cast)) is not None:
        return refusal
    if spec.noise == "tensor":
        return Refusal("noise", "makes its noise itself, from a key")
    if not spec.amax and not isinstance(cast.calibrate, CurrentScaling | DelayedScaling):
        return Refusal("calibration", f"takes the largest magnitude, not {cast.calibrate}")
    if cast.tile in ((WHOLE, WHOLE), (1, WHOLE)):
        return None
    if WHOLE in cast.tile:
        return Refusal("tile", f"scales tensors, rows and blocks, not tiles of {cast.tile}")
    if any(size & (size - 1) or size > LARGEST_TILE for size in cast.tile):
        sides = (
            f"takes blocks whose sides are powers of two of at most {LARGEST_TILE}, not {cast.tile}"
        )
        return Refusal("tile", sides)
    return Refusal("amax", "takes the amax of a block from the block") if spec.amax else None


def refuse_eden(spec: Spec) -> Refusal | None:
    """Return the reason why the kernel that corrects scales does not quantize such a tensor, or None."""
    cast = spec.cast
    if cast.rounding != "eden":
        return Refusal("rounding", f"corrects scales, which {cast.rounding!r} does not")
    if spec.in_operator:
        return Refusal("compiling", "torch.compile fuses the definition itself")
    is_empty = 0 in spec.shape
    if (refusal := refuse_tensors(spec.device, (spec.dtype,), is_empty)) is not None:
        return refusal
    if not isinstance(cast.format, FloatFormat | IntFormat) or cast.format.max < 4:
        return Refusal("format", f"rounds floats and integers up to 4 or more, not {cast.format}")
    if not (cast.scale.two_level or cast.scale == FP32) or cast.scale.power_of_two_whole:
        return Refusal("scale", f"scales by {FP32} and E4M3 numbers, not {cast.scale}")
    if cast.tile[1] not in EDEN_WIDTHS:
        return Refusal("tile", f"corrects scales of {', '.join(map(str, EDEN_WIDTHS))} elements")
    if spec.noise == "tensor":
        return Refusal("noise", "makes its noise itself, from a key")
    if spec.amax or not isinstance(cast.calibrate, CurrentScaling) or cast.headroom != 1:
        return Refusal("calibration", "takes the largest magnitude of each tile as it is")
    return None


run, both, pair, precast, with_amax, by_amax, empty = (
    imported(LAUNCHES, name)
    for name in ("run", "both", "pair", "precast", "with_amax", "by_amax", "empty")
)
