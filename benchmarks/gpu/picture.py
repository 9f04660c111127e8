"""Pictures of what a GPU has measured: python -m benchmarks.gpu.picture [--results FOLDER]

gpu_sweep.png    speed of `auto` as a multiple of BF16's, a map of K -> N for each number of tokens, from gpu_sweep.jsonl
gpu_growth.png   the same over the width of a square Linear, a line for each recipe, from gpu_growth.jsonl

Of cases that were measured several times the last line counts, on the device of the last line. What was not measured stays empty.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import harness

Row = Mapping[str, Any]
Grid = tuple[
    list[int], list[int], list[list[float]]
]  # K, N, and speed-ups [N][K], NaN where not measured
WORST, BEST = (
    0.7,
    1.9,
)  # ends of the colours: what an FP8 layer can reach is about 1.9 (pre-quantized products)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.picture", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--results", type=Path, default=harness.RESULTS, help="folder of the .jsonl files"
    )
    folder = parser.parse_args(arguments).results
    drawn = write(folder)
    for path in drawn:
        print(path)
    if not drawn:
        print(
            f"picture: no gpu_sweep.jsonl or gpu_growth.jsonl with results in {folder}. Run make bench-gpu first.",
            file=sys.stderr,
        )
    return 0 if drawn else 1


def write(folder: Path) -> list[Path]:
    """The pictures whose lines are there, written beside them."""
    drawn = []
    for question, draw in (("sweep", sweep), ("growth", growth)):
        source = folder / f"gpu_{question}.jsonl"
        rows = measured(read(source)) if source.exists() else []
        if rows:
            target = source.with_suffix(".png")
            draw(rows).savefig(target, dpi=120, metadata={"Software": None})
            drawn.append(target)
    return drawn


def read(path: Path) -> list[Row]:
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def measured(rows: Iterable[Row]) -> list[Row]:
    """Those with a ratio, on the device of the last of them; of equal cases the last."""
    whole = [row for row in rows if row.get("of_baseline")]
    last: dict[tuple[Any, ...], Row] = {}
    for row in whole:
        if row.get("device") == whole[-1].get("device"):
            last[row["case"], row["tokens"], row["inputs"], row["outputs"]] = row
    return list(last.values())


def speedup(row: Row) -> float:
    """How many times as fast as the baseline: the median of the ratios within the rounds, upside down."""
    return 1.0 / float(row["of_baseline"][0])


def grids(rows: Sequence[Row], case: str = "auto") -> dict[int, Grid]:
    """Tokens -> the map of one case."""
    mine = [row for row in rows if row["case"] == case]
    inputs, outputs = (sorted({row[axis] for row in mine}) for axis in ("inputs", "outputs"))
    found: dict[int, Grid] = {}
    for tokens in sorted({row["tokens"] for row in mine}):
        grid = [[math.nan] * len(inputs) for _ in outputs]
        for row in mine:
            if row["tokens"] == tokens:
                grid[outputs.index(row["outputs"])][inputs.index(row["inputs"])] = speedup(row)
        found[tokens] = inputs, outputs, grid
    return found


def sweep(rows: Sequence[Row]) -> Figure:
    """A map for each number of tokens; each cell says its speed-up and the recipe that was chosen."""
    maps = grids(rows)
    chosen = {
        (r["tokens"], r["outputs"], r["inputs"]): r.get("chosen", "")
        for r in rows
        if r["case"] == "auto"
    }
    across = min(4, len(maps))
    down = -(-len(maps) // across)
    figure = Figure(figsize=(0.8 + 3.4 * across, 0.9 + 3.1 * down), layout="constrained")
    image = None
    for place, (tokens, (inputs, outputs, grid)) in enumerate(maps.items(), start=1):
        axes = figure.add_subplot(down, across, place)
        image = axes.imshow(grid, cmap="RdBu", norm=_around_one(), origin="lower", aspect="auto")
        axes.set_title(f"{tokens:,} tokens", fontsize=10)
        axes.set_xticks(range(len(inputs)), [str(k) for k in inputs], fontsize=7)
        axes.set_yticks(range(len(outputs)), [str(n) for n in outputs], fontsize=7)
        axes.set_xlabel("K, inputs", fontsize=8)
        axes.set_ylabel("N, outputs", fontsize=8)
        for i, n in enumerate(outputs):
            for j, k in enumerate(inputs):
                if not math.isnan(grid[i][j]):
                    words = f"{grid[i][j]:.2f}\n{chosen[tokens, n, k].removeprefix('fp8-')}"
                    far = grid[i][j] > 1.55 or grid[i][j] < 0.8
                    axes.text(
                        j,
                        i,
                        words,
                        ha="center",
                        va="center",
                        fontsize=6,
                        color="white" if far else "black",
                    )
    if image is not None:
        figure.colorbar(image, ax=figure.axes, label="speed of auto over BF16", shrink=0.8)
    figure.suptitle(
        _title(rows, "A Linear with recipe auto, forward and backward with all casts"), fontsize=11
    )
    return figure


def growth(rows: Sequence[Row]) -> Figure:
    """A line for each case over the width."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for case in dict.fromkeys(row["case"] for row in rows if row["case"] != row.get("baseline")):
        points = sorted((row["inputs"], speedup(row)) for row in rows if row["case"] == case)
        dashes = "--" if case.startswith("torchao") else "-"
        axes.plot(*zip(*points, strict=True), dashes, marker="o", markersize=4, label=case)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    widths = sorted({row["inputs"] for row in rows})
    axes.set_xticks(widths, [f"{width:,}" for width in widths])
    axes.set_xlabel("width, K = N")
    axes.set_ylabel("speed over BF16")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    tokens = sorted({row["tokens"] for row in rows})
    figure.suptitle(
        _title(
            rows, f"A square Linear at {tokens[-1]:,} tokens, forward and backward with all casts"
        ),
        fontsize=11,
    )
    return figure


def _title(rows: Sequence[Row], words: str) -> str:
    last = rows[-1]
    return (
        f"{words}\n{last.get('device', '')}, torch {last.get('torch', '')}, {last.get('date', '')}"
    )


def _around_one() -> Any:
    """Red below the speed of BF16, blue above, white at it."""
    from matplotlib.colors import TwoSlopeNorm

    return TwoSlopeNorm(1.0, WORST, BEST)


if __name__ == "__main__":
    sys.exit(main())
