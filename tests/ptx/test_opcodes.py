"""Every opcode of the kernels against a definition in Python's integers and fractions (exact).

Independent of `numerics`: a float is decoded from its fields into a Fraction, an operation is done on
Fractions, and the result is divided by the format's unit there, with the remainder deciding. FP8 is
compared with ml_dtypes. Operands are all pairs of values at which roundings, carries, signs and
special values differ, and random ones.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.numerics import SIGNED, UNSIGNED
from tests.ptx.opcodes import operation
from tests.ptx.parser import PtxError

NARROW = {"f32": (8, 23), "bf16": (8, 7), "f16": (5, 10)}  # bits of exponent and of fraction
FORMATS = {"f64": (11, 52), **NARROW}
NAN = {"f64": 0x7FFFFFFFFFFFFFFF, "f32": 0x7FFFFFFF, "bf16": 0x7FFF, "f16": 0x7FFF}
Value = Fraction | float  # a float for infinities and NaN, and for -0


def width(kind: str) -> int:
    return 1 + sum(FORMATS[kind])


@cache
def decoded(bits: int, kind: str) -> Value:
    exponent_bits, fraction_bits = FORMATS[kind]
    sign = -1 if bits >> (exponent_bits + fraction_bits) else 1
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    if exponent == (1 << exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == fraction == 0:
        return sign * 0.0
    bias = (1 << (exponent_bits - 1)) - 1
    significand = fraction + ((1 << fraction_bits) if exponent else 0)
    return sign * significand * Fraction(2) ** (max(exponent, 1) - bias - fraction_bits)


def encoded(value: Value, kind: str) -> int:
    """Nearest code, ties to the even one; beyond the largest by half a unit: infinity."""
    exponent_bits, fraction_bits = FORMATS[kind]
    sign_bit = 1 << (exponent_bits + fraction_bits)
    if isinstance(value, float) and math.isnan(value):
        return NAN[kind]
    negative = math.copysign(1, value) < 0 if isinstance(value, float) else value < 0
    sign = sign_bit if negative else 0
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    if isinstance(value, float):
        return sign | (infinity if math.isinf(value) else 0)
    size, bias = abs(value), (1 << (exponent_bits - 1)) - 1
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(exponent - (size < Fraction(2) ** exponent), 1 - bias)
    units, rest = divmod(size, Fraction(2) ** (exponent - fraction_bits))
    half = Fraction(2) ** (exponent - fraction_bits - 1)
    units += rest > half or (rest == half and units % 2 == 1)
    return sign | min(units + ((exponent + bias - 1) << fraction_bits), infinity)


SPECIAL = {
    "f64": [
        0, 1 << 63, 1, (1 << 63) + 1, (1 << 52) - 1, 1 << 52, (1 << 63) + (1 << 52), 0x3FF0000000000000,
        0xBFF0000000000000, 0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF, 0x400921FB54442D18, 0x7FEFFFFFFFFFFFFF,
        0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x3CA0000000000000,
        0x3CB0000000000000, 0x4330000000000001, 0x380FFFFFFFFFFFFF, 0x47EFFFFFE0000000, 0x3FF0000010000000,
        0x3FF0000030000000, 0x369FFFFFFFFFFFFF,
    ],
    "f32": [
        0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000, 0xBF800000,
        0x3F800001, 0x3F7FFFFF, 0x40490FDB, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
        0x33800000, 0x34000000, 0x4B000001, 0xCB800000, 0x2F800000, 0x0D800000,
    ],
    "bf16": [
        0, 0x8000, 1, 0x007F, 0x0080, 0x8080, 0x3F80, 0xBF80, 0x3F81, 0x3F7F, 0x4049, 0x7F7F, 0xFF7F,
        0x7F80, 0xFF80, 0x7FC0, 0x3B80, 0x4380,
    ],
    "f16": [
        0, 0x8000, 1, 0x03FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x3C01, 0x3BFF, 0x4248, 0x7BFF, 0xFBFF,
        0x7C00, 0xFC00, 0x7E00, 0x1400, 0x6400,
    ],
}  # fmt: skip


def floats(kind: str, count: int, seed: int = 0) -> list[int]:
    """Random codes whose exponents are near each other, so that sums round and cancel."""
    draw = random.Random(seed)
    exponent_bits, fraction_bits = FORMATS[kind]
    bias = (1 << (exponent_bits - 1)) - 1
    found = []
    for _ in range(count):
        near = draw.choice([bias, bias, bias, 1, 2 * bias - 8])
        exponent = min(max(near + draw.randint(-8, 8), 0), 2 * bias)
        code = exponent << fraction_bits | draw.getrandbits(fraction_bits)
        found.append(code | draw.getrandbits(1) << (exponent_bits + fraction_bits))
    return found


def columns(kind: str, count: int) -> list[list[int]]:
    """Operands: special values in all pairs, and random ones; a third operand of either."""
    special = SPECIAL[kind]
    rows = [[a, b, special[(i + 3 * j) % len(special)]] for i, a in enumerate(special) for j, b in enumerate(special)]  # fmt: skip
    rows += [list(row) for row in zip(*(floats(kind, 150, seed) for seed in range(3)), strict=True)]
    return [[row[place] for row in rows] for place in range(count)]


def computed(opcode: str, *sources: list[int]) -> list[int]:
    """Results of the operation under test, unsigned."""
    found = operation(opcode)
    with np.errstate(all="ignore"):
        given = [
            np.array(column, UNSIGNED[bits])
            for column, bits in zip(sources, found.sources, strict=True)
        ]
        result = found.compute(*given)
    assert not isinstance(result, tuple)
    return [int(each) & ((1 << found.results[0]) - 1) for each in result.tolist()]


def compare(opcode: str, sources: list[list[int]], expected: list[int]) -> None:
    got = computed(opcode, *sources)
    wrong = [
        (tuple(map(hex, given)), hex(mine), hex(theirs))
        for *given, mine, theirs in zip(*sources, got, expected, strict=True)
        if mine != theirs
    ]
    assert not wrong, f"{opcode}: {len(wrong)} of {len(got)}, first {wrong[0]}"


# --- floats


def total(a: Value, b: Value) -> Value:
    """IEEE 754's sum: exact, and +0 for x - x."""
    if isinstance(a, float) and isinstance(b, float):
        return a + b
    if isinstance(a, float) or isinstance(b, float):
        special, other = (a, b) if isinstance(a, float) else (b, a)
        return other if special == 0 else special
    return a + b or 0.0


