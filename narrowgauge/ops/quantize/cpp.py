"""Casts in C++ (ops/cpp/cast.cpp), bit-identical to the reference.

One pass computes the scales, rounds, and generates the noise of stochastic rounding. It writes
codes of integers, and decoded values of all formats for GEMMs in a float dtype. Tiles have any
size. Under a two-level rule two short passes over the tiles precede it.

INT8 codes of x and of x.T, by row, take one pass for the maxima and one for the codes (`run_pair`), where two casts read x four times.
"""

from __future__ import annotations

import math
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, FloatFormat, Format, IntFormat
from narrowgauge.ops import cpp
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import FoldedQTensor, QTensor
from narrowgauge.recipe import Cast, ClippedRms, LearnedStep
from narrowgauge.scaling import (
    E4M3_EDEN,
    E4M3_EDEN_FOUR_OVER_SIX,
    E4M3_FOUR_OVER_SIX,
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E8M0_CEIL,
    E8M0_FLOOR,
    FP32,
    POW2,
    WHOLE,
    scale_shape,
)

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.spec import Pair, Spec, Two
    from narrowgauge.ops.random import Key

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # dtypes of x; others are read as float32
KINDS = {**DTYPES, torch.int8: 2}
# Must match `Rule` in rounding.h; 0: a rule that it does not know, whose scales are passed in.
RULES = {
    FP32: 1,
    POW2: 2,
    E8M0_CEIL: 2,
    E8M0_FLOOR: 3,
    E4M3_TWO_LEVEL: 4,
    E4M3_TWO_LEVEL_CEIL: 5,
    E4M3_FOUR_OVER_SIX: 6,
    E4M3_EDEN: 4,
    E4M3_EDEN_FOUR_OVER_SIX: 6,
}
_P, _L, _U = c_void_p, c_int64, c_uint32
_MATRIX = (_P, _L, _L, _L, _L, _L)  # `layout` of `run`
LIBRARY = cpp.Library(
    ("cast.cpp", "int8_codes.h", "noise.h", "rounding.h"),
    "the kernel that casts",
    {
        "amax": (_P, *_MATRIX, _P),
        "two_level": (_P, _P, _P, _P),
        "four_over_six": (_P, *_MATRIX, _P, c_int32, _P, _P),
        "pair_amax": (_P, _P, _L, _L, _L, _P, _P),
        "pair": (_P, _P, _L, _L, _L, _P, _P, _P, _P, _P),
        "cast": (_P, *_MATRIX, _P, _P, _U, _U, c_int32, _P, _P),
    },
)


def refuse(spec: Spec) -> Refusal | None:
    """Return the reason why this kernel does not quantize such a tensor, or None."""
    if spec.cast.rounding == "eden":
        return Refusal("rounding", "corrects no scales, which 'eden' does after it has rounded")
    return refuse_cast(spec) or LIBRARY.refuse(spec.device.type, spec.in_operator)


def serves_compiled(cast: Cast) -> bool:
    """Return True if compiled code calls this kernel through an operator: for bytes by row.

    Inductor's loops take longer there.
    """
    return (
        cast.tile == (1, WHOLE)
        and isinstance(cast.format, IntFormat)
        and cast.format.codes_per_byte == 1
        and scales_by_amax(cast)
        and not cast.has_global_scale
    )


def refuse_cast(spec: Spec) -> Refusal | None:
    """Return the reason why no kernel in C++ casts so, whether or not it corrects scales, or None."""
    format = spec.cast.format
    if 0 in spec.shape:
        return Refusal("shape", "there is nothing to round")
    if spec.in_operator and not serves_compiled(spec.cast):
        return Refusal("compiling", "torch.compile fuses the definition itself")
    if spec.noise == "tensor":
        return Refusal("noise", "generates the noise of a key, and reads no tensor of noise")
    # Candidates for a scale are compared by rounding to nearest.
    compares, is_eden = spec.cast.scale.reads_elements, spec.cast.rounding == "eden"
    if not rounds(format, stochastically=not (spec.noise is None or compares or is_eden)):
        return Refusal(
            "format", "rounds integers and floats; to nearest, only floats with a mantissa"
        )
    if spec.expand is None and not isinstance(format, IntFormat):
        return Refusal("expanded", "makes decoded values of floats, not their codes")
    return None


def rounds(format: Format, stochastically: bool) -> bool:
    """Return True if cast.cpp supports the format.

    A format without mantissa bits has other ties (`FloatFormat.round`).
    """
    return isinstance(format, IntFormat) or (
        isinstance(format, FloatFormat) and (stochastically or format.mantissa > 0)
    )


