"""What a run asks of the machine."""

from __future__ import annotations

import pytest

from tests.processes import PYTHON, run_ok

FAULTS = """
import resource, torch
from narrowgauge.train.machine import keep_freed_memory
kept = keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults if kept else -1)
"""


def test_freed_memory_is_kept_for_the_next_step():
    """A tensor of 64 MiB made anew touches pages that are there: a fault for each would be 16,384.

    In a process of its own: what other tests left on the heap decides where memory comes from.
    """
    faults = int(run_ok([PYTHON, "-c", FAULTS]).stdout)
    if faults < 0:
        pytest.skip("no mallopt in this C library")
    assert faults < 1000