def sign_of(value: Value) -> int:
    """-1 or 1. No Fraction becomes a float: the reciprocal of a subnormal float64 is none."""
    return int(math.copysign(1, value)) if isinstance(value, float) else 1 - 2 * (value < 0)


def product(a: Value, b: Value) -> Value:
    specials = [each for each in (a, b) if isinstance(each, float)]
    if not specials:
        return a * b
    if any(map(math.isnan, specials)) or (0 in (a, b) and any(map(math.isinf, specials))):
        return math.nan
    return sign_of(a) * sign_of(b) * (0.0 if 0 in (a, b) else math.inf)


def negated(a: Value) -> Value:
    return -a


def quotient(a: Value, b: Value) -> Value:
    if isinstance(b, float) and not math.isnan(b):
        return (
            product(a, math.copysign(0.0 if math.isinf(b) else math.inf, b)) if a or b else math.nan
        )
    return product(a, b if isinstance(b, float) else 1 / b)


EXACT = {
    "add": (2, total),
    "sub": (2, lambda a, b: total(a, negated(b))),
    "mul": (2, product),
    "fma": (3, lambda a, b, c: total(product(a, b), c)),
}


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("name", EXACT)
def test_sums_and_products_are_rounded_once(name, kind):
    count, exact = EXACT[name]
    sources = columns(kind, count)
    expected = [
        encoded(exact(*(decoded(each, kind) for each in given)), kind)
        for given in zip(*sources, strict=True)
    ]
    compare(f"{name}.rn.{kind}", sources, expected)
    if kind == "f32":  # without a rounding, which is then to nearest
        compare(f"{name}.{kind}", sources, expected) if name != "fma" else None
        return
    halves = [[low | high << 16 for low, high in zip(x, x[::-1], strict=True)] for x in sources]
    pairs = [low | high << 16 for low, high in zip(expected, expected[::-1], strict=True)]
    compare(f"{name}.rn.{kind}x2", halves, pairs)


