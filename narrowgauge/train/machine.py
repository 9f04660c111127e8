"""The device of a run: chosen, named in words, and how much of its memory was used."""

from __future__ import annotations

import resource
import sys

import torch

from narrowgauge.diagnose.hardware import c_compiler, cpp_compiler, processor_name
from narrowgauge.errors import ConfigError


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


def refuse_without_compiler(device: torch.device) -> None:
    """ConfigError where torch.compile would fail in the first step for want of a compiler."""
    compiler = cpp_compiler() if device.type == "cpu" else c_compiler()
    if compiler is None:
        language, package = ("C++", "g++") if device.type == "cpu" else ("C", "gcc")
        raise ConfigError(
            f"compile = true: torch.compile needs a {language} compiler on {device.type}, and there is none. "
            f"Install {package}, name one in the variable {'CXX' if language == 'C++' else 'CC'}, or train without --compile."
        )


def device_words(device: torch.device) -> str:
    """ "NVIDIA H200" or "AMD EPYC, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def peak_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the GPU, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
