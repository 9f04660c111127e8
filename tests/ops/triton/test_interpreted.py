"""The kernels against their definitions under Triton's interpreter; each module says what it compares, and how closely."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.ops.triton import cases
from tests.processes import interpreted

pytest.importorskip(
    "triton", reason="triton is not installed: its kernels are neither compiled nor run here"
)

PROCESSES = [
    ("interpreted", "interpreted_produced"),
    ("stepped", "casting", "interpreted_products"),
]


@pytest.mark.long
@pytest.mark.timeout(960)  # half a minute on a quiet machine
@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("quick", sum(PROCESSES, ())),
        *(pytest.param("rest", names, marks=pytest.mark.slow) for names in PROCESSES),
    ],
    ids=lambda each: each if isinstance(each, str) else " and ".join(each),
)
def test_kernels_have_the_bits_of_their_definition(part, names):
    """Several modules in each process: importing torch and tracing a first kernel takes as long as ten cases."""
    modules = [import_module(f"tests.ops.triton.{name}") for name in names]
    cases.check(interpreted(names, part), modules, part)