@pytest.mark.parametrize(
    ("name", "exact"),
    [("add", total), ("sub", EXACT["sub"][1]), ("mul", product), ("div", quotient)],
)
def test_float64_is_rounded_once(name, exact):
    sources = columns("f64", 2)
    expected = [
        encoded(exact(*(decoded(each, "f64") for each in given)), "f64")
        for given in zip(*sources, strict=True)
    ]
    compare(f"{name}.rn.f64", sources, expected)


def test_conversions_of_float64():
    """Widened exactly, and narrowed with one rounding: ties, overflow and subnormals are among the values."""
    [wide], [narrow] = columns("f64", 1), columns("f32", 1)
    compare("cvt.rn.f32.f64", [wide], [encoded(decoded(each, "f64"), "f32") for each in wide])
    compare("cvt.f64.f32", [narrow], [encoded(decoded(each, "f32"), "f64") for each in narrow])


@pytest.mark.parametrize("name", EXACT)
def test_two_float32_in_a_register_are_computed_apart(name):
    sources = columns("f32", EXACT[name][0])
    each = computed(f"{name}.rn.f32", *sources)
    halves = [[low | high << 32 for low, high in zip(x, x[::-1], strict=True)] for x in sources]
    expected = [low | high << 32 for low, high in zip(each, each[::-1], strict=True)]
    compare(f"{name}.rn.f32x2", halves, expected)


def test_quotients_and_roots_are_rounded_once():
    a, b = columns("f32", 2)
    values = [[decoded(each, "f32") for each in column] for column in (a, b)]
    expected = [encoded(quotient(*given), "f32") for given in zip(*values, strict=True)]
    compare("div.rn.f32", [a, b], expected)
    compare("div.full.f32", [a, b], expected)
    roots = [root(each) for each in values[0]]
    compare("sqrt.rn.f32", [a], roots)


def root(value: Value) -> int:
    """Code of the nearest float32, from an integer root with 200 binary places and a sticky bit."""
    if value < 0 or (isinstance(value, float) and value != 0):
        return encoded(value if value == math.inf else math.nan, "f32")
    if value == 0:
        return encoded(value, "f32")
    scaled = value.numerator * 4**200 // value.denominator
    whole = math.isqrt(scaled)
    return encoded(Fraction(2 * whole + (whole**2 != value * 4**200), 2**201), "f32")


def test_flushing_takes_subnormals_for_zero():
    [a] = columns("f32", 1)
    flushed = [each if each & 0x7F800000 else each & 0x80000000 for each in a]
    compare("abs.ftz.f32", [a], [each & 0x7FFFFFFF for each in flushed])
    one = [0x3F800000] * len(a)
    values = [decoded(each, "f32") for each in flushed]
    inverse = [
        encoded(quotient(Fraction(1), each), "f32") if each == each else NAN["f32"]
        for each in values
    ]
    inverse = [each if each & 0x7F800000 else each & 0x80000000 for each in inverse]
    compare("rcp.approx.ftz.f32", [a], inverse)
    times = [encoded(total(product(each, Fraction(1)), 0.0), "f32") for each in values]
    compare("fma.rn.ftz.f32", [a, one, [0] * len(a)], times)
    rounded = [encoded(integral(each, math.floor), "f32") for each in values]
    compare("cvt.rmi.ftz.f32.f32", [a], rounded)
    compare(
        "cvt.rpi.ftz.f32.f32", [a], [encoded(integral(each, math.ceil), "f32") for each in values]
    )


def integral(value: Value, function) -> Value:
    if isinstance(value, float):
        return value
    found = Fraction(function(value))
    return found or math.copysign(0.0, value)


@pytest.mark.parametrize("opcode", ["ex2.approx.f32", "ex2.approx.ftz.f32", "lg2.approx.f32"])
def test_powers_and_logarithms_are_near(opcode):
    """Within one unit of the C library's, in float64; of 0, infinities and NaN as PTX has it."""
    [a] = columns("f32", 1)
    for code, found in zip(a, computed(opcode, a), strict=True):
        x = float(decoded(code, "f32"))
        if "ftz" in opcode and not code & 0x7F800000:
            x = math.copysign(0.0, x)
        if opcode.startswith("lg2"):
            truth = (
                math.nan if x < 0 else -math.inf if x == 0 else math.log2(x) if x < math.inf else x
            )
        else:
            truth = 2.0**x if x < 1000 else math.inf if x == x else x
        mine = float(decoded(found, "f32"))
        unit = 2.0 ** (max(math.frexp(truth)[1], -125) - 24) if math.isfinite(truth) else 0.0
        flushes = "ftz" in opcode and abs(truth) < 2.0**-126 and mine == 0
        too_large = truth > 3.4028235e38 and mine == math.inf
        assert (
            flushes
            or too_large
            or mine == truth
            or abs(mine - truth) <= unit
            or truth != truth != mine
        )


