"""What an arithmetic instruction computes, as a function of raw bits over all threads.

`operation("mad.wide.s32")` -> Operation(results=(64,), sources=(32, 32, 64), compute=...). The
functions know nothing of registers, threads or memory, so that each opcode is tested alone
(test_opcodes.py). Instructions between threads are in `warp`, conversions in `conversions`, loads
and stores in `machine`.

Approximations (rcp.approx, ex2.approx, lg2.approx, rsqrt.approx, div.full) are computed correctly
rounded. `APPROXIMATION.units` moves their results by up to so many units of the last place, since
a GPU's may be off by one or two (PTX ISA 9.7.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tests.ptx import conversions
from tests.ptx.numerics import (
    FLOATS,
    SIGNED,
    UNSIGNED,
    Bits,
    bits32,
    bits64,
    f32,
    f64,
    flushed,
    odd_sum,
    ordered,
)
from tests.ptx.parser import PtxError


@dataclass(frozen=True)
class Operation:
    """results, sources: widths in bits, 1 for predicates. compute(*sources) -> an array or a tuple.

    A signed result is extended with its sign where its register is wider.
    """

    results: tuple[int, ...]
    sources: tuple[int, ...]
    compute: Callable[..., Any]


@dataclass
class Approximation:
    """units: largest error of an approximation, in units of the last place; random is drawn from."""

    units: int
    random: np.random.Generator


APPROXIMATION = Approximation(0, np.random.default_rng(0))


# Without one, sums and products of floats are rounded to nearest as well.
_MODIFIERS = {"rn", "ftz", "approx", "full", "NaN", "lo", "hi", "wide", "f32"}


@cache
def operation(opcode: str, operands: int = 0) -> Operation:
    """Raises PtxError for an opcode that is not known.

    operands  number of sources, for opcodes that take two or, from sm_100 on, three
    """
    name, *words = opcode.split(".")
    kind = words[-1] if words else ""
    try:
        if (name, kind, operands) in (("min", "f32", 3), ("max", "f32", 3)):
            return _of_three(_floating(name, words))
        if name == "setp":
            [relation, kind] = words
            return _comparison(relation, kind)
        if name == "selp":
            [kind] = words
            bits = _bits(kind)
            return Operation((bits,), (bits, bits, 1), lambda a, b, p: np.where(p, a, b))
        if name == "cvt":
            return Operation(*conversions.conversion(words))
        if name == "shf":
            return Operation((32,), (32, 32, 32), _FUNNELS[tuple(words)])
        if unknown := set(words[:-1]) - _MODIFIERS:
            raise KeyError(*unknown)
        if kind == "pred":
            return _LOGIC[name](1)
        if name in _FLOATING and any(kind.startswith(each) for each in FLOATS):
            return _floating(name, words)
        return _integer(name, words)
    except (KeyError, ValueError) as error:
        raise PtxError(f"This opcode is not known: {opcode} ({error}).") from error


def _bits(kind: str) -> int:
    """Width of b32, u16, s64, f32, bf16, f16x2, f32x2, pred."""
    if kind == "pred":
        return 1
    base, _, count = kind.partition("x")
    return int(base.lstrip("busf")) * int(count or 1)


# --- integers


def _uniform(count: int, function: Callable[..., Any]) -> Callable[[int], Operation]:
    """An operation whose result and `count` sources have one width."""
    return lambda bits: Operation((bits,), (bits,) * count, function)


_LOGIC = {
    "and": _uniform(2, np.bitwise_and),
    "or": _uniform(2, np.bitwise_or),
    "xor": _uniform(2, np.bitwise_xor),
    "not": _uniform(1, np.invert),
}


def _as(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on signed numbers for s32 and similar, else on unsigned ones."""
    width = _bits(kind)
    if not kind.startswith("s"):
        return function
    return lambda *values: function(*(each.view(SIGNED[width]) for each in values)).view(
        UNSIGNED[width]
    )


def _integer(name: str, words: list[str]) -> Operation:
    kind = words[-1]
    if "x2" in kind:
        return _pairwise(_integer(name, [*words[:-1], kind.removesuffix("x2")]))
    bits = _bits(kind)
    if name in _LOGIC:
        return _LOGIC[name](bits)
    if name in ("mul", "mad"):
        return _product(name, "wide" if "wide" in words else "hi" if "hi" in words else "lo", kind)
    if name in ("shl", "shr"):
        return Operation((bits,), (bits, 32), _shift(name, kind))
    if name in _FIELDS:
        return Operation((bits,), _FIELDS[name][0](bits), _FIELDS[name][1](kind))
    count, function = _INTEGERS[name]
    return Operation((bits,), (bits,) * count, _as(kind, function))


