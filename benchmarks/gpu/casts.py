"""Does quantizing run at the speed of memory? Bytes that must move, over the time, as a share of the measured copy rate.

Counted is what no kernel can avoid: 2 bytes read per bfloat16 element, 1 written per code, 4 per scale. A second read, for a maximum
that must be known first, is not counted and shows as a smaller share. "both" are codes of x and of x.T. Rounded to nearest but where
a name says otherwise; 4-bit codes two to a byte, and one bit per element beside the rotated ones.
"""

from __future__ import annotations

import torch

import narrowgauge as ng
from benchmarks.gpu.bench import SETS, Bench, Build, rotating
from narrowgauge import recipes
from narrowgauge.formats import INT4
from narrowgauge.ops.hadamard.encoding import rotate_and_encode
from narrowgauge.ops.quantize.pair import quantize_pair
from narrowgauge.ops.random import draw
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Hadamard


def main(bench: Bench) -> None:
    # 2 GiB each: a cast takes longer than the host takes to launch it, which would be measured in its place.
    rows, columns = bench.size(8 * 15_872, 32), bench.size(8192, 256)
    sets = [
        torch.randn(rows, columns, device=bench.device, dtype=torch.bfloat16) for _ in range(SETS)
    ]
    known = torch.full((1, 1), 6.0, device=bench.device)
    tensor, row, block = (
        recipes.get(name).output.lhs for name in ("fp8-current", "fp8-row", "fp8-block")
    )
    square = recipes.get("fp8-block").output.rhs
    cases: dict[str, tuple[Cast | None, torch.Tensor | None]] = {
        "tensor, known amax": (tensor, known),
        "tensor": (tensor, None),
        "row": (row, None),
        "1x128": (block, None),
        "128x128": (square, None),
        "mxfp8, 1x32": (recipes.get("mxfp8").output.lhs, None),
        "mxfp4, 1x32": (recipes.get("mxfp4").output.lhs, None),
        "nvfp4, 1x16": (recipes.get("nvfp4").output.lhs, None),
        "nvfp4, 1x16, stochastic": (recipes.get("nvfp4").grad_input.lhs, None),
    }
    builds, work = (
        {"copy": lambda: rotating(lambda x: x.clone(), sets)},
        {"copy": (2.0 * sets[0].nbytes, "copy")},
    )
    for name, (cast, amax) in cases.items():
        assert cast is not None
        q = _quantized(sets[0], cast, amax)
        builds[name] = lambda cast=cast, amax=amax: rotating(
            lambda x: _quantized(x, cast, amax), sets
        )
        work[name] = (float(sets[0].nbytes + q.nbytes), "copy")
    weight = recipes.get("nvfp4").output.rhs
    _together(
        sets,
        {"tensor": tensor, "row": row, "1x128": block, "128x128": square, "nvfp4, 16x16": weight},
        builds,
        work,
    )
    _rotated(sets, builds, work)
    if bench.has_time("casts"):
        bench.compare(
            "casts",
            builds,
            "copy",
            work=work,
            facts={"rows": rows, "columns": columns, "mode": "eager"},
        )


def _quantized(x: torch.Tensor, cast: Cast, amax: torch.Tensor | None) -> QTensor:
    """Stochastic rounding with a new key at each call, as a layer draws it."""
    noise = draw(tuple(x.shape), x.device) if cast.rounding == "stochastic" else None
    return ng.quantize(x, cast, amax=amax, noise=noise)


def _together(
    sets: list[torch.Tensor],
    casts: dict[str, Cast | None],
    builds: dict[str, Build],
    work: dict[str, tuple[float, str]],
) -> None:
    """What one read gives at once: both orientations, and this step's amax."""
    x = sets[0]
    for name, cast in casts.items():
        assert cast is not None
        plain, turned, _ = quantize_pair(x, cast)
        builds[f"{name}, both"] = lambda cast=cast: rotating(lambda x: quantize_pair(x, cast), sets)
        work[f"{name}, both"] = (float(x.nbytes + plain.nbytes + turned.nbytes), "copy")
    cast, live = casts["tensor"], torch.tensor([6.0, 0.0, 0.0], device=x.device)
    assert cast is not None
    codes = ng.quantize(x, cast).nbytes
    builds["tensor, delayed"] = lambda: rotating(
        lambda x: quantize_pair(x, cast, amax_state=live, cols=False), sets
    )
    builds["tensor, delayed, both"] = lambda: rotating(
        lambda x: quantize_pair(x, cast, amax_state=live), sets
    )
    work["tensor, delayed"] = (float(x.nbytes + codes), "copy")
    work["tensor, delayed, both"] = (float(x.nbytes + 2 * codes), "copy")


def _rotated(
    sets: list[torch.Tensor], builds: dict[str, Build], work: dict[str, tuple[float, str]]
) -> None:
    """The forward cast of 4-bit integers: rotation, codes, packing and mask in one pass, by a scale that is known."""
    hadamard, scale = Hadamard(block=16), torch.full((1, 1), 0.7, device=sets[0].device)

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return rotate_and_encode(x, hadamard, None, scale, INT4, packed=True, bits=True)

    written = sum(each.nbytes for each in cast(sets[0]) if each is not None)
    builds["int4, rotated"] = lambda: rotating(cast, sets)
    work["int4, rotated"] = (float(sets[0].nbytes + written), "copy")
