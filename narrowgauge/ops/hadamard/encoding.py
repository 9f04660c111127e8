"""rotate_and_encode: rotation and encoding of a 4-bit operand in one read of x, for a known scale.

    encode(rotate(x, hadamard, signs), scale, format)      see `ops.hadamard`

Outputs are the codes that the GEMM reads, and the packed codes and bits that are saved for
backward. Plain torch takes about twenty passes. The Triton kernel takes one read and one write; its
codes differ from the reference's where the order of a sum decides between two neighbouring codes.

Self-check of the kernel (see `ops.selfcheck`): a 40 x 300 matrix of normal numbers, with and
without a NaN, is rotated in float64 on the CPU. The kernel passes if

    |code - clip(y / scale)| <= 1/2 + 2**-10
    bits are |y / scale| <= max, except where |y / scale| is within 2**-10 of max
    packed holds the codes; NaN has code 0 and counts as clipped

Reason for 2**-10: float32 sums of 64 numbers are off by 64 * 2**-24 of their magnitudes, which are
a few units, i.e. below 2**-14 of the scale. Wrong signs or blocks are off by whole units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.formats import INT4, Format, IntFormat
from narrowgauge.ops.hadamard import (
    EncodedRows,
    encode,
    hadamard_matrix,
    rotate,
    rotated_length,
    unpack_bits,
)
from narrowgauge.ops.registry import Device, Kernel, Refusal, Registry, device_facts, device_of
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison
from narrowgauge.ops.triton import cast_constants, refuse_tensors
from narrowgauge.ops.triton.launch import Kernels, Matrix, launch
from narrowgauge.recipe import Cast, Hadamard

# Tensor cores contract 16: in smaller blocks a NaN would reach other blocks of the same
# instruction.
SMALLEST_ORDER = 16
# A matrix of 128 leaves too few registers for float32 in three bfloat16 parts: it spilled.
LARGEST_ORDER = 64
# 128 columns of 16-bit input are runs of 256 bytes; 32 rows are then 32 elements for each of 128
# threads. Not measured on a GPU.
ROWS, COLUMNS, WARPS = 32, 128, 4
triton_kernel = Kernels("narrowgauge.ops.hadamard.triton_kernel")


class Outputs(NamedTuple):
    """Outputs of the kernel.

    codes   uint8 [rows, whole]
    packed  uint8 [rows, whole / 2], or None: not written
    bits    uint8 [rows, ceil(whole / 8)], or None: not written
    """

    codes: Any
    packed: Any
    bits: Any


@dataclass(frozen=True)
class EncodingSpec:
    """Properties of a call that decide which kernel is chosen. order: matrix order b."""

    device: Device
    dtype: torch.dtype
    shape: tuple[int, int]
    order: int
    format: Format


def refuse(spec: EncodingSpec) -> Refusal | None:
    """Return the reason why the Triton kernel does not compute this, or None."""
    if (refusal := refuse_tensors(spec.device, (spec.dtype,), 0 in spec.shape)) is not None:
        return refusal
    if not (isinstance(spec.format, IntFormat) and spec.format.bits == 4):
        return Refusal("format", f"encodes 4-bit integers, not {spec.format}")
    if not SMALLEST_ORDER <= spec.order <= LARGEST_ORDER:
        return Refusal(
            "shape", f"rotates blocks of {SMALLEST_ORDER} to {LARGEST_ORDER}, not {spec.order}"
        )
    return None


def run_triton(
    x: Tensor,
    hadamard: Hadamard,
    signs: Tensor | None,
    scale: Tensor,
    format: Format,
    packed: bool,
    bits: bool,
) -> EncodedRows:
    """Launch the Triton kernel; see the module."""
    x = x.detach() if x.stride(1) == 1 or x.shape[1] == 1 else x.detach().contiguous()
    rows, columns = x.shape
    whole = rotated_length(columns, hadamard)

    def output(per_byte: int) -> Tensor:
        return torch.empty(rows, -(-whole // per_byte), dtype=torch.uint8, device=x.device)

    capability = device_facts(x.device.type, x.device.index).capability
    out = Outputs(output(1), output(2) if packed else None, output(8) if bits else None)
    launch(
        triton_kernel.rotate_and_encode, -(-rows // ROWS) * -(-whole // COLUMNS), Matrix.of(x), signs, scale, out, whole,
        C=cast_constants.constants_of(Cast(format=format), capability), ORDER=hadamard.block,
        PIECES=3 if x.dtype == torch.float32 else 1, ROWS=ROWS, COLUMNS=COLUMNS, warps=WARPS,
    )  # fmt: skip
    return EncodedRows(out.codes.view(format.storage), out.packed, out.bits)


def reference_rotate_and_encode(
    x: Tensor,
    hadamard: Hadamard,
    signs: Tensor | None,
    scale: Tensor,
    format: Format,
    packed: bool,
    bits: bool,
) -> EncodedRows:
    """Definition: `rotate` and then `encode`."""
    return encode(rotate(x, hadamard, signs), scale, format, packed=packed, bits=bits)


def rotation_is_fused(x: Tensor, hadamard: Hadamard, format: Format) -> bool:
    """Return True if a kernel rotates and encodes x in one pass.

    Otherwise there is no gain over `rotate`.
    """
    if torch.compiler.is_compiling() or x.ndim != 2:
        return False
    return KERNELS.choose(_spec(x, hadamard, format)).kernel.name != "reference"


def _spec(x: Tensor, hadamard: Hadamard, format: Format) -> EncodingSpec:
    return EncodingSpec(device_of(x), x.dtype, (x.shape[0], x.shape[1]), hadamard.block, format)


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
) -> EncodedRows:
    """Rotate and encode x [outer, inner] -> Codes of [outer, inner in whole blocks].

    signs  [inner in whole blocks] float32 or None, see `draw_signs`
    scale  [1, 1] float32
    """
    kernel = KERNELS.choose(_spec(x, hadamard, format), backend).kernel
    return kernel.run(x, hadamard, signs, scale, format, packed, bits)


# --- self-check

SAMPLE, SCALE, SLACK, SEED = (40, 300), 0.3, 2.0**-10, 20260613
LARGE = (2048, 4096)  # sample of `KernelCheck.large`
NAN_ROW, NAN_COLUMN = 17, 203
Kind = tuple[int, Format, torch.dtype]


def _compare(
    run: Callable[..., EncodedRows], kind: Kind, device: torch.device,
    shape: tuple[int, int] = SAMPLE,
) -> Iterator[OutputComparison]:  # fmt: skip
    order, format, dtype = kind
    hadamard = Hadamard(block=order, signs="random")
    whole, generator = rotated_length(shape[1], hadamard), torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (whole,), generator=generator, dtype=torch.float32) * 2 - 1
    matrix = hadamard_matrix(order, torch.device("cpu")).sign().to(torch.float64) * order**-0.5
    numbers = torch.randn(shape, generator=generator)
    for with_nan in (False, True):
        x = numbers.clone()
        if with_nan:
            x[NAN_ROW, NAN_COLUMN] = float("nan")
        x = x.to(dtype)
        scale = torch.full((1, 1), SCALE)
        got = run(x.to(device), hadamard, signs.to(device), scale.to(device), format, True, True)
        assert got.packed is not None and got.bits is not None
        filled = torch.nn.functional.pad(x.to(torch.float64), (0, whole - x.shape[1])) * signs
        ratio = (filled.reshape(-1, order) @ matrix).reshape(len(x), whole) / float(scale)
        bound = torch.where(ratio.isnan(), 0.0, 0.5 + SLACK)
        yield OutputComparison(
            "codes", got.codes, ratio.nan_to_num(nan=0.0).clamp(-format.max, format.max), bound
        )
        # Written with ~ and <= so that NaN is certain too: it counts as clipped.
        certain = ~((ratio.abs() - format.max).abs() <= SLACK)
        inside = unpack_bits(got.bits.to("cpu"), whole)
        yield OutputComparison(
            "bits of what was not clipped", inside & certain, (ratio.abs() <= format.max) & certain
        )
        yield OutputComparison("packed codes", got.packed, format.pack(got.codes.to("cpu")))


_EXAMPLES = [
    EncodingSpec(Device("cpu"), dtype, SAMPLE, order, INT4)
    for order in (16, 32, 64)
    for dtype in (torch.float32, torch.bfloat16)
]
CHECK: KernelCheck[EncodingSpec] = KernelCheck(
    lambda spec: (spec.order, spec.format, spec.dtype),
    _compare,
    lambda: _EXAMPLES,
    large=partial(_compare, shape=LARGE),
)
KERNELS: Registry[EncodingSpec] = Registry("rotate_and_encode")
KERNELS.register(Kernel("triton", refuse, run_triton, check=lambda: CHECK))
KERNELS.register(Kernel("reference", lambda spec: None, reference_rotate_and_encode, by_torch=True))
