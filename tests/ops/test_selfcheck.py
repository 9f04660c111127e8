"""GEMMs are checked before they compute: right ones pass, wrong ones are refused in words (exact and bounded).

The device is the CPU; wrong kernels are right ones with one mistake.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from packaging.version import Version

from narrowgauge import recipes
from narrowgauge.errors import BackendError, OutOfMemoryError
from narrowgauge.formats import E2M1, E4M3, E5M2, INT8
from narrowgauge.ops import selfcheck
from narrowgauge.ops.mm import cublas as native
from narrowgauge.ops.mm import definition
from narrowgauge.ops.mm.selfcheck import CHECK, flatten_cast, plain, unflatten_cast
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.registry import Device, Kernel, Refusal, Registry, device_facts
from narrowgauge.ops.selfcheck import CheckResult
from narrowgauge.recipe import GEMMS, WHOLE, Cast, DelayedScaling
from narrowgauge.scaling import E4M3_TWO_LEVEL, E8M0_CEIL, FP32, POW2
from tests.ops import cublas
from tests.ops.registries import registries
from tests.raising import raises

CPU = torch.device("cpu")
TENSOR, ROW, VECTOR, SQUARE = (
    Cast(format=E4M3, tile=tile, scale=FP32)
    for tile in ((WHOLE, WHOLE), (1, WHOLE), (1, 128), (128, 128))
)
MXFP8 = Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL)
NVFP4 = Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL)
INTEGERS = Cast(format=INT8, tile=(1, WHOLE))
CASTS = {
    "tensor": (Cast(format=E5M2), TENSOR),
    "row": (ROW, ROW),
    "blocks": (VECTOR, SQUARE),
    "mxfp8": (MXFP8, MXFP8),
    "nvfp4": (NVFP4, NVFP4),
    "int8": (INTEGERS, INTEGERS),
}


def examine(run, lhs, rhs) -> CheckResult:
    return selfcheck.examine("mm", run, CHECK, (plain(lhs), plain(rhs)), CPU)


@pytest.mark.parametrize("casts", CASTS.values(), ids=CASTS)
def test_the_reference_passes(casts):
    result = examine(definition.run, *casts)
    assert result.reason is None and 0 < result.worst < 0.2


@pytest.mark.parametrize(
    ("casts", "run"),
    [
        (CASTS["tensor"], native.run_scaled),
        pytest.param(
            CASTS["row"],
            native.run_scaled,
            marks=pytest.mark.skipif(
                Version(torch.__version__).release < (2, 13),
                reason="its CPU version knows one scale per tensor",
            ),
        ),
        (CASTS["int8"], native.run_int8),
    ],
    ids=["tensor", "row", "int8"],
)
@pytest.mark.usefixtures("exact_int8")
def test_torchs_own_kernels_pass_on_the_cpu(casts, run):
    assert examine(run, *casts).reason is None


@pytest.mark.parametrize("which", ["blocks", "mxfp8", "nvfp4"])
def test_block_kernels_pass_on_a_stand_in_for_cublas(which, monkeypatch):
    monkeypatch.setattr(native, "scaled_mm", cublas.scaled_mm)
    assert (
        examine(native.run_block if which == "blocks" else native.run_mx, *CASTS[which]).reason
        is None
    )


def changed(**parts):
    """A kernel that multiplies another left operand than it was given."""

    def run(lhs, rhs, bias, out_dtype, fast_accumulate):
        lhs = replace(lhs, **{name: change(lhs) for name, change in parts.items()})
        return definition.run(lhs, rhs, bias, out_dtype, fast_accumulate)

    return run


def without_the_last_columns(lhs, rhs, bias, out_dtype, fast_accumulate):
    """What a GEMM does that drops a ragged block of K."""
    keep = lhs.inner - 16
    values = [
        definition.times_scale(q.values(), q.scale, q.cast.tile)[:, :keep] for q in (lhs, rhs)
    ]
    return values[0] @ values[1].T


def cut_to(bits):
    """Sums with so many bits: the tensor cores of Hopper keep 13 behind the point, of fewer a result is not usable."""

    def run(lhs, rhs, bias, out_dtype, fast_accumulate):
        left, right = (definition.times_scale(q.values(), q.scale, q.cast.tile) for q in (lhs, rhs))
        out = torch.zeros(lhs.shape[0], rhs.shape[0])
        for start in range(0, lhs.inner, 32):
            out += left[:, start : start + 32] @ right[:, start : start + 32].T
            mantissa, exponent = torch.frexp(out)
            out = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
        return out if bias is None else out + bias.float()

    return run


WRONG = {
    "scales of rows turned round": (CASTS["row"], changed(scale=lambda q: q.scale.flip(0))),
    "one scale everywhere": (
        CASTS["row"],
        changed(scale=lambda q: torch.full_like(q.scale, q.scale[0, 0].item())),
    ),
    "scales of blocks in the wrong order": (
        CASTS["blocks"],
        changed(scale=lambda q: q.scale.T.reshape(q.scale.shape)),
    ),
    "scales moved by one block": (CASTS["blocks"], changed(scale=lambda q: q.scale.roll(1, 1))),
    "no swizzle": (CASTS["mxfp8"], changed(scale=lambda q: q.scale.T.reshape(q.scale.shape))),
    "the tensor's scale forgotten": (
        CASTS["nvfp4"],
        changed(global_scale=lambda q: torch.ones_like(q.global_scale)),
    ),
    "nibbles exchanged": (CASTS["nvfp4"], changed(data=lambda q: (q.data >> 4) | (q.data << 4))),
    "a block left out": (CASTS["blocks"], without_the_last_columns),
    "an accumulator of 7 bits": (CASTS["row"], cut_to(7)),
    "integers rounded to bfloat16": (
        CASTS["int8"],
        lambda *call: definition.run(*call).to(torch.bfloat16).to(torch.float32),
    ),
}


@pytest.mark.parametrize(("casts", "run"), WRONG.values(), ids=WRONG)
def test_wrong_numbers_are_found(casts, run):
    result = examine(run, *casts)
    assert result.worst > 1.5, "too close to the limit to be told from a right kernel"
    assert (
        result.reason.startswith("its result is wrong on cpu: ")
        and f"{result.worst:.2g} times" in result.reason
    )


def test_a_bias_that_is_left_out_is_found():
    result = examine(without_bias, *CASTS["row"])
    assert result.worst > 1.5 and result.reason.startswith("its result with a bias is wrong on cpu")


def test_a_narrow_accumulator_is_accepted():
    """13 bits per partial sum are what the hardware has; a check that refuses them would refuse Hopper."""
    assert examine(cut_to(13), *CASTS["row"]).reason is None


def without_bias(lhs, rhs, bias, out_dtype, fast_accumulate):
    return definition.run(lhs, rhs, None, out_dtype, fast_accumulate)


def hides_nan(*call):
    return definition.run(*call).nan_to_num(nan=0.0)


def spreads_nan(*call):
    out = definition.run(*call)
    out[0, 0] = float("nan")
    return out


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (hides_nan, "it hides NaN on cpu"),
        (spreads_nan, "it makes NaN of numbers on cpu"),
        (
            lambda *call: definition.run(*call)[:, :-1],
            "its result has the shape [136, 263] on cpu, not [136, 264]",
        ),
    ],
    ids=["hides", "spreads", "shape"],
)
def test_other_failures_have_their_words(run, words):
    assert examine(run, *CASTS["row"]).reason == words


def test_a_kernel_that_raises_is_refused_with_its_own_words():
    def run(*call):
        raise NotImplementedError(
            "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul\nand more"
        )

    result = examine(run, *CASTS["row"])
    assert result.reason == (
        "it failed when it was tried on cpu: NotImplementedError: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"
    )


def test_no_memory_is_no_refusal():
    """It says nothing about the kernel, and another would need as much."""

    def run(*call):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with raises(OutOfMemoryError, "memory.kernel-check", "mm", "cpu", "2 GiB"):
        examine(run, *CASTS["row"])


# --- once, and only where there is a device ------------------------------------------------------------------------------------


def registry_of(run):
    registry: Registry[MmSpec] = Registry("mm")
    registry.register(Kernel("fast", lambda spec: None, run, check=lambda: CHECK))
    registry.register(Kernel("reference", lambda spec: None, definition.run))
    return registry


def test_a_check_is_made_once_per_device_and_pair_of_casts(no_results):
    calls = []

    def run(*call):
        calls.append(call)
        return definition.run(*call)

    registry, here = registry_of(run), Device("cpu", index=0)
    for _ in range(3):
        assert registry.choose(MmSpec(ROW, ROW, here)).kernel.name == "fast"
    assert len(calls) == 5, (
        "with and without fast accumulation, with and without NaN, and once with a bias"
    )
    registry.choose(MmSpec(TENSOR, TENSOR, here))
    assert len(calls) == 10
    delayed = replace(TENSOR, calibrate=DelayedScaling())
    registry.choose(MmSpec(delayed, delayed, here))
    assert len(calls) == 10, "where the amax came from is nothing to a GEMM"


def test_a_device_that_is_not_here_asks_for_no_check(no_results):
    registry = registry_of(lambda *call: pytest.fail("was run"))
    assert registry.choose(MmSpec(ROW, ROW, Device("cuda", (9, 0)))).kernel.name == "fast"


def test_a_refused_kernel_is_named_and_replaced(no_results):
    registry, spec = registry_of(hides_nan), MmSpec(ROW, ROW, Device("cpu", index=0))
    with pytest.warns(
        RuntimeWarning, match="mm: the fast kernel is not used, .* because it hides NaN on cpu:0"
    ):
        choice = registry.choose(spec)
    assert choice.kernel.name == "reference"
    assert choice.refusals == (("fast", Refusal("failed-check", "it hides NaN on cpu:0")),)
    with raises(BackendError, "kernel.refused", "mm", "fast", "reference", "cpu:0"):
        registry.choose(spec, "fast")


def test_a_check_changes_nothing_around_it(no_results):
    """Random state, autograd, autocast and a running trace are left alone."""
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        result = examine(definition.run, *CASTS["row"])
        assert torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert result.reason is None and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("run", "wanted"), [(definition.run, "fast"), (hides_nan, "reference")], ids=["good", "bad"]
)
def test_a_check_in_the_middle_of_a_compilation(run, wanted, no_results):
    """Dynamo calls it with real tensors and keeps the answer; no graph break."""
    torch._dynamo.reset()
    registry, here = registry_of(run), Device("cpu", index=0)

    def choose(x):
        name = registry.choose(MmSpec(ROW, ROW, here)).kernel.name
        return x + (1 if name == "fast" else 2)

    with (
        pytest.warns(RuntimeWarning, match="hides NaN") if wanted == "reference" else nullcontext()
    ):
        seen = torch.compile(choose, backend="eager", fullgraph=True)(torch.zeros(2))
    assert seen.tolist() == ([1, 1] if wanted == "fast" else [2, 2])
    assert len(selfcheck.RESULTS) == 1


@pytest.mark.parametrize("recipe", recipes.names())
def test_casts_go_to_an_older_tracer_as_tuples(recipe):
    """torch before 2.13 hands no dataclass to what is constant while it traces; nothing that a GEMM sees is lost in words."""
    for gemm in GEMMS:
        for cast in (
            getattr(recipes.get(recipe), gemm).lhs,
            getattr(recipes.get(recipe), gemm).rhs,
        ):
            if cast is not None:
                assert unflatten_cast(*flatten_cast(cast)) == plain(cast)


def test_what_words_cannot_name_is_refused_while_an_older_torch_traces(no_results, monkeypatch):
    own = replace(FP32, name="mine")
    kernel = registry_of(definition.run).kernels[0]
    here = Device("cpu", index=0)
    monkeypatch.setattr("narrowgauge.ops.registry.TAKES_DATACLASSES", False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert kernel.refuse(MmSpec(TENSOR, TENSOR, here)) is None and len(selfcheck.RESULTS) == 1
    assert kernel.refuse(MmSpec(replace(TENSOR, scale=own), TENSOR, here)).code == "compiling"
    assert len(selfcheck.RESULTS) == 1


def test_power_of_two_scales_too():
    cast = Cast(format=E4M3, tile=(1, 128), scale=POW2)
    assert examine(definition.run, cast, cast).reason is None


# --- every registry --------------------------------------------------------------------------------------------------------------

# Without a check: compiled for the CPU and compared with their definitions in tests/ops/test_codes.py,
# tests/ops/test_norm_act_cpp.py, tests/ops/test_cross_entropy.py and tests/optim.
UNCHECKED = {
    ("hadamard", "native-cpp"), ("optim", "native"), ("quantize_pair", "native-cpp"),
    ("norm_act", "native-cpp"), ("norm_act_backward", "native-cpp"),
    ("cross_entropy", "native-cpp"), ("cross_entropy_backward", "native-cpp"), ("attention16", "native-cpp"),
}  # fmt: skip


def test_every_kernel_has_a_check():
    found = {
        (registry.op, kernel.name)
        for registry in registries()
        for kernel in registry.kernels
        if kernel.check is None and kernel.name not in ("reference", "torch")
    }
    assert found == UNCHECKED, "register a kernel with a check; it then needs no line here"


def examples_on(device):
    """(op, kernel, kind of call) of every checked kernel that can compute an example of its op on the device."""
    for registry in registries():
        for kernel in registry.kernels:
            for spec in kernel.check().examples() if kernel.check is not None else ():
                refusal = kernel.refuse(replace(spec, device=device))
                # A kernel that is only slower here computes for whoever names it.
                if refusal is None or refusal.code == "slower":
                    yield registry.op, kernel, kernel.check().kind(spec)


def test_kernels_of_this_cpu_have_the_numbers_of_their_definitions():
    for op, kernel, kind in examples_on(device_facts("cpu", None)):
        found = selfcheck.examine(op, kernel.run, kernel.check(), kind, CPU)
        assert found.reason is None, f"{op}, {kernel.name}, {kind}: {found.reason}"


@pytest.mark.gpu
def test_kernels_of_this_gpu_have_the_numbers_of_their_definitions():
    here = replace(device_facts("cuda", 0), index=None)  # refusals before any check
    for op, kernel, kind in examples_on(here):
        found = selfcheck.examine(op, kernel.run, kernel.check(), kind, torch.device("cuda", 0))
        assert found.reason is None, f"{op}, {kernel.name}, {kind}: {found.reason}"
