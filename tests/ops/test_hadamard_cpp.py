"""The C++ rotations and codes of a CPU against butterflies in plain torch (exact), and sums against float64 (bounded)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import torch

from narrowgauge.formats import INT4, INT8
from narrowgauge.ops.cpp import prebuilt
from narrowgauge.ops.cpp.build import compiler_name
from narrowgauge.ops.cpp.int4 import LIBRARY
from narrowgauge.ops.hadamard import cpp, definition
from tests.compare import assert_same

pytestmark = pytest.mark.skipif(bool(LIBRARY.missing), reason=LIBRARY.missing or "has a compiler")

SHAPES = [(1, 1), (3, 31), (5, 32), (7, 100), (2, 257), (4, 1030)]
BLOCKS = [2, 4, 8, 16, 32, 64, 128, 256, 1024]


def butterflies(y, block):
    """Rows times H without its factor, in stages: neighbours at distance 1, 2, 4 ... are added and subtracted."""
    h = 1
    while h < block:
        low, high = y.reshape(len(y), -1, 2, h).unbind(2)
        y = torch.stack((low + high, low - high), dim=2).reshape(y.shape)
        h *= 2
    return y * torch.tensor(block**-0.5, dtype=torch.float64).to(torch.float32)


def numbers(rows, columns, kind="normal"):
    """A matrix with zeros, denormals and large numbers; `kind` adds what is not finite."""
    x = torch.randn(rows, columns) * 2.0 ** torch.randint(-6, 7, (rows, columns))
    x[torch.rand(rows, columns) < 0.1] = 0.0
    x[torch.rand(rows, columns) < 0.05] = 1e-41
    if kind == "poisoned":
        x[-1, -1], x[0, 0] = float("nan"), float("inf")
    return x


def assert_same_numbers(found, expected):
    """Equal bits; the sign of a NaN is free, since instructions that swap operands differ by it."""
    assert_same(found.isnan(), expected.isnan())
    assert_same(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def layouts(x):
    """The matrix as rows, with a gap behind each row, as a transpose, and in bfloat16 and float16."""
    yield x
    yield torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]]
    yield x.T.contiguous().T
    yield x.to(torch.bfloat16)
    yield x.to(torch.float16)


@pytest.mark.parametrize("kind", ["normal", "poisoned"])
@pytest.mark.parametrize("block", BLOCKS)
def test_rotations_add_in_the_order_of_the_stages(block, kind):
    for rows, columns in SHAPES:
        whole = -(-columns // block) * block
        for signs in (None, torch.randint(0, 2, (whole,)) * 2.0 - 1.0):
            for x in layouts(numbers(rows, columns, kind)):
                full = torch.nn.functional.pad(x.float(), (0, whole - columns))
                expected = butterflies(full if signs is None else full * signs, block)
                assert_same_numbers(cpp.rotate(x, block, signs), expected)


@pytest.mark.parametrize("block", [1, *BLOCKS])
def test_inverse_rotations_read_the_elements_whose_bit_is_set(block):
    for rows, columns in SHAPES:
        whole = -(-columns // block) * block
        y = numbers(rows, whole, "poisoned")
        inside = torch.rand(rows, whole) < 0.7
        for signs in (None, torch.randint(0, 2, (whole,)) * 2.0 - 1.0):
            for bits, read in ((None, y), (definition.pack_bits(inside), y.where(inside, 0.0))):
                expected = read if block == 1 else butterflies(read, block)
                expected = (expected if signs is None else expected * signs)[:, :columns]
                found = cpp.unrotate(y, block, columns, signs, bits)
                assert_same_numbers(found, expected.contiguous())


@pytest.mark.parametrize("format", [INT4, INT8], ids=str)
@pytest.mark.parametrize("kind", ["normal", "poisoned"])
def test_codes_are_those_of_the_definition(format, kind):
    """Codes, packed codes and bits of ties, zeros, clipped elements and NaN, on ragged rows (exact)."""
    for rows, columns in SHAPES:
        y = numbers(rows, columns, kind)
        y[:, ::3] = torch.randint(-30, 31, y[:, ::3].shape) / 2
        for scale in (torch.ones(1, 1), torch.full((1, 1), 0.37), torch.full((1, 1), float("nan"))):
            found = cpp.encode(y, scale, format, True, True)
            for mine, theirs in zip(
                found, definition.encode(y, scale, format, True, True), strict=True
            ):
                assert_same(mine, theirs)


@pytest.mark.parametrize("block", [2, 32, 128])
@pytest.mark.parametrize("kind", ["normal", "poisoned"])
def test_one_pass_rotates_and_encodes_as_two_do(block, kind):
    """Codes, packed codes, bits and rounding errors, in every memory layout (exact)."""
    for rows, columns in SHAPES:
        whole = -(-columns // block) * block
        scale = torch.full((1, 1), 0.3)
        for signs in (None, torch.randint(0, 2, (whole,)) * 2.0 - 1.0):
            for x in layouts(numbers(rows, columns, kind)):
                rotated = cpp.rotate(x, block, signs)
                expected = cpp.encode(rotated, scale, INT4, True, True)
                errors = definition.rounding_errors(expected[0], rotated, scale, INT4)
                found = cpp.rotate_encode(x, block, signs, scale, INT4, True, True, True)
                for mine, theirs in zip(found, (*expected, errors), strict=True):
                    assert_same(mine, theirs)
    for empty in (torch.ones(0, 5), torch.ones(3, 0)):
        codes, *rest = cpp.rotate_encode(empty, 2, None, scale, INT4, False, False, False)
        assert codes.shape == (len(empty), -(-empty.shape[1] // 2) * 2) and rest == [None] * 3


def test_sums_for_the_gradient_of_a_step():
    """A sum of n float32 products in any order is off by at most n u times the sum of their magnitudes, u = 2**-24 (bounded)."""
    for rows, columns in [*SHAPES, (300, 512)]:
        d, y = numbers(rows, columns), numbers(rows, columns)
        scale = torch.full((1, 1), 0.2)
        codes, _, bits = definition.encode(y, scale, INT4, False, True)
        errors = definition.rounding_errors(codes, y, scale, INT4)
        inside = definition.unpack_bits(bits, columns)
        for residual in (errors, None):
            clipped, rounded = cpp.step_sums(d, codes, bits, residual)
            terms = (
                d.double() * codes * ~inside,
                d.double() * (0.0 if residual is None else residual),
            )
            for found, term in ((clipped, terms[0]), (rounded, terms[1])):
                slack = (term.numel() + 2) * 2.0**-24 * term.abs().sum() + 1e-40 * term.numel()
                assert abs(found.double() - term.sum()) <= slack
            assert rounded == 0 if residual is None else True
    d[0, 0] = float("nan")
    assert cpp.step_sums(d, codes, bits, errors)[1].isnan()


def test_results_do_not_depend_on_the_number_of_threads():
    """Rows are independent, and sums are added row by row (exact)."""
    x, d, scale = numbers(257, 1030), numbers(257, 1056), torch.full((1, 1), 0.3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            codes, packed, bits, errors = cpp.rotate_encode(
                x, 32, None, scale, INT4, True, True, True
            )
            sums = cpp.step_sums(d, codes, bits, errors)
            found.append(
                (codes, packed, bits, errors, *sums, cpp.unrotate(d, 32, 1030, None, bits))
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert_same(mine, theirs)


def results():
    torch.manual_seed(0)
    x, d, scale = numbers(5, 1030), numbers(5, 1056), torch.full((1, 1), 0.3)
    for block in BLOCKS:
        yield cpp.rotate(x, block, None)
    codes, packed, bits, errors = cpp.rotate_encode(x, 32, None, scale, INT4, True, True, True)
    yield from (codes, packed, bits, errors, *cpp.step_sums(d, codes, bits, errors))
    yield cpp.unrotate(d, 32, 1030, None, bits)


@pytest.mark.slow
@pytest.mark.parametrize("level", prebuilt.levels() or [pytest.param("", marks=pytest.mark.skip)])
def test_every_level_of_this_machine_has_the_same_bits(level, tmp_path, monkeypatch):
    """A wheel carries one library for each level; only the last one uses registers of 512 bits."""
    expected = list(results())
    source, built = (
        Path(str(resources.files("narrowgauge.ops.cpp"))) / "int4.cpp",
        tmp_path / "int4.so",
    )
    command = [shutil.which(compiler_name()), *prebuilt.FLAGS, f"-march={level}", str(source)]
    subprocess.run([*command, "-o", str(built)], check=True)
    library, functions = ctypes.CDLL(str(built)), {}
    for name, arguments in LIBRARY.signatures.items():
        function = functions[name] = getattr(library, f"narrowgauge_{name}")
        function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int64, *arguments), None
    monkeypatch.setitem(vars(LIBRARY), "functions", functions)
    for mine, theirs in zip(results(), expected, strict=True):
        assert_same(mine, theirs)
