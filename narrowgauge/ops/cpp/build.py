"""C++ kernels for the CPU, built once per machine by the compiler that is there, and called with ctypes.

A library is kept in $XDG_CACHE_HOME/narrowgauge (~/.cache/narrowgauge), which no other user may write to, under a name made
of its sources, the flags, the compiler and the processor, and of its own bytes: a file that was damaged is never loaded, which
could end the process, but built anew.
Threads are Python's: a ctypes call releases the interpreter lock, and each thread takes its share.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from narrowgauge.errors import BackendError, StorageError
from narrowgauge.storage import reading, refuse_shared

# No contraction and no -ffast-math: the numbers are part of the contract. Without errno and traps square roots vectorize.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
BUILT = reading.Kind(most_bytes=256 * reading.MIB, error=StorageError, step="Remove it.", only_own=True)
ELEMENTS_PER_THREAD = 1 << 16  # below it a thread costs more than it saves


def library(package: str, sources: tuple[str, ...], purpose: str, instead: str) -> ctypes.CDLL:
    """Loads the library of `sources`, files in `package` of which the first is compiled and the others are included; builds it if need be.

    purpose, instead  for the errors: "optim: ... to build the fused step", and what to do without a compiler
    Raises BackendError if there is no compiler, or it fails, or what it built cannot be loaded.
    """
    compiler, subject = compiler_name(), package.rpartition(".")[2]
    path = shutil.which(compiler)
    if path is None:
        raise BackendError(
            f"{subject}: no C++ compiler {compiler!r} is here to build {purpose}. Install g++, name one in the variable "
            f"CXX, or {instead}."
        )
    folder = resources.files(package)
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in sources}
    name = hashlib.sha256("\0".join((*texts.values(), *FLAGS, path, _processor())).encode()).hexdigest()[:32]
    place = cache_folder()
    target = next(filter(is_whole, sorted(place.glob(f"{subject}-{name}-*.so"))), None)
    if target is None:
        target, words = _build(path, texts, place, f"{subject}-{name}")
        if target is None:
            raise BackendError(
                f"{subject}: {compiler} could not build {purpose}: {words}. Name another compiler in the variable CXX "
                f"or another folder in XDG_CACHE_HOME, or {instead}."
            )
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:  # a folder from which nothing may be run, for one
        raise BackendError(
            f"{subject}: {purpose} cannot be loaded: {error}. Name another folder in the variable XDG_CACHE_HOME, or {instead}."
        ) from error


def is_whole(path: Path) -> bool:
    """Whether a library has the bytes that it was built with."""
    try:
        return path.stem.rpartition("-")[2] == digest(reading.bytes_of(path, BUILT))
    except StorageError:
        return False


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def compiler_name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def parts(elements: int) -> int:
    """Into how many threads' shares the work on so many elements is worth cutting."""
    return max(1, min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD))


def in_shares(count: int, run: Callable[[int], object]) -> None:
    """run(0) ... run(count - 1), each on a thread; the first on this one. Errors reach the caller.

    When it ends, by an error or Ctrl-C too, no thread is at work any more: the memory it writes to may be given away.
    """
    if count == 1:
        run(0)
        return
    shares: list[Future[object]] = []
    try:
        for k in range(1, count):  # one by one: those that began are waited for where the next cannot
            shares.append(_pool(count - 1).submit(run, k))
        run(0)
    finally:
        _wait_for(shares)
    for share in shares:
        share.result()


def _wait_for(shares: list[Future[object]]) -> None:
    try:
        wait(shares)
    except KeyboardInterrupt:  # a share takes milliseconds
        _wait_for(shares)
        raise


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="narrowgauge")


if hasattr(os, "register_at_fork"):  # a forked process has the pools and none of their threads: it would wait for ever
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _build(compiler: str, texts: dict[str, str], place: Path, name: str) -> tuple[Path | None, str]:
    """Compiles in `place` and renames, so that two processes may do it at once. Returns the library, or why there is none."""
    try:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            code, built = Path(folder) / next(iter(texts)), Path(folder) / "kernel.so"
            for file, source in texts.items():
                (Path(folder) / file).write_text(source, encoding="utf-8")
            for tuning in TUNINGS:
                command = [compiler, *FLAGS, *tuning, str(code), "-o", str(built)]
                found = subprocess.run(command, capture_output=True, encoding="utf-8")
                if found.returncode == 0:
                    built.chmod(0o700)  # whatever the umask: `is_whole` refuses what others may write to
                    target = place / f"{name}-{digest(reading.bytes_of(built, BUILT))}.so"
                    built.replace(target)
                    return target, ""
    except OSError as error:
        return None, f"{error.strerror or error}: {place}"
    words = found.stderr.strip().splitlines()
    return None, words[0] if words else "no message"


def cache_folder() -> Path:
    """Where things are kept; a folder for this process alone where `user_cache` gives a reason."""
    folder, reason = user_cache()
    return Path(_private_folder().name) if reason else folder


def user_cache() -> tuple[Path, str]:
    """$XDG_CACHE_HOME/narrowgauge, made if need be; and why it cannot be used, a clause, or ''."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"
    except RuntimeError:
        return Path(), "the user has no home"
    return folder, refuse_shared(folder) or ("" if os.access(folder, os.W_OK) else "it cannot be written")


@cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="narrowgauge-")


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine() + platform.processor() + platform.node()
    kinds = ("flags", "Features", "model name", "cpu family", "model\t")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(kinds)}))
