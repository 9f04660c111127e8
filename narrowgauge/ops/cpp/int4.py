"""The compiled kernels of the CPU (int4.cpp, gemm.h): the passes around a 4-bit product, and the product.

Ops register them as `native-cpp`. They refuse under torch.compile, which cannot look into them and fuses the references itself,
and where there is no C++ compiler (see `compiled`).
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from narrowgauge.addresses import address
from narrowgauge.errors import BackendError
from narrowgauge.ops.cpp.build import in_rows, library

SOURCES = ("int4.cpp", "gemm.h")
LEFT, RIGHT, DEPTH, OFFSET = 6, 16, 4, 7  # as in gemm.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_P, _L, _I, _U, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
_SIGNATURES = {
    "turn": (_P, _I, _L, _L, _L, _L, _L, _P, _P, _I, _I, _P),
    "encode": (_P, _L, _L, _L, _F, _F, _P, _P, _P),
    "decode": (_P, _L, _L, _L, _P),
    "round": (_P, _I, _L, _L, _L, _L, _P, _I, _F, _U, _U, _P),
    "uniform": (_U, _U, _L, _L, _P),
    "pack": (_P, _L, _L, _L, _L, _L, _L, _I, _I, _P),
    "gemm": (_P, _P, _L, _L, _L, _L, _L, _I, _I, _P, _I, _P, _I, _P),
}


def refuse(device: str) -> str | None:
    """Why the kernels cannot be used on a device of this type, or None."""
    return refuse_place(device) or unavailable() or None


def refuse_place(device: str) -> str | None:
    """Why no compiled kernel can be called here, whether or not it can be built; or None."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    return None if device == "cpu" else "for the CPU alone"


@cache
def unavailable() -> str:
    """Why there is no library here, or ''."""
    try:
        _library()
    except BackendError as error:
        return str(error)
    return ""


@cache
def has_gemm() -> bool:
    """Whether the product exists: it is written for AVX2."""
    return bool(_library().narrowgauge_has_gemm())


def turn(
    x: Tensor, whole: int, inner: int, block: int, signs: Tensor | None, bits: Tensor | None, inverse: bool
) -> Tensor:
    """rotate: x [rows, inner] -> [rows, whole]; inverse, unrotate of what `bits` lets through: [rows, whole] -> [rows, inner]."""
    x = _rows(x)
    out = torch.empty(len(x), inner if inverse else whole, dtype=torch.float32, device="cpu")
    call, dtype = _library().narrowgauge_turn, DTYPES[x.dtype]
    signs = None if signs is None else signs.contiguous()
    bits = None if bits is None else bits.contiguous()
    in_rows(
        len(x),
        len(x) * whole,
        lambda first, last: call(
            address(x), dtype, first, last, x.stride(0), inner, whole, address(signs), address(bits), block, inverse,
            address(out),
        ),
    )  # fmt: skip
    return out


def encode(
    y: Tensor, scale: float, largest: float, packed: bool, bits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y [rows, n] -> codes int8 [rows, n], packed [rows, ceil(n / 2)] and bits [rows, ceil(n / 8)], both uint8 or None."""
    y = y.to(torch.float32).contiguous()
    rows, columns = y.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device="cpu")
    pairs = torch.empty(rows, -(-columns // 2), dtype=torch.uint8, device="cpu") if packed else None
    inside = torch.empty(rows, -(-columns // 8), dtype=torch.uint8, device="cpu") if bits else None
    call = _library().narrowgauge_encode
    in_rows(
        rows,
        y.numel(),
        lambda first, last: call(
            address(y), first, last, columns, scale, largest, address(codes), address(pairs), address(inside)
        ),
    )
    return codes, pairs, inside


def decode(packed: Tensor, columns: int) -> Tensor:
    """uint8 [rows, ceil(columns / 2)] -> int8 [rows, columns]."""
    packed = packed.contiguous()
    codes = torch.empty(len(packed), columns, dtype=torch.int8, device="cpu")
    call = _library().narrowgauge_decode
    in_rows(
        len(codes),
        codes.numel(),
        lambda first, last: call(address(packed), first, last, columns, address(codes)),
    )
    return codes


def round_stochastically(x: Tensor, scale: Tensor, largest: float, key: tuple[int, int]) -> Tensor:
    """x [rows, n] float32 or bfloat16 -> int8 codes of x / scale [rows or 1, 1], rounded with the noise of `key`."""
    x, scale = _rows(x), scale.to(torch.float32).contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    call, dtype = _library().narrowgauge_round, DTYPES[x.dtype]
    in_rows(
        len(x),
        x.numel(),
        lambda first, last: call(
            address(x),
            dtype,
            first,
            last,
            x.stride(0),
            x.shape[1],
            address(scale),
            scale.numel() > 1,
            largest,
            *key,
            address(codes),
        ),
    )
    return codes


def uniform(shape: tuple[int, ...], key: tuple[int, int]) -> Tensor:
    """float32 in [0, 1) of `shape`: the noise of `key` (see `noise`)."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    call = _library().narrowgauge_uniform
    in_rows(out.numel(), out.numel(), lambda first, last: call(*key, first, last, address(out)))
    return out


def gemm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, unsigned_left: bool, largest: int
) -> Tensor:
    """left [M, K] @ right [N, K].T, times scales [M or 1, 1] and [N or 1, 1] -> float32 [M, N]; int8 codes of any strides.

    unsigned_left  whether the operand of INT4 (within +-7) is the left one, else it is the right one
    largest        magnitude of the other operand, at most 98
    """
    (m, inner), n = left.shape, len(right)
    out = torch.empty(m, n, dtype=torch.float32, device="cpu")
    a = _panels(left, LEFT, OFFSET if unsigned_left else 0)
    b = _panels(right, RIGHT, 0 if unsigned_left else OFFSET)
    steps = (2**15 - 1) // (2 * 2 * OFFSET * largest)
    scales = [scale.to(torch.float32).contiguous() for scale in (left_scale, right_scale)]
    sizes = [int(scale.numel() > 1) for scale in scales]
    call = _library().narrowgauge_gemm
    in_rows(
        -(-m // LEFT),
        out.numel() * max(inner // 64, 1),
        lambda first, last: call(
            address(a), address(b), first, last, m, n, inner, unsigned_left, steps, address(scales[0]), sizes[0],
            address(scales[1]), sizes[1], address(out),
        ),
    )  # fmt: skip
    return out


def _panels(x: Tensor, width: int, offset: int) -> Tensor:
    """x [rows, K] int8 as the panels of gemm.h."""
    rows, inner = x.shape
    count = -(-rows // width)
    panels = torch.empty(count * width * -(-inner // DEPTH) * DEPTH, dtype=torch.int8, device="cpu")
    call = _library().narrowgauge_pack
    in_rows(
        count,
        x.numel(),
        lambda first, last: call(
            address(x), first, last, rows, inner, x.stride(0), x.stride(1), width, offset, address(panels)
        ),
    )
    return panels


def _rows(x: Tensor) -> Tensor:
    """x in a dtype that the kernels read, each row contiguous."""
    x = x if x.dtype in DTYPES else x.to(torch.float32)
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


@cache
def _library() -> ctypes.CDLL:
    found = library(
        "narrowgauge.ops.cpp", SOURCES, "the kernels of 4-bit products", "use the reference, which is slower"
    )
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, f"narrowgauge_{name}")
        function.argtypes, function.restype = arguments, None
    found.narrowgauge_has_gemm.restype = ctypes.c_int32
    return found
