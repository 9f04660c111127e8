"""The kernels against their definitions under Triton's interpreter; each module says what it compares, and how closely."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.ops.triton import cases
from tests.processes import interpreted

pytest.importorskip(
    "triton", reason="triton is not installed: its kernels are neither compiled nor run here"
)

# Modules of one process -> into how many parts, of a few minutes each, their slow cases are cut.
PROCESSES = {
    ("interpreted", "interpreted_produced"): 4,
    ("stepped", "casting", "interpreted_products", "interpreted_eden"): 2,
    ("interpreted_grouped", "interpreted_rotated"): 2,
}

# `make test` runs the first of these parts of the quick cases; the others wait for the slow suite.
QUICK_PARTS = 6


@pytest.mark.long
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("part", "names"),
    [
        *(
            pytest.param(
                f"quick {number}/{QUICK_PARTS}",
                sum(PROCESSES, ()),
                marks=[pytest.mark.slow] if number > 1 else [],
            )
            for number in range(1, QUICK_PARTS + 1)
        ),
        *(
            pytest.param(f"rest {number}/{count}", names, marks=pytest.mark.slow)
            for names, count in PROCESSES.items()
            for number in range(1, count + 1)
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else " and ".join(each),
)
def test_kernels_have_the_bits_of_their_definition(part, names):
    """Several modules in each process: importing torch and tracing a first kernel takes as long as ten cases."""
    modules = [import_module(f"tests.ops.triton.{name}") for name in names]
    cases.check(interpreted(names, part), modules, part)