@pytest.mark.parametrize("kind", NARROW)
def test_signs_and_extremes(kind):
    a, b = columns(kind, 2)
    sign = 1 << (width(kind) - 1)
    compare(f"abs.{kind}", [a], [each & ~sign for each in a])
    compare(f"neg.{kind}", [a], [each ^ sign for each in a])
    for name, choose in (("max", max), ("min", min)):
        expected, propagated = [], []
        for given in zip(a, b, strict=True):
            numbers = [each for each in given if (x := decoded(each, kind)) == x]
            key = lambda each: (decoded(each, kind), -(each >> (width(kind) - 1)))  # noqa: E731
            expected.append(choose(numbers, key=key) if numbers else NAN[kind])
            propagated.append(expected[-1] if len(numbers) == 2 else NAN[kind])
        compare(f"{name}.{kind}", [a, b], expected)
        compare(f"{name}.NaN.{kind}", [a, b], propagated)


@pytest.mark.parametrize("propagates", [False, True])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_three(name, propagates):
    """sm_100 and later: a NaN loses unless all are NaN, or wins by .NaN."""
    nan = float("nan")
    rows = list(itertools.product([1.5, -2.0, nan, float("inf")], repeat=3))
    columns = [np.array(each, np.float32) for each in zip(*rows, strict=True)]
    expected = []
    for row in rows:
        numbers = [each for each in row if each == each]
        lost = not numbers or (propagates and len(numbers) < 3)
        expected.append(nan if lost else {"max": max, "min": min}[name](numbers))
    opcode = f"{name}.NaN.f32" if propagates else f"{name}.f32"
    found = operation(opcode, 3).compute(*(each.view(np.uint32) for each in columns))
    np.testing.assert_array_equal(found.view(np.float32), np.array(expected, np.float32))


RELATIONS = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_relations_of_floats(kind):
    """Without u false for NaN, also ne; with it true."""
    a, b = columns(kind, 2)
    values = [(decoded(x, kind), decoded(y, kind)) for x, y in zip(a, b, strict=True)]
    ordered = [x == x and y == y for x, y in values]
    for name, relation in RELATIONS.items():
        holds = [relation(x, y) for x, y in values]
        compare(
            f"setp.{name}.{kind}",
            [a, b],
            [int(h and o) for h, o in zip(holds, ordered, strict=True)],
        )
        compare(
            f"setp.{name}u.{kind}",
            [a, b],
            [int(h or not o) for h, o in zip(holds, ordered, strict=True)],
        )
    compare(f"setp.num.{kind}", [a, b], list(map(int, ordered)))
    compare(f"setp.nan.{kind}", [a, b], [int(not each) for each in ordered])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_relations_of_pairs_have_two_results(kind):
    a, b = columns(kind, 2)
    low = computed(f"setp.gtu.{kind}", a, b)
    found = operation(f"setp.gtu.{kind}x2").compute(
        *(
            np.array([x | y << 16 for x, y in zip(c, c[::-1], strict=True)], np.uint32)
            for c in (a, b)
        )
    )
    assert (found[0].tolist(), found[1].tolist()) == (low, low[::-1])


# --- conversions


