"""How far do weights go whose gradient has stopped, and what do units cost that wake again? Each optimizer state beside torch.

    python -m benchmarks.dead_weights            every state of narrowgauge, torch, and bitsandbytes and torchao where they are: 2 minutes
    python -m benchmarks.dead_weights --quick    200 steps, nothing recorded

Two cases, in the units of the weights (learning rate 1e-2, no weight decay), the largest over all dead weights:

    network     a two-layer ReLU network on 16 inputs learns to repeat them; after 200 steps half of its 128 hidden units are dead, so that
                their columns of the second layer have no gradient while the rows go on; `steps` later they wake. beta2 = 0.95
    synthetic   a matrix whose gradients spread over four decades in each row; after 100 steps every second column has none, or one
                millionth of it (`fades`). beta2 = 0.95 and 0.999

`woken_loss` is the loss of the first batch with all units; `recovered_loss` that of 20 steps later.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.harness import RESULTS, record

LEARNING_RATE, BEFORE = 1e-2, 200
Build = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.dead_weights", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="200 steps, nothing recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peers
    steps = {0.95: 200 if options.quick else 1200, 0.999: 200 if options.quick else 3000}
    lines = []
    print(
        f"{'states':20} {'network':>9} {'woken':>9} {'recovered':>9} {'synthetic':>9} {'0.999':>9} {'fades':>9} {'0.999':>9}"
    )
    for name, build in cases().items():
        line: dict[str, Any] = {
            "case": name,
            "learning_rate": LEARNING_RATE,
            "steps": steps,
        } | network(build, steps[0.95])
        for remains, words in ((0.0, "stops"), (1e-6, "fades")):
            for beta2, count in steps.items():
                line[f"synthetic_{words}_{beta2}"] = synthetic(build, beta2, count, remains)
        lines.append(line)
        print(
            f"{name:20} "
            + " ".join(
                f"{value:9.3g}"
                for value in line.values()
                if isinstance(value, float) and value != LEARNING_RATE
            )
        )
    if not options.quick:
        record("dead-weights", lines, RESULTS / "dead_weights.jsonl")


def cases() -> dict[str, Build]:
    from narrowgauge.optim import AdamW
    from narrowgauge.optim.moments import STATES

    def settings(beta2: float) -> dict[str, Any]:
        return {"lr": LEARNING_RATE, "betas": (0.9, beta2), "weight_decay": 0.0}

    found: dict[str, Build] = {"torch": lambda p, beta2: torch.optim.AdamW(p, **settings(beta2))}
    for states in STATES:
        found[states] = lambda p, beta2, states=states: AdamW(p, **settings(beta2), states=states)
    for package, name in (
        ("bitsandbytes", "AdamW8bit"),
        ("torchao", "AdamW8bit"),
        ("torchao", "AdamW4bit"),
    ):
        if find_spec(package):
            found[f"{package} {name}"] = _peer(package, name, settings)
    return found


def _peer(package: str, name: str, settings: Callable[[float], dict[str, Any]]) -> Build:
    from importlib import import_module

    kind = getattr(import_module(f"{package}.optim"), name)
    return lambda p, beta2: kind(p, **settings(beta2))


def network(build: Build, dead: int) -> dict[str, float]:
    torch.manual_seed(0)
    first, second = nn.Linear(16, 128), nn.Linear(128, 64)
    optimizer = build([*first.parameters(), *second.parameters()], 0.95)
    alive, start = torch.ones(128), second.weight.detach().clone()
    walk, losses = 0.0, []
    for step in range(BEFORE + dead + 20):
        if step == BEFORE:
            start = second.weight.detach().clone()
        if step == BEFORE + dead:
            walk = float((second.weight.detach() - start)[:, :64].abs().max())
        alive[:64] = 0.0 if BEFORE <= step < BEFORE + dead else 1.0
        x = torch.randn(64, 16)
        loss = (second(torch.relu(first(x)) * alive) - x.repeat(1, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"network_walk": walk, "woken_loss": losses[BEFORE + dead], "recovered_loss": losses[-1]}


def synthetic(build: Build, beta2: float, dead: int, remains: float) -> float:
    weight = nn.Parameter(torch.zeros(32, 256))
    optimizer = build([weight], beta2)
    generator = torch.Generator().manual_seed(1)
    size = 1e-3 * torch.exp(1.5 * torch.randn(32, 256, generator=generator))
    size[:, :8] *= 30
    start = weight.detach().clone()
    for step in range(100 + dead):
        gradient = (torch.randn(32, 256, generator=generator) + 0.1) * size
        if step >= 100:
            gradient[:, 1::2] *= remains
        if step == 100:
            start = weight.detach().clone()
        weight.grad = gradient
        optimizer.step()
    return float((weight.detach() - start)[:, 1::2].abs().max())


if __name__ == "__main__":
    main()
