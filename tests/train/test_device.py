"""What a run asks of the machine."""

from __future__ import annotations

import json

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.ops.mm.spec import OTHER_GPUS
from narrowgauge.train import device
from narrowgauge.train.device import chosen_device, keep_freed_memory
from tests.processes import PYTHON, run_ok
from tests.raising import raises

FAULTS = """
import json, resource, torch
from narrowgauge.train.device import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = [faults() for _ in range(4)]
kept = "kept for the next step" in keep_freed_memory(True, torch.device("cpu"))
print(json.dumps([given_back, [faults() for _ in range(16)] if kept else []]))
"""


@pytest.mark.slow
def test_freed_memory_is_kept_for_the_next_step():
    """A tensor of 64 MiB made anew touches pages that are there: a fault for each would be 16,384.

    In a process of its own: what other tests left on the heap decides where memory comes from. Small allocations may settle in
    the freed place, so that the heap grows a few times before it is large enough.
    """
    given_back, kept = json.loads(run_ok([PYTHON, "-c", FAULTS]).stdout)
    if not kept or min(given_back) < 16_000:
        pytest.skip(
            "no mallopt in this C library, or huge pages, which fault too seldom to show a difference"
        )
    assert max(kept[-4:]) < 1000, kept


def test_other_allocators_and_those_who_do_not_ask_are_left_alone(tmp_path, monkeypatch):
    """Without a call of mallopt, which stays for the whole process."""
    monkeypatch.setattr(device, "_of_glibc", lambda name: pytest.fail(name))
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 08:01 5 /usr/lib/libjemalloc.so.2\n", encoding="utf-8")
    assert "as jemalloc has it" in keep_freed_memory(True, torch.device("cpu"), maps)
    maps.write_text("7f00-7f01 r-xp 0 08:01 5 /opt/libtcmalloc_minimal.so.4\n", encoding="utf-8")
    assert "as tcmalloc has it" in keep_freed_memory(True, torch.device("cpu"), maps)
    assert "keep_freed" in keep_freed_memory(False, torch.device("cpu"), maps)
    assert "torch's own" in keep_freed_memory(True, torch.device("cuda"), maps)
    monkeypatch.setattr(device, "_of_glibc", lambda name: None)
    assert "not glibc" in keep_freed_memory(True, torch.device("cpu"), tmp_path / "none")


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


@pytest.mark.parametrize(
    ("capability", "before", "after", "words"),
    [
        ((9, 0), None, "32768", "32 MiB of the GPU's memory"),
        ((9, 0), "4096", "4096", "4096 KiB, as CUBLASLT_WORKSPACE_SIZE says"),
        ((8, 9), None, None, "torch's own"),
    ],
)
def test_hopper_gets_the_workspace_that_cublaslt_wants(capability, before, after, words):
    """What a user has set stays; other cards keep torch's."""
    environment = {} if before is None else {device.WORKSPACE: before}
    assert words in device.give_cublaslt_workspace(environment, capability)
    assert environment.get(device.WORKSPACE) == after


@pytest.mark.parametrize("name", ["mps", "xpu:0"])
def test_a_gpu_without_kernels_is_refused_with_the_reason(name):
    with raises(ConfigError, "device.name", name, OTHER_GPUS[name.partition(":")[0]]):
        chosen_device(name)
