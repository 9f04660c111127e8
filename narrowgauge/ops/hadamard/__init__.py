"""rotate: the block-diagonal Hadamard rotation of a matrix along its last, contracted axis. unrotate: back.

    rotate(x)   = x diag(signs) H        H = BlockDiag(H_b, ..., H_b)
    unrotate(y) = y H diag(signs)        H is symmetric and its own inverse

H_b is Sylvester's matrix of order b = 2**k over sqrt(b):  H_b[i, j] = (-1) ** popcount(i & j) / sqrt(b).

Contract

    x        [outer, inner], any float dtype; filled up with zeros to whole blocks, so that nothing is left unrotated
    signs    [whole blocks of inner] of +1 and -1, or None; draw them once with `draw_signs` and give them to both operands
    ->       [outer, whole blocks of inner] float32; unrotate cuts the rest off again

A row whose energy sits in one element comes out with 1 / sqrt(b) of it in every element of the block: less range to cover,
hence a smaller step. The sums are float32; NaN and infinity spread over their block. Cost in plain torch: 2 b operations per
element, as one GEMM with a b x b matrix. With a compiler, on the CPU, log2 b butterflies per element and one pass over memory
(native-cpp); the two differ by the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import ShapeError
from narrowgauge.ops.cpp import int4 as cpp
from narrowgauge.ops.hadamard import definition
from narrowgauge.ops.registry import Device, Kernel, Registry, device_of
from narrowgauge.recipe import Hadamard

hadamard_matrix = definition.hadamard_matrix


class _InCpp:
    """The compiled kernel with the reference's functions."""

    @staticmethod
    def rotate(x: Tensor, block: int, signs: Tensor | None) -> Tensor:
        return cpp.turn(x, -(-x.shape[1] // block) * block, x.shape[1], block, signs, None, inverse=False)

    @staticmethod
    def unrotate(y: Tensor, block: int, inner: int, signs: Tensor | None, bits: Tensor | None) -> Tensor:
        return cpp.turn(y, y.shape[1], inner, block, signs, bits, inverse=True)


KERNELS: Registry[Device] = Registry("rotate")  # `run` is rotate, or unrotate with more arguments
KERNELS.register(
    Kernel("native-cpp", lambda device: cpp.refuse(device.type), lambda name, *given: getattr(_InCpp, name)(*given))
)
KERNELS.register(
    Kernel("reference", lambda device: None, lambda name, *given: getattr(definition, name)(*given), by_torch=True)
)


def rotated_length(inner: int, hadamard: Hadamard) -> int:
    """Length of the contracted axis after `rotate`: `inner` in whole blocks."""
    return -(-inner // hadamard.block) * hadamard.block


def draw_signs(hadamard: Hadamard, inner: int, device: torch.device) -> Tensor | None:
    """The signs for a contracted axis of `inner` elements: None, the fixed ones, or new ones from torch's generator."""
    if hadamard.signs == "none":
        return None
    length = rotated_length(inner, hadamard)
    if hadamard.signs == "fixed":
        return definition.fixed_signs(hadamard.block, device).repeat(length // hadamard.block)
    return torch.randint(0, 2, (length,), device=device, dtype=torch.float32) * 2 - 1


@torch.no_grad()
def rotate(x: Tensor, hadamard: Hadamard, signs: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x [outer, inner] -> [outer, whole blocks of inner] float32; see the module."""
    _check(x, signs, rotated_length(x.shape[-1], hadamard) if x.ndim == 2 else 0)
    return KERNELS.choose(device_of(x, signs), backend).kernel.run("rotate", x, hadamard.block, signs)


@torch.no_grad()
def unrotate(
    y: Tensor,
    hadamard: Hadamard,
    inner: int,
    signs: Tensor | None = None,
    bits: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """The inverse of `rotate` for an x of `inner` columns: y [outer, whole blocks] -> [outer, inner] float32.

    bits  uint8 [outer, ceil(whole blocks / 8)]: only elements of y whose bit is set enter (see `codes`); None: all
    """
    length = rotated_length(inner, hadamard)
    _check(y, signs, length)
    if y.shape[1] != length:
        raise ShapeError(
            f"unrotate: y is {list(y.shape)}; {inner} elements in blocks of {hadamard.block} are {length} columns."
        )
    return KERNELS.choose(device_of(y, signs, bits), backend).kernel.run(
        "unrotate", y, hadamard.block, inner, signs, bits
    )


def _check(x: Tensor, signs: Tensor | None, length: int) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ShapeError(
            f"rotate: x is {list(x.shape)} {x.dtype}; it must be a two-dimensional float tensor. "
            "Flatten the leading axes with x.flatten(0, -2)."
        )
    if signs is not None and tuple(signs.shape) != (length,):
        raise ShapeError(f"rotate: signs is {list(signs.shape)}, it must be [{length}]. Take it from draw_signs.")
