"""mm against the float64 product of its dequantized operands, with a bound on float32 summation (bounded).

u = 2**-24. A sum of K exact products in float32, in any order, is off by at most about K u S, S = sum over k of |a| |b|. The
scales outside of the sum cost three more roundings and the bias one: (K + 5) u (S + |bias|) in all, and the last rounding
to out_dtype half a unit in its last place: 2**-8 in bfloat16, 2**-11 (at least 2**-25) in float16.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge import recipes
from narrowgauge.errors import BackendError, ConfigError, ShapeError
from narrowgauge.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT4, INT4X2, INT8, NF4
from narrowgauge.ops.mm import cublas, definition, high_precision, mm, plan
from narrowgauge.ops.mm import spec as mm_spec
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.ops.registry import Device, device_facts
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import WHOLE, Cast, Gemm
from narrowgauge.scaling import E4M3_TWO_LEVEL, E8M0_CEIL, FP32, POW2
from tests.compare import assert_same, assert_sqnr, sqnr_db
from tests.raising import coded, raises

ops_mm = importlib.import_module("narrowgauge.ops.mm")  # `narrowgauge.ops.mm` is the function

ROWS, TENSOR = Cast(format=E4M3, tile=(1, WHOLE)), Cast(format=E4M3)
NVFP4 = Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL)
MXFP4 = Cast(format=E2M1, tile=(1, 32), scale=E8M0_CEIL)
OTHER_CASTS = (
    NVFP4,
    MXFP4,
    Cast(format=INT4, tile=(1, WHOLE)),
    Cast(format=NF4, tile=(1, 64)),
    Cast(format=E4M3, tile=(1, 128)),
    Cast(format=E3M2, tile=(WHOLE, 16), scale=POW2),
    Cast(format=E2M3, tile=(3, 5)),
    Cast(format=E5M2, tile=(128, 128), scale=POW2),
)


def distinct_gemms():
    """'recipe.product' -> Gemm, the first of those with the same two casts: mm sees neither rotation nor sampling."""
    named = {
        f"{recipe.name}.{name}": gemm
        for recipe in recipes.ALL
        for name, gemm in recipe.gemms().items()
    }
    first = {(gemm.lhs, gemm.rhs): name for name, gemm in reversed(named.items())}
    return {name: named[name] for name in named if name in first.values()}


GEMMS = distinct_gemms()
SHAPES = [
    (33, 50, 130),
    (1, 1, 1),
    (16, 32, 64),
    (5, 1, 257),
    (1, 7, 31),
    (0, 4, 8),
    (4, 0, 8),
    (3, 5, 0),
    (0, 0, 0),
]
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

every_gemm = pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS)


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantized(x, cast, expand=None):
    """With the same noise for every x of a shape, where the cast rounds stochastically."""
    if not cast.draws:
        return quantize(x, cast, expand=expand)
    shape = cast.noise_shape(tuple(x.shape))
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(7))
    return quantize(x, cast, noise=noise.to(x.device), expand=expand)


def operand(x, cast, expand=None):
    return x.to(torch.bfloat16) if cast is None else quantized(x, cast, expand)


def operands(gemm, shape, expand=None):
    m, n, k = shape
    return operand(matrix(m, k), gemm.lhs, expand), operand(matrix(n, k, seed=1), gemm.rhs, expand)


def in_bfloat16_on_a_fast_cpu(gemm):
    return (
        definition.compute_dtype((gemm.lhs, gemm.rhs), Device("cpu", bf16_gemm=True))
        == torch.bfloat16
    )


def exactly(x):
    return dequantize(x).double() if isinstance(x, QTensor) else x.double()


def assert_product(out, lhs, rhs, bias=None, roundings=0.0):
    """`out` is lhs @ rhs.T + bias within the bound of the module; `roundings`: further relative errors of the sum."""
    a, b = exactly(lhs), exactly(rhs)
    exact, size = a @ b.T, a.abs() @ b.abs().T
    bound = roundings * exact.abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = bound + (a.shape[1] + 5) * 2.0**-24 * size
    unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out.dtype]
    bound = bound + unit * (exact.abs() + bound) + (2.0**-25 if out.dtype == torch.float16 else 0)
    assert out.shape == exact.shape
    error = (out.double() - exact).abs()
    assert (error <= bound).all(), (
        f"error {error.max():.3g}, {(error / bound).max():.3g} of the bound"
    )


# --- the definition -----------------------------------------------------------------------------------------------------------


@every_gemm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_recipes(gemm, shape):
    """Every product of every recipe: ragged, odd, single and empty axes, with and without bias, in every type."""
    lhs, rhs = operands(gemm, shape)
    bias = matrix(1, shape[1], seed=2)[0]
    for out_dtype in OUT_DTYPES:
        for b in (None, bias, bias.to(torch.bfloat16)):
            out = mm(lhs, rhs, bias=b, out_dtype=out_dtype)
            assert out.dtype == out_dtype
            assert_product(out, lhs, rhs, b)


@pytest.mark.slow
@given(
    m=st.integers(0, 20),
    n=st.integers(0, 20),
    k=st.integers(0, 150),
    lhs=st.sampled_from([*OTHER_CASTS, ROWS, TENSOR, None]),
    rhs=st.sampled_from([*OTHER_CASTS, ROWS, TENSOR, None]),
    expand=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
@settings(max_examples=250, deadline=None, derandomize=True)
def test_products_of_any_two_casts(m, n, k, lhs, rhs, expand):
    """Also those that no recipe pairs. bfloat16 is given only where the plan asks for it."""
    if (
        expand == torch.bfloat16
        and definition.compute_dtype((lhs, rhs), device_facts("meta", None)) != expand
    ):
        expand = torch.float32
    a, b = operands(Gemm(lhs=lhs, rhs=rhs), (m, n, k), expand)
    assert_product(mm(a, b), a, b)


@every_gemm
@pytest.mark.parametrize("shape", [(33, 50, 130), (5, 9, 31), (128, 130, 256)], ids=str)
def test_expanded_operands_give_the_product_of_the_codes(gemm, shape):
    """In float32 to the bit, and in bfloat16 too: the same numbers enter a float32 GEMM (exact)."""
    expected = mm(*operands(gemm, shape), backend="reference")
    for dtype in (torch.float32, torch.bfloat16):
        lhs, rhs = operands(gemm, shape, dtype)
        assert_same(mm(lhs, rhs), expected)


def onednn_products(monkeypatch):
    """The types of the products that go to oneDNN from now on."""
    took, once, whole = [], definition._rounded_once, definition._float_mm

    def in_float32(lhs, rhs):
        took.extend([torch.float32] if definition._uses_onednn(lhs) else [])
        return whole(lhs, rhs)

    monkeypatch.setattr(
        definition, "_rounded_once", lambda *given: took.append(torch.bfloat16) or once(*given)
    )
    monkeypatch.setattr(definition, "_float_mm", in_float32)
    return took


@pytest.mark.parametrize(
    "name", [name for name, gemm in GEMMS.items() if in_bfloat16_on_a_fast_cpu(gemm)]
)
def test_a_bfloat16_gemm_is_the_only_rounding(name, cpu, monkeypatch):
    """A bfloat16 result of a shipped recipe leaves the bfloat16 GEMM where a CPU has one, and is rounded once in any case."""
    took = onednn_products(monkeypatch)
    lhs, rhs = operands(GEMMS[name], (33, 50, 130), torch.bfloat16)
    assert_product(mm(lhs, rhs, out_dtype=torch.bfloat16), lhs, rhs)
    assert took == ([torch.bfloat16] if cpu.bf16_gemm else [])
    assert_product(mm(lhs, rhs), lhs, rhs)
    assert took == ([torch.bfloat16, torch.float32] if cpu.bf16_gemm else [])


def strided(kind, rows, columns, seed):
    """A bfloat16 matrix in the memory layout `kind`."""
    if kind == "columns":
        return matrix(columns, rows, seed=seed).to(torch.bfloat16).T
    if kind == "gaps":
        return matrix(rows, 2 * columns, seed=seed).to(torch.bfloat16)[:, ::2]
    if kind == "expanded":
        return matrix(1, columns, seed=seed).to(torch.bfloat16).expand(rows, columns)
    return matrix(rows, columns, seed=seed).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "kinds",
    [("rows", "rows"), ("columns", "gaps"), ("gaps", "columns"), ("expanded", "rows")],
    ids=str,
)
def test_a_bfloat16_gemm_with_a_bias_rounds_once(kinds, dtype, cpu, monkeypatch):
    """Where bias and sum cancel, a rounding in between would be many units in the last place off (bounded)."""
    took, once = [], definition._biased_once
    monkeypatch.setattr(definition, "_biased_once", lambda *given: took.append(1) or once(*given))
    for m, n, k in ((1, 1, 1), (1, 70, 33), (33, 1, 64), (37, 50, 70), (130, 64, 257)):
        lhs, rhs = strided(kinds[0], m, k, 0), strided(kinds[1], n, k, 1)
        sums = lhs.double() @ rhs.double().T
        for bias in (-sums[0], -2 * sums[-1], torch.zeros(n)):
            given = bias.to(dtype).repeat_interleave(2)[::2]
            assert_product(
                mm(lhs, rhs, bias=given, out_dtype=torch.bfloat16), lhs, rhs, given.float()
            )
    # The test pretends to have bfloat16 instructions; oneDNN asks the CPU itself.
    assert bool(took) == (
        cpu.bf16_gemm and dtype != torch.float64 and definition.onednn_adds_bias()
    )


def test_a_bfloat16_gemm_with_a_bias_keeps_what_is_not_finite():
    """NaN and infinity of an operand and of the bias stay where the definition in float32 has them (exact)."""
    lhs, rhs, bias = (
        strided("rows", 40, 70, 0),
        strided("rows", 50, 70, 1),
        matrix(1, 50, seed=2)[0],
    )
    lhs[3, 5], rhs[7, 2], bias[11], bias[12] = (
        float("nan"),
        float("inf"),
        float("inf"),
        float("nan"),
    )
    out = mm(lhs, rhs, bias=bias, out_dtype=torch.bfloat16).float()
    expected = lhs.float() @ rhs.float().T + bias
    assert_same(out.isnan(), expected.isnan())
    assert_same(out.isinf(), expected.isinf())


def test_a_bfloat16_gemm_with_a_bias_over_an_empty_axis():
    """Without products the bias remains, and without rows or columns nothing (exact)."""
    bias = matrix(1, 5)[0]
    out = mm(torch.ones(3, 0), torch.ones(5, 0), bias=bias, out_dtype=torch.bfloat16)
    assert_same(out, bias.to(torch.bfloat16).expand(3, 5).contiguous())
    for m, n in ((0, 5), (3, 0)):
        out = mm(torch.ones(m, 4), torch.ones(n, 4), bias=bias[:n], out_dtype=torch.bfloat16)
        assert out.shape == (m, n) and out.dtype == torch.bfloat16


def test_scales_that_are_no_powers_of_two_leave_bfloat16_to_float32(cpu, monkeypatch):
    """Row scales, and a second scale beside row scales: multiplied after a rounding they would be a second one (exact)."""
    took = onednn_products(monkeypatch)
    for cast in (ROWS, replace(ROWS, scale=POW2, headroom=4 / 3)):
        lhs, rhs = operands(Gemm(lhs=cast, rhs=cast), (33, 50, 130), torch.bfloat16)
        assert_same(mm(lhs, rhs, out_dtype=torch.bfloat16), mm(lhs, rhs).to(torch.bfloat16))
    assert set(took) == ({torch.float32} if cpu.bf16_gemm else set())


def test_scales_of_float32_leave_the_sum_on_their_own():
    """Row scales in float32 beside blocks of powers of two: neither loses a bit in bfloat16, which alone keeps 8."""
    lhs, rhs = ROWS, Cast(format=E4M3, tile=(1, 32), scale=POW2)
    for gemm in (Gemm(lhs=lhs, rhs=rhs), Gemm(lhs=rhs, rhs=lhs)):
        a, b = operands(gemm, (33, 50, 128), torch.bfloat16)
        assert_product(mm(a, b), a, b)


@every_gemm
def test_poison_reaches_its_rows_and_columns_only(gemm):
    """A NaN in row 2 of lhs: NaN in what its tile touches (of two levels: what the tensor's scale touches), numbers elsewhere."""
    a, b = matrix(300, 130), matrix(20, 130, seed=1)
    a[2, 3] = float("nan")
    lhs, rhs = operand(a, gemm.lhs), operand(b, gemm.rhs)
    out = mm(lhs, rhs)
    touched = exactly(lhs).isnan().any(dim=1)
    assert touched[2] and out[touched].isnan().all() and out[~touched].isfinite().all()
    one_scale_for_all = gemm.lhs is not None and (
        gemm.lhs.tile[0] == WHOLE or gemm.lhs.scale.two_level
    )
    assert bool(touched.all()) == one_scale_for_all


def test_transposed_codes_are_multiplied_in_place():
    """Per tensor and in squares one quantization serves both orientations (bounded)."""
    for tile in ((WHOLE, WHOLE), (16, 16)):
        cast = Cast(format=E4M3, tile=tile, scale=POW2)
        w, gy = quantize(matrix(40, 70), cast), quantize(matrix(30, 40, seed=1), cast)
        out = mm(gy, w.transposed())
        assert_product(out, gy, w.transposed())
        assert_same(out, mm(gy, quantize(matrix(40, 70).T, cast)))


def test_powers_of_two_pass_through_a_product():
    """Scaling an operand by 2**k scales the product, to the bit: nothing but scales may see it (exact)."""
    for gemm in GEMMS.values():
        a, b = matrix(9, 130), matrix(7, 130, seed=1)
        expected = mm(operand(a, gemm.lhs), operand(b, gemm.rhs))
        assert_same(
            mm(operand(a * 2.0**20, gemm.lhs), operand(b * 2.0**-13, gemm.rhs)), expected * 2.0**7
        )


def test_bias_is_added_before_rounding():
    """In float32: 256 + 1.5 rounds to 258 in bfloat16, 256 rounded first and then added to 256 (exact)."""
    ones = torch.ones(1, 257)
    out = mm(ones, ones, bias=torch.tensor([0.5]), out_dtype=torch.bfloat16)
    assert out.item() == torch.tensor(257.5).to(torch.bfloat16).item() == 258
    assert (torch.tensor(257.0).to(torch.bfloat16) + 0.5).item() == 256


def test_plain_operands_are_rounded_to_16_bits():
    """bfloat16, or float16 where the operand or the result is float16 (exact)."""
    x, w = matrix(5, 40), matrix(7, 40, seed=1)
    assert_same(mm(x, w), mm(x.to(torch.bfloat16), w.to(torch.bfloat16)))
    assert_same(mm(x, w, out_dtype=torch.float16), mm(x.half(), w.half(), out_dtype=torch.float16))
    assert_same(mm(x.double(), w.double()), mm(x.to(torch.bfloat16), w.to(torch.bfloat16)))
    assert_product(mm(x.half(), w.half()), x.half(), w.half())
    assert_product(mm(x.half(), quantize(w, ROWS)), x.half(), quantize(w, ROWS))
    for dtype, other, expected in (
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float16, torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ):
        assert high_precision(torch.ones(2, dtype=dtype), other).dtype == expected
    assert high_precision(x.half(), torch.float16).dtype == torch.float16
    y = x.to(torch.bfloat16)
    assert high_precision(y, torch.float32) is y


def test_autocast_around_a_kernel_changes_nothing():
    """A kernel that calls torch.mm would have its operands rounded to bfloat16."""
    run = definition.with_epilogue(
        lambda lhs, rhs, bias, dtype, fast: torch.mm(lhs.data.float(), rhs.data.float().T)
    )
    lhs, rhs = operands(INT8_GEMMS[0], (9, 7, 272))
    expected = run(lhs, rhs, None, torch.float32, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run(lhs, rhs, None, torch.float32, False), expected)


def test_autocast_around_mm_changes_nothing():
    for gemm in GEMMS.values():
        lhs, rhs = operands(gemm, (9, 7, 40))
        expected = mm(lhs, rhs)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(mm(lhs, rhs), expected)


# --- noise floors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gemm", "lhs", "floor_db"),
    [
        # Published in peers' tests (reference, section 4). torchao's blockwise and MX tests take y.sum() as the loss, so the
        # gradient of the output is ones, which cost nothing; for Gaussian gradients the floor is that of two casts.
        (recipes.FP8_CURRENT.output, "normal", 20),
        (recipes.FP8_CURRENT.grad_input, "normal", 20),
        (recipes.FP8_CURRENT.grad_weight, "normal", 20),
        (recipes.FP8_ROW.output, "normal", 25),
        (recipes.FP8_ROW.grad_input, "normal", 25),
        (recipes.FP8_ROW.grad_weight, "normal", 25),
        (recipes.FP8_BLOCK.output, "normal", 25),
        (recipes.FP8_BLOCK.grad_input, "ones", 30),
        (recipes.FP8_BLOCK.grad_weight, "ones", 30),
        (recipes.MXFP8.output, "normal", 26),
        (recipes.MXFP8.grad_input, "normal", 25),
        (recipes.MXFP8.grad_weight, "normal", 24),
        (Gemm(lhs=NVFP4, rhs=NVFP4), "normal", 16),
        # Derived: independent errors of two casts add, so 3.01 dB less than one cast: e4m3 31.51, e5m2 25.57 with e4m3
        # 24.6, int8 rows 42.06, MXFP4 18.75; and half a decibel for this draw.
        (recipes.FP8_BLOCK.grad_input, "normal", 28.0),
        (recipes.FP8_CURRENT.grad_input, "normal", 24.1),
        (recipes.INT8_ROW.output, "normal", 38.5),
        (Gemm(lhs=MXFP4, rhs=MXFP4), "normal", 15.2),
    ],
)
def test_noise_of_a_gaussian_product(gemm, lhs, floor_db):
    x = matrix(256, 1024) if lhs == "normal" else torch.ones(256, 1024)
    w = matrix(256, 1024, seed=1)
    assert_sqnr(mm(operand(x, gemm.lhs), operand(w, gemm.rhs)), x.double() @ w.double().T, floor_db)


