"""Runs the kernels under Triton's interpreter and says which results differ from the reference; a process of its own.

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick interpreted      tests/ops/triton/cases.py says what is printed

The interpreter computes with numpy. Faithful there: integer arithmetic, float32 sums, products and divisions. Not faithful: its casts
to 8-bit floats. So elements are rounded in integer arithmetic here, as on compute capability 8.0 and (0, 0); the instructions in their
place are checked in test_compiled and, on a GPU, in tests/ops/test_quantize_triton.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import jit
from triton import language as tl
from triton.runtime import interpreter

import narrowgauge as ng
from narrowgauge import formats
from narrowgauge.formats import E2M1, E4M3, E5M2, INT4, INT8
from narrowgauge.ops import selfcheck
from narrowgauge.ops.hadamard import draw_signs, encoding
from narrowgauge.ops.hadamard import triton_kernel as hadamard
from narrowgauge.ops.hadamard.encoding import rotate_and_encode
from narrowgauge.ops.mm import plan
from narrowgauge.ops.norm_act import triton_launch as of_norms
from narrowgauge.ops.quantize import (
    quantize,
    tile_amax,
    triton,
    triton_block,
    triton_launch,
    triton_transpose,
)
from narrowgauge.ops.quantize import selfcheck as of_casts
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import Device, Kernel
from narrowgauge.ops.triton import grids
from narrowgauge.ops.triton.cast_constants import constants_of, refuse
from narrowgauge.ops.triton.launch import launch
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.replay import Replay, Replays
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import WHOLE, Cast, DelayedScaling, Hadamard
from narrowgauge.scaling import (
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E8M0_CEIL,
    E8M0_FLOOR,
    FP32,
    POW2,
)
from tests.compare import assert_same
from tests.ops.registries import registries
from tests.ops.triton.cases import Case

KEY, TURNED_KEY = Key((123456789, 4000000000)), Key((2**32 - 1, 9))
# Formats that the kernels round to.
ELEMENTS = tuple(each for each in formats.ELEMENTS if refuse(Cast(format=each)) is None)
TILED = (
    Cast(format=E4M3),
    Cast(format=E4M3, tile=(1, WHOLE)),
    Cast(format=E5M2, tile=(1, WHOLE), rounding="stochastic"),
    Cast(format=E4M3, tile=(1, 128), scale=POW2),
    Cast(format=E4M3, tile=(128, 128), scale=POW2),
    Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL),
    Cast(format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, rounding="stochastic", headroom=4 / 3),
    Cast(format=INT4, rounding="stochastic"),
    Cast(format=INT4, tile=(1, WHOLE)),
    Cast(format=E2M1, tile=(16, 16)),
    Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL),
    Cast(format=E2M1, tile=(16, 16), scale=E4M3_TWO_LEVEL),
    Cast(
        format=E2M1,
        tile=(1, 16),
        scale=E4M3_TWO_LEVEL_CEIL,
        rounding="stochastic",
        headroom=17 / 16,
    ),
)
# Recipe, a kernel that must run in its layers, and whether the numbers are the reference's to the bit.
LAYERS = (
    ("fp8-delayed", triton_transpose.both_delayed, True),
    ("fp8-current", triton_transpose.cast_both, True),
    ("fp8-block", triton_block.cast_blocks, True),
    ("nvfp4", triton_block.cast_blocks, True),
    ("int4-hq-bs", hadamard.rotate_and_encode, False),
)
SPECIAL = (0.0, -0.0, 1e-40, -1e-30, 448.0, 1.0)


def matrix(
    rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, width: float = 8.0
) -> Tensor:
    """Magnitudes over some dozens of octaves, so that every rounding of a format happens, with special values in front."""
    x = torch.randn(rows, columns) * torch.exp2(width * torch.randn(rows, columns))
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return x.to(dtype)


def words(key: Key | None) -> Tensor | None:
    return None if key is None else key.on_device(torch.device("cpu"))


def compare(
    x: Tensor, cast: Cast, expand: torch.dtype | None = None, amax: Tensor | None = None
) -> None:
    """One orientation."""
    key = KEY if cast.rounding == "stochastic" else None
    got = triton_launch.cast_pair(x, cast, amax=amax, noise=(key, None), expand=expand)[0]
    expected = quantize(x, cast, amax=amax, noise=key, expand=expand, backend="reference")
    same(got, expected)


def same(got: QTensor, expected: QTensor) -> None:
    assert_same(got.scale.contiguous(), expected.scale.contiguous(), any_nan=True, at="scale")
    assert_same(got.data, expected.data, any_nan=True, at="data")
    assert_same(got.global_scale, expected.global_scale, any_nan=True, at="global scale")


def compare_both(x: Tensor, cast: Cast) -> None:
    key, turned = (KEY, TURNED_KEY) if cast.rounding == "stochastic" else (None, None)
    got = triton_launch.cast_pair(x, cast, cols=True, noise=(key, turned))
    same(got[0], quantize(x, cast, noise=key, backend="reference"))
    same(got[1], quantize(x.T, cast, noise=turned, backend="reference"))


def compare_delayed(in_use: float, spoiled: float | None, records: bool) -> None:
    """The codes by the scale of earlier steps, what was seen of this one, and the first step, which has no earlier one."""
    x, cast = matrix(70, 130, width=1.0), Cast(format=E4M3)
    if spoiled is not None:
        x[3, 5] = spoiled
    live, expected_live = (torch.tensor([in_use, 0.5, 0.0]) for _ in range(2))
    got, _, used = triton_launch.cast_delayed(x, cast, live, records, False)
    amax = update_amax(expected_live, tile_amax(x, (WHOLE, WHOLE)), records=records)
    expected = quantize(x, cast, amax=amax, backend="reference")
    assert_same(live, expected_live, at="live")
    assert_same(used, amax, any_nan=True, at="amax")
    if spoiled is None:
        same(got, expected)
    else:
        assert got.scale.isnan().all() and expected.scale.isnan().all()


def compare_amax(x: Tensor) -> None:
    """The largest magnitude of a tensor, twice: what programs count by is left zero."""
    for _ in range(2):
        assert_same(triton_launch.amax(x), tile_amax(x, (WHOLE, WHOLE)), any_nan=True)


class InTurns:
    """A kernel whose programs wait for each other: each runs to there, then the next one begins; the last one goes on first.

    fn  what the interpreter calls for each program, one after another; here its first call runs all
    """

    def __init__(self, fn: Any, programs: int, waits: bool) -> None:
        self.fn, self.programs, self.waits, self.running = fn, programs, waits, -1
        functools.update_wrapper(self, fn)
        self.__globals__, self.__signature__ = fn.__globals__, inspect.signature(fn)

    def __call__(self, **given: Any) -> None:
        if self.running < 0 or not self.waits:
            self.given = given
            self._begin(self.running + 1)

    def _begin(self, program: int) -> None:
        self.running = program
        interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
        self.fn(**self.given)

    def wait_for_all(self, arrived: Any) -> None:
        tl.atomic_add(arrived, 1)
        if self.waits and self.running + 1 < self.programs:
            program = self.running
            self._begin(program + 1)
            interpreter.interpreter_builder.set_grid_idx(program, 0, 0)


def cast_in_turns(call: Any, programs: int, waits: bool = True) -> Any:
    """What `call` gives where `amax_and_cast` has so many programs at most."""

    def launched(kernel: Any, count: int, *arguments: Any, warps: int, **constants: Any) -> None:
        assert kernel is triton_transpose.amax_and_cast and count > 1, kernel
        whole = kernel.rewrite
        in_turns = InTurns(whole(), count, waits)
        patch.setattr(triton_transpose, "wait_for_all", in_turns.wait_for_all)
        patch.setattr(kernel, "rewrite", lambda: in_turns)
        kernel[(count,)](*arguments, **constants)
        patch.setattr(kernel, "rewrite", whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            triton_launch, "_cooperative_grid", lambda pieces, *_: (min(pieces, programs), 8)
        )
        patch.setattr(triton_launch, "launch", launched)
        return call()


def compare_beside_others(cast: Cast) -> None:
    """Grids that leave multiprocessors free: two programs share larger pieces, six squares or two runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "_FREE", {None: 2})
        compare_in_turns(cast, 2, ((272, 144), (144, 272)))


