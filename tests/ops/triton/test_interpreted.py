"""The kernels against their definitions under Triton's interpreter; each module says what it compares, and how closely."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.ops.triton import cases
from tests.processes import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are neither compiled nor run here")


@pytest.mark.parametrize("part", ["quick", pytest.param("rest", marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", ["casting", "interpreted", "interpreted_produced", "stepped"])
def test_kernels_have_the_bits_of_their_definition(module, part):
    name = f"tests.ops.triton.{module}"
    cases.check(interpreted(name, part), import_module(name).KINDS, part)
