"""The compiled backend on the CPU: step.cpp, built once per machine (see `compiled`).

Plain C++ in a shared library and not torch.compile, because one library serves all shapes, formats and rules, builds in
seconds, computes the same bits as the definition in `update` (Inductor may contract and reorder), and can be kept: in
$XDG_CACHE_HOME/narrowgauge (~/.cache/narrowgauge), under a name made of the source, the flags, the compiler and the processor.
Threads are Python's: a ctypes call releases the interpreter lock, and each thread takes its share of the tiles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from narrowgauge.addresses import address
from narrowgauge.errors import BackendError
from narrowgauge.ops.cpp import build
from narrowgauge.optim import masters, rules
from narrowgauge.optim.moments import SmallFloat
from narrowgauge.optim.step import MomentState, ParamStep

SOURCES = ("step.cpp", "floats.h", "vectors.h")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Moment(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("expansion", ctypes.c_void_p),
        ("kind", ctypes.c_int32), ("lowest", ctypes.c_int32), ("highest", ctypes.c_int32),
    )  # fmt: skip


class _Constants(ctypes.Structure):
    _fields_ = (
        ("decay", ctypes.c_float), ("beta1", ctypes.c_float), ("one_minus_beta1", ctypes.c_float), ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float), ("eps", ctypes.c_float), ("step_size", ctypes.c_float), ("correction", ctypes.c_float),
        ("bound", ctypes.c_float), ("rule", ctypes.c_int32), ("nesterov", ctypes.c_int32),
    )  # fmt: skip


class _Job(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("tile", ctypes.c_int64),
        ("weight_dtype", ctypes.c_int32), ("gradient_dtype", ctypes.c_int32), ("master_kind", ctypes.c_int32),
        ("noise", ctypes.c_uint32), ("weight_noise", ctypes.c_uint32), ("constants", ctypes.c_void_p),
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


def step(tasks: Sequence[ParamStep]) -> None:
    """All tasks, on as many threads as torch uses. Raises BackendError if there is no compiler."""
    library = _library()
    tasks = [task for task in tasks if task.elements]
    shared: dict[int, _Constants] = {}
    jobs = (_Job * len(tasks))(*(_job(task, shared) for task in tasks))
    elements = sum(task.elements for task in tasks)
    count = build.parts(elements)
    build.in_shares(count, lambda k: library.narrowgauge_step(jobs, len(tasks), k, count))


def _job(task: ParamStep, shared: dict[int, _Constants]) -> _Job:
    """The task as the library reads it. What stays the same from step to step is made once; `shared` keeps the constants."""
    if task.native is None:
        task.native = _standing(task)
    job, c, gradient = task.native, task.constants, task.gradient
    assert c is not None and gradient is not None
    constants = shared.get(id(c))
    if constants is None:
        constants = shared[id(c)] = _constants(c, rules.number(task.rule))
    job.gradient, job.gradient_dtype = address(gradient), _DTYPES[gradient.dtype]
    job.noise, job.constants = task.noise_key, ctypes.addressof(constants)
    if task.master_kind is not None:
        job.weight_noise = task.weight_noise_key
    return job


def _constants(c: rules.Constants, rule: int) -> _Constants:
    return _Constants(
        c.decay, c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2, c.eps, c.step_size, c.correction, c.bound, rule,
        c.nesterov,
    )  # fmt: skip


def _standing(task: ParamStep) -> _Job:
    rows, columns = task.weight.shape
    return _Job(
        rows=rows, columns=columns, tile=task.tile, weight=address(task.weight), weight_dtype=_DTYPES[task.weight.dtype],
        master_kind=masters.KINDS[task.master_kind], master=address(task.master), master_scale=address(task.master_scale),
        first=_moment(task.first), second=_moment(task.second),
    )  # fmt: skip


def _moment(kept: MomentState) -> _Moment:
    format = kept.format
    lowest, highest = (format.expansions if isinstance(format, SmallFloat) else None) or (0, 0)
    return _Moment(
        address(kept.codes), address(kept.scale), address(kept.expansion), format.kind, lowest, highest
    )  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    library = build.library("narrowgauge.optim.cpp", SOURCES, "the fused step", 'take backend="torch"')
    library.narrowgauge_step.argtypes = (ctypes.POINTER(_Job), ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    library.narrowgauge_step.restype = None
    library.narrowgauge_job_bytes.restype = ctypes.c_int64
    assert library.narrowgauge_job_bytes() == ctypes.sizeof(_Job)
    return library