def _quotient(a: Bits, b: Bits) -> Bits:
    """Truncated. A division by zero is not specified; here it gives all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    floored = a // safe
    rounds_up = (a % safe != 0) & ((a < 0) != (safe < 0))
    return np.where(b == 0, ~a.dtype.type(0), floored + rounds_up.astype(a.dtype)).astype(a.dtype)


_INTEGERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "div": (2, _quotient),
    "rem": (2, lambda a, b: a - _quotient(a, b) * b),
}


def _product(name: str, part: str, kind: str) -> Operation:
    bits, is_signed = _bits(kind), kind.startswith("s")

    def wide(a: Bits, b: Bits) -> Bits:
        twice = (SIGNED if is_signed else UNSIGNED)[2 * bits]
        signed = (x.view(SIGNED[bits]) if is_signed else x for x in (a, b))
        left, right = (x.astype(twice) for x in signed)
        return (left * right).view(UNSIGNED[2 * bits])

    def high(a: Bits, b: Bits) -> Bits:
        if bits < 64:
            return (wide(a, b) >> UNSIGNED[2 * bits](bits)).astype(UNSIGNED[bits])
        signed = [(x.view(np.int64) if is_signed else x).astype(object) for x in (a, b)]
        return ((signed[0] * signed[1] >> 64) & (2**64 - 1)).astype(np.uint64)

    of_two, width = {
        "wide": (wide, 2 * bits),
        "hi": (high, bits),
        "lo": (np.multiply, bits),
    }[part]
    if name == "mul":
        return Operation((width,), (bits, bits), of_two)
    return Operation((width,), (bits, bits, width), lambda a, b, c: of_two(a, b) + c)


def _shift(name: str, kind: str) -> Callable[[Bits, Bits], Bits]:
    """Amounts beyond the width shift everything out; shr.s fills with the sign."""
    bits = _bits(kind)
    dtype = (SIGNED if kind.startswith("s") else UNSIGNED)[bits]

    def shifted(a: Bits, amount: Bits) -> Bits:
        short = np.minimum(amount, bits - 1).astype(dtype)
        moved = a.view(dtype) << short if name == "shl" else a.view(dtype) >> short
        if kind.startswith("s") and name == "shr":
            return moved.view(UNSIGNED[bits])
        return np.where(amount >= bits, UNSIGNED[bits](0), moved.view(UNSIGNED[bits]))

    return shifted


def _funnel(is_left: bool, wraps: bool) -> Callable[..., Bits]:
    """shf: the high word of 64 bits, a below b, moved to the left, or the low word moved to the right."""

    def shifted(a: Bits, b: Bits, amount: Bits) -> Bits:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        by = (amount & np.uint32(31) if wraps else np.minimum(amount, np.uint32(32))).astype(
            np.uint64
        )
        return (both << by >> np.uint64(32) if is_left else both >> by).astype(np.uint32)

    return shifted


_FUNNELS = {
    (side, mode, "b32"): _funnel(side == "l", mode == "wrap")
    for side in ("l", "r")
    for mode in ("wrap", "clamp")
}


def _extract(kind: str) -> Callable[..., Bits]:
    """bfe: a field of `length` bits from `start`, extended with zeros or its sign."""
    bits, is_signed = _bits(kind), kind.startswith("s")

    def extracted(a: Bits, start: Bits, length: Bits) -> Bits:
        wide = a.view(SIGNED[bits]).astype(np.int64) if is_signed else a.astype(np.int64)
        start, length = (np.minimum(x & 0xFF, bits).astype(np.int64) for x in (start, length))
        if is_signed:  # bits beyond the word are its sign
            length = np.minimum(length, 63 - start)
        field = (wide >> start) & ((np.int64(1) << length) - 1)
        sign = np.where(length > 0, (field >> np.maximum(length - 1, 0)) & 1, 0) * is_signed
        return (field - (sign << length)).astype(UNSIGNED[bits])

    return extracted


def _insert(kind: str) -> Callable[..., Bits]:
    """bfi: `length` bits of a at `start` of b."""
    bits = _bits(kind)

    def inserted(a: Bits, b: Bits, start: Bits, length: Bits) -> Bits:
        start, length = (np.minimum(x & 0xFF, bits).astype(np.uint64) for x in (start, length))
        mask = (((np.uint64(1) << length) - np.uint64(1)) << start).astype(UNSIGNED[bits])
        return (b & ~mask) | ((a.astype(np.uint64) << start).astype(UNSIGNED[bits]) & mask)

    return inserted


def _permute(a: Bits, b: Bits, selector: Bits) -> Bits:
    """prmt: each nibble of the selector names one of eight bytes, or with its top bit its sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint32)
    for place in range(4):
        chosen = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> ((chosen & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        sign = (byte.view(np.int8) >> np.int8(7)).view(np.uint8)
        byte = np.where(chosen & np.uint32(8), sign, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def _table(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    """lop3: bit 4 a + 2 b + c of the table."""
    result = np.zeros_like(a | b | c)
    for row in range(8):
        term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        result |= np.where((table >> np.uint32(row)) & np.uint32(1), term, np.uint32(0))
    return result


_FIELDS: dict[str, tuple[Callable[[int], tuple[int, ...]], Callable[[str], Any]]] = {
    "bfe": (lambda bits: (bits, 32, 32), _extract),
    "bfi": (lambda bits: (bits, bits, 32, 32), _insert),
    "prmt": (lambda bits: (bits, bits, 32), lambda kind: _permute),
    "lop3": (lambda bits: (bits, bits, bits, 32), lambda kind: _table),
}


def _pairwise(half: Operation) -> Operation:
    """The operation on both halves of each register: .s16x2, .bf16x2, .f32x2."""
    [bits] = half.results
    narrow, wide, shift = UNSIGNED[bits], UNSIGNED[2 * bits], UNSIGNED[2 * bits](bits)

    def both(*values: Bits) -> Bits:
        low = half.compute(*(each.astype(narrow) for each in values))
        high = half.compute(*((each >> shift).astype(narrow) for each in values))
        return low.astype(wide) | (high.astype(wide) << shift)

    return Operation((2 * bits,), tuple(2 * each for each in half.sources), both)


# --- floats


def _product64(a: Any, b: Any) -> Any:
    return a.astype(np.float64) * b.astype(np.float64)


def _sum64(a: Any, b: Any) -> Any:
    return odd_sum(a.astype(np.float64), b.astype(np.float64))


# float32 values -> float64, exact or rounded to odd.
_EXACT: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, _sum64),
    "sub": (2, lambda a, b: _sum64(a, -b)),
    "mul": (2, _product64),
    "fma": (3, lambda a, b, c: odd_sum(_product64(a, b), c.astype(np.float64))),
}
# float32 -> float32: numpy rounds quotients and roots once, as .rn does.
_ROUNDED: dict[str, tuple[int, Callable[..., Any]]] = {
    "div": (2, np.divide),
    "sqrt": (1, np.sqrt),
    "rcp": (1, lambda a: np.divide(np.float32(1), a)),
    "rsqrt": (1, lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32)),
    "ex2": (1, lambda a: np.exp2(a.astype(np.float64)).astype(np.float32)),
    "lg2": (1, lambda a: np.log2(a.astype(np.float64)).astype(np.float32)),
}
# float64 -> float64: numpy rounds each once.
_OF_FLOAT64: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}
_BY_SIGN = ("abs", "neg", "copysign")
_FLOATING = {*_EXACT, *_ROUNDED, *_BY_SIGN, "min", "max"}


