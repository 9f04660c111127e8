"""The C++ kernels of norms and activations beside the definition: values and gradients (bounded), rounding, threads and levels (exact)."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import Tensor

from narrowgauge.formats import E4M3
from narrowgauge.ops.cpp import prebuilt
from narrowgauge.ops.cpp.build import compiler_name
from narrowgauge.ops.norm_act import BACKWARD, FORWARD, KINDS, Kind, NormActSpec, cpp, definition
from narrowgauge.ops.norm_act.selfcheck import tensors_of
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Cast
from tests.compare import assert_same
from tests.raising import coded, require
from tests.selection import needs_compiler

FLOAT, NARROW = torch.float32, torch.bfloat16
CPU = Device("cpu")
SHAPES = [(1, 1), (1, 200), (7, 131), (70, 64), (3, 5000)]
# x, parameters or u, and Kind.out
DTYPES = [(FLOAT, FLOAT, None), (NARROW, NARROW, None), (FLOAT, FLOAT, NARROW)]
MIXED = [(NARROW, FLOAT, None), (FLOAT, NARROW, None)]  # of norms alone


def sample(
    kind: Kind, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...], apart: bool = False
) -> list[Tensor]:
    """apart: rows lie apart, as those of a slice of columns do."""
    generator = torch.Generator().manual_seed(sum(shape))

    def values(*size: int) -> Tensor:
        wide = torch.randn(*size[:-1], size[-1] + 9 * apart, generator=generator)
        return wide.mul(3).add(0.5)[..., : size[-1]]

    others = [values(*shape[kind.is_norm :]) for _ in range(tensors_of(kind) - 1)]
    return [values(*shape).to(dtypes[0]), *(each.to(dtypes[1]) for each in others)]


def assert_near(found: Tensor, expected: Tensor, units: float = 2) -> None:
    """Within two units of the dtype, and 72 of float32 of the largest in the row, for sums in another order."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    wide, here = (torch.nan_to_num(each.double(), 0, 0, 0) for each in (expected, found))
    size = wide.abs()
    eps = torch.finfo(expected.dtype).eps
    bound = units * eps * size + 72 * 2.0**-23 * size.amax(-1, keepdim=True) + 2.0**-149
    assert ((here - wide).abs() <= bound).all()


def compare(kind: Kind, tensors: list[Tensor], gy: Tensor | None = None) -> None:
    """Beside the definition of the same tensors; `gy` is random unless it is given."""
    spec = NormActSpec.of(kind, tensors, ())
    forward, backward = (each.choose(spec, "native-cpp").kernel.run for each in (FORWARD, BACKWARD))
    y, statistics = forward(kind, tensors, None)
    expected, truth = definition.forward(kind, tensors, None)
    assert_near(y.value, expected.value)
    for got, wanted in zip(statistics, truth, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert_near(got, wanted)
    if gy is None:
        generator = torch.Generator().manual_seed(1)
        gy = torch.randn(expected.value.shape, generator=generator).to(expected.value.dtype)
    requests = [None] * (2 if kind.is_gated else 1)
    made, sums = backward(kind, tensors, truth, gy, requests)
    wanted, wanted_sums = definition.backward(kind, tensors, truth, gy, requests)
    for got, each in zip(made, wanted, strict=True):
        assert_near(got.value, each.value)
    for got, each in zip(sums, wanted_sums, strict=True):
        assert_near(got, each)


def kinds_and_dtypes():
    for name in KINDS:
        for dtypes in DTYPES + MIXED * name.endswith("-norm"):
            yield Kind(name, 1e-5, out=dtypes[2]), dtypes
            if name == "rms-norm" and dtypes[1] is FLOAT:
                yield Kind(name, 1e-5, wide=True, out=dtypes[2]), dtypes


@needs_compiler
@pytest.mark.parametrize(("kind", "dtypes"), list(kinds_and_dtypes()), ids=str)
def test_values_and_gradients_are_those_of_the_definition(kind, dtypes):
    if kind.out is not None and not kind.is_norm:
        spec = NormActSpec(kind, CPU, dtypes[:1], 64)
        require(FORWARD.kernels[1].refuse(spec), "dtype", NARROW)
        return
    for shape, apart in itertools.product(SHAPES, (False, True)):
        compare(kind, sample(kind, shape, dtypes, apart))


@needs_compiler
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [FLOAT, NARROW], ids=str)
def test_nan_infinity_and_subnormals_are_as_in_the_definition(name, dtype):
    """One special element in a row, a row of zeros, a row of subnormals, large numbers."""
    kind = Kind(name, 1e-5)
    tensors = sample(kind, (8, 70), (dtype, dtype))
    x = tensors[0]
    x[0, 3], x[1, 69], x[2, 0], x[3] = float("nan"), float("inf"), -float("inf"), 0
    if kind.activation == "gelu":
        x[1, 69] = 1e30  # torch's vectors make NaN of infinity, and its scalars infinity
    # torch's gelu makes zeros of subnormal bfloat16.
    x[4] *= 2.0**-120 if kind.activation == "gelu" else 2.0**-133
    x[5], x[6] = 80.0, -80.0
    gy = torch.ones(8, 70, dtype=dtype)
    compare(kind, tensors, gy)
    if kind.is_gated:
        tensors[1][7, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        compare(kind, tensors, gy)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 31, 33, 200, 2100])