@every_gemm
def test_emulation_agrees_with_the_dequantized_product(gemm):
    """Peers ask for 80 dB between an MX product and that of its dequantized operands; float32 sums give 120 and more."""
    lhs, rhs = operands(gemm, (64, 64, 1024))
    assert sqnr_db(exactly(lhs) @ exactly(rhs).T, mm(lhs, rhs)) > 120


# --- native kernels -------------------------------------------------------------------------------------------------------------


INT8_GEMMS = [
    Gemm(lhs=Cast(format=INT8, tile=left), rhs=Cast(format=INT8, tile=right))
    for left, right in product(((1, WHOLE), (WHOLE, WHOLE)), repeat=2)
]


@pytest.mark.usefixtures("exact_int8")
@pytest.mark.parametrize("gemm", INT8_GEMMS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (16, 16, 16), (17, 24, 40), (100, 3, 1000)], ids=str)
def test_the_integer_gemm_is_the_reference(gemm, shape):
    """What stands around torch._int_mm. To the bit while float32 holds the sums, 127**2 K < 2**24 (exact)."""
    lhs, rhs = operands(gemm, shape)
    bias = matrix(1, shape[1], seed=2)[0]
    for out_dtype in OUT_DTYPES:
        out = cublas.run_int8(lhs, rhs, bias, out_dtype, False)
        assert_product(out, lhs, rhs, bias)
        if gemm.lhs.tile == gemm.rhs.tile == (1, WHOLE):
            assert_same(out, definition.run(lhs, rhs, bias, out_dtype, False))
    assert_product(cublas.run_int8(lhs, rhs, None, torch.float32, False), lhs, rhs)


