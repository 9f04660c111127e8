"""Cases in which compiled kernels must agree with their definitions, and how one is run.

    for case in cases(90):
        print(case.family, case.name, outcome(case, sm=90).words or "agrees")

    casts       every cast of tests/ops/triton/test_compiled.py, x alone and with x.T, on a ragged shape
                and on one of multiples of 16, on which one cooperative launch does all; bits
    delayed     by the scale of earlier steps and at the first step, with NaN, at an odd address; bits
    corrected   casts that correct their scales (EDEN), on ragged and even shapes; bits
    rotated     casts of x.T under a rotation, alone and with x beside it; bits
    strided     a view with gaps, x.T in memory, float32; bits
    precast     codes that the optimizer wrote, still right or not; bits
    norms       norms and activations, forward and backward, with their casts; as their self-check asks
    rotary      bits
    attention   noise of the difference, see `ops.attention`
    optimizer   the examples of its self-check, three steps; bits
    hadamard    rotation and encoding; half a code, and bits on whole numbers
    block mm    FP8 products; 2**-20 of the sum of magnitudes, and bits on small whole numbers
    groups      casts of rows sorted by expert, x and x.T; bits. Products of a stack of experts, both
                passes, as their self-check asks

Shapes are the smallest that use more pieces than programs and leave a ragged edge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, E5M2, INT4
from narrowgauge.ops import attention, rotary
from narrowgauge.ops.grouped import launches as grouped
from narrowgauge.ops.grouped import selfcheck as of_groups
from narrowgauge.ops.hadamard import casting, encoding
from narrowgauge.ops.mm import triton as block_mm
from narrowgauge.ops.norm_act import selfcheck as of_norms
from narrowgauge.ops.norm_act import triton_launch as norms
from narrowgauge.ops.quantize import definition, pair, triton_launch
from narrowgauge.ops.quantize import selfcheck as of_casts
from narrowgauge.ops.quantize.spec import Turn
from narrowgauge.ops.random import Key
from narrowgauge.ops.selfcheck import OutputComparison, difference, examine, spread_normal
from narrowgauge.ops.triton import has_conversions
from narrowgauge.optim import backends, selfcheck
from narrowgauge.optim.triton import launch as optim_launch
from narrowgauge.recipe import Cast, DelayedScaling, Hadamard
from narrowgauge.scaling import to_exponents, unswizzled
from tests.ops.triton.test_compiled import CASTS, EDEN, ROTATED
from tests.ptx.launching import CAPABILITIES, Interpretation, interpreted
from tests.ptx.memory import Fault
from tests.ptx.parser import PtxError

CPU = torch.device("cpu")
KEYS = Key((2**32 - 5, 77)), Key((3, 2**31 + 1))
RAGGED, EVEN, WIDE = (67, 131), (80, 144), (131, 259)  # WIDE: a whole block of 128 x 128 and more
Comparisons = Iterator[OutputComparison]


@dataclass(frozen=True)
class Case:
    """call() compares a kernel with its definition: "", or a clause that says what differs."""

    family: str
    name: str
    call: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """words: "", or what differs, or the fault. kernels: those that ran."""

    words: str
    kernels: tuple[str, ...]
    instructions: int
    elapsed_s: float


def outcome(case: Case, sm: int, **how: Any) -> Outcome:
    """Run a case for a GPU. how: see `launching.Interpretation`."""
    started_at_s = time.perf_counter()
    with interpreted(sm, **how) as found:
        words = attempt(case)
    return Outcome(
        words or ("" if found.runs else "no kernel ran"),
        tuple(dict.fromkeys(run.kernel for run in found.runs)),
        sum(run.steps for run in found.runs),
        time.perf_counter() - started_at_s,
    )


def attempt(case: Case) -> str:
    try:
        with torch.no_grad():
            return case.call()
    except (Fault, PtxError) as error:
        return f"{type(error).__name__}: {error}"


def cases(sm: int) -> Iterator[Case]:
    """All cases that a GPU of this kind can be asked for."""
    yield from _casts()
    yield from _corrected()
    yield from _rotated_casts()
    yield from _delayed()
    yield from _strided()
    yield from _groups()
    for family, op, run, check in (
        ("norms", "forward", norms.forward, of_norms.FORWARD),
        ("norms", "backward", norms.backward, of_norms.BACKWARD),
        ("rotary", "rotary", rotary.run_triton, rotary.CHECK),
        ("hadamard", "rotate", encoding.run_triton, encoding.CHECK),
    ):
        for kind in dict.fromkeys(check.kind(spec) for spec in check.examples()):
            yield Case(family, f"{op} {_named(kind)}", partial(_examined, op, run, check, kind))
    for name, kind in selfcheck.EXAMPLES.items():
        run = partial(_examined, "optim", optim_launch.step, backends.CHECK, (kind,))
        yield Case("optimizer", name, run)
    yield from _products(has_conversions(CAPABILITIES[sm]))


def _products(has_fp8: bool) -> Iterator[Case]:
    for order, dtype in ((16, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32)):
        name = f"whole numbers, order {order}, {str(dtype)[6:]}"
        yield Case("hadamard", name, partial(_rotated, order, dtype))
    if has_fp8:
        for tiles in ((1, 128, 128, 128), (128, 128, 1, 128), (1, 64, 64, 64)):
            yield Case("block mm", f"{tiles}", partial(_product, tiles, 100, 70, 200))
            # Training's sizes are multiples of 16: loads become asynchronous copies, in stages.
            yield Case("block mm", f"{tiles} aligned", partial(_product, tiles, 96, 64, 384))
        exact = partial(_product, (1, 128, 128, 128), 40, 70, 200, exact=True)
        yield Case("block mm", "whole numbers", exact)
        own = (spec for spec in of_groups.CHECK.examples() if spec.x.tile[1] != of_groups.MX)
        for kind in map(of_groups.CHECK.kind, own):
            run = partial(_examined, "grouped", grouped.passes, of_groups.CHECK, kind)
            yield Case("groups", f"both passes {_named(kind)}", run)
        # Two heads that share one of keys, and two blocks of keys of which the second is ragged.
        of_few = replace(attention.CHECK, compare=partial(attention._compare, sizes=(1, 2, 1, 140)))
        for kind in dict.fromkeys(map(of_few.kind, of_few.examples())):
            run = partial(_examined, "attention", attention.run_triton, of_few, kind)
            yield Case("attention", _named(kind), run)


def _named(kind: Any) -> str:
    return str(kind).replace("torch.", "")[:160]


def _examined(op: str, run: Callable[..., Any], check: Any, kind: Hashable) -> str:
    """The project's self-check. It takes a Fault for a reason, too."""
    return examine(op, run, check, kind, CPU).reason or ""


