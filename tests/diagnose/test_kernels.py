"""Kernels beside matrix products that `narrowgauge info` reports, on simulated devices (exact, in words)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from narrowgauge.diagnose import kernels, machine
from narrowgauge.diagnose.kernels import IN_16_BITS, IN_E4M3
from narrowgauge.ops import selfcheck, triton
from narrowgauge.ops.registry import Device

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
BY_TRITON = ("casts", "rotations", "norms, activations", "rotary embedding", kernels.STEP)
ON_CPU_ALONE = (IN_16_BITS, "dropout", "cross-entropy")
BY_CPP = (*BY_TRITON, *ON_CPU_ALONE)


def test_a_gpu_with_triton(device_is, triton_installed):
    device_is(Device("cuda", (9, 0), cuda=(12, 9)))
    found = kernels.families(CUDA)
    assert tuple(found) == tuple(kernels.FAMILIES)
    assert all(found[name].partition(";")[0] == "Triton" for name in BY_TRITON)
    assert found[IN_E4M3] == found["rotary embedding"] == "Triton"
    assert found["grouped experts"].startswith("native; Triton for fp8-block; torch for mxfp8: ")
    assert all(found[name].startswith("torch: ") for name in ON_CPU_ALONE)
    assert "torch for radam: " in found[kernels.STEP]
    assert "torch for int4-row-sr: " in found["casts"]


@pytest.mark.parametrize("cause", ["capability", "no triton", "rocm"])
def test_the_reason_of_a_gpu_without_kernels(device_is, triton_installed, monkeypatch, cause):
    device_is(Device("cuda", (7, 5) if cause == "capability" else (9, 0)))
    if cause == "no triton":
        monkeypatch.setattr(triton, "unavailable", lambda: "triton is not installed; torch has it")
    if cause == "rocm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
        device_is(Device("cuda"))
    words = {"capability": "7.5, needs 8.0", "no triton": "not installed", "rocm": "NVIDIA"}[cause]
    found = kernels.families(CUDA)
    assert all(found[name].startswith("torch: ") and words in found[name] for name in BY_TRITON)


def test_only_products_are_checked(device_is, triton_installed, monkeypatch):
    """A check launches kernels and compiles them; the report's own choices ask for none."""
    device_is(Device("cuda", (9, 0), cuda=(12, 9), index=0))
    checked = set()
    monkeypatch.setattr(
        selfcheck.KernelCheck, "failure", lambda check, op, *_: checked.add(op) and None
    )
    kernels.families(CUDA)
    assert checked == {"mm"}  # which `info` has planned, and so checked, before


def test_a_processor_without_the_instructions_of_attention(device_is):
    device_is(Device("cpu", bf16_gemm=False))
    assert "AVX512-BF16" in kernels.families(CPU)[IN_16_BITS]


@pytest.mark.parametrize("compiler", ["", "absent-compiler"])
def test_nothing_is_built_for_the_report(tmp_path, compiler):
    """In a new process with an empty cache, with and without a compiler."""
    if not compiler and machine.cpp_compiler() is None:
        pytest.skip("there is no C++ compiler")
    # Products come first, as in `info`: planning them builds their own libraries.
    code = (
        "import json, sys, torch\nfrom pathlib import Path\nfrom narrowgauge.diagnose import kernels\n"
        "cpu, built = torch.device('cpu'), lambda: len([*Path(sys.argv[1]).rglob('*.so')])\n"
        "[*kernels._operands(cpu)]\nbefore = built()\n"
        "print(json.dumps([kernels.families(cpu), before, built()]))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    if compiler:
        environment["CXX"] = compiler
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found, before, after = json.loads(run.stdout)
    assert after == before
    for name in BY_CPP:
        if compiler:
            assert found[name].startswith("torch: ") and compiler in found[name], name
        elif name != IN_16_BITS:  # depends on the processor
            assert found[name].partition(";")[0] == "C++", name
    assert all("CUDA" in found[name] for name in (IN_E4M3, "grouped experts"))


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_the_report_stays_short(device_is, triton_installed, device):
    device_is(Device("cuda", (8, 0)), "cuda")
    found = kernels.families(device)
    assert len(found) == 10 and max(map(len, found.values())) < 330
