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
    calibrated_amax, filled, amax, scales, tiles_cast = definition
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
        # Element 0 of the chunk has the noise of its place in the whole tensor. Casts that draw for
        # scales have tiles of one row.
        width = cast.noise_shape((x.shape[0], x.shape[1]))[1]
        some = (
            noise[each] if isinstance(noise, Tensor) else noise and noise.after(each.start * width)
        )
        full, size = filled(chunk, cast.tile), tuple(chunk.shape)
        data, own = tiles_cast(
            full, size, given[tiles], scale[tiles], global_scale, cast, some, expand
        )
        parts.append(data)
        taken.append(own)
    data = torch.cat(parts)
    if cast.tile[0] != WHOLE:
        scale = torch.cat(taken)
    return QTensor(
        data=data, scale=scale, cast=cast, inner=x.shape[1], global_scale=global_scale, checked=True
    )
