"""Who computes what, on which device, and in which words the others decline (exact)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge import recipes
from narrowgauge.errors import BackendError
from narrowgauge.formats import E2M1, E4M3, E5M2, INT4, INT8, NF4, IntFormat
from narrowgauge.ops.cpp import int4
from narrowgauge.ops.mm import KERNELS, int8_cpp, plan
from narrowgauge.ops.mm import cpp as mm_cpp
from narrowgauge.ops.mm import spec as mm_spec
from narrowgauge.ops.mm.definition import compute_dtype
from narrowgauge.ops.mm.spec import NEEDS, MmSpec, refuse
from narrowgauge.ops.registry import (
    Device,
    Kernel,
    Refusal,
    Registry,
    device_facts,
    onednn_without_vnni,
)
from narrowgauge.recipe import GEMMS, WHOLE, Cast, Gemm
from narrowgauge.scaling import E4M3_TWO_LEVEL, FP32, POW2
from tests.processes import PYTHON, run_ok
from tests.raising import raises

AMPERE, ADA, HOPPER, BLACKWELL = (
    Device("cuda", capability, cuda=(12, 9)) for capability in ((8, 0), (8, 9), (9, 0), (10, 0))
)
TURING = Device("cuda", (7, 5))
PLAIN_CPU = Device("cpu", bf16_gemm=False, int8_gemm=False)
FAST_CPU = Device("cpu", bf16_gemm=True, int8_gemm=True)
NO_COMPILER = "no compiler is here"


def choose(gemm, device, forced=None, expanded=False):
    return KERNELS.choose(MmSpec(gemm.lhs, gemm.rhs, device, expanded), forced)


# --- the table of the design: what runs where ------------------------------------------------------------------------------


TENSOR = dict.fromkeys(("fp8-delayed", "fp8-current", "fp8-current-fast"), "native")
FP8 = TENSOR | {"fp8-row": "native"}
INT8_UNITS = {"int8": "native-int8"}
# The recipes of the table; others need no entry.
NAMED = {
    "bf16", *FP8, *INT8_UNITS, "fp8-block", "mxfp8", "mxfp4", "nvfp4",
    "int4-hq-bs", "int4-hq-lss", "int4-lsq-luq", "int4-minmax-sr", "int4-row-sr",
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (PLAIN_CPU, {}),
        (FAST_CPU, INT8_UNITS),
        (TURING, {}),
        (AMPERE, INT8_UNITS),
        (ADA, FP8 | INT8_UNITS | {"fp8-block": "triton"}),
        (HOPPER, FP8 | INT8_UNITS | {"fp8-block": "native-block"}),
        (replace(HOPPER, cuda=(12, 8)), FP8 | INT8_UNITS | {"fp8-block": "triton"}),
        (BLACKWELL, FP8 | INT8_UNITS | {"fp8-block": "triton"} | dict.fromkeys(("mxfp8", "mxfp4", "nvfp4"), "native-mx")),
        (replace(BLACKWELL, capability=(12, 0)), FP8 | INT8_UNITS | {"fp8-block": "triton", "mxfp8": "native-mx", "nvfp4": "native-mx"}),
        (Device("xpu"), {}),
        (Device("mps"), {}),
    ],
    ids=["plain cpu", "fast cpu", "turing", "ampere", "ada", "hopper", "hopper, cuda 12.8", "blackwell", "12.0", "xpu", "mps"],
)  # fmt: skip
@pytest.mark.parametrize("gemm", GEMMS)
def test_which_kernel_computes_which_recipe(device, found, gemm, triton_installed):
    """4-bit integers run as INT8, gradients in two digits too; LUQ's powers of two and scales per contracted token do not."""
    integers: set[str] = set()
    in_cpp = device == PLAIN_CPU and not int4.LIBRARY.missing and mm_cpp.has_gemm()
    int8_in_cpp = (
        device.type == "cpu" and not int8_cpp.LIBRARY.missing and int8_cpp.fastest() is not None
    )
    native_int8 = "native-int8-cpp" if int8_in_cpp else "native-int8"
    if int8_in_cpp:
        found = {**found, "int8": native_int8}
    if "int8" in found or in_cpp:
        integers = {"int4-hq-bs", "int4-hq-lss", "int4-minmax-sr"}
        integers |= {"output": {"int4-lsq-luq", "int4-row-sr"}, "grad_input": {"int4-row-sr"}}.get(
            gemm, set()
        )
    found = dict.fromkeys(integers, "native-cpp" if in_cpp else native_int8) | found
    for recipe in map(recipes.get, sorted(NAMED)):
        expected = found.get(recipe.name, "reference")
        assert choose(getattr(recipe, gemm), device).kernel.name == expected, recipe.name


