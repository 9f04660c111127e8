"""What a run asks of the machine."""

from __future__ import annotations

import resource

import pytest
import torch

from narrowgauge.train.machine import keep_freed_memory


def test_freed_memory_is_kept_for_the_next_step():
    """A tensor of 64 MiB made anew touches pages that are there: a fault for each would be 16,384."""
    if not keep_freed_memory():
        pytest.skip("no mallopt in this C library")
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(2**24)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 1000
