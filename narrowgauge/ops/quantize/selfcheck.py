"""What a kernel that quantizes must compute rightly on a device first (see `ops.selfcheck`): the reference's bits of a small sample.

    144 x 272      no multiple of 128 in any axis; blocks of 16 x 16 up to 2**24 apart, among them zeros and subnormal numbers
    140 x 272      of these the last rows, where scales are of a tensor or a row: sides that are multiples of 16 have kernels of their own

in the order of memory and as the transpose of it, and the same with a NaN and an infinity in it. A kernel is called as its op calls it, and
so is the op's definition, on the CPU. Codes and scales must have the same bits: an instruction that rounds ties another way, a quotient
that is off by a bit, noise of another element, a scale of another tile are seen in a single code. Of delayed scaling the state of the
window is compared as well; its codes under a scale that is NaN are free (see `pair`).

Once per cast, type of x, and way of calling. What it does not find: rows longer than 8,192, and every shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import FloatFormat
from narrowgauge.ops.quantize import definition, pair, precast_weight
from narrowgauge.ops.quantize.precast_weight import PrecastWeight
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import Check, Comparison, spread_normal
from narrowgauge.recipe import Window
from narrowgauge.scaling import WHOLE

ROWS, COLUMNS, SPREAD, SEED = 144, 272, 12, 20260612
KEYS = Key((2**32 - 5, 77)), Key((3, 2**31 + 1))

Run = Callable[..., Any]
Call = tuple[
    tuple[Any, ...], str
]  # arguments on the CPU, of which with delayed scaling the third is the window's state; words for it
Calls = Callable[[Spec, Tensor], Iterator[Call]]  # of the call that a kernel is examined for, with x


def _check(definition: Run, calls: Calls, examples: Callable[[], Iterable[Spec]]) -> Check[Spec]:
    """Of kernels that are called by `calls`, on both orientations of both samples."""

    def compare(run: Run, kind: Hashable, device: torch.device) -> Iterator[Comparison]:
        spec = _spec(kind)
        cuts = (0, 4) if WHOLE in spec.cast.tile and not spec.delayed else (0,)
        for poisoned in (False, True):
            for turned, cut in itertools.product((False, True), cuts):
                x = sample(spec.dtype, poisoned)[cut:]
                for given, call in calls(spec, x.T.contiguous().T if turned else x):
                    copies = [_moved(each, device) for each in given]
                    truth, got = definition(*given), run(*copies)
                    where = f"{call}{', x.T in memory' if turned else ''}{', its last rows' if cut else ''}"
                    where += ", NaN within" if poisoned else ""
                    window = (copies[2], given[2]) if isinstance(given[2], Tensor) and given[2].ndim == 1 else None
                    for each in compared(got, truth, window, poisoned):
                        yield each._replace(name=each.name + where)

    return Check(_kind, compare, examples)


def _kind(spec: Spec) -> tuple[Hashable, ...]:
    return spec.cast, spec.dtype, spec.noise, spec.amax, spec.expand, spec.cols, spec.delayed


def _spec(kind: Any) -> Spec:
    cast, dtype, *rest = kind
    return Spec(Device("cpu"), dtype, (ROWS, COLUMNS), cast, *rest)


@cache
def sample(dtype: torch.dtype, poisoned: bool) -> Tensor:
    """[ROWS, COLUMNS] on the CPU; see the module."""
    x = spread_normal(ROWS, COLUMNS, SPREAD, torch.Generator().manual_seed(SEED))
    x[5:7], x[32:48, 32:48] = 0.0, 0.0
    x[9, :8] = torch.tensor([-0.0, 1e-40, -1e-40, 1e-30, 0.5, -0.5, 1.5, 2.5])
    if poisoned:
        x[ROWS // 2, COLUMNS // 3], x[3, 200] = float("nan"), float("-inf")
    return x.to(dtype)


def _moved(given: Any, device: torch.device) -> Any:
    """A copy on the device of what a kernel reads or writes there."""
    if isinstance(given, Tensor):
        return given.to(device, copy=True)
    if isinstance(given, PrecastWeight):
        parts = {name: getattr(given, name) for name in ("maxima", "plain", "turned", "expected")}
        return replace(given, **{name: _moved(part, device) for name, part in parts.items()})
    return given


def compared(got: Any, truth: Any, window: tuple[Tensor, Tensor] | None, poisoned: bool) -> Iterator[Comparison]:
    """A QTensor, or (that of x, that of x.T, amax), beside the truth; the window of both; the scales ahead of the codes."""
    if not isinstance(truth, tuple):
        got, truth = (got, None), (truth, None)
    if window is not None:
        yield Comparison("amax", got[2], truth[2])
        yield Comparison("window", *window)
    for mine, theirs, of in zip(got[:2], truth[:2], ("", " of x.T"), strict=True):
        if theirs is None:
            continue
        yield Comparison(f"scale{of}", mine.scale, theirs.scale)
        if theirs.global_scale is not None:
            yield Comparison(f"tensor's scale{of}", mine.global_scale.reshape(1), theirs.global_scale.reshape(1))
        if window is None or not poisoned:
            yield Comparison(f"{'values' if mine.is_expanded else 'codes'}{of}", mine.data, theirs.data)


def _calls_of_one(spec: Spec, x: Tensor) -> Iterator[Call]:
    amax = torch.full((1, 1), 3.0) if spec.amax else None
    yield (x, spec.cast, amax, None if spec.noise is None else KEYS[0], spec.expand), ""


def _calls_of_pairs(spec: Spec, x: Tensor) -> Iterator[Call]:
    """Delayed with an amax of earlier steps and without one."""
    if not spec.delayed:
        yield (x, spec.cast, None, True, True, (None, None) if spec.noise is None else KEYS), ""
        return
    for in_use in (0.0, 3.0):
        live = torch.tensor([in_use, 0.5, 0.0])
        yield (x, spec.cast, live, True, spec.cols, (None, None)), f", in use {in_use}"


def _calls_of_precast(spec: Spec, x: Tensor) -> Iterator[Call]:
    """Codes that serve, codes by an amax that is not in use, and a first step."""
    if x.stride(1) != 1:
        return  # a weight lies in memory row by row
    if not isinstance(spec.cast.calibrate, Window):
        precast = PrecastWeight.of(x, spec.cast, None)
        precast_weight.write(precast, x)
        yield (x, precast, None, True), ""
        return
    for in_use, expected in ((3.0, 3.0), (3.0, 5.0), (3.0, 0.0), (0.0, 3.0)):
        history, live = torch.zeros(spec.cast.calibrate.length), torch.tensor([expected, 0.0, 0.0])
        window: Any = SimpleNamespace(history=history, live=live, window=spec.cast.calibrate)
        precast = PrecastWeight.of(x, spec.cast, window)
        for codes in precast.codes or ():
            codes.view(torch.uint8).fill_(1)  # what is not written shall be the same everywhere
        precast_weight.write(precast, x)
        state = torch.tensor([in_use, 0.5, 0.0])
        yield (x, precast, state, True), f", in use {in_use} and expected {expected}"


def _examples(op: str) -> Iterator[Spec]:
    """The casts of all recipes. Floats rounded to nearest as decoded values too, for products that are computed in float32."""
    from narrowgauge import recipes  # who casts needs them not

    gemms = [gemm for recipe in recipes.ALL for gemm in recipe.gemms().values()]
    for cast in dict.fromkeys(cast for gemm in gemms for cast in (gemm.lhs, gemm.rhs) if cast is not None):
        delayed = op == "quantize_pair" and isinstance(cast.calibrate, Window)
        kind = (cast, torch.bfloat16, "key" if cast.rounding == "stochastic" else None, False, None)
        for cols in (True, False) if delayed else (op == "quantize_pair",):
            yield _spec((*kind, cols, delayed))
        if op == "quantize" and cast.rounding == "nearest" and isinstance(cast.format, FloatFormat):
            yield _spec((*kind[:4], torch.float32))


CHECKS = {
    op: _check(definition, calls, partial(_examples, op))
    for op, definition, calls in (
        ("quantize", definition.quantize, _calls_of_one),
        ("quantize_pair", partial(pair.in_turn, backend="reference"), _calls_of_pairs),
        ("quantize_precast", precast_weight.in_turn, _calls_of_precast),
    )
}
