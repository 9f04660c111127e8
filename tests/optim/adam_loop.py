"""How close does training with narrow optimizer states come to its target? A linear regression with features over four decades.

    python -m tests.optim.adam_loop                 every format, two betas, two learning rates, five seeds: 3 minutes, one thread
    python -m tests.optim.adam_loop --seeds 1       fewer seeds; nothing recorded
    python -m tests.optim.adam_loop --seeds 15 --states 8bit

The weight W [16, 512] fits a target T of N(0, 1). The features are independent, with mean squares s_i^2 and s_i from 1e-4 to 1 in
equal ratios, so that the exact gradient is (W - T) s^2 and the gradients of a tile spread over eight decades. AdamW without weight
decay takes STEPS steps with a cosine decay of the learning rate to 0. The distance is sum((W - T)^2). It starts at about 8,200, and
small gradients beside a decayed second moment decide where it ends.

Other sizes, schedules and learning rates of the same problem end elsewhere by orders of magnitude; the ratio to torch's distance is
what is compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record

ROWS, COLUMNS, STEPS = 16, 512, 1200
STATES = ("fp32", "8bit", "fp8", "fp8-lm", "e4m3/8bit", "4bit")
BETA2, LEARNING_RATES = (0.95, 0.999), (0.02, 0.03)


def distance(
    states: str, beta2: float, lr: float, seed: int, steps: int = STEPS, **options: Any
) -> float:
    """sum((W - T)^2) after `steps` steps; states: of narrowgauge's AdamW, or "torch" for torch's."""
    from narrowgauge.optim import AdamW

    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(ROWS, COLUMNS, generator=generator)
    squares = torch.logspace(-8, 0, COLUMNS)
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    settings: dict[str, Any] = {"lr": lr, "betas": (0.9, beta2), "weight_decay": 0.0}
    optimizer: torch.optim.Optimizer
    if states == "torch":
        optimizer = torch.optim.AdamW([weight], **settings)
    else:
        optimizer = AdamW([weight], states=states, seed=seed, **settings, **options)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
        weight.grad = (weight.detach() - target) * squares
        optimizer.step()
    error: Tensor = (weight.detach() - target).double()
    return float((error * error).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.optim.adam_loop", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--states", nargs="*", default=list(STATES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for beta2 in BETA2:
        for lr in LEARNING_RATES:
            exact = [distance("torch", beta2, lr, seed) for seed in range(options.seeds)]
            for states in options.states:
                found = [distance(states, beta2, lr, seed) for seed in range(options.seeds)]
                ratios = [mine / other for mine, other in zip(found, exact, strict=True)]
                line = {
                    "states": states, "beta2": beta2, "lr": lr, "torch": exact, "distance": found,
                    "ratio": statistics.median(ratios), "most": max(ratios), "least": min(ratios),
                }  # fmt: skip
                lines.append(line)
                print(
                    f"{states} beta2 {beta2} lr {lr}: torch {statistics.median(exact):.2g}, {statistics.median(found):.2g}, "
                    f"ratio {line['ratio']:.3g} ({line['least']:.3g} to {line['most']:.3g})",
                    flush=True,
                )
    if options.seeds >= parser.get_default("seeds"):
        record("adam-loop", lines, RESULTS / "adam_loop.jsonl")


if __name__ == "__main__":
    main()
