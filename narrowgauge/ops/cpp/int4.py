"""Python bindings of the CPU kernels around a 4-bit GEMM and of the GEMM itself (int4.cpp, gemm.h).

The operators register them as `native-cpp`. They refuse under torch.compile, which cannot trace
them and fuses the definitions itself, and where no C++ compiler is installed (see `build`).
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache

import torch
from torch import Tensor

from narrowgauge.ops.cpp import Library

LEFT, RIGHT, DEPTH, OFFSET = 6, 16, 4, 7  # must match gemm.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_P, _L, _I, _U, _F = c_void_p, c_int64, c_int32, c_uint32, c_float
_SIGNATURES = {
    "turn": (_P, _I, _L, _L, _L, _P, _P, _I, _I, _P),
    "encode": (_P, _L, _F, _F, _P, _P, _P),
    "decode": (_P, _L, _P),
    "uniform": (_U, _U, _P),
    "pack": (_P, _L, _L, _L, _L, _I, _I, _P),
    "gemm": (_P, _P, _L, _L, _L, _I, _I, _P, _I, _P, _I, _P),
}
LIBRARY = Library(("int4.cpp", "gemm.h", "noise.h"), "the kernels of 4-bit products", _SIGNATURES)
refuse, _in_rows = LIBRARY.refuse, LIBRARY.call


@cache
def has_gemm() -> bool:
    """Return True if this CPU has the GEMM, which is written for AVX2."""
    return bool(LIBRARY.loaded.narrowgauge_has_gemm())


def turn(
    x: Tensor,
    whole: int,
    inner: int,
    block: int,
    signs: Tensor | None,
    bits: Tensor | None,
    inverse: bool,
) -> Tensor:
    """Rotate x [rows, inner] -> [rows, whole] float32; inverse: [rows, whole] -> [rows, inner].

    whole    inner rounded up to whole blocks
    block    order of the Hadamard matrix
    signs    [whole] of +1 and -1, or None
    bits     (inverse) uint8 [rows, ceil(whole / 8)]; elements whose bit is zero count as 0. None:
             all count
    """
    x = _rows(x)
    signs = None if signs is None else signs.contiguous()
    bits = None if bits is None else bits.contiguous()
    out = torch.empty(len(x), inner if inverse else whole, dtype=torch.float32, device="cpu")
    sizes = (DTYPES[x.dtype], x.stride(0), inner, whole)
    _in_rows("turn", len(x), len(x) * whole, x, *sizes, signs, bits, block, inverse, out)
    return out


def encode(
    y: Tensor, scale: float, largest: float, packed: bool, bits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Encode y [rows, n] with one scale.

    The results are

        codes   int8 [rows, n]
        packed  uint8 [rows, ceil(n / 2)], two codes per byte, or None
        bits    uint8 [rows, ceil(n / 8)], set where y / scale was not clipped, or None
    """
    y = y.to(torch.float32).contiguous()
    rows, columns = y.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device="cpu")
    pairs = torch.empty(rows, -(-columns // 2), dtype=torch.uint8, device="cpu") if packed else None
    inside = torch.empty(rows, -(-columns // 8), dtype=torch.uint8, device="cpu") if bits else None
    _in_rows("encode", rows, y.numel(), y, columns, scale, largest, codes, pairs, inside)
    return codes, pairs, inside


def decode(packed: Tensor, columns: int) -> Tensor:
    """Unpack codes: uint8 [rows, ceil(columns / 2)] -> int8 [rows, columns]."""
    packed = packed.contiguous()
    codes = torch.empty(len(packed), columns, dtype=torch.int8, device="cpu")
    _in_rows("decode", len(codes), codes.numel(), packed, columns, codes)
    return codes


def uniform(shape: tuple[int, ...], key: tuple[int, int]) -> Tensor:
    """Return float32 numbers in [0, 1) of `shape`: the noise of `key` (see `ops.random`)."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    _in_rows("uniform", out.numel(), out.numel(), *key, out)
    return out


def gemm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    unsigned_left: bool,
    largest: int,
) -> Tensor:
    """Return left [M, K] @ right [N, K].T times both scales, float32 [M, N].

    left, right    int8 codes, any strides
    left_scale     [M or 1, 1]
    right_scale    [N or 1, 1]
    unsigned_left  True if the INT4 operand (codes within +-7) is the left one, else it is the right
                   one
    largest        largest magnitude in the other operand, at most 98
    """
    (m, inner), n = left.shape, len(right)
    out = torch.empty(m, n, dtype=torch.float32, device="cpu")
    a = _panels(left, LEFT, OFFSET if unsigned_left else 0)
    b = _panels(right, RIGHT, 0 if unsigned_left else OFFSET)
    # Number of maddubs results (pairs of products) that fit into 16 bits, see gemm.h.
    steps = (2**15 - 1) // (2 * 2 * OFFSET * largest)
    of_rows = left_scale.to(torch.float32).contiguous()
    of_columns = right_scale.to(torch.float32).contiguous()
    scales = (of_rows, of_rows.numel() > 1, of_columns, of_columns.numel() > 1)
    work = out.numel() * max(inner // 64, 1)
    _in_rows("gemm", -(-m // LEFT), work, a, b, m, n, inner, unsigned_left, steps, *scales, out)
    return out


def _panels(x: Tensor, width: int, offset: int) -> Tensor:
    """Pack x [rows, K] int8 into the panels of gemm.h."""
    rows, inner = x.shape
    count = -(-rows // width)
    panels = torch.empty(count * width * -(-inner // DEPTH) * DEPTH, dtype=torch.int8, device="cpu")
    _in_rows("pack", count, x.numel(), x, rows, inner, *x.stride(), width, offset, panels)
    return panels


def _rows(x: Tensor) -> Tensor:
    """Return x in a dtype that the kernels read, with contiguous rows."""
    # Rows may have any distance, so a slice of columns needs no copy.
    x = x if x.dtype in DTYPES else x.to(torch.float32)
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
