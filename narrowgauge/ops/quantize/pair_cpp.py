"""Integer codes of x and x.T by row, on a CPU, from one pass for the maxima and one for the codes (ops/cpp/cast.cpp).

Bit-identical to two casts, which read x four times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.formats import IntFormat
from narrowgauge.ops.quantize.cpp import DTYPES, LIBRARY, constants, refuse_cast, scales_by_amax
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.pair import Pair, Two
    from narrowgauge.ops.quantize.spec import Spec
    from narrowgauge.recipe import Cast

ROWS = 32  # of a block, must match PAIR_ROWS of cast.cpp


def refuse(spec: Spec) -> Refusal | None:
    """Return the reason why this kernel does not quantize such a tensor, or None."""
    cast = spec.cast
    if spec.delayed or not spec.cols or cast.tile != (1, WHOLE):
        return Refusal("operands", "makes codes of rows and of columns")
    if not isinstance(cast.format, IntFormat) or cast.format.codes_per_byte > 1:
        return Refusal("format", f"writes integers, a byte each, not {cast.format}")
    if cast.rounding != "nearest" or cast.headroom != 1 or not scales_by_amax(cast):
        return Refusal("rounding", "rounds to nearest, by the largest magnitude")
    return refuse_cast(spec) or LIBRARY.refuse(spec.device.type)


def run(x: Tensor, cast: Cast, state: Tensor | None, records: bool, cols: bool, noise: Two) -> Pair:
    """See `ops.quantize.pair`. Codes of x.T are in the memory order of x."""
    matrix = x if x.dtype in DTYPES else x.to(torch.float32)
    # A transposed view is cast as the matrix that it views: the two results change places.
    transposed = matrix.stride(0) < matrix.stride(1)
    matrix = matrix.T if transposed else matrix
    rows, columns = matrix.shape
    matrix = matrix if matrix.stride(1) == 1 or columns == 1 else matrix.contiguous()
    blocks = -(-rows // ROWS)
    of = constants(cast, True, matrix.dtype, torch.int8)
    layout, elements = (matrix, matrix.stride(0), rows, columns), rows * columns
    # Scales of rows, scales of columns, and maxima of columns by block.
    floats = torch.empty(rows + columns * (1 + blocks), dtype=torch.float32, device="cpu")
    codes = torch.empty((2, rows, columns), dtype=torch.int8, device="cpu")
    LIBRARY.call("pair_amax", blocks, elements, of, *layout, floats)
    LIBRARY.call("pair", blocks, elements, of, *layout, floats, codes)
    by_row, by_column = floats.as_strided((rows, 1), (1, 1)), floats.as_strided((columns, 1), (1, 1), rows)  # fmt: skip
    given = QTensor.of_parts(codes[0], by_row, cast, columns, None)
    turned = QTensor.of_parts(codes[1].T, by_column, cast, rows, None)
    return (turned, given, None) if transposed else (given, turned, None)