def _floating(name: str, words: list[str]) -> Operation:
    kind = words[-1]
    if kind.endswith("x2"):
        return _pairwise(_floating(name, [*words[:-1], kind.removesuffix("x2")]))
    bits, flushes = FLOATS[kind].bits, "ftz" in words
    if name in _BY_SIGN:
        return _with_flush(_signs(name, bits), flushes)
    if kind == "f64":
        function = _OF_FLOAT64[name]
        return Operation((64,), (64, 64), lambda a, b: bits64(function(f64(a), f64(b))))
    if name in ("min", "max"):
        return _with_flush(_extremum(name, kind, "NaN" in words), flushes)
    if name in _ROUNDED:
        count, function = _ROUNDED[name]
        is_near = "approx" in words or "full" in words

        def rounded(*values: Bits) -> Bits:
            found = bits32(function(*map(f32, values)))
            return _moved(found) if is_near and APPROXIMATION.units else found

        if kind != "f32":
            raise KeyError(kind)
        return _with_flush(Operation((bits,), (bits,) * count, rounded), flushes)
    count, exact = _EXACT[name]
    # add.f32.bf16: the type of the first source follows that of the result.
    mixed = len(words) > 1 and words[-2] == "f32" and kind != "f32"
    kinds = [kind if not mixed or place == 0 else "f32" for place in range(count)]
    result = FLOATS["f32" if mixed else kind]

    def computed(*values: Bits) -> Bits:
        decoded = [FLOATS[each].decode(x) for each, x in zip(kinds, values, strict=True)]
        return result.encode(exact(*decoded))

    sources = tuple(FLOATS[each].bits for each in kinds)
    return _with_flush(Operation((result.bits,), sources, computed), flushes)