@pytest.mark.usefixtures("exact_int8")
def test_long_integer_sums_do_not_wrap_around():
    """127 * 127 * 140,000 is beyond int32; the two partial sums are exact and each is rounded once."""
    q = quantize(torch.full((2, 140_000), 127.0), Cast(format=INT8, tile=(1, WHOLE)))
    out = cublas.run_int8(q, q, None, torch.float32, False)
    assert ((out.double() / (127.0 * 127 * 140_000) - 1).abs() < 2 * 2.0**-24).all()


@pytest.mark.usefixtures("exact_int8")
def test_transposed_integer_codes_reach_the_integer_gemm():
    q = quantize(matrix(40, 24), Cast(format=INT8))
    x = quantize(matrix(10, 40, seed=1), Cast(format=INT8))
    assert_product(
        cublas.run_int8(x, q.transposed(), None, torch.float32, False), x, q.transposed()
    )


SCALED_GEMMS = {
    "tensor": Gemm(lhs=TENSOR, rhs=TENSOR),
    "hybrid": Gemm(lhs=Cast(format=E5M2), rhs=TENSOR),
    "row": Gemm(lhs=ROWS, rhs=ROWS),
    "tensor x row": Gemm(lhs=TENSOR, rhs=ROWS),
    "row x tensor": Gemm(lhs=ROWS, rhs=Cast(format=E5M2)),
}
every_scaled_gemm = pytest.mark.parametrize("gemm", SCALED_GEMMS.values(), ids=SCALED_GEMMS)
ROWS_ON_CPU = Version(torch.__version__).release >= (
    2,
    13,
)  # before, torch._scaled_mm's CPU version knew one scale per tensor