@pytest.mark.parametrize(
    ("name", "device", "changed"),
    [
        ("fp8-current", PLAIN_CPU, {"native": "cpu has no FP8 units"}),
        ("fp8-current", AMPERE, {"native": "compute capability 8.0, FP8 needs 8.9"}),
        (
            "fp8-block",
            AMPERE,
            {
                "native": mm_spec.NOT_BY_ROW,
                "native-block": "compute capability 8.0, FP8 needs 8.9",
                "triton": "compute capability 8.0, FP8 needs 8.9",
            },
        ),
        (
            "mxfp8",
            HOPPER,
            {"native": mm_spec.NOT_BY_ROW, "native-mx": "compute capability 9.0, MX needs 10.0"},
        ),
        ("fp8-current", Device("xpu"), {"native": mm_spec.OTHER_GPUS["xpu"]}),
        (
            "int8",
            PLAIN_CPU,
            {"native-int8-cpp": NO_COMPILER, "native-int8": mm_spec.CPU_IS_SLOW},
        ),
        ("int8", TURING, {"native-int8": "compute capability 7.5, the integer GEMM needs 8.0"}),
        ("int8", Device("mps"), {"native-int8": mm_spec.OTHER_GPUS["mps"]}),
        ("bf16", HOPPER, {}),
    ],
)
def test_every_refusal_has_its_reason(name, device, changed, monkeypatch):
    """Kernels of another family say so in words that `describe` leaves out."""
    monkeypatch.setattr(int8_cpp, "refuse", lambda spec: Refusal("toolchain", NO_COMPILER))
    choice = choose(recipes.get(name).output, device)
    assert choice.kernel.name == "reference"
    # The first need of each kernel is about its operands; the reference refuses nothing.
    families = {
        kernel.name: NEEDS[kernel.name][0].text
        for kernel in KERNELS.kernels
        if kernel.name != "reference"
    }
    found = {name: refusal.text for name, refusal in choice.refusals}
    assert found == families | changed and list(found) == list(families)
    codes = {name: refusal.code for name, refusal in choice.refusals}
    assert {name for name, code in codes.items() if code == "operands"} == {
        name for name, text in found.items() if text in {*families.values(), mm_spec.NOT_BY_ROW}
    }
    assert set(choice.reasons) == set(changed.values()) - {mm_spec.NOT_BY_ROW}


