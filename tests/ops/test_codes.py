"""The compiled casts, the passes around a 4-bit product, and the product, against their definitions.

Encode, decode, masks, noise, rounding and the product bit for bit (exact) over ragged shapes and edges; the butterflies against
the matrix (bounded) and against themselves in torch (exact); refusals.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from narrowgauge import formats
from narrowgauge.errors import BackendError
from narrowgauge.formats import E2M1, E3M0, E4M3, INT4, INT4X2, INT8, NF4, FloatFormat
from narrowgauge.ops import random
from narrowgauge.ops.cpp import int4 as cpp
from narrowgauge.ops.hadamard import (
    decode,
    draw_signs,
    encode,
    rotate,
    rotated_length,
    unpack_bits,
    unrotate,
)
from narrowgauge.ops.hadamard.definition import pack_bits
from narrowgauge.ops.mm import cpp as product_kernel
from narrowgauge.ops.mm import mm
from narrowgauge.ops.quantize import cpp as cast_kernel
from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.quantize.cpp import rounds
from narrowgauge.ops.random import Key
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import WHOLE, Cast, ClippedRms, CurrentScaling, Hadamard
from narrowgauge.scaling import (
    E4M3_FOUR_OVER_SIX,
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E8M0_FLOOR,
    FP32,
    POW2,
)
from tests.compare import assert_same, sqnr_db
from tests.raising import raises
from tests.selection import needs_compiler, quick

needs_gemm = pytest.mark.skipif(
    bool(cpp.LIBRARY.missing) or not product_kernel.has_gemm(),
    reason="needs AVX2 and a C++ compiler",
)
SHAPES = [(0, 8), (3, 0), (1, 1), (5, 7), (4, 8), (7, 33), (16, 64), (13, 130)]
EDGES = [
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-42,
    3.4e38,
    7.0,
    7.0000005,
    -7.0,
    0.5,
    1.5,
    -2.5,
]


def matrix(rows: int, columns: int, spread: float = 4.0) -> Tensor:
    """Normal numbers with ties, the edges of the format, and what is not finite, as far as they find room."""
    x = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
        * spread
    )
    flat = x.view(-1)
    flat[: min(len(EDGES), len(flat))] = torch.tensor(EDGES)[: len(flat)]
    return x


@needs_compiler
@pytest.mark.parametrize("format", [INT4, INT8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, math.nan])
def test_encode_is_the_reference(shape, scale, format):
    x, step = matrix(*shape), torch.tensor([[scale]])
    found, expected = (
        encode(x, step, format, packed=True, bits=True, backend=backend)
        for backend in ("native-cpp", "reference")
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    assert_same(decode(found.packed, format, shape[1]), found.codes)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_let_through_what_their_bits_say(shape):
    d, inside = torch.randn(shape), torch.rand(shape) < 0.5
    assert_same(unpack_bits(pack_bits(inside), shape[1]), inside)
    assert_same(unrotate(d, None, shape[1], bits=pack_bits(inside)), torch.where(inside, d, 0.0))


def butterflies(x: Tensor, block: int) -> Tensor:
    """x H in the kernel's order of additions."""
    y, h = x.reshape(len(x), -1, block), 1
    while h < block:
        low, high = y.reshape(len(x), -1, block // (2 * h), 2, h).unbind(3)
        y = torch.stack((low + high, low - high), dim=3).reshape(len(x), -1, block)
        h *= 2
    return y.reshape(x.shape) * torch.tensor(block**-0.5, dtype=torch.float32)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("signs", ["none", "fixed"])
@pytest.mark.parametrize(
    ("block", "inner"), [(2, 1), (4, 10), (8, 8), (32, 33), (32, 384), (64, 100), (1024, 1030)]
)
def test_butterflies_are_the_matrix(block, inner, signs, dtype):
    """Float32 sums of 2**k terms in either order: each errs by less than 2**-24 k of the row's norm, 120 dB for k <= 10."""
    hadamard = Hadamard(block=block, signs=signs)
    drawn, whole = draw_signs(hadamard, inner, torch.device("cpu")), rotated_length(inner, hadamard)
    x = torch.randn(9, inner).to(dtype)
    found, expected = (
        rotate(x, hadamard, drawn, backend=backend) for backend in ("native-cpp", "reference")
    )
    assert found.shape == (9, whole) and sqnr_db(expected, found) > 120
    full = torch.nn.functional.pad(x.float(), (0, whole - inner))
    assert_same(found, butterflies(full if drawn is None else full * drawn, block))
    bits = pack_bits(torch.rand(9, whole) < 0.9)
    back, same = (
        unrotate(found, hadamard, inner, drawn, bits, backend=backend)
        for backend in ("native-cpp", "reference")
    )
    assert back.shape == (9, inner) and sqnr_db(same, back) > 120


@needs_compiler
def test_noise_is_the_definition_uniform_and_from_torchs_generator():
    """20 bins of 100,000 numbers: chi-square with 19 degrees exceeds 60 with probability 4e-6."""
    assert_same(Key((5, 2**32 - 1)).uniform((7, 33)), random.reference(5, 2**32 - 1, (7, 33)))
    torch.manual_seed(3)
    first, second = random.draw((4,), torch.device("cpu")), random.draw((4,), torch.device("cpu"))
    torch.manual_seed(3)
    assert random.draw((400, 400), torch.device("cpu")).words == first.words != second.words
    numbers = first.uniform((100_000,))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert ((counts - 5000) ** 2 / 5000).sum() < 60
    other = second.uniform((100_000,))
    assert torch.corrcoef(torch.stack((numbers, other)))[0, 1].abs() < 5 * 100_000**-0.5
    assert torch.corrcoef(torch.stack((numbers[1:], numbers[:-1])))[0, 1].abs() < 5 * 100_000**-0.5


WAYS = [
    (format, rounding)
    for format in formats.ALL
    for rounding in ("nearest", "stochastic")
    if rounds(format, stochastically=rounding == "stochastic")
]
SCALES = (FP32, POW2, E8M0_FLOOR, E4M3_TWO_LEVEL, E4M3_TWO_LEVEL_CEIL)
# Rules that compare scales tile by tile, which one scale for a whole axis leaves out.
COMPARED_SCALES = (E4M3_FOUR_OVER_SIX,)
TILES = [(WHOLE, WHOLE), (1, WHOLE), (1, 16), (16, 16), (5, 7), (WHOLE, 32)]


def expansions(format: object) -> tuple[torch.dtype | None, ...]:
    """What the pass makes of a format: values in both dtypes of floats, values and codes of integers."""
    is_float = isinstance(format, FloatFormat)
    return (torch.float32, torch.bfloat16 if is_float else None)


def uneven(special: str, layout: str) -> Tensor:
    """A ragged matrix of many magnitudes; its tiles differ by more than the scales of two levels hold."""
    x = torch.randn(37, 70) * torch.randn(37, 70).mul(3).exp()
    x[10:16] *= 2.0**-30
    if special == "poisoned":
        x[3, 5], x[20, 40] = math.nan, -math.inf
    if special == "edges":
        x[::3], x[1::3], x[2::3] = (
            0.0,
            torch.tensor([1e-38, -1e-38]).repeat(35),
            torch.arange(70) * 0.5 - 17,
        )
        x[0, 0], x[3, :13] = (
            -0.0,
            torch.tensor([0.0 if not math.isfinite(edge) else edge for edge in EDGES]),
        )
    if special == "tiny":
        x = x.mul(2.0**-126).clamp(-1e-36, 1e-36)
    if special == "far apart":
        # The scales of small tiles are subnormal relative to the tensor's.
        x[0, 0], x[16:] = 3e38, x[16:].mul(2.0**-126).clamp(-1e-36, 1e-36)
    return {"rows": x, "columns": x.T, "strided": x[:, ::2]}[layout]


def assert_is_the_reference(x: Tensor, cast: Cast, expand: torch.dtype | None, **given) -> None:
    """Data, scales and the scale of the tensor, to the bit; a NaN of a poisoned tile may be any NaN."""
    found, expected = (
        quantize(x, cast, expand=expand, backend=backend, **given)
        for backend in ("native-cpp", "reference")
    )
    assert_same(found.data, expected.data, any_nan=True)
    assert_same(found.scale, expected.scale, any_nan=True)
    assert (found.global_scale is None) == (expected.global_scale is None)
    if expected.global_scale is not None:
        assert_same(found.global_scale, expected.global_scale, any_nan=True)


@needs_compiler
@pytest.mark.parametrize("format", [INT4, INT4X2, E3M0, E2M1, E4M3], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, "transposed"], ids=str)
def test_stochastic_rounding_is_the_reference(shape, format):
    """The noise of a key, and the numbers of this noise in a tensor."""
    x = torch.randn(31, 6).T if shape == "transposed" else matrix(*shape, spread=3.0)
    numbers, key = random.reference(11, 13, tuple(x.shape)), Key((11, 13))
    for tile, scale, expand in itertools.product(
        ((WHOLE, WHOLE), (WHOLE, 1), (1, 16)), (FP32, E4M3_TWO_LEVEL_CEIL), expansions(format)
    ):
        cast = Cast(format=format, tile=tile, scale=scale, rounding="stochastic")
        found = quantize(x, cast, noise=key, expand=expand)
        expected = quantize(x, cast, noise=numbers, expand=expand)
        assert_same(found.data, expected.data, any_nan=True)
        assert_same(found.scale, expected.scale, any_nan=True)