@pytest.mark.parametrize(
    ("kind", "dtype", "largest"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn, 448),
        ("e5m2", ml_dtypes.float8_e5m2, 57344),
    ],
)
def test_conversion_to_fp8_is_that_of_ml_dtypes_and_saturates(kind, dtype, largest):
    """On all values of bfloat16, on float32 beside each tie of the format, and on special values."""
    codes = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    values = (
        np.arange(127 if kind == "e4m3" else 124, dtype=np.uint8).view(dtype).astype(np.float32)
    )
    ties = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32).view(np.uint32)
    near = np.concatenate([ties - 1, ties, ties + 1])
    given = np.concatenate([codes, near, near | 0x80000000, np.array(SPECIAL["f32"])]).astype(
        np.uint32
    )
    x = given.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    expected = np.where(np.isnan(x), 0x7F, expected).astype(np.uint16)
    other = np.roll(given, 1)
    with np.errstate(all="ignore"):
        found = operation(f"cvt.rn.satfinite.{kind}x2.f32").compute(given, other)
    assert (found == (expected << 8 | np.roll(expected, 1))).all()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_conversion_from_fp8_is_that_of_ml_dtypes(kind, dtype):
    codes = np.arange(65536, dtype=np.uint16)
    found = operation(f"cvt.rn.f16x2.{kind}x2").compute(codes).view(np.uint16).reshape(-1, 2)
    for place in range(2):
        byte = (codes >> 8 * place).astype(np.uint8)
        truth = byte.view(dtype).astype(np.float16)
        mine = found[:, place].view(np.float16)
        same = (found[:, place] == truth.view(np.uint16)) | (np.isnan(mine) & np.isnan(truth))
        assert same.all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_conversions_between_floats(kind):
    a, b = columns("f32", 2)
    expected = [encoded(decoded(each, "f32"), kind) for each in a]
    others = [encoded(decoded(each, "f32"), kind) for each in b]
    compare(f"cvt.rn.{kind}.f32", [a], expected)
    compare(
        f"cvt.rn.{kind}x2.f32",
        [a, b],
        [high << 16 | low for high, low in zip(expected, others, strict=True)],
    )
    [x] = columns(kind, 1)
    compare(f"cvt.f32.{kind}", [x], [encoded(decoded(each, kind), "f32") for each in x])
    mixed = [
        encoded(total(decoded(x, kind), decoded(y, "f32")), "f32")
        for x, y in zip(x, a, strict=False)
    ]
    compare(f"add.rn.f32.{kind}", [x[: len(mixed)], a[: len(mixed)]], mixed)


def integers(bits: int) -> list[int]:
    draw = random.Random(bits)
    edges = [
        0,
        1,
        2,
        3,
        5,
        (1 << bits) - 1,
        (1 << bits) - 2,
        1 << (bits - 1),
        (1 << (bits - 1)) - 1,
    ]
    return edges + [draw.getrandbits(bits) for _ in range(20)]


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


@pytest.mark.parametrize(
    "opcode",
    [
        "cvt.rn.f32.s32",
        "cvt.rn.f32.u32",
        "cvt.rn.f32.u16",
        "cvt.rn.f32.s8",
        "cvt.rn.bf16.u32",
    ],
)
def test_conversions_from_integers(opcode):
    *_, to, of = opcode.split(".")
    bits = int(of[1:])
    a = integers(bits) + [16777217, 33554431, 2147483583][: 3 if bits == 32 else 0]
    values = [signed(each, bits) if of[0] == "s" else each for each in a]
    compare(opcode, [a], [encoded(Fraction(each) if each else 0.0, to) for each in values])


@pytest.mark.parametrize(
    ("mode", "function"),
    [
        ("rzi", math.trunc),
        ("rmi", math.floor),
        ("rpi", math.ceil),
        ("rni", round),
    ],
)
@pytest.mark.parametrize("to", ["s32", "u32", "s16", "s8", "u8"])
def test_conversions_to_integers_saturate(mode, function, to):
    [a] = columns("f32", 1)
    a += [0x3F000000, 0x3FC00000, 0xBF000000, 0x4F000000, 0xCF000000, 0x42FE0000, 0x43000000]
    bits = int(to[1:])
    low, high = (
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    )
    expected = []
    for each in a:
        x = decoded(each, "f32")
        if isinstance(x, float) and not math.isfinite(x):
            x = 0 if x != x else low if x < 0 else high
        expected.append(min(max(function(x), low), high) & ((1 << bits) - 1))
    compare(f"cvt.{mode}.{to}.f32", [a], expected)


@pytest.mark.parametrize(
    "opcode",
    [
        "cvt.s16.s8",
        "cvt.s32.s16",
        "cvt.s32.s8",
        "cvt.s64.s32",
        "cvt.s8.s32",
        "cvt.u16.u32",
        "cvt.u32.u16",
        "cvt.u32.u64",
        "cvt.u64.u32",
    ],
)
def test_conversions_between_integers_extend_and_cut(opcode):
    _, to, of = opcode.split(".")
    a = integers(int(of[1:]))
    values = [signed(each, int(of[1:])) if of[0] == "s" else each for each in a]
    compare(opcode, [a], [each & ((1 << int(to[1:])) - 1) for each in values])


