"""The Triton kernels behind quantize: who refuses what (exact), and on a GPU the reference's bits (exact)."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from narrowgauge.errors import BackendError
from narrowgauge.formats import E2M1, E4M3, E5M2, INT4, INT8, NF4
from narrowgauge.ops import triton
from narrowgauge.ops.quantize import KERNELS, dequantize, pair, quantize, tile_amax
from narrowgauge.ops.quantize import triton as triton_kernel
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.pair import quantize_pair
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import Key, draw
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import WHOLE, Cast, ClippedRms
from narrowgauge.scaling import (
    E4M3_EDEN,
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E8M0_CEIL,
    E8M0_FLOOR,
    POW2,
)
from tests.compare import assert_same
from tests.raising import coded, raises, refusal_of, require

HOPPER = Device("cuda", (9, 0))
CASTS = (
    Cast(format=E4M3),
    Cast(format=E5M2),
    Cast(format=E5M2, rounding="stochastic"),
    Cast(format=E4M3, tile=(1, WHOLE)),
    Cast(format=E4M3, tile=(1, 128), scale=POW2),
    Cast(format=E4M3, tile=(128, 128), scale=POW2),
    Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL),
    Cast(format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, rounding="stochastic", headroom=4 / 3),
    Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL),
    Cast(format=E2M1, tile=(16, 16), scale=E4M3_TWO_LEVEL),
    Cast(
        format=E2M1,
        tile=(1, 16),
        scale=E4M3_TWO_LEVEL_CEIL,
        rounding="stochastic",
        headroom=17 / 16,
    ),
    Cast(format=INT4, rounding="stochastic"),
    Cast(format=INT4, tile=(1, WHOLE)),
    Cast(format=INT8),
)


@pytest.fixture(autouse=True)
def forgotten():
    """What was found out of the Triton that is here is forgotten, and so is what the test finds out."""
    for each in (triton.version, triton.unavailable, triton._races):
        each.cache_clear()
    yield
    for each in (triton.version, triton.unavailable, triton._races):
        each.cache_clear()


def spec(cast: Cast, device: Device = HOPPER, shape: tuple[int, int] = (64, 64), **changes) -> Spec:
    changes.setdefault("noise", "key" if cast.draws else None)
    return Spec(
        device=device, dtype=changes.pop("dtype", torch.bfloat16), shape=shape, cast=cast, **changes
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (spec(Cast(format=E4M3), Device("cpu")), coded("device", "cpu")),
        (spec(Cast(format=E4M3), Device("cuda", (7, 5))), coded("capability", "7.5", "8.0")),
        (spec(Cast(format=NF4, tile=(1, 64))), coded("format", "nf4")),
        (spec(Cast(format=E2M1, scale=E4M3_TWO_LEVEL)), coded("tile", (-1, -1))),
        (spec(Cast(format=E4M3), shape=(0, 5)), coded("shape")),
        (spec(Cast(format=E4M3), dtype=torch.float64), coded("dtype", torch.float64)),
        (spec(Cast(format=INT4, rounding="stochastic"), noise="tensor"), coded("noise")),
        (spec(Cast(format=INT4, calibrate=ClippedRms())), coded("calibration", "2.475 rms")),
        (spec(Cast(format=E4M3, tile=(WHOLE, 1))), coded("tile", (-1, 1))),
        (spec(Cast(format=E4M3, tile=(3, 5))), coded("tile", (3, 5))),
        (spec(Cast(format=E4M3, tile=(1, 256))), coded("tile", (1, 256))),
        (spec(Cast(format=E4M3, tile=(1, 32)), amax=True), coded("amax")),
    ],
)  # fmt: skip
def test_refusals_say_why(triton_installed, given, expected):
    require(refusal := refusal_of(KERNELS, "triton", given), expected.code, *expected.values)
    with raises(BackendError, "kernel.refused", refusal.text):
        KERNELS.choose(given, "triton")


EDEN = Cast(format=E2M1, tile=(1, 16), scale=E4M3_EDEN, rounding="eden", block=128)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (spec(EDEN, Device("cpu")), coded("device", "cpu")),
        (spec(EDEN, Device("cuda", (7, 5))), coded("capability", "7.5", "8.0")),
        (spec(Cast(format=E4M3)), coded("rounding", "'nearest'")),
        (spec(EDEN, in_operator=True), coded("compiling")),
        (spec(EDEN, noise="tensor"), coded("noise")),
        (spec(EDEN, shape=(0, 5)), coded("shape")),
        (spec(EDEN, amax=True), coded("calibration")),
        (spec(Cast(format=INT4, tile=(1, 8), rounding="eden", block=16)), coded("tile", "16, 32, 64, 128")),
    ],
)  # fmt: skip
def test_refusals_of_corrected_casts_say_why(triton_installed, given, expected):
    require(refusal_of(KERNELS, "triton-eden", given), expected.code, *expected.values)


def test_a_gpu_corrects_scales_by_a_kernel_of_its_own(triton_installed):
    assert KERNELS.choose(spec(EDEN)).kernel.name == "triton-eden"
    require(refusal_of(KERNELS, "triton", spec(EDEN)), "rounding")


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_takes_the_kernel(triton_installed, cast, capability):
    assert KERNELS.choose(spec(cast, Device("cuda", capability))).kernel.name == "triton"


def test_a_given_amax_replaces_every_calibration(triton_installed):
    assert triton_kernel.refuse(spec(Cast(format=INT4, calibrate=ClippedRms()), amax=True)) is None


def test_one_pass_refuses_what_it_cannot_do(triton_installed):
    def refuse_delayed(spec):
        return pair.refuse(replace(spec, delayed=True))

    assert refuse_delayed(spec(Cast(format=E4M3))) is None
    assert refuse_delayed(spec(Cast(format=INT4), shape=(4, 6))) is None
    assert "rows have 5" in str(refuse_delayed(spec(Cast(format=INT4), shape=(4, 5))))
    for cast in (Cast(format=E4M3, tile=(1, WHOLE)), Cast(format=E4M3, rounding="stochastic")):
        require(refuse_delayed(spec(cast)), "tile")


@pytest.mark.parametrize(
    ("version", "least"),
    [("3.6.0", (9, 0)), ("3.8.1", (9, 0)), ("3.9.0", (8, 9)), ("3.10.0", (8, 9))],
)
def test_conversions_of_old_triton_on_ada_round_twice(monkeypatch, version, least):
    """By way of float16; there the kernels round in integer arithmetic."""
    monkeypatch.setattr(triton.metadata, "version", lambda name: version)
    found = [
        capability
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0))
        if triton.has_conversions(capability)
    ]
    assert min(found) == least


@pytest.mark.parametrize(
    ("version", "values"), [("3.5.1", ("3.5.1", "3.6")), (None, ("torch's CUDA",))]
)
def test_an_old_or_absent_triton_is_named(monkeypatch, version, values):
    def found(name):
        if version is None:
            raise triton.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(triton.metadata, "version", found)
    require(triton.refuse("cuda", (9, 0)), "toolchain", *values)


@pytest.mark.parametrize(
    ("version", "races"),
    [
        ("3.6.0", True),
        ("3.7.0", True),
        ("3.7.1", False),
        ("3.8.0+git675c", False),
        ("3.10.0", False),
    ],
)
def test_products_load_in_one_stage_where_triton_leaves_out_a_fence(monkeypatch, version, races):
    """On capabilities whose products read shared memory; the others keep their stages."""
    monkeypatch.setattr(triton.metadata, "version", lambda name: version)
    capabilities = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [triton.stages(4, capability) for capability in capabilities]
    assert found == ([4, 4, 1, 1, 1, 4] if races else [4] * 6)
    assert [each.message.code for each in seen] == ["triton.one-stage"] * races


def test_no_c_compiler_is_a_reason(monkeypatch):
    """Triton builds its launchers with one."""
    monkeypatch.setattr(triton.metadata, "version", lambda name: "3.9.0")
    monkeypatch.setattr(triton.shutil, "which", lambda name: None)
    for compiler, named in (("", "gcc"), ("/usr/bin/cc", "")):
        monkeypatch.setenv("CC", compiler)
        triton.unavailable.cache_clear()
        assert named in triton.unavailable() and bool(triton.unavailable()) == bool(named)
    triton.unavailable.cache_clear()


def test_a_new_triton_is_taken(monkeypatch):
    monkeypatch.setenv("CC", "cc")
    for version in ("3.6.0", "3.10.0", "4.0.0+git1"):
        monkeypatch.setattr(triton.metadata, "version", lambda name, version=version: version)
        triton.unavailable.cache_clear()
        assert triton.unavailable() == ""
    triton.unavailable.cache_clear()


def test_on_the_cpu_the_same_kernels_as_before_compute():
    """The compiled one for integers with a key's noise, the reference for all else."""
    choose = KERNELS.choose
    cpu = Device("cpu")
    assert choose(spec(Cast(format=E4M3), cpu)).kernel.name == "reference"
    integers = choose(spec(Cast(format=INT4, rounding="stochastic"), cpu))
    assert integers.kernel.name in ("native-cpp", "reference")
    assert dict(integers.refusals)["triton"].text == "needs a CUDA device, the tensor is on cpu"


