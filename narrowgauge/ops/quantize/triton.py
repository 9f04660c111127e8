"""Refusals of the Triton kernels of `ops.quantize`.

The launching module, and with it Triton, is imported at the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.ops.registry import Refusal, imported
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.recipe import CurrentScaling, DelayedScaling
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.spec import Spec

LARGEST_TILE = 128
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


run, both, pair, precast, with_amax, empty = (
    imported(LAUNCHES, name) for name in ("run", "both", "pair", "precast", "with_amax", "empty")
)
