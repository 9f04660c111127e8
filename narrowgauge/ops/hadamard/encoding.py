"""rotate_and_encode: what a 4-bit product reads, and what backward keeps of it, from one read of x, for a scale that is known.

    encode(rotate(x, hadamard, signs), scale, format)      see `ops.hadamard` and `ops.hadamard.codes`

In plain torch about twenty passes; by the Triton kernel one read and one write (triton), with codes that differ from the
reference's where the order of a sum decides between two neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats import Format, IntFormat
from narrowgauge.ops.hadamard import rotate, rotated_length
from narrowgauge.ops.hadamard.codes import Codes, encode
from narrowgauge.ops.hadamard.selfcheck import CHECK, Spec
from narrowgauge.ops.registry import Kernel, Refusal, Registry, device_facts, device_of
from narrowgauge.ops.triton import cast_constants
from narrowgauge.ops.triton import refuse as refuse_device
from narrowgauge.ops.triton.arguments import Matrix
from narrowgauge.ops.triton.launch import launch
from narrowgauge.recipe import Cast, Hadamard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_ORDER = 16  # what tensor cores contract: a NaN would reach the blocks that share a product with its own
LARGEST_ORDER = 64  # a matrix of 128 leaves too few registers for float32 cut in three
# 128 columns are runs of 256 bytes in 16 bits; 32 rows of them are 32 elements for each of 128 threads. Not measured yet on a GPU.
ROWS, COLUMNS, WARPS = 32, 128, 4


def refuse(spec: Spec) -> Refusal | None:
    """Why the Triton kernel does not do it, or None."""
    if (refusal := refuse_device(spec.device.type, spec.device.capability)) is not None:
        return refusal
    if not (isinstance(spec.format, IntFormat) and spec.format.bits == 4):
        return Refusal("format", f"encodes 4-bit integers, not {spec.format}")
    if not SMALLEST_ORDER <= spec.order <= LARGEST_ORDER:
        return Refusal("shape", f"rotates blocks of {SMALLEST_ORDER} to {LARGEST_ORDER}, not {spec.order}")
    if spec.dtype not in DTYPES:
        return Refusal("dtype", f"reads float32, bfloat16 and float16, not {spec.dtype}")
    return Refusal("shape", "there is nothing to round") if 0 in spec.shape else None


def in_triton(
    x: Tensor, hadamard: Hadamard, signs: Tensor | None, scale: Tensor, format: Format, packed: bool, bits: bool
) -> Codes:
    """See the module."""
    from narrowgauge.ops.hadamard import triton_kernel

    x = x.detach() if x.stride(1) == 1 or x.shape[1] == 1 else x.detach().contiguous()
    rows, columns = x.shape
    whole = rotated_length(columns, hadamard)

    def output(per_byte: int) -> Tensor:
        return torch.empty(rows, -(-whole // per_byte), dtype=torch.uint8, device=x.device)

    capability = device_facts(x.device.type, x.device.index).capability
    out = triton_kernel.Outputs(output(1), output(2) if packed else None, output(8) if bits else None)
    launch(
        triton_kernel.rotate_and_encode, -(-rows // ROWS) * -(-whole // COLUMNS), Matrix.of(x), signs, scale, out, whole,
        C=cast_constants.constants_of(Cast(format=format), capability), ORDER=hadamard.block,
        PIECES=3 if x.dtype == torch.float32 else 1, ROWS=ROWS, COLUMNS=COLUMNS, warps=WARPS,
    )  # fmt: skip
    return Codes(out.codes.view(format.storage), out.packed, out.bits)


def in_turn(
    x: Tensor, hadamard: Hadamard, signs: Tensor | None, scale: Tensor, format: Format, packed: bool, bits: bool
) -> Codes:
    return encode(rotate(x, hadamard, signs), scale, format, packed=packed, bits=bits)


KERNELS: Registry[Spec] = Registry("rotate_and_encode")
KERNELS.register(Kernel("triton", refuse, in_triton, check=lambda: CHECK))
KERNELS.register(Kernel("reference", lambda spec: None, in_turn, by_torch=True))


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
