"""The machine of a run: device, threads, peak memory, allocator, folders for compiled code.

torch.compile and Triton execute the files in their cache folders, and torch.compile unpickles some.
torch.compile's default folder lies in the shared temporary folder, under a predictable name that
any user can create first. `use_own_caches` therefore moves both into the user's own cache. The C++
kernels of narrowgauge are cached there too (`narrowgauge.ops.cpp.build`).
"""

from __future__ import annotations

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
from narrowgauge.conversion.measure import processor_name
from narrowgauge.diagnose.machine import c_compiler, cpp_compiler, threads_words
from narrowgauge.errors import ConfigError, Reason
from narrowgauge.ops.cpp.build import cache_folder, user_cache
from narrowgauge.ops.mm.spec import OTHER_GPUS
from narrowgauge.ops.triton.grids import leave_multiprocessors_free, multiprocessors

# Linux only; writing "5" to clear_refs resets VmHWM
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MAPS = Path("/proc/self/maps")
WORKSPACE, CUBLASLT_KIB = "CUBLASLT_WORKSPACE_SIZE", 32768


def chosen_device(name: str) -> torch.device:
    """Parses the setting `device`. "auto" is the first CUDA device, or the CPU if there is none.

    Raises ConfigError for a device that is not present.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        why = OTHER_GPUS.get(name.partition(":")[0])
        raise ConfigError(
            f"device = {name!r}: must be one of 'auto', 'cpu', 'cuda' or 'cuda:N'"
            + (f"; {why}." if why else "."),
            code="device.name",
        )
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        have = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device"
        raise ConfigError(
            f"device = {name!r}: PyTorch sees {have} here. Use --device auto or --device cpu.",
            code="device.missing",
        )
    return torch.device("cuda", device.index or 0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads inside the block; 0 changes nothing.

    Use the run's setting: on busy cores, more threads wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leave_free(count: int, device: torch.device) -> None:
    """Applies the setting `device.free_multiprocessors` to the process.

    Raises ConfigError on a CPU, and if no multiprocessor is left for casts.
    """
    present = multiprocessors(device.index) if device.type == "cuda" else 0
    if count and count >= present:
        have = f"{device} has {present} multiprocessors" if present else f"{device} has none"
        raise ConfigError(
            f"device.free_multiprocessors = {count}: {have}, and casts need one. "
            + (f"Pass at most {present - 1}." if present else "Leave it out."),
            code="device.free-multiprocessors",
        )
    if present:
        leave_multiprocessors_free(count, device)


def device_name(device: torch.device) -> str:
    """Name of the device, such as "NVIDIA H200" or "AMD EPYC, 2 threads"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {threads_words()}"


def peak_bytes(device: torch.device) -> int:
    """Peak memory since `reset_peak`: allocated on a GPU, resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = STATUS.read_text(encoding="utf-8") if STATUS.exists() else ""
    # Prefer VmHWM to ru_maxrss, which includes the memory of the process before it executed Python.
    if found := re.search(r"VmHWM:\s*(\d+) kB", status):
        return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> bool:
    """Frees unused memory and restarts the peak of `peak_bytes`.

    Returns False if the system cannot reset it.
    """
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
    """Makes glibc keep freed memory for the next step. Returns a sentence on the result.

    A step frees and allocates every gradient and activation. By default glibc returns each
    allocation above at most 32 MiB, and free memory at the end of the heap, to the kernel. The
    kernel then maps and zeroes these pages again, which costs about a tenth of a small model's
    step.

    The setting applies to the whole process and is never undone. Memory that is free between steps
    stays resident. The peak is unchanged except for fragmentation. A preloaded allocator (jemalloc,
    tcmalloc, mimalloc) has its own settings and is left alone.
    """
    if device.type != "cpu":
        return "Freed memory: torch's own allocator keeps it."
    if not asked:
        return "Freed memory: given back to the system as the C library has it, for memory.keep_freed = false."
    mapped = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    if other := re.search(r"(jemalloc|tcmalloc|mimalloc)[^/\s]*\.so", mapped):
        return f"Freed memory: as {other[1]} has it, which is loaded in the place of the C library's allocator."
    mallopt = _of_glibc("mallopt")
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h
    if mallopt is None or not mallopt(mmap_max, 0) or not mallopt(trim_threshold, 2**31 - 1):
        return "Freed memory: as this system has it, whose C library is not glibc."
    return "Freed memory: kept for the next step (glibc: M_MMAP_MAX 0, M_TRIM_THRESHOLD 2 GiB)."


def _of_glibc(name: str) -> Any:
    """A function of glibc; None on other C libraries."""
    # musl lacks mallopt and malloc_trim
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def give_cublaslt_workspace(
    environment: MutableMapping[str, str], capability: tuple[int, int]
) -> str:
    """Gives cuBLASLt a workspace of CUBLASLT_KIB on compute capability 9.x. Returns a sentence.

    torch's default is 1 MiB.

    With more workspace cuBLASLt can choose among all of its kernels. NVIDIA recommends 32 MiB on
    Hopper. Call this before the first matmul: torch reads the variable once. A value that the user
    has set is kept.
    """
    if (own := environment.get(WORKSPACE)) is not None:
        return f"cuBLASLt's workspace: {own} KiB, as {WORKSPACE} says."
    if capability[0] != 9:
        return "cuBLASLt's workspace: torch's own."
    environment[WORKSPACE] = str(CUBLASLT_KIB)
    return f"cuBLASLt's workspace: {CUBLASLT_KIB >> 10} MiB of the GPU's memory ({WORKSPACE}={CUBLASLT_KIB})."


def refuse_without_compiler(device: torch.device) -> None:
    """Raises ConfigError if torch.compile lacks a compiler, and would fail in the first step."""
    compiler = cpp_compiler() if device.type == "cpu" else c_compiler()
    if compiler is None:
        language, package, variable = (
            ("C++", "g++", "CXX") if device.type == "cpu" else ("C", "gcc", "CC")
        )
        raise ConfigError(
            f"device.compile = true: torch.compile needs a {language} compiler on {device.type}, and there is none. "
            f"Install {package}, name one in the variable {variable}, or train without --device.compile.",
            code="compile.no-compiler",
        )


def use_own_caches(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Sets cache folders for Inductor and Triton in `environment`.

    environment  os.environ, for this process

    A folder that the user has set is kept and checked. Yields a sentence for each folder outside
    the user's own cache. Raises ConfigError if other users may write to a folder.
    """
    user, reason = user_cache()
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    # The name of Inductor's folder includes the CPU capability. Inductor (2.13) looks kernels up by
    # their graph alone: one built for AVX512 and reused under ATEN_CPU_CAPABILITY=avx2 left half of
    # its lanes unwritten.
    for variable, name in (
        ("TORCHINDUCTOR_CACHE_DIR", f"inductor-{capability}"),
        ("TRITON_CACHE_DIR", "triton"),
    ):
        own = (cache_folder() if reason else user) / name
        folder = Path(environment.get(variable) or own)
        if shared := storage.refuse_shared(folder):
            raise ConfigError(
                f"{variable} = '{folder}': what is compiled is kept there and run from there, but {shared}. "
                f"Name a folder of your own with mode 0700, or unset {variable}.",
                code="compile.unsafe-folder",
            )
        environment[variable] = str(folder)
        if folder != own:
            yield Reason(
                "compile.named-folder", f"compiled code is kept in {folder}, as {variable} says."
            )
        elif reason:
            yield Reason(
                "compile.own-folder",
                f"compiled code is kept for this run alone: {user} cannot be used, for {reason}.",
            )