def compare_in_turns(
    cast: Cast, programs: int, shapes: tuple[Any, Any] = ((80, 272), (144, 80))
) -> None:
    """Twice, with smaller numbers the second time: what programs count by, and the maxima of lines, are left zero."""
    for width in (3.0, 0.1):
        for x in (matrix(*shapes[0], width=width), matrix(*shapes[1], width=width).T):
            got = cast_in_turns(lambda x=x: triton_launch.cast_pair(x, cast, cols=True), programs)
            same(got[0], quantize(x, cast, backend="reference"))
            same(got[1], quantize(x.T, cast, backend="reference"))
            if cast.is_per_tensor:
                rows, amax = cast_in_turns(lambda x=x: triton_launch.with_amax(x, cast), programs)
                same(rows, quantize(x, cast, backend="reference"))
                assert_same(amax, tile_amax(x, (WHOLE, WHOLE)))


def compare_in_two_launches(cast: Cast) -> None:
    """Where no grid is launched: beside collectives, and with ragged sides; the amax is written there too."""
    for x in (matrix(80, 272, width=3.0), matrix(144, 80, width=0.1).T, matrix(37, 53, width=3.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_launch, "launched_as_grid", lambda start, index: False)
            got = triton_launch.cast_pair(x, cast, cols=True)
            same(got[0], quantize(x, cast, backend="reference"))
            same(got[1], quantize(x.T, cast, backend="reference"))
            if cast.is_per_tensor:
                rows, amax = triton_launch.with_amax(x, cast)
                same(rows, quantize(x, cast, backend="reference"))
                assert_same(amax, tile_amax(x, (WHOLE, WHOLE)))


def find_programs_that_do_not_wait() -> None:
    """Control: each casts by the maxima that it finds when it comes."""
    x = torch.linspace(0.1, 3.0, 144 * 272).reshape(144, 272)
    for cast in (Cast(format=E4M3), Cast(format=E4M3, tile=(1, WHOLE))):
        got = cast_in_turns(
            lambda cast=cast: triton_launch.cast_pair(x, cast, cols=True), 4, waits=False
        )
        assert not torch.equal(got[1].data, quantize(x.T, cast, backend="reference").data)


def compare_both_delayed(in_use: float, spoiled: float | None, transposed: bool) -> None:
    """As compare_delayed, both orientations."""
    x, cast = matrix(70, 130, width=1.0), Cast(format=E4M3)
    if spoiled is not None:
        x[3, 5] = spoiled
    x = x.T.contiguous().T if transposed else x
    live, expected_live = (torch.tensor([in_use, 0.5, 0.0]) for _ in range(2))
    *found, used = triton_launch.cast_delayed(x, cast, live, True, True)
    amax = update_amax(expected_live, tile_amax(x, (WHOLE, WHOLE)))
    assert_same(live, expected_live, at="live")
    assert_same(used, amax, any_nan=True, at="amax")
    for got, of in zip(found, (x, x.T), strict=True):
        if spoiled is None:
            same(got, quantize(of.contiguous(), cast, amax=amax, backend="reference"))
        else:
            assert got.scale.isnan().all()


def checked_by_interpreter() -> Iterator[tuple[str, Kernel[Any], Any]]:
    """Every Triton kernel of every registry, with the examples of its check that it does not refuse on a GPU."""
    hopper = Device("cuda", (9, 0), cuda=(12, 9))
    for registry in registries():
        for kernel in registry.kernels:
            if kernel.name == "triton" and kernel.check is not None:
                examples = [replace(spec, device=hopper) for spec in kernel.check().examples()]
                if registry.op == "rotary":  # whose products of bfloat16 are wrong here
                    examples = [spec for spec in examples if torch.bfloat16 not in spec.dtypes]
                yield from (
                    (registry.op, kernel, spec) for spec in examples if kernel.refuse(spec) is None
                )


def check(op: str, kernel: Kernel[Any], spec: Any) -> None:
    """What a GPU is asked for before it may compute. Of GEMMs the operands are decoded: FP8 is not the hardware's here."""

    def decoded(lhs: QTensor, rhs: QTensor, *rest: Any) -> Tensor:
        return kernel.run(lhs.expanded(torch.float32), rhs.expanded(torch.float32), *rest)

    runs = {"mm": decoded, "attention": functools.partial(kernel.run, decoded=True)}
    run = runs.get(op, kernel.run)
    how = kernel.check()
    result = selfcheck.examine(op, run, how, how.kind(spec), torch.device("cpu"))
    assert result.reason is None, result.reason


def find_a_broken_kernel() -> None:
    """Scales without their headroom, and a cast that takes the next power of two: neither passes."""
    for cast, change in (
        (Cast(format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, headroom=4 / 3), {"headroom": 1.0}),
        (Cast(format=E4M3, tile=(1, 128), scale=POW2), {"carry": 0}),
    ):
        C = replace(constants_of(cast, (0, 0)), **change)

        spec = Spec.of(torch.zeros(2, 2, dtype=torch.bfloat16), cast)
        check = of_casts.CHECKS["quantize"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_launch, "constants", lambda *given, C=C: C)
            result = selfcheck.examine(
                "quantize", triton.run, check, check.kind(spec), torch.device("cpu")
            )
        assert result.reason is not None and "is wrong on cpu" in result.reason, result


def train_layers(recipe: str) -> dict[str, object]:
    """Two steps of two layers with the weights cast once; a matrix in each orientation."""
    torch.manual_seed(1)
    model = ng.convert(
        torch.nn.Sequential(torch.nn.Linear(80, 48), torch.nn.GELU(), torch.nn.Linear(48, 32)),
        recipe,
    )
    ng.advance(model)
    found = []
    for _ in range(2):
        x = torch.randn(40, 80, requires_grad=True)
        y = model(x)
        y.backward(torch.randn_like(y))
        found += [y.detach(), x.grad]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        ng.advance(model)
    return {"outputs": found, "state": dict(model.state_dict())}


def compare_layers(recipe: str, kernel: object, exact: bool) -> None:
    """A model whose casts are these kernels', as on a GPU, beside one whose casts are the reference's."""
    found, launches = [], []
    whole = triton_launch.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "narrowgauge.nn.plan.plan",
            lambda gemm, device: replace(plan(gemm, device), expand=None),
        )
        found.append(train_layers(recipe))
        for module in (triton, encoding):
            patch.setattr(module, "refuse_tensors", lambda *given: None)
        for module in (triton_launch, encoding):
            patch.setattr(
                module,
                "launch",
                lambda kernel, *call, **o: launches.append(kernel) or whole(kernel, *call, **o),
            )
        found.append(train_layers(recipe))
    assert kernel in launches, "it was another that ran"
    if exact:
        assert_same(found[1], found[0])
    else:
        for mine, theirs in zip(found[1]["outputs"], found[0]["outputs"], strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max())
            )