def _with_flush(of: Operation, flushes: bool) -> Operation:
    if not flushes:
        return of
    return Operation(
        of.results, of.sources, lambda *values: flushed(of.compute(*map(flushed, values)))
    )


def _moved(bits: Bits) -> Bits:
    """float32 off by up to `APPROXIMATION.units` units, where it is a normal number."""
    units = APPROXIMATION.units
    by = APPROXIMATION.random.integers(-units, units + 1, len(bits))
    exponent = (bits >> np.uint32(23)) & np.uint32(0xFF)
    fine = (exponent > 0) & (exponent < 254)
    return np.where(fine, (bits.astype(np.int64) + by).astype(np.uint32), bits)


def _signs(name: str, bits: int) -> Operation:
    sign = UNSIGNED[bits](1 << (bits - 1))
    if name == "abs":
        return Operation((bits,), (bits,), lambda a: a & ~sign)
    if name == "neg":
        return Operation((bits,), (bits,), lambda a: a ^ sign)
    return Operation((bits,), (bits, bits), lambda a, b: (b & ~sign) | (a & sign))


def _extremum(name: str, kind: str, propagates: bool) -> Operation:
    """-0 is below +0. A NaN loses against a number, unless `propagates` (.NaN)."""
    bits, decode = FLOATS[kind].bits, FLOATS[kind].decode
    nan = UNSIGNED[bits](0x7FFFFFFF if bits == 32 else 0x7FFF)

    def found(a: Bits, b: Bits) -> Bits:
        left, right = ordered(a, bits), ordered(b, bits)
        chosen = np.where(left < right if name == "min" else left > right, a, b)
        a_nan, b_nan = np.isnan(decode(a)), np.isnan(decode(b))
        either = np.where(a_nan, np.where(b_nan | propagates, nan, b), np.where(propagates, nan, a))
        return np.where(a_nan | b_nan, either, chosen)

    return Operation((bits,), (bits, bits), found)


def _of_three(of_two: Operation) -> Operation:
    """min and max of three float32 (PTX ISA 8.6): a NaN loses, or wins by .NaN, as between two."""
    bits = of_two.results[0]
    return Operation((bits,), (bits,) * 3, lambda a, b, c: of_two.compute(of_two.compute(a, b), c))


# --- comparisons

_RELATIONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
_UNSIGNED_RELATIONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _comparison(relation: str, kind: str) -> Operation:
    """Of floats a relation is false for NaN; with u behind it (gtu) it is true."""
    base = kind.removesuffix("x2")
    if base in FLOATS:
        one = _float_relation(relation, FLOATS[base].decode)
        bits = FLOATS[base].bits
        if base == kind:
            return Operation((1,), (bits, bits), one)
        return Operation((1, 1), (32, 32), lambda a, b: _of_halves(one, a, b))
    bits = _bits(kind)
    compare: Any = _RELATIONS[_UNSIGNED_RELATIONS.get(relation, relation)]
    if kind.startswith("s"):
        signed = SIGNED[bits]
        return Operation((1,), (bits, bits), lambda a, b: compare(a.view(signed), b.view(signed)))
    return Operation((1,), (bits, bits), compare)


def _float_relation(relation: str, decode: Callable[[Bits], Any]) -> Callable[[Bits, Bits], Any]:
    def found(a: Bits, b: Bits) -> Any:
        left, right = decode(a), decode(b)
        unordered = np.isnan(left) | np.isnan(right)
        if relation in ("num", "nan"):
            return unordered if relation == "nan" else ~unordered
        holds = _RELATIONS[relation[:2]](left, right)
        return holds | unordered if relation.endswith("u") else holds & ~unordered

    if relation not in ("num", "nan") and relation.removesuffix("u") not in _RELATIONS:
        raise KeyError(relation)
    return found


def _of_halves(function: Callable[[Bits, Bits], Any], a: Bits, b: Bits) -> tuple[Any, Any]:
    low, high = (
        function((a >> shift).astype(np.uint16), (b >> shift).astype(np.uint16))
        for shift in (np.uint32(0), np.uint32(16))
    )
    return low, high
