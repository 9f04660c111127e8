"""The compiled backend on the CPU: kernel.cpp, built once per machine by the C++ compiler that is there, called with ctypes.

Plain C++ in a shared library and not torch.compile, because one library serves all shapes, formats and rules, builds in
seconds, computes the same bits as the definition in `update` (Inductor may contract and reorder), and can be kept: in
$XDG_CACHE_HOME/narrowgauge (~/.cache/narrowgauge), under a name made of the source, the flags, the compiler and the processor.
Threads are Python's: a ctypes call releases the interpreter lock, and each thread takes its share of the tiles.
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
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from narrowgauge.errors import BackendError
from narrowgauge.optim import masters, rules
from narrowgauge.optim.moments import SmallFloat
from narrowgauge.optim.update import Kept, Task

# No contraction and no -ffast-math: the numbers are part of the contract. Without errno and traps square roots vectorize.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
SOURCES = ("kernel.cpp", "kernel_floats.h", "kernel_avx2.h")
ELEMENTS_PER_THREAD = 1 << 16  # below it a thread costs more than it saves

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Moment(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("expansion", ctypes.c_void_p),
        ("kind", ctypes.c_int32), ("is_signed", ctypes.c_int32), ("lowest", ctypes.c_int32), ("highest", ctypes.c_int32),
    )  # fmt: skip


class _Job(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("tile", ctypes.c_int64),
        ("rule", ctypes.c_int32), ("nesterov", ctypes.c_int32), ("weight_dtype", ctypes.c_int32),
        ("gradient_dtype", ctypes.c_int32), ("master_kind", ctypes.c_int32),
        ("noise", ctypes.c_uint32), ("weight_noise", ctypes.c_uint32),
        ("decay", ctypes.c_float), ("beta1", ctypes.c_float), ("rest1", ctypes.c_float), ("beta2", ctypes.c_float),
        ("rest2", ctypes.c_float), ("eps", ctypes.c_float), ("step_size", ctypes.c_float), ("correction", ctypes.c_float),
        ("weight", ctypes.c_void_p), ("gradient", ctypes.c_void_p), ("master", ctypes.c_void_p),
        ("master_scale", ctypes.c_void_p), ("first", _Moment), ("second", _Moment),
    )  # fmt: skip


def refuse() -> str:
    """Why the compiled backend cannot be used here, or ''."""
    try:
        _library()
    except BackendError as error:
        return str(error)
    return ""


@cache
def tell_once(reason: str) -> None:
    """That the slow backend is in use, and why."""
    warnings.warn(
        f"narrowgauge.optim steps in plain torch, several times slower: {reason}", RuntimeWarning, stacklevel=2
    )


def step(tasks: Sequence[Task]) -> None:
    """All tasks, on as many threads as torch uses. Raises BackendError if there is no compiler."""
    library = _library()
    tasks = [task for task in tasks if task.weight.numel()]
    jobs = (_Job * len(tasks))(*map(_job, tasks))
    elements = sum(task.weight.numel() for task in tasks)
    parts = max(1, min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD))
    if parts == 1:
        library.narrowgauge_step(jobs, len(tasks), 0, 1)
        return
    shares = [_pool(parts - 1).submit(library.narrowgauge_step, jobs, len(tasks), k, parts) for k in range(1, parts)]
    library.narrowgauge_step(jobs, len(tasks), 0, parts)
    for share in shares:
        share.result()


def _job(task: Task) -> _Job:
    """The task as the library reads it. What stays the same from step to step is made once."""
    if task.native is None:
        task.native = _standing(task)
    job, c, gradient = task.native, task.constants, task.gradient
    assert c is not None and gradient is not None
    job.gradient, job.gradient_dtype = gradient.data_ptr(), _DTYPES[gradient.dtype]
    job.noise, job.weight_noise = task.noise_key, task.weight_noise_key
    job.rule, job.nesterov, job.decay, job.eps = rules.KINDS[c.rule], c.nesterov, c.decay, c.eps
    job.beta1, job.rest1, job.beta2, job.rest2 = c.beta1, c.rest1, c.beta2, c.rest2
    job.step_size, job.correction = c.step_size, c.correction
    return job


def _standing(task: Task) -> _Job:
    rows, columns = task.weight.shape
    return _Job(
        rows=rows, columns=columns, tile=task.tile, weight=task.weight.data_ptr(), weight_dtype=_DTYPES[task.weight.dtype],
        master_kind=masters.KINDS[task.master_kind], master=_pointer(task.master), master_scale=_pointer(task.master_scale),
        first=_moment(task.first), second=_moment(task.second),
    )  # fmt: skip


def _moment(kept: Kept) -> _Moment:
    format = kept.format
    signed = isinstance(format, SmallFloat) and format.signed
    lowest, highest = (format.expansions if isinstance(format, SmallFloat) else None) or (0, 0)
    return _Moment(
        _pointer(kept.codes), _pointer(kept.scale), _pointer(kept.expansion), format.kind, signed, lowest, highest
    )  # fmt: skip


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="narrowgauge-optim")


@cache
def _library() -> ctypes.CDLL:
    compiler = compiler_name()
    path = shutil.which(compiler)
    if path is None:
        raise BackendError(
            f"optim: no C++ compiler {compiler!r} is here to build the fused step. Install g++, name one in the variable CXX, "
            'or take backend="torch".'
        )
    folder = resources.files("narrowgauge.optim")
    sources = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES}
    name = hashlib.sha256("\0".join((*sources.values(), *FLAGS, path, _processor())).encode()).hexdigest()[:32]
    target = _folder() / f"optim-{name}.so"
    if not target.exists():
        _build(path, sources, target)
    library = ctypes.CDLL(str(target))
    library.narrowgauge_step.argtypes = (ctypes.POINTER(_Job), ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    library.narrowgauge_step.restype = None
    library.narrowgauge_job_bytes.restype = ctypes.c_int64
    assert library.narrowgauge_job_bytes() == ctypes.sizeof(_Job)
    return library


def compiler_name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _build(compiler: str, sources: dict[str, str], target: Path) -> None:
    """Compiles next to the target and renames, so that two processes may do it at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        code, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        for name, source in sources.items():
            (Path(folder) / name).write_text(source, encoding="utf-8")
        for tuning in TUNINGS:
            found = subprocess.run(
                [compiler, *FLAGS, *tuning, str(code), "-o", str(built)], capture_output=True, encoding="utf-8"
            )
            if found.returncode == 0:
                built.replace(target)
                return
    words = found.stderr.strip().splitlines()
    raise BackendError(
        f"optim: {compiler} could not build the fused step: {words[0] if words else 'no message'}. "
        'Name another compiler in the variable CXX, or take backend="torch".'
    )


def _folder() -> Path:
    """Where libraries are kept; a folder for this process alone if that cannot be written or belongs to someone else."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid == os.getuid() and os.access(root, os.W_OK):
            return root
    except OSError:
        pass
    return Path(_private_folder().name)


@cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="narrowgauge-")


def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        known = {
            line for line in lines if line.startswith(("flags", "Features", "model name", "cpu family", "model\t"))
        }
        return platform.machine() + "".join(sorted(known))
    return platform.machine() + platform.processor() + platform.node()
