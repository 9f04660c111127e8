"""EDEN casts in C++ (ops/cpp/eden.cpp), bit-identical to the definition (eden.py).

    run            a cast of x, as `ops.quantize`
    run_rotated    the same of x under a rotation, which is never in memory under float32 scales

Under float32 scales one pass reads x, rotates it in groups of 16 rows, and writes codes or decoded
values and scales. Under two-level scales the largest magnitude of the rotated tensor must be known
first: one pass writes the rotated x and the largest magnitude of each tile, the second casts and
corrects. x may be transposed in memory; the result is row-major.

Left out: tiles of other widths than WIDTHS, noise that is no key, and codes of floats.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops.cpp import Library
from narrowgauge.ops.quantize import cpp
from narrowgauge.ops.quantize.spec import Turn
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.spec import Spec
    from narrowgauge.ops.random import Key
    from narrowgauge.recipe import Cast

WIDTHS = (16, 32, 64, 128)  # must match `with_width` in eden.cpp
_P, _L, _I, _U = c_void_p, c_int64, c_int32, c_uint32
_SOURCE = (_P, _I, _L, _L, _L, _L, _P, _P, _I)  # `Source` in eden.cpp
LIBRARY = Library(
    ("eden.cpp", "butterflies.h", "noise.h", "rounding.h"),
    "the kernel that corrects scales",
    {
        "rotated": (*_SOURCE, _L, _P, _P),
        "eden": (_P, *_SOURCE, _L, _L, _L, _I, _P, _P, _P, _U, _U, _P),
    },
)


def refuse(spec: Spec) -> Refusal | None:
    """Return the reason why this kernel does not quantize such a tensor, or None."""
    if spec.cast.rounding != "eden":
        return Refusal("rounding", f"corrects scales, which {spec.cast.rounding!r} does not")
    if (refusal := cpp.refuse_cast(spec)) is not None:
        return refusal
    if spec.cast.tile[1] not in WIDTHS:
        return Refusal("tile", f"corrects scales of {', '.join(map(str, WIDTHS))} elements")
    return LIBRARY.refuse(spec.device.type)


def run(
    x: Tensor, cast: Cast, amax: Tensor | None, noise: Key | None, expand: torch.dtype | None
) -> QTensor:
    """See `ops.quantize`."""
    return run_rotated(x, cast, amax, noise, expand)


def run_rotated(
    x: Tensor, cast: Cast, amax: Tensor | None, noise: Key | None, expand: torch.dtype | None,
    block: int = 1, signs: Tensor | None = None, second: Tensor | None = None,
) -> QTensor:  # fmt: skip
    """The same for x under a rotation (`nn.rotation`), whose blocks hold whole tiles.

    block  of the rotation; 1: none
    """
    turn = Turn(block, signs, second)
    matrix = x if x.dtype in cpp.DTYPES else x.to(torch.float32)
    rows, inner = matrix.shape  # neither is 0, see `cpp.refuse`
    columns, width = -(-inner // turn.block) * turn.block, cast.tile[1]
    tiles = -(-columns // width)
    scale = torch.empty(rows, tiles, dtype=torch.float32, device="cpu")
    made, rotates = amax is None and cpp.scales_by_amax(cast), turn.block > 1
    source = _source(matrix, columns if rotates else tiles * width, turn)
    largest = shared = None
    if (made and cast.scale.two_level) or (rotates and not made):
        # Scales depend on other rows: rotate all of them, and find the maxima on the way.
        turned = torch.empty(rows, columns, dtype=torch.float32, device="cpu") if rotates else None
        LIBRARY.call(
            "rotated", rows, rows * columns, *_source(matrix, columns, turn), width, scale, turned
        )
        if turned is not None:
            source, x = _source(turned, columns, Turn()), turned
    if not made:
        given, shared = cpp.scales_by_definition(x, cast, amax)
        scale = given.contiguous()
    elif cast.scale.two_level:
        largest, shared = scale.amax(), torch.empty((), dtype=torch.float32, device="cpu")
    data = torch.empty(rows, columns, dtype=expand or torch.int8, device="cpu")
    words = (0, 0) if noise is None else noise.words
    assert isinstance(words, tuple)
    constants = cpp.constants(cast, False, torch.float32, data.dtype)
    LIBRARY.call(
        "eden", rows, rows * columns, constants, *source, columns, width, cast.block, not made, scale, largest, shared, *words, data
    )  # fmt: skip
    if expand is None and cast.format.codes_per_byte > 1:
        data = cast.format.pack(data)
    return QTensor.of_parts(data, scale, cast, columns, shared)


def _source(x: Tensor, whole: int, turn: Turn) -> tuple[Any, ...]:
    """The arguments for `Source` in eden.cpp."""
    signs, second = (
        None if each is None else each.contiguous() for each in (turn.signs, turn.second)
    )
    strides = x.stride(0), 1 if x.shape[1] == 1 else x.stride(1)
    return x, cpp.DTYPES[x.dtype], *strides, x.shape[1], whole, signs, second, turn.block
