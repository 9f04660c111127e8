"""The machine of a run: its device, how freed memory is kept, and where torch.compile and Triton keep what they built.

Both run what they find in their folders, and torch.compile unpickles it. Its default is a folder in the shared temporary folder, under
a name that anybody can take first. The C++ kernels of narrowgauge are kept in the user's own cache too (`narrowgauge.ops.cpp.build`).

Inductor's folder has the CPU's capability in its name: Inductor (2.13) finds a kernel again by its graph alone, and one made for AVX512
and met under ATEN_CPU_CAPABILITY=avx2 left half of its lanes unwritten.
"""

import ctypes
import gc
import re
import resource
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from narrowgauge import storage
from narrowgauge.diagnose.machine import c_compiler, cpp_compiler, processor_name, threads_words
from narrowgauge.errors import ConfigError
from narrowgauge.ops.cpp.build import cache_folder, user_cache

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux; "5" resets VmHWM
MAPS = Path("/proc/self/maps")
WORKSPACE, CUBLASLT_KIB = "CUBLASLT_WORKSPACE_SIZE", 32768


def chosen_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device if there is one, else the CPU. Raises ConfigError for one that is not here."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"device = {name!r}: must be one of 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        have = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device"
        raise ConfigError(f"device = {name!r}: PyTorch sees {have} here. Use --device auto or --device cpu.")
    return torch.device("cuda", device.index or 0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside the block torch has so many; 0: as before. What a run has in its settings: more wait for each other on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """ "NVIDIA H200" or "AMD EPYC, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {threads_words()}"


def peak_bytes(device: torch.device) -> int:
    """Most memory in use since `reset_peak`: allocated on the GPU, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = STATUS.read_text(encoding="utf-8") if STATUS.exists() else ""
    # Not ru_maxrss where VmHWM is known: it counts what the process was before it became Python.
    if found := re.search(r"VmHWM:\s*(\d+) kB", status):
        return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> bool:
    """Gives free memory back and begins the peak of `peak_bytes` anew; False where the system keeps that of the whole process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if trim := _of_glibc("malloc_trim"):
        trim(0)
    try:
        CLEAR_REFS.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def keep_freed_memory(asked: bool, device: torch.device, maps: Path = MAPS) -> str:
    """Asks glibc to keep what this process frees, instead of giving each large tensor back to the system; what became of it, a sentence.

    A step frees and allocates every gradient and activation anew. Each allocation above 32 MiB at most, and freed memory at
    the end of the heap, would be mapped again and zeroed page by page by the kernel: about a tenth of a small model's step.
    The setting is the process's and stays. Memory that is free between steps stays resident; the peak is what it was, but
    for what fragments. An allocator that was preloaded (jemalloc, tcmalloc, mimalloc) has settings of its own and is left alone.
    """
    if device.type != "cpu":
        return "Freed memory: torch's own allocator keeps it."
    if not asked:
        return "Freed memory: given back to the system as the C library has it, for keep_freed = false."
    mapped = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    if other := re.search(r"(jemalloc|tcmalloc|mimalloc)[^/\s]*\.so", mapped):
        return f"Freed memory: as {other[1]} has it, which is loaded in the place of the C library's allocator."
    mallopt = _of_glibc("mallopt")
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    if mallopt is None or not mallopt(mmap_max, 0) or not mallopt(trim_threshold, 2**31 - 1):
        return "Freed memory: as this system has it, whose C library is not glibc."
    return "Freed memory: kept for the next step (glibc: M_MMAP_MAX 0, M_TRIM_THRESHOLD 2 GiB)."


def _of_glibc(name: str) -> Any:
    """A function of the C library that glibc has; None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None  # musl has neither


def give_cublaslt_workspace(environment: MutableMapping[str, str], capability: tuple[int, int]) -> str:
    """Lets cuBLASLt take CUBLASLT_KIB on 9.x, instead of torch's 1 MiB; a sentence on what it takes.

    With more workspace it can choose from all of its kernels; NVIDIA recommends 32 MiB on Hopper. Call it before the first product:
    torch reads the variable once. One that is set already is respected.
    """
    if (own := environment.get(WORKSPACE)) is not None:
        return f"cuBLASLt's workspace: {own} KiB, as {WORKSPACE} says."
    if capability[0] != 9:
        return "cuBLASLt's workspace: torch's own."
    environment[WORKSPACE] = str(CUBLASLT_KIB)
    return f"cuBLASLt's workspace: {CUBLASLT_KIB >> 10} MiB of the GPU's memory ({WORKSPACE}={CUBLASLT_KIB})."


def refuse_without_compiler(device: torch.device) -> None:
    """ConfigError where torch.compile would fail in the first step for want of a compiler."""
    compiler = cpp_compiler() if device.type == "cpu" else c_compiler()
    if compiler is None:
        language, package, variable = ("C++", "g++", "CXX") if device.type == "cpu" else ("C", "gcc", "CC")
        raise ConfigError(
            f"compile = true: torch.compile needs a {language} compiler on {device.type}, and there is none. "
            f"Install {package}, name one in the variable {variable}, or train without --compile."
        )


def use_own_caches(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Sets the variables in `environment`, os.environ for this process; one that is set already is respected and checked.

    Yields a sentence for each folder that is not below the user's own cache.
    Raises ConfigError if others may write to a folder, whoever named it.
    """
    user, reason = user_cache()
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", f"inductor-{capability}"), ("TRITON_CACHE_DIR", "triton")):
        own = (cache_folder() if reason else user) / name
        folder = Path(environment.get(variable) or own)
        if shared := storage.refuse_shared(folder):
            raise ConfigError(
                f"{variable} = '{folder}': what is compiled is kept there and run from there, but {shared}. "
                f"Name a folder of your own with mode 0700, or unset {variable}."
            )
        environment[variable] = str(folder)
        if folder != own:
            yield f"compiled code is kept in {folder}, as {variable} says."
        elif reason:
            yield f"compiled code is kept for this run alone: {user} cannot be used, for {reason}."
