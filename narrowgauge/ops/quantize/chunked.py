"""Bit-identical `quantize` by chunks of rows (ops/chunking.py): first all scales, then the codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops.chunking import row_chunks
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, CurrentScaling, DelayedScaling
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key


def chunks_of(x: Tensor, cast: Cast) -> list[slice]:
    """Return slices of x's rows that split no tile.

    The exception is a tile that spans all rows: its largest magnitude is the maximum over the
    chunks.
    """
    of_columns = cast.tile[0] == WHOLE and cast.tile[1] != WHOLE
    if of_columns and not isinstance(cast.calibrate, CurrentScaling | DelayedScaling):
        return [slice(0, x.shape[0])]
    return row_chunks(x, max(cast.tile[0], 1))


def quantize_chunked(
    definition: tuple[Callable[..., Any], ...], chunks: Sequence[slice], x: Tensor, cast: Cast, given: Tensor | None,
    noise: Tensor | Key | None, expand: torch.dtype | None,
) -> QTensor:  # fmt: skip
    """Quantize x chunk by chunk.

    definition  the functions of the definition of a whole tensor
    given       amax of each tile, or None
    """
    calibrated_amax, filled, amax, scales, least_error, encoded = definition
    if given is None and cast.tile == (WHOLE, WHOLE):
        given = calibrated_amax(x, cast)
    elif given is None:
        given = torch.cat(
            [amax(filled(x[each], cast.tile), tuple(x[each].shape), cast) for each in chunks]
        )
        # The maximum over chunks is exact, unlike a sum: `chunks_of` splits such tiles only for
        # maxima.
        given = given.amax(dim=0, keepdim=True) if cast.tile[0] == WHOLE else given
    scale, global_scale = scales(given, cast)
    parts, taken = [], []
    for each in chunks:
        chunk, height = x[each], 1 if cast.tile[0] == WHOLE else cast.tile[0]
        tiles = (
            slice(None)
            if cast.tile[0] == WHOLE
            else slice(each.start // height, -(-each.stop // height))
        )
        # Element 0 of the chunk has the noise of its place in the whole tensor.
        some = (
            noise[each]
            if isinstance(noise, Tensor)
            else noise and noise.after(each.start * x.shape[1])
        )
        full = filled(chunk, cast.tile)
        own = least_error(full, given[tiles], scale[tiles], global_scale, cast)
        taken.append(own)
        parts.append(encoded(full, tuple(chunk.shape), own, global_scale, cast, some, expand))
    data = torch.cat(parts)
    if cast.scale.reads_elements:
        scale = torch.cat(taken)
    return QTensor(
        data=data, scale=scale, cast=cast, inner=x.shape[1], global_scale=global_scale, checked=True
    )