@every_scaled_gemm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_the_scaled_gemm_on_the_cpu(gemm, shape, biased):
    """torch._scaled_mm has a CPU version since 2.13: filling up, cutting, scales and bias, without a GPU.

    Row scales make its result bfloat16; so does out_dtype=bfloat16 without bias. On a GPU see the tests at the end.
    """
    lhs, rhs = operands(gemm, shape)
    bias = matrix(1, shape[1], seed=2)[0] if biased else None
    row_wise = gemm.lhs.tile != (WHOLE, WHOLE) or gemm.rhs.tile != (WHOLE, WHOLE)
    if row_wise and not ROWS_ON_CPU:
        pytest.skip(f"torch {torch.__version__} has no row scales on a CPU")
    for out_dtype in OUT_DTYPES:
        out = cublas.run_scaled(lhs, rhs, bias, out_dtype, True)
        assert out.dtype == out_dtype
        assert_product(out, lhs, rhs, bias, roundings=2.0**-8 if row_wise else 0.0)


@every_scaled_gemm
@pytest.mark.parametrize("shape", [(33, 50, 130), (1, 1, 1), (16, 16, 16), (17, 3, 48)], ids=str)
def test_scaled_gemms_meet_what_cuda_asks_for(gemm, shape, monkeypatch):
    """Layouts, multiples of 16, shapes and layouts of scales: torch's own check of CUDA arguments, on tensors without data."""
    call, checked = torch._scaled_mm, []

    def check(a, b, **options):
        with FakeTensorMode():
            options_on_cuda = {
                k: on_fake_cuda(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()
            }
            checked.append(call(on_fake_cuda(a), on_fake_cuda(b), **options_on_cuda))
        return torch.zeros(checked[-1].shape, dtype=checked[-1].dtype)

    monkeypatch.setattr(torch, "_scaled_mm", check)
    lhs, rhs = operands(gemm, shape)
    for transposed in (False, True):
        if transposed and gemm.rhs.is_symmetric:
            rhs = quantize(matrix(shape[2], shape[1]), gemm.rhs).transposed()
        cublas.run_scaled(lhs, rhs, None, torch.float32, True)
    assert all(out.device.type == "cuda" for out in checked) and len(checked) == 2


@pytest.mark.parametrize(
    ("dtype", "given"), [(torch.bfloat16, True), (torch.float32, False)], ids=str
)
def test_the_gemm_of_a_gpu_adds_the_bias(dtype, given, monkeypatch):
    """In its epilogue, in bfloat16 and filled up as rhs is: no float32 result, no pass over it; torch has none of a float32 result."""
    call, seen = torch._scaled_mm, []
    monkeypatch.setattr(cublas, "_on_cuda", lambda lhs, rhs: True)

    def check(a, b, **options):
        with FakeTensorMode():
            on_cuda = {
                k: on_fake_cuda(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()
            }
            out = call(on_fake_cuda(a), on_fake_cuda(b), **on_cuda)
        seen.append((options["bias"], out))
        return torch.zeros(out.shape, dtype=out.dtype)

    monkeypatch.setattr(torch, "_scaled_mm", check)
    lhs, rhs = (quantize(matrix(rows, 130), Cast(format=E4M3)) for rows in (33, 50))
    bias = matrix(1, 50)[0].to(torch.bfloat16)
    out = cublas.with_epilogue(cublas._scaled, adds=cublas._on_cuda)(lhs, rhs, bias, dtype, True)
    ((handed, product),) = seen
    assert (
        (handed is not None) == given
        and product.dtype == out.dtype == dtype
        and out.shape == (33, 50)
    )
    if given:
        assert_same(handed, torch.nn.functional.pad(bias, (0, 14)))
    else:
        assert_same(out, bias.to(dtype).expand(33, 50).contiguous())


def test_the_check_of_cuda_arguments_does_check():
    """Control: eight columns, and a row-major right operand, are refused by it."""
    with FakeTensorMode():
        one = torch.ones((), device="cuda")
        narrow, wide = (
            torch.empty(n, n, device="cuda", dtype=torch.float8_e4m3fn) for n in (8, 16)
        )
        with pytest.raises(RuntimeError, match="divisible by 16"):
            torch._scaled_mm(narrow, narrow.T, one, one, out_dtype=torch.float32)
        with pytest.raises(RuntimeError, match="must be col_major"):
            torch._scaled_mm(wide, wide, one, one, out_dtype=torch.float32)


def on_fake_cuda(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


@pytest.mark.usefixtures("exact_int8")
@pytest.mark.parametrize("shape", [(33, 50, 130), (1, 1, 1), (16, 16, 16), (17, 3, 48)], ids=str)
def test_integer_gemms_meet_what_cuda_asks_for(shape, monkeypatch):
    """torch._int_mm on CUDA: more than 16 rows, K and N multiples of 8, rhs column-major (aten/src/ATen/native/cuda/Blas.cpp).

    Its meta function does not check this, so it is checked here.
    """
    seen = []

    def checked(a, b, call=torch._int_mm):
        assert a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
        assert a.is_contiguous() and b.T.is_contiguous()
        seen.append(a.shape)
        return call(a, b)

    monkeypatch.setattr(torch, "_int_mm", checked)
    lhs, rhs = operands(INT8_GEMMS[0], shape)
    assert_product(cublas.run_int8(lhs, rhs, None, torch.float32, False), lhs, rhs)
    assert len(seen) == 1


# --- the choice of a kernel ------------------------------------------------------------------------------------------------------


def test_a_forced_kernel_refuses_in_words():
    lhs, rhs = operands(recipes.FP8_CURRENT.output, (4, 4, 8))
    with raises(BackendError, "kernel.refused", "mm", "native", "reference"):
        mm(lhs, rhs, backend="native")
    with raises(BackendError, "kernel.refused", "mm", "native-int8", mm_spec.NOT_INTEGERS):
        mm(lhs, rhs, backend="native-int8")
    with raises(BackendError, "kernel.refused", "mm", "triton"):
        mm(lhs, rhs, backend="triton")
    with raises(BackendError, "kernel.unknown", "'refrence'", "'reference'"):
        mm(lhs, rhs, backend="refrence")
    assert_same(
        mm(lhs, rhs, backend="reference"), definition.run(lhs, rhs, None, torch.float32, False)
    )


@pytest.mark.usefixtures("exact_int8")
def test_expanded_operands_never_reach_a_native_kernel(device_is):
    """On a CPU with VNNI too, where int8 codes go to the integer GEMM."""
    device_is(Device("cpu", int8_gemm=True))
    codes, values = (
        operands(INT8_GEMMS[0], (20, 24, 40), expand) for expand in (None, torch.float32)
    )
    chosen = plan(INT8_GEMMS[0], torch.device("cpu")).choice.kernel.name
    assert chosen in ("native-int8", "native-int8-cpp")
    assert_same(mm(*codes), mm(*values))
    assert_product(mm(codes[0], values[1]), *values)
    with raises(BackendError, "kernel.refused"):
        mm(*values, backend="native-int8")


# --- refusals ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lhs", "rhs", "bias", "words"),
    [
        (
            torch.ones(2, 3, 4),
            torch.ones(5, 4),
            None,
            coded("mm.axes", "lhs float32 [2, 3, 4] and rhs float32 [5, 4]"),
        ),
        (torch.ones(4), torch.ones(5, 4), None, coded("mm.axes")),
        (
            torch.ones(2, 3),
            torch.ones(5, 4),
            None,
            coded("mm.contracted", [2, 3], [5, 4]),
        ),
        (torch.ones(2, 3), torch.ones(3, 4), None, coded("mm.contracted", "rhs.T")),
        (
            quantize(torch.ones(2, 6), ROWS),
            torch.ones(5, 4),
            None,
            coded("mm.contracted", "lhs e4m3 row fp32 [2, 6] and rhs float32 [5, 4]"),
        ),
        (
            quantize(torch.ones(2, 7), NVFP4),
            torch.ones(5, 4),
            None,
            coded("mm.contracted", "[2, 7]"),
        ),
        (
            torch.ones(2, 4),
            torch.ones(5, 4, device="meta"),
            None,
            coded("mm.device", "cpu", "meta"),
        ),
        (
            torch.ones(2, 4),
            torch.ones(5, 4),
            torch.ones(2),
            coded("mm.bias", "[2]", "[5]"),
        ),
        (torch.ones(2, 4), torch.ones(5, 4), torch.ones(1, 5), coded("mm.bias", "[1, 5]", "[5]")),
        (None, None, None, coded("mm.type", "lhs", "NoneType")),
        (torch.ones(2, 4), [[1.0]], None, coded("mm.type", "rhs", "list")),
    ],
)
def test_shapes_that_do_not_fit_are_refused_in_words(lhs, rhs, bias, words):
    with raises(ShapeError, words):
        mm(lhs, rhs, bias=bias)


# --- compiled -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8-current", "mxfp8"])
def test_compiled_code_computes_the_same(name):
    """quantize, mm and dequantize in one graph, against eager: codes, scales and products to the bit (exact)."""
    gemm = recipes.get(name).output

    def step(x, w, bias):
        lhs, rhs = quantize(x, gemm.lhs), quantize(w, gemm.rhs)
        return (
            lhs.data,
            lhs.scale,
            dequantize(rhs),
            mm(lhs, rhs, bias=bias, out_dtype=torch.bfloat16),
        )

    torch._dynamo.reset()
    x, w, bias = matrix(40, 70) * 3e-3, matrix(48, 70, seed=1), matrix(1, 48, seed=2)[0]
    x[3] = 0
    compiled = torch.compile(step, fullgraph=True)(x, w, bias)
    for actual, expected in zip(compiled, step(x, w, bias), strict=True):
        assert_same(actual, expected)


# --- wrong rules ------------------------------------------------------------------------------------------------------------------


def test_the_bound_notices_a_narrow_accumulator():
    """Control: sums rounded to bfloat16 every 32 products, and a product without its scales, are both out of bounds."""
    lhs, rhs = operands(recipes.FP8_ROW.output, (33, 50, 256))
    a, b = dequantize(lhs), dequantize(rhs)
    total = torch.zeros(33, 50, dtype=torch.bfloat16)
    for part, other in zip(a.split(32, dim=1), b.split(32, dim=1), strict=True):
        total = total + (part @ other.T).to(torch.bfloat16)
    for wrong in (total.float(), lhs.values() @ rhs.values().T):
        with pytest.raises(AssertionError, match="of the bound"):
            assert_product(wrong, lhs, rhs)


# --- on a GPU -------------------------------------------------------------------------------------------------------------------------


def on_cuda(q):
    whole = None if q.global_scale is None else q.global_scale.cuda()
    return replace(q, data=q.data.cuda(), scale=q.scale.cuda(), global_scale=whole)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cast", [*OTHER_CASTS, *{g.lhs: 0 for g in GEMMS.values() if g.lhs}], ids=str
)
def test_a_gpu_quantizes_like_a_cpu(cast):
    """Codes and scales to the bit, at every magnitude (exact)."""
    x = matrix(200, 333) * torch.exp2((40 * matrix(200, 1, seed=3)).clamp(-110, 110))
    expected, q = quantized(x, cast), quantized(x.cuda(), cast)
    assert_same(q.data.cpu(), expected.data)
    assert_same(q.scale.cpu(), expected.scale)
    assert_same(dequantize(q).cpu(), dequantize(expected))


@pytest.mark.gpu
@every_gemm
def test_the_reference_on_a_gpu(gemm):
    """TF32 is off by default, so float32 products are exact there too."""
    for shape in SHAPES:
        lhs, rhs = (
            on_cuda(q) if isinstance(q, QTensor) else q.cuda() for q in operands(gemm, shape)
        )
        assert_product(mm(lhs, rhs, backend="reference").cpu(), *operands(gemm, shape))


@pytest.mark.gpu
@every_scaled_gemm
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
def test_the_scaled_gemm_on_a_gpu(gemm, fast):
    """Against the float64 product: tensor cores keep about 14 bits of a sum (Hopper), 2**-13 of S.

    Two roundings to bfloat16, of row-scaled results and to out_dtype, are 2**-7 of the result.
    """
    choice = plan(gemm, torch.device("cuda")).choice
    if choice.kernel.name != "native":
        pytest.skip(str(choice.refusals))
    for shape in ((33, 50, 130), (1, 1, 1), (128, 256, 512), (3, 5, 0), (0, 4, 8)):
        lhs, rhs = operands(gemm, shape)
        for out_dtype, bias in product(OUT_DTYPES, (None, matrix(1, shape[1], seed=2)[0])):
            out = cublas.run_scaled(
                on_cuda(lhs), on_cuda(rhs), None if bias is None else bias.cuda(), out_dtype, fast
            )
            exact = exactly(lhs) @ exactly(rhs).T
            size = exactly(lhs).abs() @ exactly(rhs).abs().T
            if bias is not None:
                exact, size = exact + bias.double(), size + bias.double().abs()
            error = (out.cpu().double() - exact).abs()
            assert (error <= 2.0**-13 * size + 2.0**-7 * exact.abs() + 2.0**-25).all(), (
                shape,
                out_dtype,
            )


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", INT8_GEMMS, ids=str)
def test_the_integer_gemm_on_a_gpu(gemm):
    """Exact sums, so the same numbers as on the CPU (exact)."""
    for shape in (*SHAPES, (17, 24, 40)):
        lhs, rhs = operands(gemm, shape)
        out = cublas.run_int8(on_cuda(lhs), on_cuda(rhs), None, torch.float32, False).cpu()
        assert_same(out, cublas.run_int8(lhs, rhs, None, torch.float32, False))


@pytest.mark.parametrize("scale", [FP32, E4M3_TWO_LEVEL], ids=str)
def test_bfloat16_values_keep_the_bits_of_their_scales(scale):
    """Scales that are no powers of two once became bfloat16 before they multiplied expanded bfloat16 values (exact)."""
    x, w = torch.randn(16, 64), torch.randn(24, 64)
    cast = Cast(format=E4M3, tile=(1, 32), scale=scale)
    codes = mm(quantize(x, cast), quantize(w, cast))
    expanded = mm(
        quantize(x, cast, expand=torch.bfloat16), quantize(w, cast, expand=torch.bfloat16)
    )
    assert_same(expanded, codes)


def test_levels_of_tables_are_not_squeezed_into_bfloat16():
    q = quantize(torch.randn(4, 16), Cast(format=NF4))
    assert q.expanded(torch.float32).is_expanded
    with raises(ConfigError, "qtensor.expanded-dtype", "nf4"):
        q.expanded(torch.bfloat16)


@pytest.mark.parametrize("k", [1000, 30_000])
def test_products_of_integers_are_exact_at_any_length(k: int) -> None:
    """All codes at their largest: one float32 sum would round from 24,455 products on (exact)."""
    split, four = Cast(format=INT4X2), Cast(format=INT4)
    lhs, rhs = (quantize(torch.ones(2, k), cast, expand=torch.float32) for cast in (split, four))
    lhs.data[:, -1] = 1  # an odd number at the end, which a rounded sum would lose
    out = mm(lhs, rhs)
    exact = torch.tensor(98.0 * 7 * (k - 1) + 7).double() * (1 / 98) * (1 / 7)
    torch.testing.assert_close(out.double(), exact.expand(2, 2), rtol=3e-7, atol=0)
    total = mm(replace(lhs, scale=torch.ones(1, 1)), replace(rhs, scale=torch.ones(1, 1))).double()
    assert (total == torch.tensor(98.0 * 7 * (k - 1) + 7).double().float().double()).all(), (
        "rounded once"
    )


@pytest.mark.parametrize("formats", [(INT4X2, INT4), (INT4, INT4), (INT4, INT8)], ids=str)
def test_four_bit_codes_multiply_as_int8(formats) -> None:  # type: ignore[no-untyped-def]
    """The integer GEMM on packed and split codes gives what the emulation gives, bit for bit."""
    lhs, rhs = (torch.randn(33, 70), torch.randn(20, 70))
    codes = [
        quantize(x, Cast(format=format)) for x, format in zip((lhs, rhs), formats, strict=True)
    ]
    values = [q.expanded(torch.float32) for q in codes]
    assert_same(cublas.run_int8(*codes, None, torch.float32, False), mm(*values))
