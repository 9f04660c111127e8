"""What the Triton kernels of the ops share on NVIDIA GPUs, and in words why there are none. Kernels lie in the folder of their op.

    elements        rounding to a format: the conversion instruction where the GPU has one, the same in integer arithmetic elsewhere
    scales          from the largest magnitude of a tile to its scale, on the bits
    noise           the counter-based random numbers of `ops.random`
    cast_constants  what they are compiled with, worked out from a Cast
    launch          starting one, and what they take together: a matrix, one orientation of a result, the state of a window

Nothing here imports Triton until a kernel is wanted; a module that holds kernels imports it at its top and is imported last.

Kernels are compiled without contraction of products and sums (enable_fp_fusion=False) and divide with div.rn: the numbers are part
of the contract. Maxima are taken of the bits of |x| as integers, in which NaN is larger than infinity and infinity larger than
all numbers: NaN propagates by itself, and the NaN-propagating maximum beside a transposed 8-bit store that Triton miscompiled
(triton-lang/triton issue 11111) does not occur.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import cache
from importlib import metadata

import torch

from narrowgauge.addresses import dry_run_on
from narrowgauge.ops.registry import Device, Refusal, constant_while_compiling

OLDEST = (3, 6)  # what torch 2.11, the oldest that is supported, comes with
LEAST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what kernels read
FP8_CONVERSIONS = (8, 9)  # cvt.rn.satfinite.e4m3x2.f32 and its like; below, integer arithmetic
EVERYWHERE = (3, 9)  # before, Triton has float32 pass through float16 on 8.9, which rounds twice


def refuse(device: str, capability: tuple[int, int], in_operator: bool = False) -> Refusal | None:
    """Why Triton kernels cannot be used on a device of this type and compute capability, or None.

    in_operator  whether torch.compile sees an operator in their place (`ops.quantize.compiled`)
    """
    if torch.compiler.is_compiling() and not in_operator:
        return Refusal("compiling", "torch.compile fuses the reference itself")
    if device != "cuda":
        return Refusal("device", f"needs a CUDA device, the tensor is on {device}")
    if torch.version.hip is not None:
        return Refusal("capability", "written for NVIDIA GPUs")
    if capability < LEAST_CAPABILITY:
        return Refusal("capability", f"compute capability {_dotted(capability)}, needs {_dotted(LEAST_CAPABILITY)}")
    missing = "" if dry_run_on() is not None else unavailable()  # what that device's machine has is not known here
    return Refusal("toolchain", missing) if missing else None


def refuse_tensors(
    device: Device, dtypes: Iterable[torch.dtype], is_empty: bool, in_operator: bool = False
) -> Refusal | None:
    """As `refuse`, and why they do not read tensors of these types there, or have nothing to do."""
    if (refusal := refuse(device.type, device.capability, in_operator)) is not None:
        return refusal
    wrong = [dtype for dtype in dtypes if dtype not in DTYPES]
    if wrong:
        return Refusal("dtype", f"reads float32, bfloat16 and float16, not {wrong[0]}")
    return Refusal("shape", "there is nothing to compute") if is_empty else None


def has_conversions(capability: tuple[int, int]) -> bool:
    """Whether Triton compiles float32 -> FP8 for this compute capability to the one instruction, which rounds once."""
    return capability >= (FP8_CONVERSIONS if version() >= EVERYWHERE else (9, 0))


@constant_while_compiling
@cache
def unavailable() -> str:
    """Why Triton cannot be used here, or ''. Does not import it."""
    if not version():
        return "triton is not installed; torch's CUDA builds for Linux bring it"
    if version() < OLDEST:
        return f"triton is {metadata.version('triton')}, needs {_dotted(OLDEST)}"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "no C compiler is here, and triton builds what starts a kernel with one: install gcc, or name one in CC"
    return ""


@cache
def version() -> tuple[int, ...]:
    """(3, 6) of "3.6.0"; () where it is not installed."""
    try:
        return tuple(int(part) for part in metadata.version("triton").split(".")[:2])
    except metadata.PackageNotFoundError:
        return ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
