"""How far is an 8-bit second moment from the exact one after 60 steps? Each optimizer state, beside bitsandbytes and torchao.

    python -m benchmarks.second_moment            every state of narrowgauge, and those peers that are installed
    python -m benchmarks.second_moment --steps 2000

Gradients are N(0, 1) numbers times 0.01, beta2 = 0.999. The error is the norm of the difference over the norm of the exact moment
(float64), in percent, the median over eight seeds. `bias` is the mean of the difference over the mean of the moment: what rounding to
nearest adds and stochastic rounding does not.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record
from narrowgauge.optim import AdamW
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.transfer import transfer

ROWS, COLUMNS, BETA2, SEEDS = 64, 256, 0.999, 8
SETTINGS = {"lr": 1e-4, "betas": (0.9, BETA2), "weight_decay": 0.0}
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Read = Callable[[torch.optim.Optimizer, nn.Parameter], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.second_moment", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peers
    rows = []
    for name, (build, read) in cases().items():
        found = [measured(build, read, options.steps, seed) for seed in range(SEEDS)]
        error, bias = (statistics.median(each) * 100 for each in zip(*found, strict=True))
        rows.append(
            {"case": name, "steps": options.steps, "error_percent": error, "bias_percent": bias}
        )
        print(f"{name:20} error {error:7.2f} %   bias {bias:+7.2f} %")
    record("second_moment", rows, options.results / "second_moment.jsonl")


def cases() -> dict[str, tuple[Build, Read]]:
    found: dict[str, tuple[Build, Read]] = {}
    for states in STATES:
        found[states] = (lambda p, states=states: AdamW(p, **SETTINGS, states=states), own)
    if find_spec("bitsandbytes"):
        from bitsandbytes.optim import AdamW8bit

        found["bitsandbytes-8bit"] = (lambda p: AdamW8bit(p, **SETTINGS), of_bitsandbytes)
    if find_spec("torchao"):
        from torchao.optim import AdamW8bit as Torchaos

        found["torchao-8bit"] = (lambda p: Torchaos(p, **SETTINGS), of_torchao)
    return found


def measured(build: Build, read: Read, steps: int, seed: int) -> tuple[float, float]:
    """(error, bias) of the moment after so many steps, relative to the exact one."""
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = build([weight])
    exact = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for _ in range(steps):
        weight.grad = torch.randn(ROWS, COLUMNS, generator=generator) * 0.01
        exact = exact * BETA2 + weight.grad.double().square() * (1 - BETA2)
        optimizer.step()
    off = read(optimizer, weight).double() - exact
    return float(off.norm() / exact.norm()), float(off.mean() / exact.mean())


def own(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    """Moved to an optimizer whose states are float32, which decodes them."""
    copy = nn.Parameter(weight.detach().clone())
    wide = AdamW([copy], **SETTINGS, states="fp32")
    transfer(optimizer, wide, [(weight, copy)])
    return wide.state[copy]["exp_avg_sq"]


def of_bitsandbytes(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    """Codes of blocks of 256 elements, by a map of values."""
    state = optimizer.state[weight]
    if state["state2"].dtype != torch.uint8:
        raise SystemExit("bitsandbytes keeps this tensor in float32: it is too small.")
    values = state["qmap2"][state["state2"].long()].reshape(-1, 256)
    return (values * state["absmax2"].reshape(-1, 1)).reshape(weight.shape)


def of_torchao(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Tensor:
    return optimizer.state[weight]["exp_avg_sq"].dequantize()


if __name__ == "__main__":
    main()