def test_both_and_delayed_are_what_they_say_on_the_cpu():
    x = torch.randn(40, 70)
    cast = Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL)
    for got, expected in zip(
        quantize_pair(x, cast)[:2], (quantize(x, cast), quantize(x.T, cast)), strict=True
    ):
        assert_same(got.data, expected.data)
        assert_same(got.scale, expected.scale)
    live, same_live = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([2.0, 1.0, 0.0])
    got, _, amax = quantize_pair(x, Cast(format=E4M3), amax_state=live, cols=False)
    assert_same(amax, update_amax(same_live, tile_amax(x, (WHOLE, WHOLE))))
    assert_same(got.data, quantize(x, Cast(format=E4M3), amax=amax).data)
    assert_same(live, same_live)


def test_a_key_on_a_device_has_the_numbers_of_the_key():
    words = torch.tensor([5, 2**32 - 1], dtype=torch.int64)
    assert_same(Key(words).uniform((7, 33)), Key((5, 2**32 - 1)).uniform((7, 33)))


# --- on a GPU -------------------------------------------------------------------------------------------------------------------------


def wide(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(rows, columns) * torch.exp2((8 * torch.randn(rows, columns)).clamp(-60, 60))
    return x.to(dtype)


def check(x: torch.Tensor, cast: Cast, expand: torch.dtype | None = None) -> None:
    """x on the GPU, by the kernel and by the reference on the CPU; both orientations where there are codes."""
    random = cast.draws
    key, other = (Key((11, 13)), Key((17, 19))) if random else (None, None)
    expected = quantize(x.cpu(), cast, noise=key, expand=expand, backend="reference")
    pairs = [(quantize(x, cast, noise=key, expand=expand, backend="triton"), expected)]
    if expand is None:
        both = quantize_pair(x, cast, noise=(key, other), backend="triton")[:2]
        turned = quantize(x.cpu().T, cast, noise=other, backend="reference")
        pairs += list(zip(both, (expected, turned), strict=True))
    for got, wanted in pairs:
        assert_same(got.scale.contiguous(), wanted.scale.contiguous(), any_nan=True, at="scale")
        assert_same(got.data, wanted.data, any_nan=True, at="data")


@pytest.mark.gpu
@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 4097), (37, 53), (129, 8193), (304, 512), (300, 512), (1024, 1024)],
    ids=str,
)
def test_kernels_have_the_bits_of_the_reference(gpu, cast, shape):
    """Every orientation, odd sizes, poisoned outputs; hence the conversion instruction as well."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = wide(*shape, dtype).nan_to_num(posinf=6e4, neginf=-6e4)
        check(x.to(gpu), cast)
        check(x.T.contiguous().T.to(gpu), cast)
    check(wide(*shape).to(gpu), cast, torch.bfloat16)
    check(wide(shape[0], 2 * shape[1]).to(gpu)[:, : shape[1]], cast)


def test_memory_that_kernels_count_in_is_kept_and_what_they_leave_written_lies_apart():
    """A kernel that counts on zeros is never given what another one left there; nor a call that is made again a fake tensor."""
    zeros = pytest.importorskip("narrowgauge.ops.triton.launch")
    cpu = torch.device("cpu")
    plain, written = zeros.zeroed_workspace(9, cpu), zeros.zeroed_workspace(9, cpu, written=8)
    assert plain.data_ptr() == zeros.zeroed_workspace(9, cpu).data_ptr() != written.data_ptr()
    known = {}
    with FakeTensorMode():
        assert isinstance(zeros.of_stream(7, cpu, 0, known), FakeTensor) and not known
    assert zeros.of_stream(7, cpu, 0, known) is zeros.of_stream(7, cpu, 0, known)


@pytest.mark.gpu
@pytest.mark.timeout(120)  # programs that wait for ever would not end
@pytest.mark.parametrize("cast", [Cast(format=E4M3), Cast(format=INT8, tile=(1, WHOLE))], ids=str)
def test_programs_that_wait_for_each_other(gpu, cast):
    """More pieces than programs, beside work on another stream, again and again, and in a CUDA graph: the bits of the reference."""
    shape = (6000, 4112)
    x, busy, graph = (
        torch.randn(*shape, dtype=torch.bfloat16, device=gpu),
        torch.cuda.Stream(),
        torch.cuda.CUDAGraph(),
    )
    numbers = torch.randn(4096, 4096, device=gpu)
    for i in range(10):
        x.mul_(0.7)
        with torch.cuda.stream(busy):
            numbers @ numbers
        if i == 3:
            with torch.cuda.graph(graph):
                captured = quantize_pair(x, cast, backend="triton")
        if i > 3:
            graph.replay()
        for got in [quantize_pair(x, cast, backend="triton"), *([captured] if i > 3 else [])]:
            for mine, of in zip(got[:2], (x, x.T), strict=True):
                wanted = quantize(of.cpu(), cast, backend="reference")
                assert_same(mine.scale.contiguous(), wanted.scale.contiguous())
                assert_same(mine.data, wanted.data)


@pytest.mark.gpu
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_nan_beside_a_transposed_store(gpu, cast):
    """triton-lang/triton issue 11111: a NaN-propagating maximum beside a transposed 8-bit store gave NaN and infinity elsewhere."""
    for value in (float("nan"), float("inf"), -float("inf")):
        x = wide(256, 384)
        x[5, 7] = value
        check(x.to(gpu), cast)


@pytest.mark.gpu
@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1, INT8], ids=str)
def test_every_bfloat16_is_rounded_as_the_reference_rounds_it(gpu, format):
    """Ties, subnormals, saturation: all 65,280 finite bfloat16 numbers, by scales that move them to every place."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = codes[codes.isfinite()].reshape(255, 256)
    for amax in (format.max, 1.0, 3.0, 1e-3, 2.0**-100):
        given = torch.full((1, 1), float(amax))
        got = quantize(x.to(gpu), Cast(format=format), amax=given.to(gpu), backend="triton")
        assert_same(
            got.data, quantize(x, Cast(format=format), amax=given, backend="reference").data
        )


