"""What a run asks of the machine."""

from __future__ import annotations

import json

import pytest
import torch

from narrowgauge.train import device
from tests.processes import PYTHON, run_ok

FAULTS = """
import json, resource, torch
from narrowgauge.train.device import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = [faults() for _ in range(4)]
kept = keep_freed_memory()
print(json.dumps([given_back, [faults() for _ in range(16)] if kept else []]))
"""


def test_freed_memory_is_kept_for_the_next_step():
    """A tensor of 64 MiB made anew touches pages that are there: a fault for each would be 16,384.

    In a process of its own: what other tests left on the heap decides where memory comes from. Small allocations may settle in
    the freed place, so that the heap grows a few times before it is large enough.
    """
    given_back, kept = json.loads(run_ok([PYTHON, "-c", FAULTS]).stdout)
    if not kept or min(given_back) < 16_000:
        pytest.skip("no mallopt in this C library, or huge pages, which fault too seldom to show a difference")
    assert max(kept[-4:]) < 1000, kept


def test_a_peak_is_measured_where_the_system_tells_none_of_its_own(monkeypatch, tmp_path):
    """A sandbox may have /proc without VmHWM, and nothing that resets it.

    Half, for each core counts pages of its own before it reports them; bytes and kilobytes are a thousand apart.
    """
    cpu = torch.device("cpu")
    own = device.peak_bytes(cpu)
    (tmp_path / "status").write_text("VmRSS:\t 1 kB\n", encoding="utf-8")
    for status in (tmp_path / "status", tmp_path / "none"):
        monkeypatch.setattr(device, "STATUS", status)
        monkeypatch.setattr(device, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
        assert device.peak_bytes(cpu) >= own / 2 and not device.reset_peak(cpu)
