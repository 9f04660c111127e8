"""What a kernel that quantizes must compute rightly on a device first (see `ops.selfcheck`): the reference's bits of a small sample.

    136 x 272      no multiple of 128 in any axis; blocks of 16 x 16 up to 2**24 apart, among them zeros and subnormal numbers

in the order of memory and as the transpose of it, and the same with a NaN and an infinity in it. Codes and scales must have the bits that
the reference computes on the CPU: an instruction that rounds ties another way, a quotient that is off by a bit, noise of another
element, a scale of another tile are seen in a single code. Of delayed scaling the state of the window is compared as well; its codes
under a scale that is NaN are free (see `pair`).

Once per cast, type of x, and way of calling. What it does not find: rows longer than 8,192, and every shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import FloatFormat
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import Check, Comparison
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Window
from narrowgauge.scaling import WHOLE

ROWS, COLUMNS, SPREAD, SEED = 136, 272, 12, 20260612
KEY, TURNED_KEY = Key(2**32 - 5, 77), Key(3, 2**31 + 1)

# (run of the kernel, the call it is examined for, device, x on it, whether x is poisoned) -> comparisons with the reference
Casts = Callable[[Callable[..., Any], Spec, torch.device, Tensor, bool], Iterable[Comparison]]


@cache
def check(casts: Casts) -> Check[Spec]:
    """Of kernels that are called as `casts` calls them, on both orientations of both samples."""

    def compare(run: Callable[..., Any], kind: Hashable, device: torch.device) -> Iterator[Comparison]:
        spec = _spec(kind)
        for poisoned in (False, True):
            x = sample(spec.dtype, poisoned)
            for turned in (False, True):
                here = x.T.contiguous().to(device).T if turned else x.to(device)
                where = f"{', x.T in memory' if turned else ''}{', NaN within' if poisoned else ''}"
                for each in casts(run, spec, device, here, poisoned):
                    yield each._replace(name=each.name + where)

    examples: dict[Casts, Callable[[], Iterable[Spec]]] = {check_one: _examples_of_one, check_pair: _examples_of_pairs}
    return Check(_kind, compare, examples.get(casts, _examples))


def _kind(spec: Spec) -> tuple[Hashable, ...]:
    return spec.cast, spec.dtype, spec.noise, spec.amax, spec.expand, spec.cols, spec.delayed


def _spec(kind: Any) -> Spec:
    cast, dtype, *rest = kind
    return Spec(Device("cpu"), dtype, (ROWS, COLUMNS), cast, *rest)


def _examples() -> Iterator[Spec]:
    """The casts of all recipes, of both types of activations."""
    from narrowgauge import recipes  # who casts needs them not

    gemms = [gemm for recipe in recipes.ALL for gemm in recipe.gemms().values()]
    for cast in dict.fromkeys(cast for gemm in gemms for cast in (gemm.lhs, gemm.rhs) if cast is not None):
        yield _spec((cast, torch.bfloat16, "key" if cast.rounding == "stochastic" else None))


def _examples_of_one() -> Iterator[Spec]:
    """Floats rounded to nearest as decoded values too, for products that are computed in float32."""
    for spec in _examples():
        yield spec
        if spec.noise is None and isinstance(spec.cast.format, FloatFormat):
            yield replace(spec, expand=torch.float32)


def _examples_of_pairs() -> Iterator[Spec]:
    for spec in _examples():
        delayed = isinstance(spec.cast.calibrate, Window)
        for cols in (True, False) if delayed else (True,):
            yield replace(spec, cols=cols, delayed=delayed)


@cache
def sample(dtype: torch.dtype, poisoned: bool) -> Tensor:
    """[ROWS, COLUMNS] on the CPU; see the module."""
    generator = torch.Generator().manual_seed(SEED)
    spread = torch.randint(-SPREAD, SPREAD + 1, (-(-ROWS // 16), -(-COLUMNS // 16)), generator=generator)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x = torch.ldexp(x, spread.repeat_interleave(16, 0)[:ROWS].repeat_interleave(16, 1)[:, :COLUMNS])
    x[5:7], x[32:48, 32:48] = 0.0, 0.0
    x[9, :8] = torch.tensor([-0.0, 1e-40, -1e-40, 1e-30, 0.5, -0.5, 1.5, 2.5])
    if poisoned:
        x[ROWS // 2, COLUMNS // 3], x[3, 200] = float("nan"), float("-inf")
    return x.to(dtype)


def check_one(
    run: Callable[..., Any], spec: Spec, device: torch.device, x: Tensor, poisoned: bool
) -> Iterator[Comparison]:
    """`quantize`."""
    amax = torch.full((1, 1), 3.0) if spec.amax else None
    key = KEY if spec.noise is not None else None
    got = run(x, spec.cast, None if amax is None else amax.to(device), key, spec.expand)
    yield from compared(got, _truth(x, spec, amax, key))


def check_pair(
    run: Callable[..., Any], spec: Spec, device: torch.device, x: Tensor, poisoned: bool
) -> Iterator[Comparison]:
    """`quantize_pair`; delayed with an amax of earlier steps and without one."""
    if not spec.delayed:
        keys = (KEY, TURNED_KEY) if spec.noise is not None else (None, None)
        rows, cols, _ = run(x, spec.cast, None, True, True, keys)
        yield from compare_both(rows, cols, spec, x, keys)
        return
    for in_use in (0.0, 3.0):
        before = torch.tensor([in_use, 0.5, 0.0])
        here = before.to(device, copy=True)
        *found, used = run(x, spec.cast, here, True, spec.cols, (None, None))
        casts = [each for each in found if each is not None]
        for each in compare_delayed(casts, used, here, before, spec, x, poisoned):
            yield each._replace(name=f"{each.name}, in use {in_use}")


def compare_both(
    plain: QTensor, turned: QTensor, spec: Spec, x: Tensor, keys: tuple[Key | None, ...] = (None, None)
) -> Iterator[Comparison]:
    """The casts of x and of x.T by their own amax."""
    yield from compared(plain, _truth(x, spec, None, keys[0]))
    yield from compared(turned, _truth(x.T, spec, None, keys[1]), " of x.T")


def compare_delayed(
    found: Sequence[QTensor], used: Tensor, here: Tensor, live: Tensor, spec: Spec, x: Tensor, poisoned: bool
) -> Iterator[Comparison]:
    """The casts of x and of x.T, the amax that they used, and the window `here`, which was `live` before."""
    live = live.clone()
    amax = update_amax(live, definition.tile_amax(x.cpu(), (WHOLE, WHOLE)))
    yield Comparison("amax", used, amax)
    yield Comparison("window", here, live)
    for got, of in zip(found, (x, x.T), strict=False):
        truth = compared(got, _truth(of, spec, amax, None))
        yield from [next(truth)] if poisoned else truth  # the codes under a scale that is NaN are free


def _truth(x: Tensor, spec: Spec, amax: Tensor | None, key: Key | None) -> QTensor:
    x = x.cpu()
    return definition.quantize(x, spec.cast, amax, None if key is None else key.uniform(tuple(x.shape)), spec.expand)


def compared(got: QTensor, truth: QTensor, of: str = "") -> Iterator[Comparison]:
    """The scales first."""
    yield Comparison(f"scale{of}", got.scale, truth.scale)
    if truth.global_scale is not None:
        assert got.global_scale is not None
        yield Comparison(f"tensor's scale{of}", got.global_scale.reshape(1), truth.global_scale.reshape(1))
    yield Comparison(f"{'codes' if not got.is_expanded else 'values'}{of}", got.data, truth.data)
