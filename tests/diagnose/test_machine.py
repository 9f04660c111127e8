"""`narrowgauge info` on this CPU, on simulated ones and on simulated GPUs (exact, in words)."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from narrowgauge import recipes
from narrowgauge.conversion import measure
from narrowgauge.conversion.measure import AUTOCAST, FLOAT32
from narrowgauge.diagnose import machine
from narrowgauge.diagnose.kernels import FAMILIES
from narrowgauge.ops.mm import spec as mm_spec
from narrowgauge.ops.registry import Device, Refusal
from narrowgauge.ops.selfcheck import CheckResult


@pytest.fixture
def simulate(monkeypatch, device_is, triton_installed):
    """simulate(cpu=Device(...), cuda=(9, 0)): what the registry and torch say of the machine."""

    def install(cpu=None, cuda=None):
        device_is(cpu or Device("cpu"))
        if cuda is not None:
            device_is(Device("cuda", cuda))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda is not None))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Simulated GPU")
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device=None: SimpleNamespace(total_memory=80 * 2**30),
        )

    return install


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """Seconds of the rounds, in place of a measurement on a quiet machine."""
    seconds = {
        AUTOCAST: [0.02] * 5,
        FLOAT32: [0.04] * 5,
        "int8": [0.010, 0.010, 0.010, 0.011, 0.0095],
        "int4-hq-bs": [0.019, 0.021, 0.021, 0.020, 0.021],
    }
    monkeypatch.setattr(
        machine,
        "measured_rounds",
        lambda workload, names, device: ({name: seconds[name] for name in names}, {}),
    )
    monkeypatch.setattr(machine, "_load", lambda: 0.1)
    return seconds


def verdict_of_rates(text: str) -> str:
    return next(line for line in text.splitlines() if " times; " in line)


def test_the_rates_of_this_cpu_are_told_with_their_spread(simulate):
    """INT4 wins the first round and loses others, so it is not called faster."""
    simulate(cpu=Device("cpu", bf16_gemm=True))
    text = machine.info()
    assert "bf16 autocast 20.0 ms (161 GFLOP/s)" in text and "int8 10.0 ms (322 GOP/s)" in text
    verdict = verdict_of_rates(text)
    assert AUTOCAST in verdict and "int8 (2.00 times; 1.82 to 2.11 over 5 rounds)" in verdict
    assert "int4" not in verdict and "busy" not in text


def test_the_rival_is_the_faster_of_torchs_own(simulate, rates):
    """A CPU without bfloat16 instructions emulates bf16: there float32 alone is measured."""
    rates[FLOAT32] = [0.015] * 5
    simulate(cpu=Device("cpu", bf16_gemm=True))
    assert f" {FLOAT32}, " in verdict_of_rates(machine.info())
    simulate(cpu=Device("cpu", bf16_gemm=False))
    text = machine.info()
    assert "int8 (1.50 times;" in verdict_of_rates(text) and f"{AUTOCAST} " not in text


@pytest.mark.parametrize("cause", ["load", "spread"])
def test_a_busy_machine_is_asked_again(simulate, rates, monkeypatch, cause):
    simulate(cpu=Device("cpu"))
    if cause == "load":
        monkeypatch.setattr(machine, "_load", lambda: 1.5)
    else:
        rates["int8"][0] = 0.016
    assert "busy" in machine.info()
    # On a busy machine no gain is no verdict.
    for name in ("int8", "int4-hq-bs"):
        rates[name][1] = 1.0
    text = machine.info()
    assert machine.UNKNOWN in text and machine.NO_RECIPE_IS_FASTER not in text


def verdicts(text, device):
    """recipe -> words, from the block of one device."""
    block = text.partition(f"{device}:")[2].split("\n\n")[1]
    return dict(line.strip().split(maxsplit=1) for line in block.splitlines())


def test_every_recipe_is_listed_for_every_device(simulate):
    simulate(cuda=(9, 0))
    for device in ("cuda:0", "cpu"):
        assert tuple(verdicts(machine.info(), device)) == recipes.names()


def test_kernels_beside_products_are_listed_for_every_device(simulate):
    simulate(cuda=(9, 0))
    text = machine.info()
    for device in ("cuda:0", "cpu"):
        rows = text.partition(f"{device}:")[2].split("\n\n")[2].splitlines()
        assert [row[2:].partition("  ")[0] for row in rows] == list(FAMILIES)


def test_the_real_machine():
    text = machine.info()
    assert text.startswith("narrowgauge ") and f"torch {torch.__version__}" in text.splitlines()[0]
    assert measure.processor_name() in text and "cpu:" in text


def test_a_plain_cpu_says_that_it_multiplies_in_float32(simulate, monkeypatch):
    refusal = Refusal("toolchain", "no compiler")
    monkeypatch.setattr("narrowgauge.ops.mm.int8_cpp.refuse", lambda spec: refusal)
    simulate(cpu=Device("cpu", bf16_gemm=False, int8_gemm=False))
    text = machine.info()
    assert "fast bfloat16 and" not in text
    found = verdicts(text, "cpu")
    assert "bfloat16" in found["bf16"] and "float32" in found["bf16"]
    assert found["fp8-current"].startswith("emulated") and "FP8" in found["fp8-current"]
    assert "no compiler" in found["int8"] and "no VNNI" in found["int8"]


def test_a_cpu_with_narrow_units(simulate):
    simulate(cpu=Device("cpu", bf16_gemm=True, int8_gemm=True))
    text = machine.info()
    assert "fast bfloat16 and int8 (VNNI) GEMM" in text
    found = verdicts(text, "cpu")
    assert found["bf16"] == "native" and found["int8"] == "native"
    assert found["fp8-current"].startswith("emulated")


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((8, 0), set()),
        ((8, 9), {"fp8-delayed", "fp8-current", "fp8-current-fast", "fp8-row"}),
        ((9, 0), {"fp8-delayed", "fp8-current", "fp8-current-fast", "fp8-row"}),
    ],
)
def test_gpus(simulate, capability, native):
    """4-bit integers whose gradients are integers with one scale per row run as INT8 in all three products."""
    native = native | {"bf16", "int8", "int4-hq-bs", "int4-hq-lss", "int4-minmax-sr"}
    simulate(cuda=capability)
    text = machine.info()
    major, minor = capability
    assert f"cuda:0: Simulated GPU, compute capability {major}.{minor}, 80 GiB" in text
    found = verdicts(text, "cuda:0")
    assert {name for name, words in found.items() if words == "native"} == native
    if capability >= (8, 9):
        assert found.pop("fp8-block") == "Triton"
    assert all("emulated" in words for name, words in found.items() if name not in native)
    assert found["int4-lsq-luq"].startswith("output: native; grad_input, grad_weight: emulated")
    for name, words in found.items():
        gemms = [each for each in words.split("; ") if "emulated exactly in" in each]
        assert all(re.search(r"emulated exactly in \w+: \w", each) for each in gemms), name


@pytest.mark.parametrize("kind", mm_spec.OTHER_GPUS)
def test_a_gpu_without_kernels_has_a_line(simulate, monkeypatch, kind):
    simulate(cpu=Device("cpu"))
    assert mm_spec.OTHER_GPUS[kind] not in machine.info()
    module = {"mps": torch.backends.mps, "xpu": torch.xpu}[kind]
    monkeypatch.setattr(module, "is_available", lambda: True)
    [line] = [line for line in machine.info().splitlines() if line.startswith(f"{kind}: ")]
    assert mm_spec.OTHER_GPUS[kind] in line and "emulated" in line


def test_what_checks_found_is_told(simulate, monkeypatch):
    simulate(cuda=(9, 0))
    assert "Checked here" not in machine.info()
    right, wrong = CheckResult(None, 0.25, 0.5), CheckResult("it hides NaN on cuda:0", 0.0, 0.25)
    monkeypatch.setattr(
        machine,
        "RESULTS",
        {("mm", "a", None, 0): right, ("mm", "b", None, 0): wrong, ("mm", "a", 1, 1): right},
    )
    words = (
        "Checked here against the definition, of the ops mm alone: 1 of 2 kernels are right (largest error 25% of what is allowed), in "
        "0.8 s. Each other kernel is checked before its first use."
    )
    assert words in machine.info()


def test_the_compiler_is_the_one_that_torch_takes(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.cpp_compiler() == "g++"
    assert "C++ compiler: g++" in machine.info()
    monkeypatch.setenv("CXX", "icpx")  # torch would call this one, and fail
    assert machine.cpp_compiler() is None
    compiler.rename(tmp_path / "clang++")
    monkeypatch.delenv("CXX")
    assert "C++ compiler: none" in machine.info()
    assert "C++ kernels of the CPU: none" in machine.info()
    monkeypatch.setattr(machine.build.prebuilt, "carried_level", lambda: "x86-64-v3")
    assert "those of the wheel, compiled for x86-64-v3" in machine.info()


def test_the_c_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.c_compiler() is None
    compiler = tmp_path / "clang"
    compiler.write_text("#!/bin/sh\n", encoding="utf-8")
    compiler.chmod(0o755)
    assert machine.c_compiler() == "clang"
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    assert machine.c_compiler() is None


def test_a_machine_without_proc(monkeypatch):
    monkeypatch.setattr(measure, "Path", lambda name: SimpleNamespace(read_text=_refuse))
    assert measure.processor_name()


def _refuse(encoding):
    raise FileNotFoundError(encoding)


def test_a_reason_is_said_once(simulate):
    """Two kernels refuse the same product in the same words."""
    simulate(cpu=Device("cpu", bf16_gemm=True, int8_gemm=True))
    words = verdicts(machine.info(), "cpu")["int4-row-sr"]
    [reason] = [each.text for each in mm_spec.NEEDS["native-int8"] if each.code == "tile"]
    assert words.count(reason) == 1
