"""rotate_and_encode: what a 4-bit product reads, and what backward keeps of it, from one read of x, for a scale that is known.

    encode(rotate(x, hadamard, signs), scale, format)      see `ops.hadamard` and `ops.hadamard.codes`

In plain torch about twenty passes; by the Triton kernel one read and one write (triton), with codes that differ from the
reference's where the order of a sum decides between two neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.formats import Format, IntFormat
from narrowgauge.ops import selfcheck
from narrowgauge.ops.hadamard import rotate
from narrowgauge.ops.hadamard import selfcheck as proof
from narrowgauge.ops.hadamard.codes import Codes, encode
from narrowgauge.ops.registry import Device, Kernel, Registry, device_facts, device_of
from narrowgauge.ops.triton import cast_constants
from narrowgauge.ops.triton import refuse as refuse_device
from narrowgauge.recipe import Cast, Hadamard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_ORDER = 64  # a matrix of 128 leaves too few registers for float32 cut in three


@dataclass(frozen=True)
class Spec:
    """What a kernel is chosen by."""

    device: Device
    dtype: torch.dtype
    shape: tuple[int, int]
    order: int
    format: Format


def refuse(spec: Spec) -> str | None:
    """Why the Triton kernel does not do it, or None."""
    reason = refuse_device(spec.device.type, spec.device.capability)
    if reason is None and not (isinstance(spec.format, IntFormat) and spec.format.bits == 4):
        reason = f"encodes 4-bit integers, not {spec.format}"
    if reason is None and spec.order > LARGEST_ORDER:
        reason = f"rotates blocks of at most {LARGEST_ORDER}, not {spec.order}"
    if reason is None and spec.dtype not in DTYPES:
        reason = f"reads float32, bfloat16 and float16, not {spec.dtype}"
    if reason is None and 0 in spec.shape:
        reason = "there is nothing to round"
    return reason


def _refuse_or_fail(spec: Spec) -> str | None:
    """As `refuse`, and where the kernel fails its proof on the device at hand."""
    reason = refuse(spec)
    if reason is not None or spec.device.index is None:
        return reason
    return selfcheck.once(
        "rotate_and_encode", "triton", (spec.order, spec.format, spec.dtype), spec.device.type, spec.device.index,
        lambda device: proof.compare(_in_triton, spec.order, spec.format, spec.dtype, device),
    )  # fmt: skip


def _in_triton(
    x: Tensor, hadamard: Hadamard, signs: Tensor | None, scale: Tensor, format: Format, packed: bool, bits: bool
) -> Codes:
    from narrowgauge.ops.hadamard import triton_launch

    capability = device_facts(x.device.type, x.device.index).capability
    constants = cast_constants.constants_of(Cast(format=format), capability)
    codes, pairs, inside = triton_launch.rotate_and_encode(
        x.detach(), hadamard.block, signs, scale, constants, packed, bits
    )
    return Codes(codes.view(format.storage), pairs, inside)


def _in_turn(
    x: Tensor, hadamard: Hadamard, signs: Tensor | None, scale: Tensor, format: Format, packed: bool, bits: bool
) -> Codes:
    return encode(rotate(x, hadamard, signs), scale, format, packed=packed, bits=bits)


KERNELS: Registry[Spec] = Registry("rotate_and_encode")
KERNELS.register(Kernel("triton", _refuse_or_fail, _in_triton))
KERNELS.register(Kernel("reference", lambda spec: None, _in_turn, by_torch=True))


def in_one_pass(x: Tensor, hadamard: Hadamard, format: Format) -> bool:
    """Whether a kernel rotates and encodes in one pass over x; else there is no gain over `rotate`."""
    if torch.compiler.is_compiling() or x.ndim != 2:
        return False
    return KERNELS.choose(_spec(x, hadamard, format)).kernel.name != "reference"


def _spec(x: Tensor, hadamard: Hadamard, format: Format) -> Spec:
    return Spec(device_of(x), x.dtype, (x.shape[0], x.shape[1]), hadamard.block, format)


@torch.no_grad()
def rotate_and_encode(
    x: Tensor,
    hadamard: Hadamard,
    signs: Tensor | None,
    scale: Tensor,
    format: Format,
    *,
    packed: bool = False,
    bits: bool = False,
    backend: str | None = None,
) -> Codes:
    """x [outer, inner] float -> Codes of the rotated matrix [outer, whole blocks of inner]; see the module.

    signs  [whole blocks of inner] float32 or None, see `draw_signs`; scale [1, 1] float32
    """
    kernel = KERNELS.choose(_spec(x, hadamard, format), backend).kernel
    return kernel.run(x, hadamard, signs, scale, format, packed, bits)
