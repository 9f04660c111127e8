"""Self-check of the grouped kernels (see `ops.selfcheck`): one small stack of experts, both passes.

    6 experts of 128 x 208 (MX: 256), 419 tokens   experts with 0, 1, 127, 128, 129 and 20 rows, and 14 rows
                                          without an expert

The reference is a loop over the experts on the CPU: the casts of the definition, decoded, and
products in float64. Every result passes within the bound of `ops.mm.selfcheck`. NaN in one token
must appear in its row of output and grad_input, and in its expert's gradient alone.

LARGE is for `KernelCheck.large`: more tiles than a device computes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial

import torch
from torch import Tensor

from narrowgauge.formats import E4M3
from narrowgauge.ops.flat_cast import flatten_cast, plain, unflatten_cast
from narrowgauge.ops.grouped import MX, TILE, GroupSpec
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison, spread_normal
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E8M0_CEIL, POW2, WHOLE

COUNTS, OUTER, INNER, SEED = (0, 1, 127, 128, 129, 20, 14), TILE, 208, 20261129
INNER_MX = 2 * TILE  # torch takes whole tiles
LARGE, LARGE_OUTER, LARGE_INNER = (0, 1500, 700, 129, 1, 900, 600, 266, 40), 1024, 1280
SPREAD = 4
Casts = tuple[Cast, Cast]
NAMES = ("output", "grad_input", "grad_weight", "bias gradient")


def _kind(spec: GroupSpec) -> tuple[Hashable, ...] | None:
    if spec.x is None or spec.w is None:
        return None
    return flatten_cast(plain(spec.x)), flatten_cast(plain(spec.w)), spec.biased


def _compare(
    run: Callable[..., tuple[Tensor, ...]], kind: tuple[Hashable, ...], device: torch.device,
    large: bool = False,
) -> Iterator[OutputComparison]:  # fmt: skip
    casts = unflatten_cast(*kind[0]), unflatten_cast(*kind[1])  # type: ignore[misc]
    counts, outer = (LARGE, LARGE_OUTER) if large else (COUNTS, OUTER)
    inner = LARGE_INNER if large else INNER_MX if casts[0].mx_kind else INNER
    for with_nan in (False,) if large else (False, True):
        given = sample(counts, (outer, inner), bool(kind[2]), with_nan)
        on_device = [None if each is None else each.to(device) for each in given]
        found = run(*on_device, casts)
        for name, out, (truth, bound) in zip(NAMES, found, loop(*given, casts), strict=True):
            yield OutputComparison(name, out, truth, bound)


def sample(
    counts: tuple[int, ...], sizes: tuple[int, int], biased: bool, with_nan: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return x [S, K], w [E, N, K], bias [E, N], gy [S, N] and counts of a stack. sizes: N, K."""
    made = torch.Generator().manual_seed(SEED)
    rows, experts, (outer, inner) = sum(counts), len(counts) - 1, sizes
    x, gy = (spread_normal(rows, each, SPREAD, made) for each in (inner, outer))
    w = spread_normal(experts * outer, inner, SPREAD, made).view(experts, outer, inner)
    bias = torch.randn(experts, outer, generator=made) if biased else None
    if with_nan:
        x[200, 3] = gy[200, 5] = float("nan")
    return x, w, bias, gy, torch.tensor(counts, dtype=torch.int32)


def loop(
    x: Tensor, w: Tensor, bias: Tensor | None, gy: Tensor, counts: Tensor, casts: Casts
) -> list[tuple[Tensor, Tensor]]:
    """Return the four results in float64 with the largest error that is allowed, expert by expert."""
    rows, wide, own = casts[0], casts[1], counts.tolist()
    biases = torch.zeros(w.shape[:2]) if bias is None else bias
    parts: list[list[tuple[Tensor, Tensor]]] = [[], [], [], []]
    for x_e, g_e, w_e, b_e in zip(
        x.split(own)[:-1], gy.split(own)[:-1], w, biases.double(), strict=True
    ):
        y, size = _product(_decoded(x_e, rows), _decoded(w_e, wide))
        parts[0].append((y + b_e, size + 2.0**-20 * b_e.abs()))
        parts[1].append(_product(_decoded(g_e, rows), _decoded(w_e.T, wide)))
        parts[2].append(_product(_decoded(g_e.T, rows), _decoded(x_e.T, rows)))
        parts[3].append((g_e.double().sum(0), g_e.double().abs().sum(0) * 2.0**-12))
    zeros = [torch.zeros(own[-1], each.shape[1], dtype=torch.float64) for each in (gy, x)]
    found = [torch.cat([part for part, _ in parts[k]] + [zeros[k]]) for k in (0, 1)]
    bounds = [torch.cat([part for _, part in parts[k]] + [zeros[k]]) for k in (0, 1)]
    stacked = [tuple(map(torch.stack, zip(*part, strict=True))) for part in parts[2:]]
    return [*zip(found, bounds, strict=True), *stacked]  # type: ignore[list-item]


def _decoded(x: Tensor, cast: Cast) -> Tensor:
    if 0 in x.shape:
        return x.double()
    return definition.dequantize(definition.quantize(x, cast, None, None, None)).double()


def _product(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    allowed = 2.0**-8 + 2.0**-13 * -(-lhs.shape[1] // 32)
    size = lhs.abs() @ rhs.abs().T
    tiny = torch.finfo(torch.float32).tiny
    return lhs @ rhs.T, size.clamp_min(tiny) * allowed


def _examples() -> Iterator[GroupSpec]:
    # Of training. The check's own tensors are float32.
    experts, dtypes = len(COUNTS) - 1, (torch.bfloat16,) * 3
    for tiles in (((1, TILE), (TILE, TILE)), ((1, WHOLE), (1, WHOLE))):
        x, w = (Cast(format=E4M3, tile=tile, scale=POW2) for tile in tiles)
        for biased in (False, True):
            yield GroupSpec(x, w, Device("cpu"), dtypes, experts, (OUTER, INNER), biased)
    mx = Cast(format=E4M3, tile=(1, MX), scale=E8M0_CEIL)
    yield GroupSpec(mx, mx, Device("cpu"), dtypes, experts, (OUTER, INNER_MX), False)


CHECK: KernelCheck[GroupSpec] = KernelCheck(
    _kind, _compare, _examples, large=partial(_compare, large=True)
)
