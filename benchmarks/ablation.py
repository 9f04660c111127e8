"""4-bit training taken apart: which forward, which backward, how many bits? A grid of recipes on scikit-learn's digits, seeds in pairs.

    python -m benchmarks.ablation                                                  forward x backward in 4 bits
    python -m benchmarks.ablation --forward hq2 hq3 hq4 hq6 hq8 --backward bf16    bit widths of the forward pass
    python -m benchmarks.ablation --forward bf16 --backward sr3 sr4 sr6 sr8        bit widths of the gradient

A recipe is FORWARD/BACKWARD, or a name of `narrowgauge recipes`.

    forward   bf16; rms4: a step from the tensor's spread; hq4: the same after a Hadamard rotation; lsq4: a learned step;
              hqlsq4: a learned step after a rotation. The digit is the width, 2 to 8 bits.
    backward  bf16; split: two 4-bit digits, a scale per row (bit splitting); lss: the same, rows sampled by leverage score;
              luq: powers of two, one scale; sr4: integers, one scale; row4: integers, a scale per row. All stochastic, 2 to 8 bits.

`int4-hq-bs` is hq4/split, `int4-hq-lss` hqlsq4/lss, `int4-lsq-luq` lsq4/luq.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import digits
from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, markdown, summarize

FORWARD = ("bf16", "rms4", "hq4", "lsq4", "hqlsq4")
BACKWARD = ("bf16", "split", "lss", "luq", "sr4", "row4")
METRICS = digits.METRICS
WIDTH = re.compile(r"([a-z]+)([2-8])")


def main() -> None:
    options = _options()
    settings = {
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
    }
    grid = [f"{forward}/{backward}" for forward in options.forward for backward in options.backward]
    names = ["fp32", *options.recipes, *(name for name in grid if name != "bf16/bf16")]
    for name in names[1:]:
        recipe(name)  # what is misspelt is refused before the first run
    experiment = Experiment(train, names, options.seeds, settings, options.output)
    rows = summarize(experiment.results(options.jobs), METRICS, "fp32")
    record("ablation", [row | {"settings": settings} for row in rows], options.results)
    print(markdown(rows, METRICS))


def train(name: str, seed: int, **settings: Any) -> dict[str, float]:
    return digits.train(name if name == "fp32" else recipe(name), seed, **settings)


def recipe(name: str) -> Any:
    """The Recipe that FORWARD/BACKWARD says, or that narrowgauge knows by this name."""
    from narrowgauge import recipes
    from narrowgauge.formats import E3M0, INT4, INT4X2, INT8, IntFormat
    from narrowgauge.recipe import (
        WHOLE,
        Cast,
        ClippedRms,
        Gemm,
        Hadamard,
        LearnedStep,
        LeverageScore,
        Recipe,
    )

    if "/" not in name:
        return recipes.get(name)
    forward, backward = name.split("/")

    def integers(width: int) -> IntFormat:
        return {4: INT4, 8: INT8}.get(width) or replace(
            INT8, name=f"int{width}", max=2 ** (width - 1) - 1
        )

    def parts(word: str, known: tuple[str, ...]) -> tuple[str, int]:
        match = WIDTH.fullmatch(word)
        if not match or match[1] not in known:
            raise SystemExit(
                f"{name!r}: {word!r} is not bf16 or one of {', '.join(known)} with a width from 2 to 8, as hq4/split."
            )
        return match[1], int(match[2])

    cast: Cast | None = None
    rotate = sample = None
    if forward != "bf16":
        kind, width = parts(forward, ("rms", "hq", "lsq", "hqlsq"))
        cast = Cast(
            format=integers(width),
            calibrate=LearnedStep()
            if kind.endswith("lsq")
            else ClippedRms()
            if width == 4
            else ClippedRms(clip=clip(width)),
        )
        rotate = Hadamard() if kind.startswith("hq") else None
    rows = columns = None
    if backward in ("split", "lss"):
        rows = columns = Cast(format=INT4X2, tile=(1, WHOLE), rounding="stochastic")
        sample = LeverageScore() if backward == "lss" else None
    elif backward == "luq":
        rows = columns = Cast(format=E3M0, rounding="stochastic")
    elif backward != "bf16":
        kind, width = parts(backward, ("sr", "row"))
        tile = {"sr": (WHOLE, WHOLE), "row": (1, WHOLE)}[kind]
        rows = Cast(format=integers(width), tile=tile, rounding="stochastic")
        columns = replace(rows, tile=tile[::-1])
    return Recipe(
        name=name.replace("/", "-"),
        output=Gemm(lhs=cast, rhs=cast, rotate=rotate),
        grad_input=Gemm(lhs=rows, rhs=cast, sample=sample),
        grad_weight=Gemm(lhs=columns, rhs=cast, sample=sample),
        save="quantized" if cast is not None else "original",
        backward="straight-through",
    )


def clip(width: int) -> float:
    """Standard deviations of a Gaussian at which 2**width - 1 levels clip with the least squared error; 2.475 of 15 levels."""
    from scipy.integrate import quad
    from scipy.optimize import minimize_scalar
    from scipy.stats import norm

    most = 2 ** (width - 1) - 1

    def error(at: float) -> float:
        step = at / most
        edges = [0.0, *((level + 0.5) * step for level in range(most)), float("inf")]
        parts = pairwise(edges)
        return sum(
            quad(lambda x, level=level: (x - level * step) ** 2 * norm.pdf(x), *part)[0]
            for level, part in enumerate(parts)
        )

    return round(
        float(
            minimize_scalar(error, bounds=(0.5, 6.0), method="bounded", options={"xatol": 1e-6}).x
        ),
        3,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.ablation", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--forward", nargs="+", default=list(FORWARD))
    parser.add_argument("--backward", nargs="+", default=list(BACKWARD))
    parser.add_argument(
        "--recipes", nargs="*", default=[], help="further ones, by name or as FORWARD/BACKWARD"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--results", type=Path, default=RESULTS / "ablation.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
