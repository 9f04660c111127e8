"""Shared parts of the Triton kernels for NVIDIA GPUs, and the reasons why Triton is unavailable.

    elements        rounding to a format: the GPU's conversion instruction, or the same in integer
                    arithmetic
    scales          from the largest magnitude of a tile to its scale, on the bits
    noise           the counter-based random numbers of `ops.random`
    cast_constants  compile-time constants, computed from a Cast
    launch          starting a kernel, and its structured arguments: a matrix, one orientation of a
                    result, an amax state
    replay          recorded launches
    workspaces      counters and maxima that kernels leave zero
    grids           cooperative grids: why none is launched, and multiprocessors that they leave free

Kernels are in the folder of their operator. No module here imports Triton before a kernel is
needed. A module with kernels imports Triton at its top, and is imported last.

Kernels are compiled without contraction of products and sums (enable_fp_fusion=False) and divide
with div.rn, because results must be bit-identical to the definitions.

Maxima are taken over the bits of |x| as integers, in which NaN > infinity > all numbers. NaN
therefore propagates by itself. This also avoids a bug of Triton: it miscompiled the NaN-propagating
maximum beside a transposed 8-bit store (triton-lang/triton issue 11111).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from functools import cache
from importlib import metadata

import torch

from narrowgauge.addresses import dry_run_on
from narrowgauge.errors import SlowerWarning, warn
from narrowgauge.ops.registry import Device, Refusal, constant_while_compiling

OLDEST = (3, 6)  # Triton of torch 2.11, the oldest supported version
LEAST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # input dtypes of the kernels
# cvt.rn.satfinite.e4m3x2.f32 and similar; older GPUs take integer arithmetic.
FP8_CONVERSIONS = (8, 9)
# Older Triton leaves out the fence (fence.proxy.async) between asynchronous copies to shared memory and
# products that read it there: its pull request 9610, which 3.7.1 took over (10537).
FENCES_COPIES = (3, 7, 1)
READ_SHARED_MEMORY = (9, 10)  # major capabilities whose products (wgmma, tcgen05) do
EVERYWHERE = (3, 9)  # older Triton converts float32 by way of float16 on 8.9, which rounds twice


def refuse(device: str, capability: tuple[int, int], in_operator: bool = False) -> Refusal | None:
    """Return the reason why Triton kernels cannot run on such a device, or None.

    in_operator  True if torch.compile sees an operator in their place (`ops.quantize.compiled`)
    """
    if torch.compiler.is_compiling() and not in_operator:
        return Refusal("compiling", "torch.compile fuses the reference itself")
    if device != "cuda":
        return Refusal("device", f"needs a CUDA device, the tensor is on {device}")
    if torch.version.hip is not None:
        return Refusal("capability", "written for NVIDIA GPUs")
    if capability < LEAST_CAPABILITY:
        return Refusal(
            "capability",
            f"compute capability {_dotted(capability)}, needs {_dotted(LEAST_CAPABILITY)}",
        )
    # The software of a pretended device's machine is unknown.
    missing = "" if dry_run_on() is not None else unavailable()
    return Refusal("toolchain", missing) if missing else None


def refuse_tensors(
    device: Device, dtypes: Iterable[torch.dtype], is_empty: bool, in_operator: bool = False
) -> Refusal | None:
    """Like `refuse`, and also refuse unsupported dtypes and empty tensors."""
    if (refusal := refuse(device.type, device.capability, in_operator)) is not None:
        return refusal
    wrong = [dtype for dtype in dtypes if dtype not in DTYPES]
    if wrong:
        return Refusal("dtype", f"reads float32, bfloat16 and float16, not {wrong[0]}")
    return Refusal("shape", "there is nothing to compute") if is_empty else None


def has_conversions(capability: tuple[int, int]) -> bool:
    """Return True if Triton compiles float32 -> FP8 to the instruction that rounds once."""
    return capability >= (FP8_CONVERSIONS if version() >= EVERYWHERE else (9, 0))


def stages(wanted: int, capability: tuple[int, int]) -> int:
    """Return how many stages of loads a kernel with products may have in flight: `wanted`, or 1.

    With one stage loads pass through registers, which every Triton orders. Warns once.
    """
    return 1 if capability[0] in READ_SHARED_MEMORY and _races() else wanted


@constant_while_compiling
@cache
def _races() -> bool:
    if not version():
        return False
    whole = metadata.version("triton")
    # "3.8.0rc1" and "3.8.0+git1" are 3.8.0.
    if tuple(map(int, re.findall(r"\d+", whole)[:3])) >= FENCES_COPIES:
        return False
    warn(
        f"Triton {whole} does not order copies before products on compute capability 9.0 and 10.x: results could be "
        f"wrong. FP8 products load in one stage there, which is right and slower. Install triton>={_dotted(FENCES_COPIES)}.",
        code="triton.one-stage",
        stacklevel=2,
        category=SlowerWarning,
    )
    return True


@constant_while_compiling
@cache
def unavailable() -> str:
    """Return the reason why Triton is unavailable, or ''. Does not import Triton."""
    if not version():
        return "triton is not installed; torch's CUDA builds for Linux bring it"
    if version() < OLDEST:
        return f"triton is {metadata.version('triton')}, needs {_dotted(OLDEST)}"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "no C compiler is here, and triton builds what starts a kernel with one: install gcc, or name one in CC"
    return ""


@cache
def version() -> tuple[int, ...]:
    """Return (3, 6) for "3.6.0", or () if Triton is not installed."""
    try:
        return tuple(int(part) for part in metadata.version("triton").split(".")[:2])
    except metadata.PackageNotFoundError:
        return ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
