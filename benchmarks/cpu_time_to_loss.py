"""Seconds of a processor until a language model reaches a loss: INT8 beside torch's bf16 autocast, on one thread.

    python -m benchmarks.cpu_time_to_loss --seeds 0 1 2
    python -m benchmarks.cpu_time_to_loss --corpus FILE --steps 300      another text, fewer steps
    python -m benchmarks.cpu_time_to_loss --summary                      of the committed rows, without running

A Llama of 10.8 million parameters (384 wide, 6 layers, bytes) on the Python standard library, 2 x 256 tokens a step, AdamW with
warm-up and a cosine. The cases are those of `bench_cpu`; a seed decides start and batches alike. Each run is a process of its own,
timed by its processor time without evaluations. A validation loss is the mean over the same 48 pieces of 256 bytes of held-out files.

The loss that counts is the higher of the two final losses of a seed: the times are those at which each case first stays at or below
it, between two evaluations by a straight line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_cpu import BASELINE, CASES, llama, step_of
from benchmarks.harness import RESULTS, record
from narrowgauge.diagnose.time_to_loss import reached_s

OUTPUT = RESULTS / "cpu_time_to_loss.jsonl"
BATCH, TOKENS, PIECES, EVERY = 2, 256, 48, 50
PEAK, WARMUP = 1e-3, 100


def corpus(path: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(training, validation) bytes. Without a path: the standard library, one file of ten held out."""
    if path is not None:
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [
        b"\n".join(file.read_bytes() for file in chosen)
        for chosen in ([f for i, f in enumerate(files) if i % 10], files[::10])
    ]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def batch_of(data: torch.Tensor, starts: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.stack([data[start : start + TOKENS] for start in starts]).long()
    return {"input_ids": ids, "labels": ids}


def rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))))


@torch.no_grad()
def validation(model: Any, data: torch.Tensor) -> float:
    model.eval()
    starts = torch.linspace(0, len(data) - TOKENS, PIECES).long()
    losses = []
    for part in starts.split(8):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(float(model(**batch_of(data, part)).loss) * len(part))
    model.train()
    return sum(losses) / PIECES


def run(case: str, seed: int, steps: int, path: Path | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    train, held_out = corpus(path)
    torch.manual_seed(seed)
    step = step_of(case, llama(384, 1024, 6), {})
    starts = torch.randint(0, len(train) - TOKENS, (steps, BATCH))
    curve, spent_s = [], 0.0
    for index in range(steps):
        for group in step.optimizer.param_groups:
            group["lr"] = rate(index, steps)
        step.batch = batch_of(train, starts[index])
        begun_s = time.process_time()
        step()
        if index >= 3:  # the first steps choose and compile kernels
            spent_s += time.process_time() - begun_s
        if (index + 1) % EVERY == 0:
            curve.append([index + 1, spent_s, validation(step.model, held_out)])
            print(case, seed, curve[-1], flush=True)
    return {"case": case, "seed": seed, "steps": steps, "curve": curve, "corpus": path.name if path else "python"}  # fmt: skip


def summary() -> None:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in OUTPUT.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault((row["corpus"], row["seed"]), {})[row["case"]] = row
    gains: dict[str, list[float]] = {}
    for (text, seed), cases in sorted(found.items()):
        base = cases[BASELINE]["curve"]
        for case, row in cases.items():
            final, reference = row["curve"][-1][2], base[-1][2]
            loss = max(final, reference)
            mine, theirs = (
                reached_s([each[1:] for each in curve], loss) for curve in (row["curve"], base)
            )
            if case != BASELINE and mine is not None and theirs is not None:
                gains.setdefault(case, []).append(theirs / mine)
                print(
                    f"{text}, seed {seed}, {case}: loss {final:.4f} for {reference:.4f}; to {loss:.4f} in {mine:.0f} s "
                    f"for {theirs:.0f} s, {theirs / mine:.2f} times as fast"
                )
    for case, each in gains.items():
        print(f"{case}: median {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cpu_time_to_loss", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[BASELINE, "int8-fused"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    if not options.summary:
        for seed in options.seeds:
            for case in options.cases:
                record("cpu_time_to_loss", [run(case, seed, options.steps, options.corpus)], OUTPUT)  # fmt: skip
    summary()


if __name__ == "__main__":
    main()