def _differences(found: Comparisons) -> str:
    return next(
        (words for each in found if (words := difference(each.name, each.got, each.truth, CPU))), ""
    )


# --- casts


def sample(
    shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, poisoned: bool = False
) -> Tensor:
    """Numbers whose powers of two differ by block, zeros, subnormals, ties; poisoned: NaN, -inf."""
    x = spread_normal(*shape, 12, torch.Generator().manual_seed(20260612))
    x[5:7], x[32:48, 32:48] = 0.0, 0.0
    x[9, :8] = torch.tensor([-0.0, 1e-40, -1e-40, 1e-30, 0.5, -0.5, 1.5, 2.5])
    if poisoned:
        x[shape[0] // 2, shape[1] // 3], x[3, -2] = float("nan"), float("-inf")
    return x.to(dtype)


def _casts() -> Iterator[Case]:
    for name, cast in CASTS.items():
        for shape in (WIDE if 128 in cast.tile else RAGGED, EVEN):
            for cols in (False, True):
                label = f"{name} {shape[0]}x{shape[1]}{' and x.T' if cols else ''}"
                yield Case("casts", label, partial(compare_cast, cast, sample(shape), cols))


def _corrected() -> Iterator[Case]:
    for name, cast in EDEN.items():
        for shape in (RAGGED, EVEN):
            for dtype in (torch.float32, torch.bfloat16):
                run = partial(compare_corrected, cast, sample(shape, dtype))
                label = f"{name} {shape[0]}x{shape[1]} {_named(dtype)}"
                yield Case("corrected", label, run)
        run = partial(compare_corrected, cast, sample(RAGGED, torch.float32, poisoned=True))
        yield Case("corrected", f"{name}, NaN and infinity", run)


def compare_corrected(cast: Cast, x: Tensor) -> str:
    noise = KEYS[0] if cast.draws else None
    got = triton_launch.eden(x, cast, None, noise, None)
    truth = definition.quantize(x, cast, None, noise, None)
    return _differences(of_casts.compared(got, truth, None, False))


def _rotated_casts() -> Iterator[Case]:
    for name, (cast, block) in ROTATED.items():
        for shape in (RAGGED, EVEN):
            for beside in (False, True):
                run = partial(compare_rotated, cast, block, sample(shape), beside)
                label = f"{name} rotated {shape[0]}x{shape[1]}{' and x' if beside else ''}"
                yield Case("rotated", label, run)
        for words, x in (
            ("float32", sample((49, 131), torch.float32)),
            ("NaN and infinity", sample((49, 131), poisoned=True)),
        ):
            run = partial(compare_rotated, cast, block, x, True)
            yield Case("rotated", f"{name} rotated, {words}", run)
        run = partial(compare_rotated, cast, block, sample(RAGGED), False, torch.float32)
        yield Case("rotated", f"{name} rotated, decoded", run)


def compare_rotated(
    cast: Cast, block: int, x: Tensor, beside: bool, expand: torch.dtype | None = None
) -> str:
    length, generator = -(-x.shape[0] // block) * block, torch.Generator().manual_seed(block)
    signs = torch.randint(0, 2, (length,), generator=generator, dtype=torch.float32) * 2 - 1
    noise = KEYS if cast.draws else (None, None)
    given = x.T, cast, Turn(block, signs), noise, expand, beside
    got, truth = triton_launch.rotated(*given), casting.reference(*given)
    return _differences(of_casts.compared((*got, None), (*truth, None), None, False))


def compare_cast(cast: Cast, x: Tensor, cols: bool) -> str:
    noise = KEYS if cast.rounding == "stochastic" else (None, None)
    got = triton_launch.cast_pair(x, cast, cols=cols, noise=(noise[0], noise[1] if cols else None))
    truth = [definition.quantize(x, cast, None, noise[0], None)]
    truth += [definition.quantize(x.T, cast, None, noise[1], None)] if cols else [None]
    return _differences(of_casts.compared((*got, None), (*truth, None), None, False))


def _strided() -> Iterator[Case]:
    base = sample((100, 300))
    for name in ("tensor", "row", "vector", "square", "mx"):
        cast = CASTS[name]
        for words, x in (
            ("a view with gaps", base[3:67, 5:133]),
            ("transposed memory", sample((96, 144)).T),
            ("float32", sample((49, 144), torch.float32)),
            ("NaN and infinity", sample((49, 144), poisoned=True)),
        ):
            yield Case("strided", f"{name}, {words}", partial(compare_cast, cast, x, True))


def _delayed() -> Iterator[Case]:
    casts = {each: Cast(format=each, calibrate=DelayedScaling()) for each in (E4M3, E5M2)}
    for cast in casts.values():
        for in_use in (0.0, 3.0):
            for cols in (True, False):
                name = f"{cast.format} {'later' if in_use else 'first'}{' and x.T' if cols else ''}"
                yield Case("delayed", name, partial(compare_delayed, cast, in_use, cols))
                run = partial(compare_delayed, cast, in_use, cols, shape=(144, 144))
                yield Case("delayed", f"{name}, even", run)
    cast = casts[E4M3]
    run = partial(compare_delayed, cast, 3.0, True, poisoned=True, shape=(144, 144))
    yield Case("delayed", "NaN, even", run)
    yield Case("delayed", "NaN", partial(compare_delayed, cast, 3.0, True, poisoned=True))
    yield Case("delayed", "odd address", partial(compare_delayed, cast, 3.0, True, odd=True))
    check = of_casts.CHECKS["quantize_precast"]
    for kind in dict.fromkeys(check.kind(spec) for spec in check.examples()):
        if isinstance(kind[0].calibrate, DelayedScaling):
            run = partial(_examined, "precast", triton_launch.precast, check, kind)
            yield Case("precast", _named(kind), run)


def compare_delayed(
    cast: Cast, in_use: float, cols: bool, poisoned: bool = False, odd: bool = False,
    shape: tuple[int, int] = RAGGED,
) -> str:  # fmt: skip
    """GroupedCodes, scales, the amax in use, the window, and counters that are zero again."""
    x = sample(shape, poisoned=poisoned)
    if odd:
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    live, expected_live = (torch.tensor([in_use, 0.5, 0.0]) for _ in range(2))
    got = triton_launch.cast_delayed(x, cast, live, True, cols)
    truth = pair.reference_pair(
        x, cast, expected_live, True, cols, (None, None), backend="reference"
    )
    window = (live, expected_live)
    counters = triton_launch.zeroed_workspace(triton_launch.DELAYED_COUNTERS, CPU)
    left = "" if not counters.any() else "counters are left that are not zero"
    return _differences(of_casts.compared(got, truth, window, poisoned)) or left


# --- experts


def _groups() -> Iterator[Case]:
    """Experts without rows, with one, with a whole tile and with one row more; rows without an expert."""
    for counts in ((0, 1, 127, 128, 129, 20, 14), (5, 0), (0, 0, 0, 3), (130, 0)):
        for name in ("vector", "row", "mx"):
            for rows, cols in ((True, True), (True, False), (False, True)):
                label = f"{name} {counts}{' x' * rows}{' x.T' * cols}"
                yield Case("groups", label, partial(compare_groups, name, counts, rows, cols))


def compare_groups(name: str, counts: tuple[int, ...], rows: bool, cols: bool) -> str:
    """The casts of each expert's rows by themselves."""
    cast = CASTS[name]
    # Torch's grouped GEMM of MX tiles takes whole blocks of 128.
    x = sample((max(sum(counts), 50), 256 if name == "mx" else 144))[: sum(counts)]
    got = grouped.operand(x, cast, torch.tensor(counts, dtype=torch.int32), rows, cols)
    compared = _compared_exponents if name == "mx" else _compared_groups
    return _differences(compared(got, x, counts, cast))


def _compared_groups(
    got: grouped.GroupedCodes, x: Tensor, counts: tuple[int, ...], cast: Cast
) -> Comparisons:
    first = tile = 0
    for expert, count in enumerate(counts[:-1]):
        own = x[first : first + count]
        if got.rows is not None and got.row_scales is not None and count:
            truth = definition.quantize(own, cast, None, None, None)
            part = slice(first, first + count)
            yield OutputComparison("codes", _bytes(got.rows[part]), _bytes(truth.data))
            yield OutputComparison("scales", got.row_scales[part], truth.scale)
        if got.cols is not None and got.col_scales is not None and count:
            truth = definition.quantize(own.T, cast, None, None, None)
            tiles, start = -(-count // grouped.TILE), tile * grouped.TILE
            whole = torch.zeros(x.shape[1], tiles * grouped.TILE, dtype=torch.uint8)
            whole[:, :count] = _bytes(truth.data)
            found = _bytes(got.cols[:, start : start + whole.shape[1]])
            yield OutputComparison("turned codes", found, whole)
            by_row = grouped.is_by_row(cast)
            scales = (
                got.col_scales[expert, :, None]
                if by_row
                else got.col_scales[:, tile : tile + tiles]
            )
            yield OutputComparison("turned scales", scales, truth.scale)
        first, tile = first + count, tile + -(-count // grouped.TILE)


def _compared_exponents(
    got: grouped.GroupedCodes, x: Tensor, counts: tuple[int, ...], cast: Cast
) -> Comparisons:
    """Each expert's rows filled up to whole tiles: its codes, and its own blocks of exponents."""
    first, tile, wide = 0, 0, x.shape[1] // grouped.TILE
    for count in counts[:-1]:
        own, tiles = x[first : first + count], -(-count // grouped.TILE)
        blocks = slice(tile * wide, (tile + tiles) * wide)
        whole = torch.cat([own, own.new_zeros(tiles * grouped.TILE - count, x.shape[1])])
        if got.rows is not None and got.row_scales is not None and count:
            truth = definition.quantize(whole, cast, None, None, None)
            found = got.rows[first : first + count]
            yield OutputComparison("codes", _bytes(found), _bytes(truth.data[:count]))
            units = got.row_scales.view(-1, 512)[blocks]
            known = _exponents(units, count, truth.scale[:count])
            yield OutputComparison("exponents", *known)
        if got.cols is not None and got.col_scales is not None and count:
            truth = definition.quantize(whole.T, cast, None, None, None)
            found = got.cols[:, tile * grouped.TILE : (tile + tiles) * grouped.TILE]
            yield OutputComparison("turned codes", _bytes(found), _bytes(truth.data))
            units = got.col_scales.view(-1, 512)[blocks]
            yield OutputComparison("turned exponents", *_exponents(units, x.shape[1], truth.scale))
        first, tile = first + count, tile + tiles


def _exponents(units: Tensor, rows: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    return unswizzled(units.flatten(), rows, scale.shape[1]), to_exponents(scale)


def _bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


# --- products


def _rotated(order: int, dtype: torch.dtype) -> str:
    """Whole numbers so small that every order of summation gives the same."""
    hadamard, generator = (
        Hadamard(block=order, signs="random"),
        torch.Generator().manual_seed(order),
    )
    x = torch.randint(-8, 9, (40, 300), generator=generator).to(dtype)
    whole = encoding.rotated_length(x.shape[1], hadamard)
    signs = torch.randint(0, 2, (whole,), generator=generator, dtype=torch.float32) * 2 - 1
    given = (x, hadamard, signs, torch.full((1, 1), 0.7), INT4, True, True)
    got, truth = encoding.run_triton(*given), encoding.reference_rotate_and_encode(*given)
    names = ("codes", "packed", "bits")
    return _differences(OutputComparison(*each) for each in zip(names, got, truth, strict=True))


def _product(tiles: tuple[int, ...], m: int, n: int, k: int, exact: bool = False) -> str:
    """FP8 [m, k] times [n, k] with power-of-two scales, against float64."""
    generator = torch.Generator().manual_seed(m)

    def codes(rows: int) -> Tensor:
        if exact:
            return (
                torch.randint(-4, 5, (rows, k), generator=generator).float().to(torch.float8_e4m3fn)
            )
        return torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn)

    operands = codes(m), codes(n)
    scales = [
        torch.ldexp(
            torch.ones(-(-x.shape[0] // a), -(-k // b)),
            torch.randint(-1 if exact else -5, 2 if exact else 6, (-(-x.shape[0] // a), -(-k // b)), generator=generator),
        )
        for x, (a, b) in zip(operands, (tiles[:2], tiles[2:]), strict=True)
    ]  # fmt: skip
    bias = torch.randint(-3, 4, (n,), generator=generator).float()
    got = block_mm.launch(
        operands[0], scales[0], operands[1], scales[1], bias, list(tiles), torch.float32
    ).double()
    full = [
        x.double() * s.double().repeat_interleave(a, 0)[: len(x)].repeat_interleave(b, 1)[:, :k]
        for x, s, (a, b) in zip(operands, scales, (tiles[:2], tiles[2:]), strict=True)
    ]
    truth, size = full[0] @ full[1].T + bias, full[0].abs() @ full[1].abs().T + bias.abs()
    error = float(((got - truth).abs() / size.clamp(min=1e-30)).max())
    # float32 holds 24 bits; sums of 128 products are added one after another.
    limit = 0.0 if exact else 2.0**-20
    return "" if error <= limit else f"its product is off by {error:.3g} of the sum of magnitudes"


__all__ = ["CPU", "Case", "Interpretation", "Outcome", "attempt", "cases", "outcome"]