# --- integers


def pairs(bits: int) -> list[list[int]]:
    found = integers(bits)
    return [[a for a in found for _ in found], [b for _ in found for b in found]]


TWO = {
    "add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "min": min, "max": max,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "div": lambda a, b: int(Fraction(a, b)) if b else -1,
    "rem": lambda a, b: a - b * int(Fraction(a, b)) if b else a + b,
}  # fmt: skip


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("name", TWO)
def test_integers_of_two_operands(name, bits):
    a, b = pairs(bits)
    mask = (1 << bits) - 1
    for kind in ("b",) if name in ("and", "or", "xor") else ("s", "u"):
        values = [[signed(x, bits) if kind == "s" else x for x in column] for column in (a, b)]
        expected = [TWO[name](x, y) & mask for x, y in zip(*values, strict=True)]
        if name == "rem":  # by zero: not specified
            keep = [n for n, each in enumerate(b) if each]
            a, b, expected = ([column[n] for n in keep] for column in (a, b, expected))
        compare(f"{name}.{kind}{bits}", [a, b], expected)
        a, b = pairs(bits)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("kind", ["s", "u"])
def test_products_of_other_widths(bits, kind):
    a, b = pairs(bits)
    values = [[signed(x, bits) if kind == "s" else x for x in column] for column in (a, b)]
    whole = [x * y for x, y in zip(*values, strict=True)]
    mask = (1 << bits) - 1
    compare(f"mul.hi.{kind}{bits}", [a, b], [each >> bits & mask for each in whole])
    c = b[::-1]
    low = [(each + z) & mask for each, z in zip(whole, c, strict=True)]
    compare(f"mad.lo.{kind}{bits}", [a, b, c], low)
    if bits < 64:
        wide = (1 << 2 * bits) - 1
        compare(f"mul.wide.{kind}{bits}", [a, b], [each & wide for each in whole])
        c = [each * 0x10003 & wide for each in c]
        compare(
            f"mad.wide.{kind}{bits}",
            [a, b, c],
            [(x + z) & wide for x, z in zip(whole, c, strict=True)],
        )


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_integers_of_one_operand_and_relations(bits):
    a, b = pairs(bits)
    mask = (1 << bits) - 1
    compare(f"not.b{bits}", [a], [~each & mask for each in a])
    compare(f"neg.s{bits}", [a], [-each & mask for each in a])
    compare(f"abs.s{bits}", [a], [abs(signed(each, bits)) & mask for each in a])
    for name, relation in RELATIONS.items():
        apart = [(signed(x, bits), signed(y, bits)) for x, y in zip(a, b, strict=True)]
        compare(f"setp.{name}.s{bits}", [a, b], [int(relation(*each)) for each in apart])
        compare(
            f"setp.{name}.u{bits}",
            [a, b],
            [int(relation(*each)) for each in zip(a, b, strict=True)],
        )
    compare(f"setp.eq.b{bits}", [a, b], [int(x == y) for x, y in zip(a, b, strict=True)])
    choice = [n % 3 == 0 for n in range(len(a))]
    compare(
        f"selp.b{bits}",
        [a, b, choice],
        [x if p else y for x, y, p in zip(a, b, choice, strict=True)],
    )


