"""The compiled CPU backend: step.cpp, built once per machine (see `ops.cpp.build`).

Plain C++ in a shared library has four advantages over torch.compile. One library serves all shapes,
formats and rules. It builds in seconds. It is bit-identical to the definition in `step`, while
Inductor may contract and reorder. It can be cached: in $XDG_CACHE_HOME/narrowgauge
(~/.cache/narrowgauge), with a name made of the source, the flags, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from narrowgauge.addresses import address, dry_run_on
from narrowgauge.errors import BackendError
from narrowgauge.ops.cpp import build, parts
from narrowgauge.ops.cpp.threads import on_threads
from narrowgauge.optim import masters, rules
from narrowgauge.optim.step import DTYPES, MomentState, ParamStep

if TYPE_CHECKING:
    from narrowgauge.optim.rules import Rule

SOURCES = ("step.cpp", "floats.h", "vectors.h")
_P, _L, _I, _U, _F = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_float,
)
_CONSTANTS = (
    "decay",
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "eps",
    "step_size",
    "correction",
    "bound",
    "lag",
    "lag_of_decay",
)


class _Moment(ctypes.Structure):
    _fields_ = (
        ("codes", _P),
        ("scale", _P),
        ("expansion", _P),
        ("kind", _I),
        ("lowest", _I),
        ("highest", _I),
    )


class _Constants(ctypes.Structure):
    _fields_ = (*((name, _F) for name in _CONSTANTS), ("rule", _I), ("nesterov", _I))


class _Job(ctypes.Structure):
    _fields_ = (
        ("rows", _L), ("columns", _L), ("tile", _L), ("row_length", _L), ("first_index", _L), ("weight_dtype", _I),
        ("gradient_dtype", _I), ("master_kind", _I), ("noise", _U), ("weight_noise", _U), ("constants", _P), ("weight", _P),
        ("gradient", _P), ("master", _P), ("master_scale", _P), ("first", _Moment), ("second", _Moment),
    )  # fmt: skip


_ARGUMENTS = (ctypes.POINTER(_Job), _L, _L)  # of narrowgauge_step, after `first` and `last`


@cache
def refuse() -> str:
    """Reason why the compiled backend is unavailable, or ''. A failed build is not tried again."""
    try:
        _library()
    except BackendError as error:
        return str(error)
    return ""


def _number(rule: Rule) -> int:
    """Number of the rule in step.cpp.

    Raises BackendError if step.cpp has no branch for it, or another one than the rule describes.
    """
    number = rules.number(rule)
    flags = _library().narrowgauge_rule(number)
    if flags < 0:
        raise BackendError(
            f"optim: step.cpp has no branch for rule {rule.name!r} with kernel = {number}.",
            code="optim.kernel-rule",
        )
    if flags != rule.draws_first + 2 * rule.lags:
        raise BackendError(
            f"optim: DRAWS and LAGS of rule {rule.name!r} in step.cpp are not its draws_first and lags.",
            code="optim.kernel-rule",
        )
    return number


def step(param_steps: Sequence[ParamStep]) -> None:
    """Compute all steps, on as many threads as torch uses.

    Raises BackendError if there is no compiler.
    """
    if dry_run_on() is not None:
        return
    library = _library()
    param_steps = [each for each in param_steps if each.elements]
    shared: dict[int, _Constants] = {}
    jobs = (_Job * len(param_steps))(*(_job(each, shared) for each in param_steps))
    count = parts(sum(each.elements for each in param_steps))
    given = (jobs, len(param_steps), count)
    if count == 1:
        library.narrowgauge_step(0, 1, *given)
    elif (run := _on_threads()) is not None:
        run(count, count, ctypes.addressof(jobs), *given[1:])
    else:
        build.in_shares(count, lambda k: library.narrowgauge_step(k, k + 1, *given))


def _job(param_step: ParamStep, shared: dict[int, _Constants]) -> _Job:
    """Return the C struct of a step.

    The constant part is built once and cached in `param_step.native`. `shared` keeps the constants
    alive during the call.
    """
    if param_step.native is None:
        rows, columns = param_step.weight.shape
        param_step.native = _Job(
            rows=rows, columns=columns, tile=param_step.tile, row_length=param_step.part.row_length(param_step.tile),
            first_index=param_step.first_index, weight=address(param_step.weight),
            weight_dtype=DTYPES[param_step.weight.dtype], master_kind=masters.KINDS[param_step.master_kind],
            master=address(param_step.master), master_scale=address(param_step.master_scale),
            first=_moment(param_step.first), second=_moment(param_step.second),
        )  # fmt: skip
    job, c, gradient = param_step.native, param_step.constants, param_step.gradient
    assert c is not None and gradient is not None
    constants = shared.get(id(c))
    if constants is None:
        numbers = (getattr(c, name) for name in _CONSTANTS)
        constants = shared[id(c)] = _Constants(*numbers, _number(param_step.rule), c.nesterov)
    job.gradient, job.gradient_dtype = address(gradient), DTYPES[gradient.dtype]
    job.noise, job.constants = param_step.noise_key, ctypes.addressof(constants)
    # The key costs a hash per parameter and step, so it is computed only if the weight draws noise.
    if param_step.master_kind is not None:
        job.weight_noise = param_step.weight_noise_key
    return job


def _moment(kept: MomentState) -> _Moment:
    format, memory = kept.format, map(address, (kept.codes, kept.scale, kept.expansion))
    return _Moment(*memory, format.kind, format.lowest, format.highest)


@cache
def _on_threads() -> Callable[..., None] | None:
    return on_threads(_library().narrowgauge_step, _ARGUMENTS)


@cache
def _library() -> ctypes.CDLL:
    library = build.library(
        "narrowgauge.optim.cpp", SOURCES, "the fused step", 'take backend="torch"'
    )
    library.narrowgauge_step.argtypes = (_L, _L, *_ARGUMENTS)
    library.narrowgauge_step.restype = None
    library.narrowgauge_job_bytes.restype = library.narrowgauge_rule.restype = _L
    library.narrowgauge_rule.argtypes = (_L,)
    # Both sides declare the struct, so its sizes must agree.
    assert library.narrowgauge_job_bytes() == ctypes.sizeof(_Job)
    return library
