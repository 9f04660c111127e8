"""The C++ kernel of EDEN casts against the definition, bit for bit (exact).

Without a rotation against `quantize(..., backend="reference")`, under one against the same of the
rotated tensor. Shapes are ragged, values poisoned, zero, subnormal or far apart.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.errors import BackendError
from narrowgauge.formats import E2M1, INT4, IntFormat
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.cpp import prebuilt
from narrowgauge.ops.cpp.build import compiler_name
from narrowgauge.ops.hadamard.casting import plan_rotated
from narrowgauge.ops.quantize import eden_cpp, quantize
from narrowgauge.ops.quantize.spec import Turn
from narrowgauge.ops.random import Key
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, Hadamard
from narrowgauge.scaling import E4M3_EDEN, E4M3_EDEN_FOUR_OVER_SIX
from tests.compare import assert_same
from tests.raising import raises
from tests.selection import needs_compiler, quick

EDEN = Cast(format=E2M1, tile=(1, 16), scale=E4M3_EDEN, rounding="eden")
CASTS = {
    "one scale": EDEN,
    "four-over-six": replace(EDEN, scale=E4M3_EDEN_FOUR_OVER_SIX),
    "integers": Cast(format=INT4, tile=(1, 128), rounding="eden"),
    "tiles of 32": Cast(format=INT4, tile=(1, 32), rounding="eden"),
    "from the spread": Cast(
        format=INT4, tile=(1, 128), rounding="eden", calibrate=ClippedRms()
    ),
    "another rule": replace(EDEN, scale=replace(E4M3_EDEN, name="mine")),
    "blocks of 32": replace(EDEN, block=32),
}  # fmt: skip
SPECIALS = ("normal", "poisoned", "zeros", "tiny", "huge", "far apart", "sparse")
LAYOUTS = ("rows", "columns", "strided")
SHAPES = ((37, 300), (1, 1), (5, 130), (16, 256))


def values(special: str, shape: tuple[int, int], layout: str = "rows") -> Tensor:
    rows, columns = shape
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(8))
    if special == "poisoned":
        x[rows // 2, columns // 3], x[0, -1] = float("nan"), float("inf")
    elif special == "zeros":
        x[::2] = 0.0
        x[:, : columns // 2] = -0.0
    elif special == "tiny":
        x *= 1e-39
    elif special == "huge":
        x *= 1e37
    elif special == "far apart":
        x *= torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).mul(6).exp()
    elif special == "sparse":
        x *= torch.rand(x.shape, generator=torch.Generator().manual_seed(9)) < 0.1
    if layout == "columns":
        return x.T.contiguous().T
    return x.repeat_interleave(2, dim=1)[:, ::2] if layout == "strided" else x


def assert_same_cast(found: QTensor, expected: QTensor) -> None:
    assert found.shape == expected.shape
    assert_same(found.scale, expected.scale, any_nan=True)
    assert_same(found.data, expected.data)
    if expected.global_scale is not None:
        assert_same(found.global_scale, expected.global_scale, any_nan=True)


def assert_is_the_definition(
    x: Tensor, cast: Cast, rounds: int = 0, amax: Tensor | None = None, at: int = 5
) -> None:
    """rounds  of a rotation in blocks of the cast; 0: none."""
    noise = Key((at, 2**32 - 7)) if cast.draws else None
    is_whole = isinstance(cast.format, IntFormat)
    for expand in (None, torch.float32) if is_whole else (torch.float32, torch.bfloat16):
        if not rounds:
            of = {"noise": noise, "expand": expand, "amax": amax}
            found, expected = (
                quantize(x, cast, **of, backend=each) for each in ("native-eden", "reference")
            )
        else:
            turn = Rotation.draw(Hadamard(block=cast.block, signs="random", rounds=rounds), x)
            found = eden_cpp.run_rotated(
                x, cast, amax, noise, expand, cast.block, turn.signs, turn.second
            )
            expected = quantize(
                turn(x), cast, noise=noise, expand=expand, amax=amax, backend="reference"
            )
        assert_same_cast(found, expected)


@needs_compiler
@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize(
    ("name", "layout", "threads"),
    quick(
        [("one scale", "columns", 2), ("four-over-six", "strided", 2), ("integers", "columns", 2)],
        [*itertools.product(CASTS, LAYOUTS, (2,)), *((each, "rows", 1) for each in CASTS)],
    ),
)
def test_scales_and_values_are_those_of_the_definition(
    name, layout, threads, special, monkeypatch
):  # fmt: skip
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for shape, dtype in itertools.product(SHAPES[:2], (torch.float32, torch.bfloat16)):
        x = values(special, shape, layout).to(dtype)
        for rounds in (0, 1, 2):
            assert_is_the_definition(x, CASTS[name], rounds)


@needs_compiler
@pytest.mark.parametrize("name", CASTS)
def test_other_dtypes_shapes_and_a_given_amax(name):
    for shape in SHAPES[2:]:
        assert_is_the_definition(values("normal", shape).to(torch.float16), CASTS[name], 1)
        for rounds in (0, 1):
            assert_is_the_definition(
                values("normal", shape), CASTS[name], rounds, torch.full((1, 1), 0.7)
            )


@needs_compiler
def test_other_noise_rounds_other_scales():
    """The negative control: without it a kernel that ignores the key would pass."""
    x = values("normal", (16, 256))
    one, other = (
        quantize(x, EDEN, noise=Key((at, 3)), expand=torch.float32, backend="native-eden")
        for at in (1, 2)
    )
    assert_same(one.data, other.data)
    assert not torch.equal(one.scale, other.scale)


@needs_compiler
def test_what_the_kernel_leaves_to_the_definition():
    x = values("normal", (4, 64))
    numbers = torch.rand(4, 4)
    for cast, expand, noise, code in (
        (replace(EDEN, tile=(1, 8)), torch.float32, Key((1, 2)), "tile"),
        (EDEN, torch.float32, numbers, "noise"),
        (EDEN, None, Key((1, 2)), "expanded"),
        (replace(EDEN, rounding="nearest"), torch.float32, None, "rounding"),
    ):
        with raises(BackendError, "kernel.refused") as caught:
            quantize(x, cast, expand=expand, noise=noise, backend="native-eden")
        assert caught.value.refusal == code
    turn = Turn(128)
    assert plan_rotated(x, replace(EDEN, tile=(1, 8)), torch.float32, turn) is None
    assert plan_rotated(x, EDEN, torch.float32, turn) is not None
    assert plan_rotated(x, EDEN, torch.float32, turn, beside=True) is None


@needs_compiler
@pytest.mark.parametrize("recipe", ["quartet2", "quartet2-46", "int4-eden"])
def test_a_layer_has_the_same_gradients_without_the_kernel(recipe, monkeypatch):
    found = []
    for missing in ("", "switched off"):
        monkeypatch.setitem(vars(eden_cpp.LIBRARY), "missing", missing)
        torch.manual_seed(3)
        layer = torch.nn.Linear(96, 80)
        model = ng.convert(torch.nn.Sequential(layer), {"*": ng.recipes.get(recipe)})
        x = torch.randn(40, 96, requires_grad=True)
        torch.manual_seed(4)
        model(x).square().sum().backward()
        found.append((x.grad, layer.weight.grad))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("level", prebuilt.levels() or [pytest.param("", marks=pytest.mark.skip)])
def test_every_level_of_this_machine_has_the_same_bits(level, tmp_path, monkeypatch):
    """A wheel carries one library for each level; the baseline has no butterflies by hand."""
    source = Path(str(resources.files("narrowgauge.ops.cpp"))) / "eden.cpp"
    built = tmp_path / "eden.so"
    compiler = shutil.which(compiler_name())
    tuning = f"-march={level}"
    subprocess.run([compiler, *prebuilt.FLAGS, tuning, str(source), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))
    for name, arguments in eden_cpp.LIBRARY.signatures.items():
        function = getattr(library, f"narrowgauge_{name}")
        function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int64, *arguments), None
    monkeypatch.setitem(vars(eden_cpp.LIBRARY), "loaded", library)
    for name, special in itertools.product(tuple(CASTS)[:3], SPECIALS):
        for rounds in (0, 1):
            assert_is_the_definition(values(special, (37, 300), "columns"), CASTS[name], rounds)