@needs_compiler
@pytest.mark.parametrize("special", ["plain", "poisoned", "edges", "tiny", "far apart"])
@pytest.mark.parametrize(
    ("layout", "threads"),
    quick([("strided", 3)], [("rows", 1), ("rows", 3), ("columns", 3), ("strided", 3)]),
)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("format", "rounding"), quick([E2M1, E3M0, E4M3, INT4X2], WAYS), ids=str)
def test_rounding_is_the_reference(format, rounding, threads, tile, layout, special, monkeypatch):
    """Scales, values in both types, and codes of integers.

    On several threads, a tensor whose tiles do not suffice for all of them has its largest magnitudes from torch.
    """
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = uneven(special, layout)
    given = {"noise": Key((2**32 - 7, 13))} if rounding == "stochastic" else {}
    compares = WHOLE not in tile and rounds(format, stochastically=False)
    rules = (*SCALES, *COMPARED_SCALES) if compares else SCALES
    for scale, dtype in itertools.product(rules, (torch.float32, torch.bfloat16)):
        cast = Cast(format=format, tile=tile, scale=scale, rounding=rounding)
        for expand in expansions(format):
            assert_is_the_reference(x.to(dtype), cast, expand, **given)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_read_as_float32(dtype):
    for tile, scale in itertools.product(((1, 16), (WHOLE, WHOLE)), (FP32, E4M3_TWO_LEVEL)):
        for layout in ("columns", "strided"):
            x = uneven("plain", layout).to(dtype)
            assert_is_the_reference(x, Cast(format=E2M1, tile=tile, scale=scale), torch.float32)