def test_gradients_have_the_same_bits_on_any_number_of_threads(rows, monkeypatch):
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 100)
    for name in ("layer-norm", "rms-norm", "swiglu"):
        kind = Kind(name, 1e-5)
        tensors = sample(kind, (rows, 97), (NARROW, NARROW))
        statistics = definition.statistics(kind, tensors)
        gy, found = torch.ones(rows, 97, dtype=NARROW), []
        for threads in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            y, _ = cpp.forward(kind, tensors, None)
            made, sums = cpp.backward(kind, tensors, statistics, gy, [])
            found.append([y.value, *(each.value for each in made), *sums])
        for other in found[1:]:
            assert_same(other, found[0])


def spread() -> Tensor:
    """Float32 of every exponent and sign, neighbours of powers of two included, NaN and infinity."""
    exponents = torch.arange(0, 256).mul(1 << 23)[:, None]
    generator = torch.Generator().manual_seed(0)
    few = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001, 0x7FFFFF])
    mantissas = torch.cat((few, torch.randint(1 << 23, (256, 4000), generator=generator)[0]))
    positive = (exponents + mantissas).to(torch.int32).view(FLOAT).flatten()
    return torch.cat((positive, -positive))


@needs_compiler
def test_float32_is_rounded_as_torch_does():
    """To nearest even, with NaN, infinity and subnormals, and what rounds to infinity."""
    x = spread()
    for part in (x, x[3:]):  # of another alignment
        y = torch.empty(len(part), dtype=NARROW)
        cpp.LIBRARY.call("bfloat16", len(part), len(part), part, y)
        assert_same(y, part.to(NARROW), any_nan=True)


@needs_compiler
def test_exp_and_the_distribution_are_as_exact_as_is_stated():
    """The bounds at the head of vectors.h: two units of exp, 2**-21 of the distribution."""
    dense = torch.cat((spread(), torch.linspace(-106, 90, 300_001), torch.linspace(-5, 5, 300_001)))
    y, truth = torch.empty_like(dense), dense.double().exp()
    cpp.LIBRARY.call("exp", len(dense), len(dense), dense, y)
    exponent = torch.frexp(truth)[1].clamp(min=-125) - 24
    unit = torch.ldexp(torch.ones_like(truth), exponent)
    overflows = truth > torch.finfo(FLOAT).max
    assert torch.equal(y.isnan(), dense.isnan()) and bool(y[overflows].isinf().all())
    finite = ~overflows & ~dense.isnan()
    assert bool(((y.double() - truth).abs() <= 2 * unit)[finite].all())
    cpp.LIBRARY.call("normal", len(dense), len(dense), dense, y)
    error = (y.double() - torch.special.ndtr(dense.double())).abs()
    assert torch.equal(y.isnan(), dense.isnan())
    assert bool((error <= 2.0**-21)[~dense.isnan()].all())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (NormActSpec(Kind("swiglu"), CPU, (NARROW,), 8, ((Cast(format=E4M3), False),)), coded("operands")),
        (NormActSpec(Kind("gelu"), CPU, (NARROW,), 8, kept=(Cast(format=E4M3), False)), coded("operands")),
        (NormActSpec(Kind("gelu"), CPU, (torch.float16,), 8), coded("dtype", torch.float16)),
        (NormActSpec(Kind("swiglu"), CPU, (NARROW, FLOAT), 8), coded("dtype", FLOAT)),
        (NormActSpec(Kind("gelu"), CPU, (NARROW,), 8, is_empty=True), coded("shape")),
        (NormActSpec(Kind("gelu"), Device("cuda", (9, 0)), (NARROW,), 8), coded("device", "cuda")),
    ],
)  # fmt: skip
def test_refusals_say_why(spec, expected):
    for registry in (FORWARD, BACKWARD):
        require(registry.kernels[1].refuse(spec), expected.code, *expected.values)
        assert registry.choose(spec).kernel.name != "native-cpp"


def test_without_a_compiler_the_definition_computes(monkeypatch):
    monkeypatch.setitem(vars(cpp.LIBRARY), "missing", "no compiler is here")
    choice = FORWARD.choose(NormActSpec(Kind("gelu"), CPU, (NARROW,), 8))
    assert choice.kernel.name == "reference" and "no compiler is here" in choice.reasons


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("level", prebuilt.levels() or [pytest.param("", marks=pytest.mark.skip)])
def test_every_level_of_this_machine_computes_the_same(level, tmp_path, monkeypatch):
    """A wheel carries one library for each level; widths of vectors and instructions differ."""
    source = Path(str(resources.files("narrowgauge.ops.cpp"))) / "norm_act.cpp"
    built = tmp_path / "norm_act.so"
    command = [shutil.which(compiler_name()), *prebuilt.FLAGS, f"-march={level}", str(source)]
    subprocess.run([*command, "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))
    for name, arguments in cpp.LIBRARY.signatures.items():
        function = getattr(library, f"narrowgauge_{name}")
        function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int64, *arguments), None
    kind = Kind("layer-norm", 1e-5, out=NARROW)
    tensors = sample(kind, (7, 131), (FLOAT, FLOAT))
    here = [cpp.forward(kind, tensors, None)[0].value]
    monkeypatch.setitem(vars(cpp.LIBRARY), "loaded", library)
    assert_same(cpp.forward(kind, tensors, None)[0].value, here[0])
    for each, dtypes in kinds_and_dtypes():
        if each.is_norm or each.out is None:
            compare(each, sample(each, (7, 131), dtypes, apart=True))
    test_float32_is_rounded_as_torch_does()
    test_exp_and_the_distribution_are_as_exact_as_is_stated()
