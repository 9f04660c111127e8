"""Kernels around a 4-bit GEMM: Hadamard rotation and encoding with a known scale.

The rotation is block-diagonal. `unrotate` and `decode` are the inverses.

    rotate(x)     = x diag(signs) H        H = BlockDiag(H_b, ..., H_b)
    unrotate(y)   = y H diag(signs)        H is symmetric and its own inverse;
                                           elements of y with a zero bit count as 0
    encode(y)     codes  = round(clip(r, -max, max)), ties to even; r = y * (1 / scale)
                  packed = the codes as the format stores them
                  bits   = |r| <= max, i.e. the element was not clipped
    decode(packed) = codes

H_b is Sylvester's matrix of order b = 2**k, divided by sqrt(b):

    H_b[i, j] = (-1) ** popcount(i & j) / sqrt(b)

Contract

    x        [outer, inner], any float dtype; padded with zeros to whole blocks, so every element is
             rotated
    signs    [inner in whole blocks] of +1 and -1, or None; draw them once with `draw_signs`, for
             both operands
    ->       [outer, inner in whole blocks] float32; unrotate removes the padding
    y        [outer, n], any float dtype; NaN gets code 0 and counts as clipped (the scale is NaN
             and carries it)
    scale    [1, 1] float32
    format   INT4 or another IntFormat with codes of at most 8 bits
    codes    int8, one per byte, as an integer GEMM reads them
    packed   two codes per byte, the first in the low nibble; a view of the codes for formats of
             more than 4 bits
    bits     eight per byte, the first in the lowest bit

A row whose energy is concentrated in one element is spread over its block: every element gets 1 /
sqrt(b) times that element. The range shrinks, and with it the step size. Sums are float32; NaN and
infinity spread over their block.

Cost in plain torch: a rotation takes log2 b passes of butterflies on the CPU, and encoding about ten
passes. With a C++ compiler (native-cpp) each takes one pass over memory, with the same butterflies:
the results are bit-identical. On a GPU and in compiled code a rotation is one GEMM with a b x b
matrix, 2 b operations per element, which differs by the order of summation. Kernels that rotate and
cast have the order of the butterflies (`casting`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import ShapeError
from narrowgauge.ops.cpp import int4
from narrowgauge.ops.hadamard import cpp, definition
from narrowgauge.ops.hadamard.definition import EncodedRows, hadamard_matrix, unpack_bits
from narrowgauge.ops.registry import Device, Kernel, Registry, device_of, facts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from narrowgauge.formats import Format
    from narrowgauge.ops.random import Stream
    from narrowgauge.recipe import Hadamard

__all__ = [
    "KERNELS", "EncodedRows", "Functions", "decode", "draw_signs", "encode", "hadamard_matrix", "plan",
    "rotate", "rotated_length", "unpack_bits", "unrotate",
]  # fmt: skip


class Functions(NamedTuple):
    """The functions of a kernel. They check no arguments; the module docstring has their meaning.

    rotate_encode  (x, block, signs, scale, format, packed, bits, residual) -> (codes, packed, bits,
                   residual) of rotate and encode in one pass. residual: codes - rotate(x) / scale,
                   float32, zero where clipped
    step_sums      (d, codes, bits, residual), d [outer, n] float32, residual None or as above -> two
                   sums, 0-d float32: of d codes over clipped elements, of d residual over all

    A tuple and not the module that defines them: plans are copied and pickled.
    """

    rotate: Callable[[Tensor, int, Tensor | None], Tensor]
    unrotate: Callable[[Tensor, int, int, Tensor | None, Tensor | None], Tensor]
    encode: Callable[
        [Tensor, Tensor, Format, bool, bool], tuple[Tensor, Tensor | None, Tensor | None]
    ]
    decode: Callable[[Tensor, Format, int], Tensor]
    rotate_encode: Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]
    step_sums: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


_CPP = Functions(cpp.rotate, cpp.unrotate, cpp.encode, cpp.decode, cpp.rotate_encode, cpp.step_sums)
_DEFINITION = Functions(
    definition.rotate, definition.unrotate, definition.encode, definition.decode,
    definition.rotate_encode, definition.step_sums,
)  # fmt: skip
# `run` of a kernel returns its functions: one choice serves all.
KERNELS: Registry[Device] = Registry("hadamard")
KERNELS.register(Kernel("native-cpp", lambda device: int4.refuse(device.type), lambda: _CPP))
KERNELS.register(Kernel("reference", lambda device: None, lambda: _DEFINITION, by_torch=True))


def plan(device: torch.device, hidden_by: str = "") -> Functions:
    """Choose the kernel for tensors on `device`.

    hidden_by  kind of wrapper that hides their memory, see `addresses.wrapper`
    """
    functions: Functions = KERNELS.choose(facts_of(device, hidden_by)).kernel.run()
    return functions


def _functions(backend: str | None, *tensors: Tensor | None) -> Functions:
    """Choose the kernel for one call with these tensors; the first is given."""
    first, *others = tensors
    assert first is not None
    functions: Functions = KERNELS.choose(device_of(first, *others), backend).kernel.run()
    return functions


def rotated_length(inner: int, hadamard: Hadamard | None) -> int:
    """Return the length after `rotate`: `inner` rounded up to whole blocks."""
    return inner if hadamard is None else -(-inner // hadamard.block) * hadamard.block


def draw_signs(
    hadamard: Hadamard,
    inner: int,
    device: torch.device,
    stream: Stream | None = None,
    product: str = "",
) -> Tensor | None:
    """Return the signs for a contracted axis of `inner` elements.

    They are None, the fixed ones, or new ones from torch's generator or the stream.
    """
    if hadamard.signs == "none":
        return None
    length = rotated_length(inner, hadamard)
    if hadamard.signs == "fixed":
        # A view of signs for a power of two of blocks: few lengths are cached, and nothing is copied.
        blocks = 1 << (max(length // hadamard.block, 1) - 1).bit_length()
        return definition.fixed_signs(hadamard.block, device, blocks)[:length]
    if stream is not None:
        return (stream.key(product, "signs").uniform((length,)).to(device) < 0.5) * 2.0 - 1.0
    return torch.randint(0, 2, (length,), device=device, dtype=torch.float32) * 2 - 1


@torch.no_grad()
def rotate(
    x: Tensor, hadamard: Hadamard, signs: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Rotate x [outer, inner] -> [outer, inner in whole blocks] float32; see the module.

    One round: of a rotation of two, `nn.rotation` calls it with the signs of each.
    """
    _check(x, signs, rotated_length(x.shape[-1], hadamard) if x.ndim == 2 else 0)
    return _functions(backend, x, signs).rotate(x, hadamard.block, signs)


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
    """Invert `rotate` for an x of `inner` columns: y [outer, n] -> [outer, inner] float32.

    y         n is `inner` rounded up to whole blocks
    hadamard  None: no rotation is undone, so only the bits apply
    bits      uint8 [outer, ceil(n / 8)]; elements of y whose bit is zero count as 0. None: all
              count
    """
    length = rotated_length(inner, hadamard)
    _check(y, signs, length)
    # A block of 1 is the identity, so kernels need no second entry point for bits alone.
    block = 1 if hadamard is None else hadamard.block
    if y.shape[1] != length:
        raise ShapeError(
            f"unrotate: y is {list(y.shape)}; {inner} elements in blocks of {block} are {length} columns.",
            code="unrotate.columns",
        )
    return _functions(backend, y, signs, bits).unrotate(y, block, inner, signs, bits)


def _check(x: Tensor, signs: Tensor | None, length: int) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ShapeError(
            f"rotate: x is {list(x.shape)} {x.dtype}; it must be a two-dimensional float tensor. "
            "Flatten the leading axes with x.flatten(0, -2).",
            code="rotate.shape",
        )
    if signs is not None and tuple(signs.shape) != (length,):
        raise ShapeError(
            f"rotate: signs is {list(signs.shape)}, it must be [{length}]. Take it from draw_signs.",
            code="rotate.signs",
        )


@torch.no_grad()
def encode(
    y: Tensor,
    scale: Tensor,
    format: Format,
    *,
    packed: bool = False,
    bits: bool = False,
    backend: str | None = None,
) -> EncodedRows:
    """Encode y [outer, n]. `packed` and `bits` are None unless they are requested."""
    return EncodedRows(*_functions(backend, y, scale).encode(y, scale, format, packed, bits))


@torch.no_grad()
def decode(packed: Tensor, format: Format, length: int) -> Tensor:
    """Return the int8 codes [outer, length] of packed codes."""
    return _functions(None, packed).decode(packed, format, length)
