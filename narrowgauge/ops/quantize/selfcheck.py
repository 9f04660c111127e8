"""Self-checks of kernels that quantize: bit-identical results on two small samples.

`ops.selfcheck` runs them.

    144 x 272      no axis is a multiple of 128; blocks of 16 x 16 differ by up to 2**24, and
                   include zeros and subnormals
    140 x 272      its last rows, for scales of a tensor or a row: sides that are multiples of 16
                   have kernels of their own

Each sample is cast in its memory order and as a transposed view, without and with a NaN and an
infinity. The kernel is called as its operator calls it; so is the definition, on the CPU. Codes and
scales must be bit-identical. Wrong ties, an inexact quotient, the noise of another
element, or the scale of another tile show in a single code.

Under delayed scaling the amax state is compared as well. Codes under a NaN scale are not (see
`pair`).

A check runs once per cast, dtype of x and form of the call. It does not cover rows longer than
8,192, nor every shape. Its 10 to 15 programs take another binary than training, whose cooperative
grids fill the device: LARGE is for those (`KernelCheck.large`), in both orders of memory, without
NaN.
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
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison, spread_normal
from narrowgauge.recipe import DelayedScaling
from narrowgauge.scaling import WHOLE

ROWS, COLUMNS, SPREAD, SEED = 144, 272, 12, 20260612
LARGE = 2048, 4096  # 2,048 squares of 64 x 64; at most 752 programs are resident (188 SMs times 4)
KEYS = Key((2**32 - 5, 77)), Key((3, 2**31 + 1))

Run = Callable[..., Any]
# (arguments on the CPU, text for messages). Under delayed scaling the third argument is the amax
# state.
Call = tuple[tuple[Any, ...], str]
Calls = Callable[[Spec, Tensor], Iterator[Call]]  # all calls for which a kernel is checked, with x


def _check(
    definition: Run, calls: Calls, examples: Callable[[], Iterable[Spec]]
) -> KernelCheck[Spec]:
    """Return the check of kernels that `calls` calls, on both orientations of both samples."""

    def compare(
        run: Run, kind: Hashable, device: torch.device, shape: tuple[int, int] = (ROWS, COLUMNS)
    ) -> Iterator[OutputComparison]:
        spec = _spec(kind)
        is_small = shape == (ROWS, COLUMNS)
        cuts = (0, 4) if WHOLE in spec.cast.tile and not spec.delayed and is_small else (0,)
        for poisoned in (False, True) if is_small else (False,):
            for turned, cut in itertools.product((False, True), cuts):
                x = sample(spec.dtype, poisoned, shape)[cut:]
                for given, call in calls(spec, x.T.contiguous().T if turned else x):
                    copies = [_moved(each, device) for each in given]
                    truth, got = definition(*given), run(*copies)
                    where = f"{call}{', x.T in memory' if turned else ''}{', its last rows' if cut else ''}"
                    where += ", NaN within" if poisoned else ""
                    window = (
                        (copies[2], given[2])
                        if isinstance(given[2], Tensor) and given[2].ndim == 1
                        else None
                    )
                    for each in compared(got, truth, window, poisoned):
                        yield each._replace(name=each.name + where)

    return KernelCheck(_kind, compare, examples, large=partial(compare, shape=LARGE))


def _kind(spec: Spec) -> tuple[Hashable, ...]:
    return spec.cast, spec.dtype, spec.noise, spec.amax, spec.expand, spec.cols, spec.delayed


def _spec(kind: Any) -> Spec:
    cast, dtype, *rest = kind
    return Spec(Device("cpu"), dtype, (ROWS, COLUMNS), cast, *rest)


@cache
def sample(dtype: torch.dtype, poisoned: bool, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Tensor:
    """Return the sample of this shape, at least [ROWS, COLUMNS], on the CPU; see the module."""
    x = spread_normal(*shape, SPREAD, torch.Generator().manual_seed(SEED))
    x[5:7], x[32:48, 32:48] = 0.0, 0.0
    x[9, :8] = torch.tensor([-0.0, 1e-40, -1e-40, 1e-30, 0.5, -0.5, 1.5, 2.5])
    if poisoned:
        x[ROWS // 2, COLUMNS // 3], x[3, 200] = float("nan"), float("-inf")
    return x.to(dtype)


def _moved(given: Any, device: torch.device) -> Any:
    """Copy the tensors of an argument to the device."""
    if isinstance(given, Tensor):
        # Always a copy: on the CPU `.to` returns the same tensor, and a kernel that never updates
        # the amax state would pass.
        return given.to(device, copy=True)
    if isinstance(given, PrecastWeight):
        parts = {name: getattr(given, name) for name in ("maxima", "plain", "turned", "expected")}
        return replace(given, **{name: _moved(part, device) for name, part in parts.items()})
    return given


def compared(
    got: Any, truth: Any, window: tuple[Tensor, Tensor] | None, poisoned: bool
) -> Iterator[OutputComparison]:
    """Yield the comparisons of a QTensor, or of (x, x.T, amax).

    Amax states come first, and scales before codes.

    window  (amax state of the kernel, amax state of the definition), or None
    """
    if not isinstance(truth, tuple):
        got, truth = (got, None), (truth, None)
    if window is not None:
        yield OutputComparison("amax", got[2], truth[2])
        yield OutputComparison("window", *window)
    for mine, theirs, of in zip(got[:2], truth[:2], ("", " of x.T"), strict=True):
        if theirs is None:
            continue
        yield OutputComparison(f"scale{of}", mine.scale, theirs.scale)
        if theirs.global_scale is not None:
            yield OutputComparison(
                f"tensor's scale{of}", mine.global_scale.reshape(1), theirs.global_scale.reshape(1)
            )
        if window is None or not poisoned:
            yield OutputComparison(
                f"{'values' if mine.is_expanded else 'codes'}{of}", mine.data, theirs.data
            )


def _calls_of_one(spec: Spec, x: Tensor) -> Iterator[Call]:
    amax = torch.full((1, 1), 3.0) if spec.amax else None
    yield (x, spec.cast, amax, None if spec.noise is None else KEYS[0], spec.expand), ""


def _calls_of_pairs(spec: Spec, x: Tensor) -> Iterator[Call]:
    """Delayed scaling is called with an amax of earlier steps and without one."""
    if not spec.delayed:
        yield (x, spec.cast, None, True, True, (None, None) if spec.noise is None else KEYS), ""
        return
    for in_use in (0.0, 3.0):
        live = torch.tensor([in_use, 0.5, 0.0])
        yield (x, spec.cast, live, True, spec.cols, (None, None)), f", in use {in_use}"


def _calls_of_precast(spec: Spec, x: Tensor) -> Iterator[Call]:
    """Yield calls with valid codes, with codes by another amax, and of a first step."""
    if x.stride(1) != 1:
        return  # weights are stored row by row
    if not isinstance(spec.cast.calibrate, DelayedScaling):
        precast = PrecastWeight.of(x, spec.cast, None)
        precast_weight.write(precast, x)
        yield (x, precast, None, True), ""
        return
    for in_use, expected in ((3.0, 3.0), (3.0, 5.0), (3.0, 0.0), (0.0, 3.0)):
        history, live = torch.zeros(spec.cast.calibrate.length), torch.tensor([expected, 0.0, 0.0])
        buffers: Any = SimpleNamespace(history=history, live=live, settings=spec.cast.calibrate)
        precast = PrecastWeight.of(x, spec.cast, buffers)
        for codes in precast.codes or ():
            codes.view(torch.uint8).fill_(1)  # bytes that no kernel writes must be equal
        precast_weight.write(precast, x)
        state = torch.tensor([in_use, 0.5, 0.0])
        yield (x, precast, state, True), f", in use {in_use} and expected {expected}"


def _examples(op: str) -> Iterator[Spec]:
    """Yield the casts of all recipes.

    Floats also yield decoded values, for GEMMs in float32.
    """
    from narrowgauge import recipes  # imported here because a cast does not need it

    gemms = [gemm for recipe in recipes.ALL for gemm in recipe.gemms().values()]
    for cast in dict.fromkeys(
        cast for gemm in gemms for cast in (gemm.lhs, gemm.rhs) if cast is not None
    ):
        delayed = op == "quantize_pair" and isinstance(cast.calibrate, DelayedScaling)
        kind = (cast, torch.bfloat16, "key" if cast.draws else None, False, None)
        for cols in (True, False) if delayed else (op == "quantize_pair",):
            yield _spec((*kind, cols, delayed))
        if op == "quantize" and isinstance(cast.format, FloatFormat):
            yield _spec((*kind[:4], torch.float32))


CHECKS = {
    op: _check(definition, calls, partial(_examples, op))
    for op, definition, calls in (
        ("quantize", definition.quantize, _calls_of_one),
        ("quantize_pair", partial(pair.reference_pair, backend="reference"), _calls_of_pairs),
        ("quantize_precast", precast_weight.reference_precast, _calls_of_precast),
    )
}
