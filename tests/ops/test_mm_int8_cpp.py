"""INT8 GEMM on a CPU's integer units, in every form that this processor has (exact).

Integer sums equal int64 arithmetic, results the definition's, to the bit. A form that the processor lacks is skipped.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import BackendError
from narrowgauge.formats import INT4, INT4X2, INT8
from narrowgauge.ops.mm import KERNELS, cpp, definition, int8_cpp, mm
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.registry import Device, Refusal
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE, scale_shape
from tests.compare import assert_same
from tests.raising import raises

pytestmark = [
    pytest.mark.skipif(
        int8_cpp.LIBRARY.missing != "" or int8_cpp.fastest() is None,
        reason="needs a C++ compiler and AVX2",
    ),
    pytest.mark.usefixtures("poisoned_memory"),
]
NAME = "native-int8-cpp"
LARGEST = {INT8: 127, INT4: 7, INT4X2: 98}
# Edges of tiles (6 rows), groups (16), panels (16, 48, 64) and steps (2, 4).
SIZES = (1, 2, 3, 4, 5, 6, 7, 13, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 97, 130)
ORDERS = ("rows", "columns", "gaps", "repeated")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def skip_unless_here(form: str) -> None:
    if form not in int8_cpp.forms():
        pytest.skip(f"this processor has no form {form}: {int8_cpp.forms()}")


def laid_out(codes: torch.Tensor, order: str) -> torch.Tensor:
    """The same codes in another order of memory."""
    rows, columns = codes.shape
    if order == "rows":
        return codes.clone()
    if order == "columns":
        return codes.T.contiguous().T
    if order == "gaps":  # neither axis is contiguous
        room = torch.full((2 * rows, 3 * columns), 99, dtype=torch.int8)
        room[::2, ::3] = codes
        return room[::2, ::3]
    # Rows that lie on one another, as `expand` makes them.
    return codes[:1].clone().expand(rows, columns)


def random_codes(rows: int, columns: int, largest: int = 127) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, (rows, columns), dtype=torch.int8)


def operand(
    codes: torch.Tensor, by_row: bool, format: object = INT8, special: float | None = None
) -> QTensor:
    cast = Cast(format=format, tile=(1 if by_row else WHOLE, WHOLE))
    scale = torch.rand(scale_shape(tuple(codes.shape), cast.tile)) + 0.1
    scale[::3] *= -(2.0**-7)
    if special is not None:
        scale[-1] = special
    return QTensor(data=codes, scale=scale, cast=cast, inner=codes.shape[1])


# --- sums ------------------------------------------------------------------------------------------------------------------------


def assert_sums(form: str, left: torch.Tensor, right: torch.Tensor) -> None:
    out = torch.empty(len(left), len(right), dtype=torch.int32)
    int8_cpp.multiply(left, right, out, form=form)
    assert_same(out, (left.to(torch.int64) @ right.to(torch.int64).T).to(torch.int32))


@pytest.mark.parametrize("form", int8_cpp.FORMS)
@settings(max_examples=150)
@given(
    m=st.sampled_from(SIZES), n=st.sampled_from(SIZES), k=st.sampled_from(SIZES),
    orders=st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_sums_are_those_of_64_bit_integers(form, m, n, k, orders, seed):
    """The kernel takes all 256 bytes, though INT8 has no code for -128."""
    skip_unless_here(form)
    torch.manual_seed(seed)
    left, right = (
        laid_out(torch.randint(-128, 128, (rows, k), dtype=torch.int8), order)
        for rows, order in zip((m, n), orders, strict=True)
    )
    assert_sums(form, left, right)


@pytest.mark.parametrize("form", int8_cpp.FORMS)
@pytest.mark.parametrize("signs", [(127, 127), (-127, 127), (-127, -127), (-128, 127)])
def test_the_longest_sums_of_the_largest_codes_do_not_overflow(form, signs):
    """K of LONGEST_SUM: more parts of K than one, and sums at the edge of 32 bits."""
    skip_unless_here(form)
    left, right = (
        torch.full((rows, int8_cpp.LONGEST_SUM), sign, dtype=torch.int8)
        for rows, sign in zip((7, 3), signs, strict=True)
    )
    assert_sums(form, left, right)


@pytest.mark.parametrize("form", int8_cpp.FORMS)
@pytest.mark.parametrize("orders", [("rows", "columns"), ("columns", "rows")])
def test_operands_beyond_one_chunk_and_one_block(form, orders, monkeypatch):
    """Several chunks of panels, blocks of left rows and parts of K, all with a remainder."""
    skip_unless_here(form)
    monkeypatch.setattr(int8_cpp, "CHUNK", 1 << 19)
    left, right = (
        laid_out(random_codes(200, 6503), orders[0]),
        laid_out(random_codes(203, 6503), orders[1]),
    )
    assert_sums(form, left, right)


def test_nothing_outside_the_operands_is_read_or_written():
    """The operands and the result lie in the middle of other numbers, which change nothing and stay."""
    for form in int8_cpp.forms():
        for m, n, k in ((7, 5, 3), (49, 65, 33), (5, 17, 66)):
            codes = random_codes(m, k), random_codes(n, k)
            found = []
            for fill in (0, 77):
                rooms = [
                    torch.full((len(each) + 2, k + 5), fill, dtype=torch.int8) for each in codes
                ]
                for room, each in zip(rooms, codes, strict=True):
                    room[1:-1, 2:-3] = each
                out = torch.full((m + 2, n + 4), fill, dtype=torch.int32)
                views = [room[1:-1, 2:-3] for room in rooms]
                int8_cpp.multiply(*views, out[1:-1, 1:-3], form=form)
                found.append(out[1:-1, 1:-3].clone())
                out[1:-1, 1:-3] = fill
                assert (out == fill).all()
            assert_same(found[0], found[1])


# --- scales, bias, rounding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", int8_cpp.FORMS)
@settings(max_examples=120)
@given(
    sizes=st.tuples(*[st.sampled_from(SIZES)] * 3), by_row=st.tuples(st.booleans(), st.booleans()),
    formats=st.sampled_from([(INT8, INT8), (INT4, INT4X2), (INT4, INT4), (INT8, INT4)]),
    bias=st.sampled_from([None, *DTYPES]), out_dtype=st.sampled_from([*DTYPES, torch.float64]),
    special=st.sampled_from([None, None, math.nan, math.inf, 0.0, -0.0, 1e-38, 3e38, 1e-45]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_results_are_those_of_the_definition(
    form, sizes, by_row, formats, bias, out_dtype, special, seed
):
    """The order of multiplications and roundings too. A NaN is any NaN: torch itself makes several."""
    skip_unless_here(form)
    torch.manual_seed(seed)
    m, n, k = sizes
    left, right = (
        operand(
            random_codes(rows, k, LARGEST[format]), each, format, special if i == seed % 2 else None
        )
        for i, (rows, format, each) in enumerate(zip((m, n), formats, by_row, strict=True))
    )
    bias = None if bias is None else (torch.randn(n) * 100).to(bias)
    expected = definition.run(left, right, bias, out_dtype, False)
    found = int8_cpp.run(left, right, bias, out_dtype, False, form)
    assert_same(found, expected, any_nan=True)


def test_subnormal_results_are_rounded_and_not_flushed():
    left, right = operand(random_codes(5, 40), True), operand(random_codes(70, 40), True)
    left.scale.fill_(2.0**-126)
    right.scale.copy_(torch.logspace(-34, -8, 70, base=2.0).reshape(70, 1))
    expected = definition.run(left, right, None, torch.bfloat16, False)
    tiny = expected.float().abs()
    assert ((tiny > 0) & (tiny < 2.0**-126)).any()
    for form in int8_cpp.forms():
        assert_same(int8_cpp.run(left, right, None, torch.bfloat16, False, form), expected)


def test_a_sum_beyond_32_bits_is_added_in_parts(monkeypatch):
    """In parts of LONGEST_SUM products; shortened here."""
    monkeypatch.setattr(int8_cpp, "LONGEST_SUM", 100)
    left, right = operand(random_codes(9, 2351), True), operand(random_codes(11, 2351), False)
    bias = torch.randn(11)
    for dtype in DTYPES:
        for each in (None, bias):
            expected = definition.run(left, right, each, dtype, False)
            assert_same(int8_cpp.run(left, right, each, dtype, False), expected)


def test_packed_codes_of_four_bits():
    codes = [random_codes(rows, 37, 7) for rows in (10, 20)]
    plain = [operand(each, False, INT4) for each in codes]
    packed = [
        QTensor(data=INT4.pack(q.data), scale=q.scale, cast=q.cast, inner=q.inner) for q in plain
    ]
    assert packed[0].is_packed
    expected = mm(*plain, backend="reference")
    assert_same(mm(*packed, backend=NAME), expected)
    assert_same(mm(*plain, backend=NAME), expected)


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 5, 0), (0, 0, 0)])
def test_empty_operands(shape):
    m, n, k = shape
    left, right = operand(random_codes(m, k), False), operand(random_codes(n, k), False)
    for bias in (None, torch.randn(n)):
        expected = mm(left, right, bias=bias, backend="reference")
        assert_same(mm(left, right, bias=bias, backend=NAME), expected)


def test_under_autocast_nothing_is_rounded():
    left, right = operand(random_codes(33, 65), True), operand(random_codes(20, 65), True)
    expected = mm(left, right, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(mm(left, right, backend=NAME), expected)


# --- threads ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(300, 200, 700), (600, 321, 500), (5, 1000, 600), (1, 70, 60_000), (3000, 1, 800)]
)
@pytest.mark.parametrize("orders", [("rows", "rows"), ("columns", "columns")])
def test_bits_do_not_depend_on_the_number_of_threads(shape, orders):
    """More threads than rows and panels, too."""
    m, n, k = shape
    left = operand(laid_out(random_codes(m, k), orders[0]), True)
    right = operand(laid_out(random_codes(n, k), orders[1]), True)
    expected = mm(left, right, backend="reference", out_dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 13):
            torch.set_num_threads(threads)
            for form in int8_cpp.forms():
                found = int8_cpp.run(left, right, None, torch.bfloat16, False, form)
                assert_same(found, expected)
    finally:
        torch.set_num_threads(before)


# --- choice ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vnni", [True, False])
def test_where_it_is_chosen(vnni):
    """INT4 products belong to the INT4 kernel on CPUs without VNNI; a caller can still name this one."""
    here = Device("cpu", int8_gemm=vnni)
    cast = {each: Cast(format=each) for each in (INT8, INT4, INT4X2)}
    for left, right in ((INT8, INT8), (INT8, INT4), (INT4, INT4), (INT4X2, INT4)):
        spec = MmSpec(cast[left], cast[right], here)
        in_int4 = not vnni and INT8 not in (left, right) and cpp.refuse(spec) is None
        expected = "native-cpp" if in_int4 else NAME
        assert KERNELS.choose(spec).kernel.name == expected
        assert KERNELS.choose(spec, NAME).kernel.name == NAME


def test_refusals(monkeypatch, device_is):
    device_is(Device("cpu"))
    int8 = recipes.get("int8").output
    spec = MmSpec(int8.lhs, int8.rhs, Device("cpu"))
    monkeypatch.setattr(int8_cpp, "fastest", lambda: None)
    words = int8_cpp.NO_UNITS
    assert int8_cpp.refuse(spec) == Refusal("capability", words)
    left, right = operand(random_codes(4, 8), True), operand(random_codes(4, 8), True)
    with raises(BackendError, "kernel.refused", "mm", NAME, words):
        mm(left, right, backend=NAME)
    assert KERNELS.choose(spec).kernel.name == "native-int8"
    with raises(BackendError, "mm.form", "'neon'", "avx2"):
        int8_cpp.multiply(left.data, right.data, torch.empty(4, 4), form="neon")


@pytest.mark.parametrize(
    ("held", "found"), [("AVX512", "avx512-vnni"), ("AVX2", "avx2"), ("DEFAULT", None)]
)
def test_the_variable_that_holds_torch_back_holds_the_form_back(monkeypatch, held, found):
    monkeypatch.setattr(int8_cpp, "forms", lambda: ("avx2", "vnni-256", "avx512-vnni"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: held)
    assert int8_cpp.fastest.__wrapped__() == found


def test_describe_shows_the_instructions(device_is):
    device_is(Device("cpu"))
    [row] = ng.describe(ng.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "int8"))
    assert row.backend == f"{NAME} ({int8_cpp.INSTRUCTIONS[int8_cpp.fastest()]})"


# --- torch.compile ---------------------------------------------------------------------------------------------------------------


def test_compiled_code_has_one_operator_and_the_same_bits():
    left, right = operand(random_codes(33, 65), True), operand(random_codes(20, 65), False)
    bias = torch.randn(20)
    for dtype in DTYPES:
        run = partial(mm, left, right, bias=bias, out_dtype=dtype)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert_same(compiled(), run(backend="reference"))


def test_the_operator_has_the_right_fake():
    codes, scale = random_codes(5, 16), torch.rand(5, 1)
    given = (codes, codes.T.contiguous().T, scale, scale[:1], torch.randn(5), torch.bfloat16)
    torch.library.opcheck(
        torch.ops.narrowgauge.int8_mm.default,
        given,
        test_utils=("test_schema", "test_faketensor"),
    )