def run(
    x: Tensor, cast: Cast, amax: Tensor | None, noise: Key | None, expand: torch.dtype | None,
    may_fold: bool = True,
) -> QTensor:  # fmt: skip
    """See `ops.quantize`.

    may_fold  values may come multiplied by their scales, see `FoldedQTensor`
    """
    matrix = x if x.dtype in DTYPES else x.to(torch.float32)
    # Cast the transpose where its rows are contiguous: codes are written in x's memory order,
    # without a copy.
    transposed = matrix.stride(0) < matrix.stride(1)
    matrix, tile = (matrix.T, cast.tile[::-1]) if transposed else (matrix, cast.tile)
    rows, columns = matrix.shape  # neither is 0, see `refuse`
    matrix = matrix if matrix.stride(1) == 1 or columns == 1 else matrix.contiguous()
    height = rows if tile[0] == WHOLE else tile[0]
    width = columns if tile[1] == WHOLE else tile[1]
    layout = (matrix, matrix.stride(0), rows, columns, height, width)
    tiles, dtype = (-(-rows // height), -(-columns // width)), expand or torch.int8
    elements = rows * columns
    # The kernels compute the scales too where each thread has whole tiles.
    is_whole = elements < 2 * cpp.ELEMENTS_PER_THREAD or tiles[0] >= cpp.parts(elements)
    makes_scales = amax is None and is_whole and scales_by_amax(cast)
    is_fused = makes_scales and not cast.scale.two_level
    # A row with one scale of two levels multiplies its sum by both at once.
    several = tiles[0 if transposed else 1] > 1 if cast.scale.two_level else is_fused
    extent = exponents(cast) if may_fold and several and expand is not None else None
    of = constants(cast, is_fused, matrix.dtype, dtype, extent is not None)
    span = None if extent is None else _Span(0, 0)
    shared = None
    if not makes_scales:
        scale, shared = scales_by_definition(x, cast, amax)
        scale = (scale.T if transposed else scale).contiguous()
    elif is_fused:
        scale = torch.empty(tiles, dtype=torch.float32, device="cpu")
        if cast.headroom != 1:
            shared = torch.full((), cast.headroom, device="cpu")
    else:
        scale, shared = _two_level_scales(tiles, of, layout, cast, transposed)
    data = torch.empty((rows, columns), dtype=dtype, device="cpu")
    words = (0, 0) if noise is None else noise.words
    assert isinstance(words, tuple)
    parts = tiles[0] if is_fused else rows
    LIBRARY.call(
        "cast", parts, elements, of, *layout, scale, shared, *words, transposed, span, data
    )
    if transposed:
        data, scale = data.T, scale.T
    if span is not None and extent is not None:
        lowest, highest = extent
        if not cast.scale.two_level:
            lowest, highest = lowest + span[0], highest + span[1]
        if lowest < _LOWEST or highest > _HIGHEST or span[1] == _NAN:
            return run(x, cast, amax, noise, expand, may_fold=False)
        return FoldedQTensor.of_folded(data, scale, cast, x.shape[1], (lowest, highest), shared)
    if expand is None and cast.format.codes_per_byte > 1:
        data = cast.format.pack(data)
    return QTensor.of_parts(data, scale, cast, x.shape[1], shared)


_Span = c_int32 * 2
# What bfloat16 holds exactly: the smallest subnormal, and the power of two above all numbers.
_LOWEST, _HIGHEST = -133, 128
_NAN = 128  # exponent of a scale that is NaN


@cache
def exponents(cast: Cast) -> tuple[int, int] | None:
    """Return (a, b): folded values are 0 or at least 2**a, and below 2**b. None: not folded.

    Values of a format times a power of two, or times the e4m3 scale of a two-level rule, are exact in
    bfloat16. A GEMM in a float dtype multiplies so anyway where a row has several scales, in a pass
    of its own. One scale for the tensor is a factor of the result, and its codes may be saved. For
    powers of two, a and b are those of a scale of 1.
    """
    format = cast.format
    if not isinstance(format, FloatFormat):
        return None
    smallest, largest = format.smallest, format.max
    if cast.scale.two_level and format.mantissa < 4:
        smallest, largest = smallest * E4M3.smallest, largest * E4M3.max
    elif cast.tile == (WHOLE, WHOLE) or cast.headroom != 1 or RULES.get(cast.scale) not in (2, 3):
        return None
    return math.frexp(smallest)[1] - 1, math.frexp(largest)[1]


def scales_by_amax(cast: Cast) -> bool:
    """Return True if the kernels know the rule of the scales, and it takes the largest magnitude."""
    return cast.scale in RULES and not isinstance(cast.calibrate, ClippedRms | LearnedStep)


def _two_level_scales(
    tiles: tuple[int, int], of: Any, layout: tuple[Any, ...], cast: Cast, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return the scales of the tiles, and the factor that all tiles share."""
    scale = torch.empty(tiles, dtype=torch.float32, device="cpu")
    shared = torch.empty((), dtype=torch.float32, device="cpu")
    LIBRARY.call("amax", tiles[0], layout[0].numel(), of, *layout, scale)
    number, largest = scale.numel(), scale.amax()
    if cast.scale.reads_elements:
        LIBRARY.call(
            "four_over_six", tiles[0], layout[0].numel(), of, *layout, largest, transposed, scale, shared
        )  # fmt: skip
    else:
        LIBRARY.call("two_level", number, number, of, largest, scale, shared)
    return scale, shared


def scales_by_definition(
    x: Tensor, cast: Cast, amax: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the same for x, by the definition; `amax` replaces the tensor's own."""
    if amax is None:
        # The reference sums squares and magnitudes in float32. For the largest magnitude the dtype
        # does not matter.
        sums = isinstance(cast.calibrate, ClippedRms | LearnedStep)
        amax = definition.calibrated_amax(x.to(torch.float32) if sums else x, cast)
    else:
        amax = amax.to(torch.float32)
        if cast.tile != (WHOLE, WHOLE):
            amax = amax.expand(scale_shape((x.shape[0], x.shape[1]), cast.tile))
    if cast.scale.reads_elements:
        return definition.scales_of(definition.filled(x, cast.tile), amax, cast)
    return definition.scales(amax, cast)


@cache
def constants(
    cast: Cast, makes_scales: bool, x_dtype: torch.dtype, dtype: torch.dtype, folds: bool = False
) -> Any:
    """Return `CppCast`."""
    from narrowgauge.ops.quantize.cpp_constants import constants_of  # once for each cast

    return constants_of(
        cast, makes_scales, RULES.get(cast.scale, 0), DTYPES[x_dtype], KINDS[dtype], folds
    )


# --- Codes of x and of x.T ---

PAIR_ROWS = 32  # rows of a block, must match cast.cpp


def refuse_pair(spec: Spec) -> Refusal | None:
    """Return the reason why this kernel does not quantize such a tensor, or None."""
    cast = spec.cast
    if spec.delayed or not spec.cols or cast.tile != (1, WHOLE):
        return Refusal("operands", "makes codes of rows and of columns")
    if not isinstance(cast.format, IntFormat) or cast.format.codes_per_byte > 1:
        return Refusal("format", f"writes integers, a byte each, not {cast.format}")
    if cast.rounding != "nearest" or cast.headroom != 1 or not scales_by_amax(cast):
        return Refusal("rounding", "rounds to nearest, by the largest magnitude")
    return refuse_cast(spec) or LIBRARY.refuse(spec.device.type, spec.in_operator)


def run_pair(
    x: Tensor, cast: Cast, state: Tensor | None, records: bool, cols: bool, noise: Two
) -> Pair:
    """See `ops.quantize.pair`. Codes of x.T are in the memory order of x."""
    matrix = x if x.dtype in DTYPES else x.to(torch.float32)
    # A transposed view is cast as the matrix that it views: the two results change places.
    transposed = matrix.stride(0) < matrix.stride(1)
    matrix = matrix.T if transposed else matrix
    rows, columns = matrix.shape
    matrix = matrix if matrix.stride(1) == 1 or columns == 1 else matrix.contiguous()
    of, blocks = constants(cast, True, matrix.dtype, torch.int8), -(-rows // PAIR_ROWS)
    layout, elements = (matrix, matrix.stride(0), rows, columns), rows * columns
    # Compiled code receives these, and no two results of an operator may share memory.
    out = torch.empty(rows, columns, dtype=torch.int8, device="cpu")
    by_row, beside = torch.empty(rows, 1, dtype=torch.float32, device="cpu"), torch.empty_like(out)
    by_column, of_blocks = by_row.new_empty(columns, 1), by_row.new_empty(blocks, columns)
    if cpp.parts(elements) > 1:  # a single thread finds the maxima by itself
        LIBRARY.call("pair_amax", blocks, elements, of, *layout, by_row, of_blocks)
    LIBRARY.call("pair", blocks, elements, of, *layout, by_row, of_blocks, by_column, out, beside)
    given, turned = (
        QTensor.of_parts(out, by_row, cast, columns, None),
        QTensor.of_parts(beside.T, by_column, cast, rows, None),
    )
    return (turned, given, None) if transposed else (given, turned, None)