@pytest.mark.gpu
@pytest.mark.parametrize("in_use", [0.0, 3.0])
@pytest.mark.parametrize("spoiled", [None, float("nan"), float("inf")])
def test_delayed_scaling_in_one_pass(gpu, in_use, spoiled):
    """Codes, the amax used, and the window's state, beside `observe` and the reference."""
    for shape in ((3, 5), (700, 1300), (3000, 4096)):
        x = torch.randn(*shape).bfloat16()
        if spoiled is not None:
            x[1, 2] = spoiled
        live, expected_live = (torch.tensor([in_use, 0.5, 0.0]) for _ in range(2))
        live = live.to(gpu)
        got, _, used = quantize_pair(
            x.to(gpu), Cast(format=E4M3), amax_state=live, cols=False, backend="triton"
        )
        amax = update_amax(expected_live, tile_amax(x, (WHOLE, WHOLE)))
        assert_same(live, expected_live)
        assert_same(used, amax, any_nan=True)
        assert_same(
            dequantize(got), dequantize(quantize(x, Cast(format=E4M3), amax=amax)), any_nan=True
        )
        live = torch.tensor([in_use, 0.5, 0.0], device=gpu)
        *both, used = quantize_pair(x.to(gpu), Cast(format=E4M3), amax_state=live, backend="triton")
        assert_same(live, expected_live)
        assert_same(used, amax, any_nan=True)
        for got, of in zip(both, (x, x.T), strict=True):
            assert_same(
                dequantize(got),
                dequantize(quantize(of, Cast(format=E4M3), amax=amax)),
                any_nan=True,
            )


