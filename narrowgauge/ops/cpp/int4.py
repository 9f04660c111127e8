"""The library of CPU kernels around a 4-bit GEMM and of the GEMM itself (int4.cpp, gemm.h).

Its functions are bound where their operators are: hadamard/cpp.py, mm/cpp.py; `uniform` of
ops/random.py here. They refuse under torch.compile, which cannot trace them and fuses the
definitions itself, and where no C++ compiler is installed (see `build`).
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p

import torch
from torch import Tensor

from narrowgauge.ops.cpp import Library

_P, _L, _I, _U, _F = c_void_p, c_int64, c_int32, c_uint32, c_float
_SIGNATURES = {
    "turn": (_P, _I, _L, _L, _L, _P, _P, _I, _I, _P),
    "encode": (_P, _L, _P, _F, _P, _P, _P),
    "turn_encode": (_P, _I, _L, _L, _L, _P, _I, _P, _F, _P, _P, _P, _P),
    "step_sums": (_P, _P, _P, _P, _L, _P),
    "decode": (_P, _L, _P),
    "uniform": (_U, _U, _P),
    "pack": (_P, _L, _L, _L, _L, _I, _I, _P),
    "gemm": (_P, _P, _L, _L, _L, _I, _I, _P, _I, _P, _I, _P),
}
LIBRARY = Library(
    ("int4.cpp", "butterflies.h", "gemm.h", "noise.h"), "the kernels of 4-bit products", _SIGNATURES
)
refuse = LIBRARY.refuse


def uniform(shape: tuple[int, ...], key: tuple[int, int]) -> Tensor:
    """Return float32 numbers in [0, 1) of `shape`: the noise of `key` (see `ops.random`)."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    LIBRARY.call("uniform", out.numel(), out.numel(), *key, out)
    return out