@pytest.mark.parametrize("name", ["fp8-current", "int8", "mxfp8", "int4-hq-bs"])
def test_an_amd_gpu_is_no_nvidia_gpu_of_compute_capability_0(name, monkeypatch):
    """torch calls its device "cuda"."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    choice = choose(recipes.get(name).output, Device("cuda"))
    assert choice.kernel.name == "reference" and mm_spec.ROCM in choice.reasons
    assert not any("compute capability" in reason for reason in choice.reasons)


@pytest.mark.parametrize(
    ("lhs", "rhs", "reason"),
    [
        (Cast(format=E5M2), Cast(format=E5M2), mm_spec.NO_E5M2_PAIR.text),
        (Cast(format=E4M3), None, mm_spec.NOT_FP8),
        (None, Cast(format=E4M3), mm_spec.NOT_FP8),
        (Cast(format=E4M3), Cast(format=INT8), mm_spec.NOT_FP8),
        (Cast(format=E4M3, tile=(WHOLE, 1)), Cast(format=E4M3), mm_spec.NOT_BY_ROW),
        (Cast(format=E4M3), Cast(format=E4M3, tile=(1, 32)), mm_spec.NOT_BY_ROW),
    ],
)
def test_what_a_scaled_gemm_cannot_do(lhs, rhs, reason):
    assert choose(Gemm(lhs=lhs, rhs=rhs), BLACKWELL).refusals[0][1].text == reason


def test_a_scaled_gemm_mixes_formats_and_granularities():
    rows, tensor = Cast(format=E4M3, tile=(1, WHOLE)), Cast(format=E5M2)
    assert choose(Gemm(lhs=tensor, rhs=rows), HOPPER).kernel.name == "native"
    words = "compute capability 8.9, row scales of E5M2 need 9.0"
    assert choose(Gemm(lhs=tensor, rhs=rows), ADA).refusals[0][1] == Refusal("capability", words)


def test_expanded_operands_are_for_the_reference():
    for name, kernel in (("fp8-current", "native"), ("int8", "native-int8")):
        choice = choose(recipes.get(name).output, HOPPER, expanded=True)
        assert choice.kernel.name == "reference" and dict(choice.refusals)[kernel] == Refusal(
            "expanded", mm_spec.CODES.text
        )


# --- forcing a kernel --------------------------------------------------------------------------------------------------------


def test_a_forced_kernel_is_taken_or_raises():
    gemm = recipes.get("fp8-current").output
    assert choose(gemm, HOPPER, "native").kernel.name == "native"
    assert choose(gemm, HOPPER, "reference").kernel.name == "reference", (
        "never replaced by a faster one"
    )
    with raises(BackendError, "kernel.refused", "mm", "native", "reference"):
        choose(gemm, PLAIN_CPU, "native")
    with raises(BackendError, "kernel.refused", "native-int8", "native, reference"):
        choose(gemm, HOPPER, "native-int8")


def test_an_unknown_kernel_names_the_closest():
    with raises(
        BackendError, "kernel.unknown", "mm", "'nativ'", "'native', 'native-mx', 'native-cpp'"
    ):
        choose(Gemm(), PLAIN_CPU, "nativ")
    with raises(BackendError, "kernel.unknown", "'zzz'"):
        choose(Gemm(), PLAIN_CPU, "zzz")


def test_kernels_are_tried_in_the_order_of_registration():
    registry: Registry[Device] = Registry("op")

    def register(name, taken, words):
        def refuse(device):
            n = device.capability[0]
            return None if taken(n) else Refusal("shape", f"{n} is {words}")

        registry.register(Kernel(name, refuse, print))

    def number(n):
        return Device("cuda", (n, 0))

    register("even", lambda n: n % 2 == 0, "odd")
    register("small", lambda n: n < 10, "large")
    register("any", lambda n: True, "")
    assert (
        registry.choose(number(4)).kernel.name == "even"
        and registry.choose(number(4)).refusals == ()
    )
    odd = ("even", Refusal("shape", "3 is odd"))
    assert registry.choose(number(3)).kernel.name == "small" and registry.choose(
        number(3)
    ).refusals == (odd,)
    assert registry.choose(number(13)).refusals == (
        ("even", Refusal("shape", "13 is odd")),
        ("small", Refusal("shape", "13 is large")),
    )
    assert registry.choose(number(4), "small").refusals == (), (
        "a kernel that was passed over did not refuse"
    )
    with raises(BackendError, "kernel.refused", "op", "even", "3 is odd", "small, any"):
        registry.choose(number(3), "even")


# --- in which form operands are wanted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lhs", "rhs", "exact"),
    [
        (Cast(format=E4M3), Cast(format=E5M2), True),
        (Cast(format=E4M3, tile=(1, WHOLE)), Cast(format=INT8, tile=(1, WHOLE)), True),
        (
            Cast(format=E4M3, tile=(1, 32), scale=POW2),
            Cast(format=E4M3, tile=(128, 128), scale=POW2),
            True,
        ),
        (Cast(format=INT8, tile=(1, 32), scale=POW2), None, True),
        (
            Cast(format=E4M3, tile=(1, 128)),
            Cast(format=E4M3),
            False,
        ),  # float32 scales inside the sum
        (Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL), None, True),  # 2 bits times 4 bits
        (Cast(format=INT8, tile=(1, 16), scale=E4M3_TWO_LEVEL), None, False),  # 7 bits times 4 bits
        (
            Cast(format=E2M1, tile=(1, 32), scale=POW2, headroom=4 / 3),
            None,
            True,
        ),  # the 4/3 leaves the sum
        (Cast(format=NF4), None, False),  # levels with 24 bits
        (Cast(format=INT4, tile=(1, WHOLE)), None, True),
        (None, None, True),
    ],
)
def test_bfloat16_is_used_only_where_it_is_exact(lhs, rhs, exact):
    for device in (FAST_CPU, AMPERE, HOPPER):
        assert compute_dtype((lhs, rhs), device) == compute_dtype((rhs, lhs), device)
        assert compute_dtype((lhs, rhs), device) == (torch.bfloat16 if exact else torch.float32)
    assert compute_dtype((lhs, rhs), PLAIN_CPU) == torch.float32, (
        "several times faster without bfloat16 units"
    )


def test_every_recipe_is_exact_in_bfloat16():
    for recipe in recipes.ALL:
        for gemm in recipe.gemms().values():
            # A CPU's bfloat16 GEMM returns bfloat16, which rounds integer sums; scales per token stay in the sum in float32.
            integers = gemm.lhs is not None and isinstance(gemm.lhs.format, IntFormat)
            inside = gemm.lhs is not None and (
                gemm.lhs.tile == (WHOLE, 1)
                or (gemm.lhs.scale == FP32 and WHOLE not in gemm.lhs.tile)
            )
            assert compute_dtype((gemm.lhs, gemm.rhs), FAST_CPU) == (
                torch.float32 if integers else torch.bfloat16
            )
            assert compute_dtype((gemm.lhs, gemm.rhs), AMPERE) == (
                torch.float32 if inside else torch.bfloat16
            )


def test_plans_want_codes_for_native_kernels_and_values_for_the_reference(device_is):
    gemm = recipes.get("fp8-current").output
    for facts, name, expand in (
        (HOPPER, "native", None),
        (AMPERE, "reference", torch.bfloat16),
        (PLAIN_CPU, "reference", torch.float32),
        (FAST_CPU, "reference", torch.bfloat16),
    ):
        device_is(facts, of="cpu")
        found = plan(gemm, torch.device("cpu"))
        assert (found.choice.kernel.name, found.expand) == (name, expand)
    assert plan(gemm, torch.device("cpu"), "reference").expand == torch.bfloat16


def test_facts_about_this_machine():
    facts = device_facts("cpu", None)
    assert facts.type == "cpu" and facts.capability == (0, 0)
    assert isinstance(facts.bf16_gemm, bool) and isinstance(facts.int8_gemm, bool)
    assert device_facts("meta", None) == Device("meta")


@pytest.mark.parametrize(
    ("environment", "held"),
    [
        ({}, False),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, True),
        ({"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, True),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, False),
    ],
    ids=str,
)
def test_onednn_may_be_held_back_from_vnni(environment, held):
    assert onednn_without_vnni(environment) is held


@pytest.mark.gpu
def test_facts_about_this_gpu():
    assert device_facts("cuda", 0).capability == torch.cuda.get_device_capability(0)


class NotComparable(tuple):
    """A version as Dynamo of torch 2.11 sees the ones of a Device: it cannot trace a comparison of two tuples."""

    def _refuse(self, other):
        raise TypeError("Dynamo of torch 2.11 compares no tuples of a dataclass")

    __lt__ = __le__ = __gt__ = __ge__ = _refuse


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("kernel", NEEDS)
def test_requirements_compare_versions_number_by_number(kernel, capability):
    """So that torch 2.11 can trace them; for every pair of casts of the recipes (exact)."""
    device = Device("cuda", NotComparable(capability), cuda=NotComparable((12, 9)))
    for recipe in recipes.ALL:
        for gemm in recipe.gemms().values():
            if gemm.lhs and gemm.rhs:
                plain = MmSpec(gemm.lhs, gemm.rhs, Device("cuda", capability, cuda=(12, 9)))
                found = refuse(kernel)(MmSpec(gemm.lhs, gemm.rhs, device))
                assert found == refuse(kernel)(plain)


@pytest.mark.slow
def test_a_kernel_is_imported_while_torch_compiles():
    """In a fresh process: Dynamo traces no import, and a layer compiled before its first call has to import its kernel's module."""
    program = """
import sys, torch
from narrowgauge import recipes
from narrowgauge.ops.mm import KERNELS
from narrowgauge.ops.quantize import quantize
kernel = next(each for each in KERNELS.kernels if each.name == "native-int8")
gemm = recipes.get("int8").output
a, b = (quantize(torch.randn(32, 64), cast) for cast in (gemm.lhs, gemm.rhs))
run = lambda: kernel.run(a, b, None, torch.float32, False)
assert "narrowgauge.ops.mm.cublas" not in sys.modules
assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(), run())
"""
    run_ok([PYTHON, "-c", program])
