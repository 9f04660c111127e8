"""Run C++ kernels on torch's own threads (threads.cpp): those of the OpenMP runtime that torch has loaded.

`team` returns None where the process has no such runtime (macOS, Windows): `build.in_shares` then divides
the work over Python threads, which costs 0.05 ms a call. A forked process computes in one thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from narrowgauge.errors import BackendError
from narrowgauge.ops.cpp import build

SOURCES = ("threads.cpp",)
WORDS, NUMBERS = 22, 4  # most integers and addresses, and floating-point numbers, of a kernel
_FLOATS = (ctypes.c_float, ctypes.c_double)
_INTEGERS = (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64)
# Calling conventions under which a function may be passed more arguments than it has parameters.
_MACHINES = ("x86_64", "aarch64")


class _Runtime(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("parallel", "thread", "threads"))


@cache
def team() -> ctypes.CDLL | None:
    """The library of threads.cpp; None where torch's threads cannot be used."""
    if _runtime() is None:
        return None
    try:
        return build.library(
            "narrowgauge.ops.cpp", SOURCES, "the division of work", "go on without it"
        )
    except BackendError:
        return None  # no kernel of this package can be built either


@cache
def _runtime() -> _Runtime | None:
    """Functions of the OpenMP runtime that this process has loaded, or None."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    process = ctypes.CDLL(None)
    try:
        names = (process.GOMP_parallel, process.omp_get_thread_num, process.omp_get_num_threads)
    except AttributeError:
        return None
    found = _Runtime(*(ctypes.cast(each, ctypes.c_void_p) for each in names))
    os.register_at_fork(after_in_child=lambda: setattr(found, "parallel", None))
    return found


def on_threads(function: Any, arguments: Sequence[Any]) -> Callable[..., None] | None:
    """Return call(shares, rows, *values), which runs `function` over shares of the rows; None as `team`.

    function   of a CDLL, called as function(first, last, *values)
    arguments  ctypes types of `values`, which are numbers: addresses too
    """
    if (found := _packed(function, arguments)) is None:
        return None
    order, pack, run = found
    return lambda shares, rows, *values: run(pack(shares, rows, *order(values)))


class PackedCall(NamedTuple):
    """A function of a library, called as run(pack(shares, rows, *order(values))) on any system.

    places  places of addresses among the values
    order   of the values in the record
    """

    places: tuple[int, ...]
    order: Callable[[Sequence[Any]], tuple[Any, ...]]
    pack: Callable[..., Any]
    run: Callable[[Any], None]

    @classmethod
    def of(cls, function: Any, arguments: Sequence[Any]) -> PackedCall:
        """Arguments as of `on_threads`."""
        numbers = (*_INTEGERS, *_FLOATS)
        places = tuple(place for place, kind in enumerate(arguments) if kind not in numbers)
        if (found := _packed(function, arguments)) is not None:
            return cls(places, *found)
        run = partial(_on_python_threads, function)
        return cls(places, tuple, lambda *values: values, run)


def _packed(
    function: Any, arguments: Sequence[Any]
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], None]] | None:
    """Return (order, pack, run) of a `PackedCall` by threads.cpp.

    ctypes would convert each argument by itself, in three times the time.
    """
    library, found = team(), _runtime()
    if library is None or found is None:
        return None
    words = [place for place, each in enumerate(arguments) if each not in _FLOATS]
    numbers = [place for place, each in enumerate(arguments) if each in _FLOATS]
    missing = WORDS - len(words), NUMBERS - len(numbers)
    assert min(missing) >= 0, "more arguments than threads.cpp passes on"
    floats = "".join("d" if arguments[place] is ctypes.c_double else "f4x" for place in numbers)
    of_call = Struct(f"={4 + len(words)}q{8 * missing[0]}x{floats}{8 * missing[1]}x")
    kernel = ctypes.cast(function, ctypes.c_void_p).value
    pack = partial(of_call.pack, ctypes.addressof(found), kernel)
    run = library.narrowgauge_in_shares
    run.argtypes, run.restype = (ctypes.c_char_p,), None
    # Words come first. itemgetter returns no tuple of a single value, which needs no order.
    order = itemgetter(*words, *numbers) if words and numbers else tuple
    return order, pack, run


def _on_python_threads(function: Any, given: tuple[Any, ...]) -> None:
    shares, rows, *values = given
    build.in_shares(
        shares, lambda k: function(rows * k // shares, rows * (k + 1) // shares, *values)
    )