@pytest.mark.gpu
def test_keys_are_drawn_without_waiting_and_repeat_with_the_generator(gpu):
    torch.cuda.manual_seed(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = draw((40, 50), gpu)
        x = torch.randn(40, 50, device=gpu)
        one = quantize(x, Cast(format=INT4, rounding="stochastic"), noise=first)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.manual_seed(3)
    again = draw((40, 50), gpu)
    assert isinstance(first, Key) and torch.equal(first.words, again.words)
    expected = quantize(
        x.cpu(), Cast(format=INT4, rounding="stochastic"), noise=first.uniform((40, 50)).cpu()
    )
    assert_same(one.data, expected.data)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("cast", [CASTS[0], CASTS[3], CASTS[4], CASTS[6]], ids=str)
def test_more_than_two_to_the_31_elements(gpu, cast):
    """The last rows, of element numbers that 32 bits do not hold, as when they are quantized alone."""
    rows, columns = 2**16 + 8, 2**15
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free GPU memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=gpu)
    x[-130:] = wide(130, columns).to(gpu)
    x[0, 0] = x.abs().amax() if WHOLE in cast.tile and cast.tile[0] == WHOLE else 1.0
    got = quantize(x, cast, backend="triton")
    first = rows - 256 if rows % 256 == 0 else rows // 128 * 128 - 128
    last = quantize(
        x[first:].cpu(), cast, backend="reference",
        amax=x.abs().amax().float().cpu().reshape(1, 1) if cast.tile == (WHOLE, WHOLE) else None,
    )  # fmt: skip
    assert_same(got.data[first:], last.data)
    assert_same(got.scale[-1:], last.scale[-1:])
