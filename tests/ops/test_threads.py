"""Kernels on torch's own threads (ops/cpp/threads.py): each share once, any arguments, any number of threads."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest

from narrowgauge.ops.cpp import threads
from narrowgauge.ops.cpp.threads import NUMBERS, WORDS, on_threads
from tests.processes import PYTHON, run_ok

pytestmark = pytest.mark.skipif(threads.team() is None, reason="torch has no such runtime here")
# Types of arguments, with a value of each that a wrong width or sign would change.
VALUES = {
    ctypes.c_int32: -5,
    ctypes.c_uint32: 2**32 - 3,
    ctypes.c_int64: -(2**40) - 1,
    ctypes.c_float: -0.375,
    ctypes.c_double: 1e300,
}


@pytest.mark.parametrize(("rows", "shares"), [(1, 1), (7, 2), (7, 3), (100, 7), (3, 3), (64, 2)])
def test_every_row_is_computed_once(rows, shares):
    seen = np.zeros(rows, dtype=np.int64)
    parts = []

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    def kernel(first, last, place):
        assert place == seen.ctypes.data
        seen[first:last] += 1
        parts.append(last - first)

    on_threads(kernel, (ctypes.c_void_p,))(shares, rows, seen.ctypes.data)
    assert seen.tolist() == [1] * rows
    assert sorted(parts) == sorted(rows * (k + 1) // shares - rows * k // shares for k in range(shares))  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_arguments_of_any_types_arrive(seed):
    """Up to the most that are passed on, integers and floats in any order."""
    draw = np.random.default_rng(seed)
    words, numbers = draw.integers(0, WORDS + 1), draw.integers(0, NUMBERS + 1)
    kinds = [kind for kind in VALUES if kind not in (ctypes.c_float, ctypes.c_double)]
    chosen = [kinds[place] for place in draw.integers(0, len(kinds), words)]
    chosen += [(ctypes.c_float, ctypes.c_double)[place] for place in draw.integers(0, 2, numbers)]
    types = [chosen[place] for place in draw.permutation(len(chosen))]
    values, found = [VALUES[kind] for kind in types], []

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, *types)
    def kernel(first, last, *given):
        found.append((first, last, *given))

    on_threads(kernel, types)(2, 10, *values)
    assert sorted(found) == [(0, 5, *values), (5, 10, *values)]


def test_a_forked_process_has_one_thread():
    """The runtime would wait there for the threads of the parent, for ever."""
    program = (
        "import os, signal, torch, narrowgauge as ng\n"
        "from narrowgauge.ops.quantize import quantize\n"
        "torch.set_num_threads(2)\n"
        "x, cast = torch.ones(512, 1024), ng.recipes.get('int8').output.lhs\n"
        "before = quantize(x, cast).data.numpy()  # torch's operators hang in the child, too\n"
        "if (child := os.fork()) == 0:\n"
        "    signal.alarm(20)\n"
        "    os._exit(3 if (quantize(x, cast).data.numpy() == before).all() else 4)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert hasattr(os, "fork") and run_ok([PYTHON, "-c", program]).stdout.strip() == "3"