@needs_compiler
@pytest.mark.parametrize("layout", ["columns", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_reads_a_matrix_of_any_strides_as_the_reference(dtype, layout):
    """With scales from sums, whose order follows the memory."""
    x = (torch.randn(301, 402) * torch.randn(301, 402).exp()).to(dtype)
    x = {"columns": x.T, "strided": x[:, ::2]}[layout]
    for tile, calibrate in itertools.product(
        ((WHOLE, WHOLE), (1, WHOLE)), (CurrentScaling(), ClippedRms())
    ):
        cast = Cast(format=INT4, tile=tile, rounding="stochastic", calibrate=calibrate)
        found, expected = (
            quantize(x, cast, noise=Key((5, 6)), backend=each)
            for each in ("native-cpp", "reference")
        )
        assert_same(found.data, expected.data)
        assert_same(found.scale, expected.scale)


@needs_compiler
def test_rounding_by_a_given_amax_and_with_headroom_is_the_reference(monkeypatch):
    """Elements beyond the amax saturate; on three threads."""
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x, key = torch.randn(50, 90), Key((5, 8))
    own = replace(E4M3_TWO_LEVEL, name="mine")
    for cast in (
        Cast(format=E4M3),
        Cast(format=E4M3, tile=(1, 32), headroom=1.25),
        Cast(format=INT8),
        Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL, headroom=17 / 16),
        Cast(format=E2M1, tile=(1, 16), scale=own),
        Cast(format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, rounding="stochastic", headroom=4 / 3),
    ):
        given = {"noise": key} if cast.draws else {}
        for amax in (None, torch.tensor([[0.7]])):
            assert_is_the_reference(x, cast, torch.float32, amax=amax, **given)
            assert_is_the_reference(x.T, cast, torch.float32, amax=amax, **given)


@needs_compiler
@pytest.mark.parametrize("headroom", [1.0, 17 / 16])
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_elements_next_to_a_tie_are_rounded_as_the_reference(scale, headroom):
    """A reciprocal in another order, or rounded once more, moves some of them."""
    cast = Cast(format=E2M1, tile=(1, 16), scale=scale, headroom=headroom)
    x = torch.randn(512, 16).exp()
    x[:, 0] = 20 * x.amax(dim=1)  # sets the scale of its tile
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5])
    x[:, 1:6] = ties * quantize(x, cast).full_scale()
    x[:, 6:11] = x[:, 1:6].nextafter(torch.tensor(math.inf))
    x[:, 11:] = x[:, 1:6].nextafter(torch.tensor(0.0))
    assert_is_the_reference(x, cast, torch.float32)


def test_what_the_pass_leaves_to_the_reference():
    x, numbers = torch.randn(4, 32), torch.rand(4, 32)
    stochastic = Cast(format=E2M1, tile=(1, 16), rounding="stochastic")
    for cast, expand, noise, code in (
        (Cast(format=E3M0, tile=(1, 32)), torch.float32, None, "format"),
        (Cast(format=NF4, tile=(1, 32)), torch.float32, None, "format"),
        (Cast(format=E4M3), None, None, "expanded"),
        (stochastic, torch.float32, numbers, "noise"),
    ):
        with raises(BackendError, "kernel.refused") as caught:
            quantize(x, cast, expand=expand, noise=noise, backend="native-cpp")
        assert caught.value.refusal == code