def compare_rotated(order: int, dtype: torch.dtype) -> None:
    """Whole numbers small enough that every order of summation gives the same, and a scale that they seldom tie on (exact)."""
    for shape in ((5, 37), (40, 300)):
        x = torch.randint(-9, 10, shape).to(dtype)
        if dtype == torch.float32:
            x += torch.randint(-9, 10, shape) * 2.0**-12
        hadamard, scale = Hadamard(block=order, signs="random"), torch.tensor([[0.7]])
        signs = draw_signs(hadamard, shape[1], x.device)
        got = encoding.run_triton(x, hadamard, signs, scale, INT4, True, True)
        expected = rotate_and_encode(
            x, hadamard, signs, scale, INT4, packed=True, bits=True, backend="reference"
        )
        for name, mine, theirs in zip(("codes", "packed", "bits"), got, expected, strict=True):
            assert_same(mine, theirs, at=name)


@jit
def fill(out, key, count, BLOCK: tl.constexpr):
    """out [count] float32 = the noise of the key."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, uniform(key, index, 1, tl.zeros_like(index)), mask=index < count)


def compare_noise() -> None:
    out = torch.empty(3000)
    launch(fill, 3, out, words(KEY), 3000, BLOCK=1024, warps=4)
    assert_same(out, KEY.uniform((3000,)))


def compare_replays(cast: Cast, cols: bool, dtype: torch.dtype) -> None:
    """Calls that are recorded and made again beside calls that are made anew: the same results, and windows."""
    is_delayed = isinstance(cast.calibrate, DelayedScaling)

    def call(x: Tensor, live: Tensor | None) -> Any:
        if cols or is_delayed:
            return triton_launch.pair(x, cast, live, True, cols, (None, None))
        return triton_launch.run(x, cast, None, None, None)

    replays = Replays(call)
    lives = [torch.tensor([3.0, 0.0, 0.0]) if is_delayed else None for _ in range(2)]
    for shape in ((40, 70), (33, 64), (40, 70), (40, 70), (33, 64), (40, 70), (33, 64), (33, 64)):
        x = matrix(*shape, dtype)
        found = [
            made if isinstance(made, tuple) else (made,)
            for made in (replays(x, lives[0]), call(x, lives[1]))
        ]
        assert [type(each) for each in found[0]] == [type(each) for each in found[1]]
        for mine, theirs, at in zip(*found, ("rows", "cols", "amax"), strict=False):
            if theirs is not None:
                both = [
                    vars(each) if isinstance(each, QTensor) else each for each in (mine, theirs)
                ]
                assert_same(*both, at=at)
        if is_delayed:
            assert_same(lives[0], lives[1])
    assert [type(each) for each in replays._found.values()] == [Replay, Replay], (
        "it was never replayed"
    )


# By what a case begins with.
OF_FORMATS = tuple(f"{format} tensor" for format in ELEMENTS)
KINDS = (
    "noise", "amax of ", *OF_FORMATS, "both ",
    "turned ", "float16 ", "values ", "nan ", "infinity ", "huge ", "tiny ",
    "given amax ", "one column ", "long rows ", "delayed, ", "rotated ", "in turns ", "beside others ", "in two launches ", "not in turns",
    "check of ", "broken ", "layers ", "replayed ",
)  # fmt: skip
# A second of the interpreter and more: whole checks of a kernel, and matrices of several programs along both axes.
SLOW_KINDS = (
    "long rows int4",
    "layers int4",
    "layers nvfp4",
    "layers fp8-block",  # whose kernel runs in "both e4m3 1x128"
    "in turns int",
    "in turns e5m2",
    "beside others int",
    "beside others e5m2",
    "in two launches int",
    "in two launches e5m2",
    "not in turns",
)
# Of products, norms and casts of both orientations the other modules and the cases here run the kernels.
QUICK_CHECKS = (
    "check of rotate_and_encode: 32 int4 torch.bfloat16",
    "check of quantize: e4m3 1x128",
)
REPLAYED = ("delayed (max of 1024) True", "1x128 pow2 True")
SEVERAL_PROGRAMS = (
    "both e4m3 tensor fp32",
    "both e4m3 128x128 pow2",
    "both e4m3 1x128 pow2",
)


def is_quick(name: str) -> bool:
    if name.startswith("both ") and name.endswith("(130, 260)"):
        return name.startswith(SEVERAL_PROGRAMS)
    if name.startswith("check of "):  # of several casts by one kernel those of two at once, to E4M3
        if "None False None" in name:  # the values as codes alone, which "both " compares
            return False
        return name.startswith(QUICK_CHECKS) and not name.endswith(" None") and "int8" not in name
    if name.startswith("replayed "):
        return name.endswith(REPLAYED)
    if name.startswith("rotated "):  # every order and every dtype once
        return name.endswith(("16 torch.float32", "32 torch.bfloat16", "64 torch.float16"))
    if name.startswith(OF_FORMATS) and not name.startswith("e4m3 "):
        return " fp32" in name  # the rules of scales do not depend on the format
    return not name.startswith(SLOW_KINDS)


def cases() -> Iterator[Case]:
    yield "noise", compare_noise
    for format in ELEMENTS:
        for rule in (FP32, POW2, E8M0_FLOOR):
            for rounding in ("nearest", "stochastic"):
                cast = Cast(
                    format=format,
                    scale=rule,
                    rounding=rounding,
                    headroom=4 / 3 if rule is FP32 else 1.0,
                )
                yield f"{cast}", lambda cast=cast: compare(matrix(33, 62), cast)
    for cast in TILED:
        for shape in ((37, 53), (130, 260)):
            yield (
                f"both {cast} {shape}",
                lambda cast=cast, shape=shape: compare_both(matrix(*shape), cast),
            )
        yield f"turned {cast}", lambda cast=cast: compare(matrix(60, 37).T, cast)
        yield f"float16 {cast}", lambda cast=cast: compare(matrix(20, 34, torch.float16, 2.0), cast)
        yield (
            f"values {cast}",
            lambda cast=cast: compare(matrix(20, 35, torch.float32), cast, torch.bfloat16),
        )
    for order in (16, 32, 64):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield (
                f"rotated {order} {dtype}",
                lambda order=order, dtype=dtype: compare_rotated(order, dtype),
            )
    yield (
        "amax of a tensor",
        lambda: [
            compare_amax(x)
            for x in (matrix(70, 130), matrix(70, 130).T, matrix(3, 5) * float("nan"))
        ],
    )
    for cast in (
        Cast(format=E4M3),
        Cast(format=INT4),
        Cast(format=E5M2, tile=(1, WHOLE)),
        Cast(format=INT8, tile=(1, WHOLE)),
    ):
        yield f"in turns {cast}", lambda cast=cast: compare_in_turns(cast, 3)
        yield f"beside others {cast}", lambda cast=cast: compare_beside_others(cast)
        yield f"in two launches {cast}", lambda cast=cast: compare_in_two_launches(cast)
    yield "not in turns", find_programs_that_do_not_wait
    for in_use in (0.0, 3.0):
        for value in (None, float("nan")):
            yield (
                f"both delayed, in use {in_use}, {value} within",
                lambda in_use=in_use, value=value: compare_both_delayed(in_use, value, in_use > 0),
            )
    of_norms.PARTS = 16  # each of them is a program to interpret
    for op, kernel, spec in checked_by_interpreter():
        kind = " ".join(map(str, spec.casts if op == "mm" else kernel.check().kind(spec)))
        yield f"check of {op}: {kind}", lambda call=(op, kernel, spec): check(*call)
    yield "broken kernels", find_a_broken_kernel
    for cast in (
        Cast(format=E4M3),
        Cast(format=E4M3, calibrate=DelayedScaling()),
        *TILED[1:2],
        *TILED[3:6],
        TILED[8],
    ):
        for cols in (False, True):
            yield (
                f"replayed {cast} {cols}",
                lambda cast=cast, cols=cols: compare_replays(cast, cols, torch.bfloat16),
            )
    for recipe, kernel, exact in LAYERS:
        yield f"layers {recipe}", lambda call=(recipe, kernel, exact): compare_layers(*call)
    yield from _at_the_edges()


def _at_the_edges() -> Iterator[Case]:
    for cast in (
        Cast(format=E4M3),
        Cast(format=INT8),
        Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL),
        TILED[-3],
    ):
        for name, value in (
            ("nan", float("nan")),
            ("infinity", float("inf")),
            ("huge", 3e38),
            ("tiny", 1e-44),
        ):

            def spoiled(cast: Cast = cast, value: float = value) -> None:
                x = matrix(20, 40, torch.float32)
                x[7, 9] = value
                compare_both(x, cast)
                compare(x * 1e-44, cast)

            yield f"{name} {cast}", spoiled
    amax = torch.tensor([[0.75]])
    for cast in (Cast(format=E5M2), Cast(format=E4M3, tile=(1, WHOLE)), Cast(format=INT4)):
        yield (
            f"given amax {cast}",
            lambda cast=cast: compare(matrix(9, 50), cast, amax=_as_scales(amax, cast)),
        )
        yield f"one column {cast}", lambda cast=cast: compare(matrix(50, 1), cast)
        yield f"long rows {cast}", lambda cast=cast: compare(matrix(2, 8193, width=1.0), cast)
    for in_use in (0.0, 3.0):
        for value in (None, float("nan"), float("-inf")):
            for records in (True, False):
                name = f"delayed, in use {in_use}, {value} within, records {records}"
                yield (
                    name,
                    lambda in_use=in_use, value=value, records=records: compare_delayed(
                        in_use, value, records
                    ),
                )


def _as_scales(amax: Tensor, cast: Cast) -> Tensor:
    return amax if cast.tile[0] == WHOLE else amax.expand(9, 1).contiguous()
