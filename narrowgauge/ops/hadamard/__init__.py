"""The passes around a 4-bit product: a block-diagonal Hadamard rotation, and codes for a scale that is known; and back.

    rotate(x)     = x diag(signs) H        H = BlockDiag(H_b, ..., H_b)
    unrotate(y)   = y H diag(signs)        H is symmetric and its own inverse; y where its bits are set, else 0, if bits are given
    encode(y)       codes = round(clip(r, -max, max)), ties to even     int8, one to a byte: what an integer GEMM reads; r = y * (1 / scale)
                    packed                                              two to a byte, the first in the low nibble
                    bits = |r| <= max                                   what was not clipped, eight to a byte, the first lowest
    decode(packed)  the codes

H_b is Sylvester's matrix of order b = 2**k over sqrt(b):  H_b[i, j] = (-1) ** popcount(i & j) / sqrt(b).

Contract

    x        [outer, inner], any float dtype; filled up with zeros to whole blocks, so that nothing is left unrotated
    signs    [whole blocks of inner] of +1 and -1, or None; draw them once with `draw_signs` and give them to both operands
    ->       [outer, whole blocks of inner] float32; unrotate cuts the rest off again
    y        [outer, n], any float dtype; NaN becomes code 0 and counts as clipped (its scale is NaN and carries it)
    scale    [1, 1] float32
    format   INT4 or another IntFormat with codes of 8 bits at most; of more than 4 bits `packed` is a view of the codes

A row whose energy sits in one element comes out with 1 / sqrt(b) of it in every element of the block: less range to cover,
hence a smaller step. The sums are float32; NaN and infinity spread over their block. Cost of a rotation in plain torch: 2 b operations
per element, as one GEMM with a b x b matrix; of codes about ten passes. With a compiler, on the CPU (native-cpp): one pass over memory
each, with log2 b butterflies per element; the two rotations differ by the order of summation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ShapeError
from narrowgauge.formats import Format
from narrowgauge.ops.cpp import int4
from narrowgauge.ops.hadamard import cpp, definition
from narrowgauge.ops.hadamard.definition import Codes, hadamard_matrix, unpack_bits
from narrowgauge.ops.random import Stream
from narrowgauge.ops.registry import Device, Kernel, Registry, device_of
from narrowgauge.recipe import Hadamard

__all__ = [
    "KERNELS", "Codes", "decode", "draw_signs", "encode", "hadamard_matrix", "rotate", "rotated_length", "unpack_bits", "unrotate",
]  # fmt: skip


def _by_name(functions: ModuleType) -> Any:
    """(name, its arguments) -> what that function of the module gives."""
    return lambda name, *given: getattr(functions, name)(*given)


KERNELS: Registry[Device] = Registry("hadamard")
KERNELS.register(Kernel("native-cpp", lambda device: int4.refuse(device.type), _by_name(cpp)))
KERNELS.register(Kernel("reference", lambda device: None, _by_name(definition), by_torch=True))


def rotated_length(inner: int, hadamard: Hadamard | None) -> int:
    """Length of the contracted axis after `rotate`: `inner` in whole blocks."""
    return inner if hadamard is None else -(-inner // hadamard.block) * hadamard.block


def draw_signs(
    hadamard: Hadamard, inner: int, device: torch.device, stream: Stream | None = None, product: str = ""
) -> Tensor | None:
    """The signs for a contracted axis of `inner` elements: None, the fixed ones, or new ones from torch's generator or a stream."""
    if hadamard.signs == "none":
        return None
    length = rotated_length(inner, hadamard)
    if hadamard.signs == "fixed":
        return definition.fixed_signs(hadamard.block, device).repeat(length // hadamard.block)
    if stream is not None:
        return (stream.key(product, "signs").uniform((length,)).to(device) < 0.5) * 2.0 - 1.0
    return torch.randint(0, 2, (length,), device=device, dtype=torch.float32) * 2 - 1


@torch.no_grad()
def rotate(x: Tensor, hadamard: Hadamard, signs: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x [outer, inner] -> [outer, whole blocks of inner] float32; see the module."""
    _check(x, signs, rotated_length(x.shape[-1], hadamard) if x.ndim == 2 else 0)
    return KERNELS.choose(device_of(x, signs), backend).kernel.run("rotate", x, hadamard.block, signs)


@torch.no_grad()
def unrotate(
    y: Tensor,
    hadamard: Hadamard | None,
    inner: int,
    signs: Tensor | None = None,
    bits: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """The inverse of `rotate` for an x of `inner` columns: y [outer, whole blocks] -> [outer, inner] float32.

    hadamard  None: nothing was rotated, and bits alone count
    bits      uint8 [outer, ceil(whole blocks / 8)]: only elements of y whose bit is set enter; None: all
    """
    length = rotated_length(inner, hadamard)
    _check(y, signs, length)
    block = 1 if hadamard is None else hadamard.block
    if y.shape[1] != length:
        raise ShapeError(f"unrotate: y is {list(y.shape)}; {inner} elements in blocks of {block} are {length} columns.")
    kernel = KERNELS.choose(device_of(y, signs, bits), backend).kernel
    return kernel.run("unrotate", y, block, inner, signs, bits)


def _check(x: Tensor, signs: Tensor | None, length: int) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ShapeError(
            f"rotate: x is {list(x.shape)} {x.dtype}; it must be a two-dimensional float tensor. "
            "Flatten the leading axes with x.flatten(0, -2)."
        )
    if signs is not None and tuple(signs.shape) != (length,):
        raise ShapeError(f"rotate: signs is {list(signs.shape)}, it must be [{length}]. Take it from draw_signs.")


@torch.no_grad()
def encode(
    y: Tensor, scale: Tensor, format: Format, *, packed: bool = False, bits: bool = False, backend: str | None = None
) -> Codes:
    """y [outer, n] -> Codes, of which `packed` and `bits` only if they are asked for."""
    kernel = KERNELS.choose(device_of(y, scale), backend).kernel
    return Codes(*kernel.run("encode", y, scale, format, packed, bits))


@torch.no_grad()
def decode(packed: Tensor, format: Format, length: int) -> Tensor:
    """packed -> int8 codes [outer, length]."""
    return KERNELS.choose(device_of(packed)).kernel.run("decode", packed, format, length)
