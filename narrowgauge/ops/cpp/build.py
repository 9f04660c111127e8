"""Load C++ kernels for the CPU with ctypes: those of the wheel (prebuilt.py), else built here.

Each library is built once per machine, with the installed compiler.

A library that was built is cached in $XDG_CACHE_HOME/narrowgauge (default ~/.cache/narrowgauge), which no other
user may write to. Its file name contains a hash of the sources, the flags, the compiler and the
processor, and a hash of the library's own bytes. Loading a damaged library could end the process,
so a file whose bytes do not match its name is rebuilt.

Threads are Python threads: a ctypes call releases the GIL, and each thread computes its share of
the rows.
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

from narrowgauge.errors import BackendError, StorageError
from narrowgauge.ops.cpp import prebuilt
from narrowgauge.ops.cpp.prebuilt import FLAGS, digest
from narrowgauge.storage import reading, refuse_shared

TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # the first one that the compiler accepts
BUILT = reading.Kind(
    most_bytes=256 * reading.MIB, error=StorageError, step="Remove it.", only_own=True
)
# Whoever installed the package owns its libraries, as he owns its Python files.
CARRIED = reading.Kind(most_bytes=256 * reading.MIB, error=StorageError, step="Install it again.")


def library(package: str, sources: tuple[str, ...], purpose: str, instead: str) -> ctypes.CDLL:
    """Load the library of `sources`: the wheel's, or a cached one, or one that is built now.

    package    Python package that contains the sources
    sources    file names; the first is compiled, the others are included by it
    purpose    text for error messages, as in "optim: ... to build the fused step"
    instead    text for error messages: the alternative without a compiler

    Raises BackendError if there is no compiler, if it fails, or if the result cannot be loaded.
    """
    folder = resources.files(package)
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in sources}
    found = carried(Path(str(folder)), sources[0], texts)
    if found is not None:
        return found
    compiler, subject = compiler_name(), package.rpartition(".")[2]
    path = shutil.which(compiler)
    if path is None:
        raise BackendError(
            f"{subject}: no C++ compiler {compiler!r} is here to build {purpose}. Install g++, name one in the variable "
            f"CXX, or {instead}.",
            code="compiler.missing",
        )
    name = hashlib.sha256(
        "\0".join((*texts.values(), *FLAGS, path, _processor())).encode()
    ).hexdigest()[:32]
    place = cache_folder()
    target = next(filter(is_whole, sorted(place.glob(f"{subject}-{name}-*.so"))), None)
    if target is None:
        target, words = _build(path, texts, place, f"{subject}-{name}")
        if target is None:
            raise BackendError(
                f"{subject}: {compiler} could not build {purpose}: {words}. Name another compiler in the variable CXX "
                f"or another folder in XDG_CACHE_HOME, or {instead}.",
                code="compiler.failed",
            )
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:  # for example, a file system that is mounted noexec
        raise BackendError(
            f"{subject}: {purpose} cannot be loaded: {error}. Name another folder in the variable XDG_CACHE_HOME, or {instead}.",
            code="compiler.unloadable",
        ) from error


def origin_of_kernels(compiler: str | None) -> str:
    """Where casts, 4-bit products and optimizer steps on the CPU come from, as a sentence."""
    if level := prebuilt.carried_level():
        return f"those of the wheel, compiled for {level}."
    if compiler:
        return f"compiled by {compiler} when they are first used, and kept in {cache_folder()}."
    return (
        "none. Training works in plain torch, with the same numbers: casts and optimizer steps take "
        "several times as long. Install g++, or a wheel that carries kernels (make wheel)."
    )


def carried(folder: Path, source: str, texts: dict[str, str]) -> ctypes.CDLL | None:
    """Load the library that the wheel carries for this processor; None if there is none."""
    for path in prebuilt.candidates(folder, source, texts):
        if is_whole(path, CARRIED):
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # e.g. mounted noexec; one that is built lies in another folder
                continue
    return None


def is_whole(path: Path, kind: reading.Kind = BUILT) -> bool:
    """Return True if the file still has the bytes that were written when it was built."""
    try:
        return path.stem.rpartition("-")[2] == digest(reading.bytes_of(path, kind))
    except StorageError:
        return False


def compiler_name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def has_compiler() -> bool:
    return shutil.which(compiler_name()) is not None


def in_shares(count: int, run: Callable[[int], object]) -> None:
    """Call run(0) ... run(count - 1), one per thread; run(0) uses the calling thread.

    Errors reach the caller.

    No thread is running when this function returns or raises, Ctrl-C included, because the caller
    may free the memory that the threads write to.
    """
    if count == 1:
        run(0)
        return
    shares: list[Future[object]] = []
    try:
        # One by one, so that `finally` waits for those that started even if a later submit fails.
        for k in range(1, count):
            shares.append(_pool(count - 1).submit(run, k))
        run(0)
    finally:
        _wait_for(shares)
    for share in shares:
        share.result()


def _wait_for(shares: list[Future[object]]) -> None:
    try:
        wait(shares)
    except KeyboardInterrupt:  # a share takes milliseconds, so wait on before raising
        _wait_for(shares)
        raise


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="narrowgauge")


# A forked child inherits the pools but none of their threads, and would wait for ever.
if hasattr(
    os, "register_at_fork"
):  # a forked process has the pools and none of their threads: it would wait for ever
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _build(compiler: str, texts: dict[str, str], place: Path, name: str) -> tuple[Path | None, str]:
    """Compile in `place`. Returns (library, "") or (None, reason).

    The result is renamed into place, so two processes may build it at the same time.
    """
    try:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            code, built = Path(folder) / next(iter(texts)), Path(folder) / "kernel.so"
            for file, source in texts.items():
                (Path(folder) / file).write_text(source, encoding="utf-8")
            for tuning in TUNINGS:
                command = [compiler, *FLAGS, *tuning, str(code), "-o", str(built)]
                found = subprocess.run(
                    command, capture_output=True, encoding="utf-8", errors="replace"
                )
                if found.returncode == 0:
                    # Explicit, whatever the umask: `is_whole` refuses files that others may write
                    # to.
                    built.chmod(0o700)
                    target = place / f"{name}-{digest(reading.bytes_of(built, BUILT))}.so"
                    built.replace(target)
                    return target, ""
    except OSError as error:
        return None, f"{error.strerror or error}: {place}"
    words = found.stderr.strip().splitlines()
    return None, words[0] if words else "no message"


def cache_folder() -> Path:
    """Return the user's cache folder, or a temporary one if `user_cache` reports a problem."""
    folder, reason = user_cache()
    return Path(_private_folder().name) if reason else folder


def user_cache() -> tuple[Path, str]:
    """Return ($XDG_CACHE_HOME/narrowgauge, reason why it cannot be used or '').

    The folder is created if necessary.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"
    except RuntimeError:
        return Path(), "the user has no home"
    return folder, refuse_shared(folder) or (
        "" if os.access(folder, os.W_OK) else "it cannot be written"
    )


@cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="narrowgauge-")


def _processor() -> str:
    """Return the properties of the processor that -march=native depends on, as one string."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine() + platform.processor() + platform.node()
    kinds = ("flags", "Features", "model name", "cpu family", "model\t")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(kinds)}))