def test_stochastic_rounding_of_poison_is_seen_in_the_scale():
    x = torch.randn(4, 6)
    x[1, 2] = math.nan
    assert (
        quantize(x, Cast(format=INT4X2, rounding="stochastic"), noise=Key((1, 2)))
        .scale.isnan()
        .all()
    )


def coded(rows: int, inner: int, format: object, tile: tuple[int, int], largest: bool) -> QTensor:
    """Codes over the whole range, or all of the largest magnitude, and uneven scales."""
    most = int(format.max)
    codes = torch.randint(-most, most + 1, (rows, inner), dtype=torch.int8)
    codes = torch.full_like(codes, most) if largest else codes
    scale = torch.rand(rows if tile[0] == 1 else 1, 1) + 0.1
    return QTensor(
        data=format.pack(codes) if format.bits == 4 else codes,
        scale=scale,
        cast=Cast(format=format, tile=tile),
        inner=inner,
    )


@needs_gemm
@pytest.mark.parametrize("largest", [False, True], ids=["random", "largest"])
@pytest.mark.parametrize("tile", [(WHOLE, WHOLE), (1, WHOLE)], ids=str)
@pytest.mark.parametrize("formats", [(INT4, INT4), (INT4X2, INT4), (INT4, INT4X2)], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (5, 3, 7), (6, 16, 4), (13, 33, 130), (7, 17, 2049)]
)
def test_products_of_codes_are_exact(m, n, k, formats, tile, largest):
    lhs, rhs = (
        coded(rows, k, format, tile, largest) for rows, format in zip((m, n), formats, strict=True)
    )
    bias = torch.randn(n)
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = (
            mm(lhs, rhs, bias=bias, out_dtype=dtype, backend=backend)
            for backend in ("native-cpp", "reference")
        )
        assert_same(found, expected)


@needs_gemm
def test_longer_sums_than_32_bits_hold_are_cut(monkeypatch):
    from narrowgauge.ops.mm import cpp as compiled_kernel

    lhs, rhs = coded(4, 300, INT4X2, (1, WHOLE), True), coded(5, 300, INT4, (1, WHOLE), True)
    whole = mm(lhs, rhs, backend="native-cpp")
    monkeypatch.setattr(compiled_kernel, "LONGEST_SUM", 128)
    assert_same(mm(lhs, rhs, backend="native-cpp"), whole)


@needs_gemm
def test_a_sum_that_no_float32_holds_is_rounded_once():
    """Its parts are added before they are rounded."""
    from narrowgauge.ops.mm.cpp import LONGEST_SUM

    k, operands = LONGEST_SUM + 5000, []
    for format, least in ((INT4, 5), (INT4X2, 90)):
        codes = torch.randint(least, int(format.max) + 1, (4, k), dtype=torch.int8)
        data = format.pack(codes) if format is INT4 else codes
        operands.append(
            QTensor(data=data, scale=torch.ones(1, 1), cast=Cast(format=format), inner=k)
        )
    assert_same(mm(*operands, backend="native-cpp"), mm(*operands, backend="reference"))


@needs_gemm
def test_threads_change_nothing(monkeypatch):
    lhs, rhs = (
        coded(50, 90, INT4X2, (WHOLE, WHOLE), False),
        coded(40, 90, INT4, (WHOLE, WHOLE), False),
    )
    alone = mm(lhs, rhs, backend="native-cpp"), Key((3, 4)).uniform((50, 90))
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for mine, theirs in zip(
        (mm(lhs, rhs, backend="native-cpp"), Key((3, 4)).uniform((50, 90))), alone, strict=True
    ):
        assert_same(mine, theirs)


def test_without_a_compiler_the_reference_computes_and_says_why(monkeypatch):
    monkeypatch.setitem(vars(cpp.LIBRARY), "missing", "cpp: no C++ compiler 'g++' is here")
    x, step = torch.randn(3, 5), torch.ones(1, 1)
    assert_same(encode(x, step, INT4).codes, INT4.encode(x))
    assert_same(Key((1, 2)).uniform((9,)), random.reference(1, 2, (9,)))
    with raises(BackendError, "kernel.refused", "hadamard", "native-cpp"):
        encode(x, step, INT4, backend="native-cpp")
    monkeypatch.setitem(vars(cast_kernel.LIBRARY), "missing", "cpp: no C++ compiler 'g++' is here")
    assert_same(
        quantize(x, Cast(format=E4M3), expand=torch.float32).data,
        E4M3.round(x / (x.abs().max() / 448)),
    )
    with raises(BackendError, "kernel.refused", "quantize", "native-cpp"):
        quantize(x, Cast(format=E4M3), expand=torch.float32, backend="native-cpp")
