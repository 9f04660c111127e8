"""The device of a run: chosen, named in words, and how much of its memory was used."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import torch
from torch import nn

from narrowgauge.conversion.description import describe
from narrowgauge.diagnose.machine import c_compiler, cpp_compiler, processor_name, threads_words
from narrowgauge.errors import ConfigError
from narrowgauge.optim import state_bytes


def chosen_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device if there is one, else the CPU. Raises ConfigError for one that is not here."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            have = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device"
            raise ConfigError(f"device = {name!r}: PyTorch sees {have} here. Use --device auto or --device cpu.")
        return torch.device("cuda", device.index or 0)
    return device


def keep_freed_memory() -> bool:
    """Asks glibc to keep what this process frees, instead of giving each large tensor back to the system; False elsewhere.

    A step frees and allocates every gradient and activation anew. Each allocation above 32 MiB at most, and freed memory at
    the end of the heap, would be mapped again and zeroed page by page by the kernel: about a tenth of a small model's step.
    The setting is the process's and stays. Memory that is free between steps stays resident; the peak is what it was, but
    for what fragments.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    return mallopt is not None and bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def refuse_without_compiler(device: torch.device) -> None:
    """ConfigError where torch.compile would fail in the first step for want of a compiler."""
    compiler = cpp_compiler() if device.type == "cpu" else c_compiler()
    if compiler is None:
        language, package = ("C++", "g++") if device.type == "cpu" else ("C", "gcc")
        raise ConfigError(
            f"compile = true: torch.compile needs a {language} compiler on {device.type}, and there is none. "
            f"Install {package}, name one in the variable {'CXX' if language == 'C++' else 'CC'}, or train without --compile."
        )


DRIVER = Path("/proc/driver/nvidia/version")


def unused_gpu(device: torch.device) -> str:
    """A sentence for a run on the CPU of a machine whose NVIDIA driver torch cannot use; '' otherwise."""
    if device.type != "cpu" or torch.cuda.is_available() or not DRIVER.exists():
        return ""
    words = DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0].partition(":")[2].strip()
    build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return (
        f"This runs on the CPU although there is an NVIDIA driver ({words}): torch {torch.__version__} is built {build} "
        "and sees no device. Install a torch for the driver's CUDA, or a newer driver."
    )


def emulated_on_gpu(model: nn.Module, device: torch.device) -> list[str]:
    """On a GPU, a sentence for each reason for which products run in 16 bits that a recipe wants narrow; [] on a CPU."""
    if device.type != "cuda":
        return []
    layers: dict[str, int] = {}
    for row in describe(model):
        if row.emulated:
            layers[f"{row.recipe}: {row.backend}"] = layers.get(f"{row.recipe}: {row.backend}", 0) + 1
    return [
        f"Not on narrow units, so no faster than bfloat16 ({count} layer{'s' if count > 1 else ''}): {words}."
        for words, count in layers.items()
    ]


def stepped_in_torch(optimizer: torch.optim.Optimizer) -> list[str]:
    """A sentence for each reason for which tensors are stepped in plain torch instead of by a kernel."""
    tensors: dict[str, int] = {}
    for row in state_bytes(optimizer).rows:
        if row.slow_because:
            tensors[row.slow_because] = tensors.get(row.slow_because, 0) + row.tensors
    return [
        f"The optimizer steps {count} tensors in plain torch, several times slower than its kernel: {why}."
        for why, count in tensors.items()
    ]


def device_name(device: torch.device) -> str:
    """ "NVIDIA H200" or "AMD EPYC, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {threads_words()}"


def peak_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the GPU, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
