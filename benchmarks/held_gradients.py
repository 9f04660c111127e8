"""How exact is a gradient that is held in FP8 while micro-batches add up? The choice of `narrowgauge.optim.held_gradients`, measured.

    python -m benchmarks.held_gradients            a minute on one core; rows in results/held_gradients.jsonl

The small Llama of `optimizer_convergence` after 40 steps; gradients of 1 to 64 micro-batches of its matrices ("batches"), or the first
one so many times ("equal", the worst case of small addends), summed in float32 and in E4M3: tiles of 1 x 128 or one scale a tensor
(FP8-LM's, mu = 1), sums rounded to nearest, stochastically, or stochastically after the eighth pass ("ours"). Reported: the signal beside
its error in dB, all matrices together and the worst one, and the share of the sum that is left, <g, g'> / <g, g>.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, record
from benchmarks.optimizer_convergence import BATCH, SIZES, TOKENS, corpus, loss
from narrowgauge.optim.held_gradients import NEAREST_PASSES

PASSES = (1, 2, 4, 8, 16, 64)


def main() -> None:
    argparse.ArgumentParser(
        prog="benchmarks.held_gradients", description=__doc__.splitlines()[0]
    ).parse_args()  # type: ignore[union-attr]
    torch.set_num_threads(1)
    passes = gradients(max(PASSES))
    lines = []
    for data in ("batches", "equal"):
        for count in PASSES:
            summed = passes[:count] if data == "batches" else passes[:1] * count
            for tile in ("1 x 128", "tensor"):
                for sums in ("nearest", "stochastic", "ours") if count > 1 else ("nearest",):
                    if sums == "ours" and (tile == "tensor" or count <= NEAREST_PASSES):
                        continue  # the same as nearest
                    lines.append(
                        {"data": data, "passes": count, "tile": tile, "sums": sums}
                        | measured(summed, tile, sums)
                    )
                    print(
                        *(f"{x:.4g}" if isinstance(x, float) else x for x in lines[-1].values()),
                        flush=True,
                    )
    record("held-gradients", lines, RESULTS / "held_gradients.jsonl")


def gradients(count: int) -> list[list[Tensor]]:
    """Of `count` micro-batches, those of all matrices of 4,096 elements or more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model, text = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)), corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(40 + count):
        model.zero_grad()
        places = torch.randint(0, len(text) - TOKENS, (BATCH,)).tolist()
        loss(model, torch.stack([text[place : place + TOKENS] for place in places])).backward()
        if step < 40:
            optimizer.step()
        else:
            found.append(
                [
                    p.grad.clone()
                    for p in model.parameters()
                    if p.ndim > 1 and p.numel() >= 4096 and p.grad is not None
                ]
            )
    return found


def measured(passes: list[list[Tensor]], tile: str, sums: str) -> dict[str, Any]:
    from narrowgauge.formats import E4M3
    from narrowgauge.ops.quantize import dequantize, quantize
    from narrowgauge.recipe import WHOLE, Cast
    from narrowgauge.scaling import E8M0_CEIL, FP32

    shape = (
        {"tile": (1, 128), "scale": E8M0_CEIL}
        if tile == "1 x 128"
        else {"tile": (WHOLE, WHOLE), "scale": FP32}
    )
    nearest, drawn = (
        Cast(format=E4M3, rounding=rounding, **shape) for rounding in ("nearest", "stochastic")
    )  # type: ignore[arg-type]
    signal = error = kept = 0.0
    worst = math.inf
    for place in range(len(passes[0])):
        whole = torch.stack([each[place] for each in passes]).sum(0)
        held = dequantize(quantize(passes[0][place], nearest))
        for turn, each in enumerate(passes[1:], 2):
            added = held + each[place]
            if sums == "nearest" or (sums == "ours" and turn <= NEAREST_PASSES):
                held = dequantize(quantize(added, nearest))
            else:
                held = dequantize(quantize(added, drawn, noise=torch.rand_like(added)))
        own_signal, own_error = float(whole.square().sum()), float((held - whole).square().sum())
        signal, error, kept = (
            signal + own_signal,
            error + own_error,
            kept + float((held * whole).sum()),
        )
        worst = min(worst, 10 * math.log10(own_signal / own_error))
    return {"sqnr_db": 10 * math.log10(signal / error), "worst_db": worst, "kept": kept / signal}


if __name__ == "__main__":
    main()