def test_16_bit_pairs_are_added_apart():
    a, b = pairs(32)
    for name, function in (("add", operator.add), ("sub", operator.sub)):
        halves = [
            (function(x, y) & 0xFFFF) | (function(x >> 16, y >> 16) & 0xFFFF) << 16
            for x, y in zip(a, b, strict=True)
        ]
        compare(f"{name}.s16x2", [a, b], halves)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_beyond_the_width_empty_or_fill(bits):
    a = [each for each in integers(bits) for _ in range(8)]
    by = [0, 1, 7, bits - 1, bits, bits + 1, 200, 0xFFFFFFFF] * (len(a) // 8)
    mask = (1 << bits) - 1
    compare(f"shl.b{bits}", [a, by], [x << min(n, 100) & mask for x, n in zip(a, by, strict=True)])
    compare(f"shr.u{bits}", [a, by], [x >> min(n, 100) for x, n in zip(a, by, strict=True)])
    arithmetic = [signed(x, bits) >> min(n, 100) & mask for x, n in zip(a, by, strict=True)]
    compare(f"shr.s{bits}", [a, by], arithmetic)


def test_funnel_shifts_move_two_words():
    a, b = pairs(32)
    by = [(0, 1, 4, 31, 32, 33, 200, 0xFFFFFFFF)[n % 8] for n in range(len(a))]
    for mode, limited in (("wrap", [n & 31 for n in by]), ("clamp", [min(n, 32) for n in by])):
        both = [(x | y << 32, n) for x, y, n in zip(a, b, limited, strict=True)]
        left = [(word << n >> 32) & 0xFFFFFFFF for word, n in both]
        compare(f"shf.l.{mode}.b32", [a, b, by], left)
        compare(f"shf.r.{mode}.b32", [a, b, by], [word >> n & 0xFFFFFFFF for word, n in both])


def test_fields_of_bits():
    a = [each for each in integers(32) for _ in range(16)]
    start = [0, 1, 8, 31] * (len(a) // 4)
    length = [each for each in (0, 1, 9, 32) for _ in range(4)] * (len(a) // 16)
    unsigned, extended, inserted = [], [], []
    for x, s, n in zip(a, start, length, strict=True):
        field = x >> s & ((1 << n) - 1)
        unsigned.append(field)
        # PTX: bits beyond the word are its sign, and so is the sign of the field.
        wide = signed(x, 32) >> s & ((1 << n) - 1)
        extended.append((signed(wide, n) if n else 0) & 0xFFFFFFFF)
        mask = ((1 << n) - 1) << s & 0xFFFFFFFF
        inserted.append((~x & 0xFFFFFFFF & ~mask) | (x << s & mask))
    compare("bfe.u32", [a, start, length], unsigned)
    compare("bfe.s32", [a, start, length], extended)
    compare("bfi.b32", [a, [~x & 0xFFFFFFFF for x in a], start, length], inserted)


def test_bytes_are_permuted_and_signs_replicated():
    a, b = pairs(32)
    draw = random.Random(1)
    selector = [draw.choice([0x3210, 0x7632, 0xBA98, draw.getrandbits(16)]) for _ in a]
    expected = []
    for x, y, s in zip(a, b, selector, strict=True):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        chosen = [source[s >> 4 * n & 7] for n in range(4)]
        signs = [0xFF if byte & 0x80 else 0 for byte in chosen]
        taken = [signs[n] if s >> 4 * n & 8 else chosen[n] for n in range(4)]
        expected.append(int.from_bytes(bytes(taken), "little"))
    compare("prmt.b32", [a, b, selector], expected)


@pytest.mark.parametrize("table", [0x96, 0xE8, 0xF8, 0x01, 0xCA])
def test_logic_of_three_operands_follows_its_table(table):
    a, b = pairs(32)
    c = b[::-1]
    expected = []
    for given in zip(a, b, c, strict=True):
        rows = (sum((x >> bit & 1) << place for place, x in zip((2, 1, 0), given, strict=True)) for bit in range(32))  # fmt: skip
        expected.append(sum((table >> row & 1) << bit for bit, row in enumerate(rows)))
    compare("lop3.b32", [a, b, c, [table] * len(a)], expected)


def test_logic_of_predicates():
    a, b = [0, 0, 1, 1], [0, 1, 0, 1]
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        compare(f"{name}.pred", [a, b], [function(x, y) for x, y in zip(a, b, strict=True)])
    compare("not.pred", [a], [1 - x for x in a])


@pytest.mark.parametrize(
    "opcode",
    [
        "popc.b32",
        "cvt.rn.e4m3x2.f32",
        "cvt.rz.f32.f32",
        "add.rz.f32",
        "add.sat.s32",
        "setp.lx.s32",
        "setp.lt.and.s32",
        "prmt.b32.f4e",
    ],
)
def test_what_is_not_known_is_refused(opcode):
    with pytest.raises(PtxError, match="not known"):
        operation(opcode)


def test_signed_results_are_extended():
    """A wider register takes the sign: cvt.s8.s32 into 16 bits."""
    found = operation("cvt.s8.s32").compute(np.array([0x180, 0x7F], np.uint32))
    assert found.dtype == SIGNED[8] and found.astype(np.uint16).tolist() == [0xFF80, 0x7F]
