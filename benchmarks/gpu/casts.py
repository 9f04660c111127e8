"""Does quantizing run at the speed of memory? Bytes that must move, over the time, as a share of the measured copy rate.

Counted is what no kernel can avoid: 2 bytes read per bfloat16 element, 1 written per code, 4 per scale. A second read, for a maximum
that must be known first, is not counted and shows as a smaller share.
"""

from __future__ import annotations

import torch

import narrowgauge as ng
from benchmarks.gpu.bench import SETS, Bench, rotating
from narrowgauge import recipes
from narrowgauge.recipe import Cast


def main(bench: Bench) -> None:
    rows, columns = bench.size(15_872, 32), bench.size(8192, 256)
    sets = [torch.randn(rows, columns, device=bench.device, dtype=torch.bfloat16) for _ in range(SETS)]
    known = torch.full((1, 1), 6.0, device=bench.device)
    tensor, row, block = (recipes.get(name).output.lhs for name in ("fp8-current", "fp8-row", "fp8-block"))
    square = recipes.get("fp8-block").output.rhs
    cases: dict[str, tuple[Cast | None, torch.Tensor | None]] = {
        "tensor, known amax": (tensor, known),
        "tensor": (tensor, None),
        "row": (row, None),
        "1x128": (block, None),
        "128x128": (square, None),
    }
    builds, work = {"copy": lambda: rotating(lambda x: x.clone(), sets)}, {"copy": (2.0 * sets[0].nbytes, "copy")}
    for name, (cast, amax) in cases.items():
        assert cast is not None
        q = ng.quantize(sets[0], cast, amax=amax)
        builds[name] = lambda cast=cast, amax=amax: rotating(lambda x: ng.quantize(x, cast, amax=amax), sets)
        work[name] = (float(sets[0].nbytes + q.nbytes), "copy")
    if bench.has_time("casts"):
        bench.compare("casts", builds, "copy", work=work, facts={"rows": rows, "columns": columns, "mode": "eager"})
