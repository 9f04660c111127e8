"""Writes run folders that look like real ones, without training: the same files, the same events, made-up numbers.

The losses are a decay to the data's entropy plus the batch's own difficulty, which both runs share, plus each run's own
noise; the tensor events come from `tensor_statistics` over normal random tensors whose size drifts along the run.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.diagnose.statistics import tensor_statistics

SAMPLE_PROMPT = "FIRST CITIZEN:\n"
SAMPLE_TEXT = (
    'FIRST CITIZEN:\nBefore we proceed <b>any further</b>, hear me speak: "3 < 4 && 5 > 2" & so on.\n'
    "ROMÉO: Où es-tu, ma chère? 你好, Ζεύς; 🙂\n</pre><script>alert('sample')</script>{{ 7 * 7 }}\n"
    "And thou shalt know the narrow gauge of words,\nThat eight small bits may carry all the sense.\n"
)
REFERENCE_TEXT = (
    SAMPLE_PROMPT
    + "What say you, neighbour? The price of bread is up,\nand we are down; so runs the world.\n"
)
MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.3.mlp.down_proj",
)
# role: (standard deviation at the start and at the end of the run, share of far larger outliers)
TENSORS = {"x": (1.0, 2.6, 2e-4), "w": (0.02, 0.045, 0.0), "gy": (3e-5, 2e-6, 1e-3)}
FORMATS = {"e4m3": (448.0, 2.0**-9), "e5m2": (57344.0, 2.0**-16)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the made-up run is like."""

    recipe: str = "fp8-delayed"
    steps: int = 300
    planned: int = 300
    gap: float = 0.006  # nats above the reference at the end
    speed: float = 41000.0  # tokens per second
    peak_bytes: int = 1_310_000_000
    seed: int = 1
    tensors: bool = False
    done: str | None = "finished"
    nonfinite_at: int | None = None
    resumed_at: tuple[int, ...] = ()
    format: str = "e4m3"


REFERENCE = Plan(recipe="bf16", gap=0.0, speed=36500.0, peak_bytes=1_560_000_000, seed=2)


def write_pair(
    folder: Path, plan: Plan = Plan(tensors=True, resumed_at=(160,)), reference: Plan = REFERENCE
) -> Path:
    """A run with its reference inside."""
    write_run(folder, plan)
    write_run(folder / f"compare-{reference.recipe}", reference)
    return folder


def write_run(folder: Path, plan: Plan) -> Path:
    """config.toml, run.json and metrics.jsonl of one run."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config(plan), encoding="utf-8")
    (folder / "run.json").write_text(
        json.dumps(run(plan), indent=1, ensure_ascii=False), encoding="utf-8"
    )
    lines = (json.dumps(storable(event), ensure_ascii=False) for event in events(plan))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def storable(event: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity as the strings that the reader restores."""
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return {
        key: value
        if not isinstance(value, float) or math.isfinite(value)
        else names.get(value, "NaN")
        for key, value in event.items()
    }


def config(plan: Plan) -> str:
    return (
        f'recipe = "{plan.recipe}"\nsteps = {plan.planned}\nseed = 17\n\n'
        '[model]\nname = "llama-tiny"  # <not a tag>\nhidden_size = 128\nlayers = 4\n\n'
        '[data]\nsource = "tinyshakespeare.txt"\n\n[optimizer]\nlr = 0.002\nbetas = [0.9, 0.95]\n'
    )


def run(plan: Plan) -> dict[str, Any]:
    return {
        "narrowgauge": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "device": "CPU, 2 threads, AVX-512",
        "threads": 2,
        "started_at": "2026-11-20T22:56:00+00:00",
        "command": [
            "narrowgauge",
            "train",
            "--recipe",
            plan.recipe,
            "--data",
            "a file & more.txt",
            "--compare",
            "bf16",
        ],
        "seed": 17,
        "recipe": plan.recipe,
        "precision": "bf16",
        "parameters": 3_212_928,
        "model": {
            "name": "llama-tiny",
            "hidden_size": 128,
            "layers": 4,
            "heads": 4,
            "vocab_size": 65,
        },
        "data": {
            "source": "tinyshakespeare.txt",
            "documents": 1,
            "train_tokens": 1_003_854,
            "validation_tokens": 111_540,
            "unigram_entropy": 3.3127,
        },
        "tokens_per_step": 8192,
        "steps": plan.planned,
        "describe": describe(plan),
    }


def describe(plan: Plan) -> list[dict[str, str]]:
    """Seven Linear layers in each of four blocks, and an output layer that stays ordinary."""
    shapes = {"q": 128, "k": 128, "v": 128, "o": 128, "gate": 384, "up": 384, "down": 128}
    forward = f"{plan.format} × {plan.format}, per tensor"
    rows = []
    for layer in range(4):
        for short, out in shapes.items():
            block = "self_attn" if short in "qkvo" else "mlp"
            rows.append(
                {
                    "name": f"model.layers.{layer}.{block}.{short}_proj",
                    "shape": f"{out} × {384 if short == 'down' else 128}",
                    "recipe": plan.recipe,
                    "output": forward,
                    "grad_input": f"e5m2 × {plan.format}, per tensor",
                    "grad_weight": f"e5m2 × {plan.format}, per tensor",
                    "backend": "reference",
                    "note": "",
                }
            )
    ordinary = {
        "output": "bf16",
        "grad_input": "bf16",
        "grad_weight": "bf16",
        "backend": "torch",
        "recipe": "–",
    }
    return [
        *rows,
        {"name": "lm_head", "shape": "65 × 128", **ordinary, "note": "output layer, kept ordinary"},
    ]


def events(plan: Plan) -> list[dict[str, Any]]:
    """What metrics.jsonl holds, in the order written."""
    batch, own = random.Random(0), random.Random(plan.seed)
    written: list[dict[str, Any]] = []
    drift = elapsed = 0.0
    for step in range(1, plan.steps + 1):
        level = 1.52 + 2.65 * math.exp(-step / 32) + 0.35 * math.exp(-step / 140)
        drift = 0.9 * drift + own.gauss(0, 0.0022) * min(step / 40, 1)
        loss = (
            level
            + batch.gauss(0, 0.035)
            + drift
            + own.gauss(0, 0.004)
            + plan.gap * min(step / 150, 1)
        )
        if plan.nonfinite_at is not None and step >= plan.nonfinite_at:
            loss = math.nan
        rate = plan.speed * (0.4 if step == 1 else 1 + own.gauss(0, 0.02))
        elapsed += 8192 / rate
        if step in plan.resumed_at:
            written.append(
                {
                    "event": "resume",
                    "step": step,
                    "path": f"checkpoints/step-{step:08d}",
                    "skipped": ["checkpoints/step-00000170"],
                }
            )
        written.append(
            {
                "event": "step", "step": step, "loss": loss, "grad_norm": 0.0 * loss + 0.6 + abs(own.gauss(0, 0.1)),
                "lr": 0.002, "tokens": 8192, "tokens_per_s": rate, "elapsed_s": elapsed, "peak_bytes": plan.peak_bytes,
            }
        )  # fmt: skip
        if step % 50 == 0 or step == plan.planned:
            noise = own.gauss(0, 0.003)
            written.append(
                {
                    "event": "eval",
                    "step": step,
                    "loss": level + 0.06 + plan.gap + noise,
                    "tokens": 111540,
                    "elapsed_s": elapsed,
                }
            )
            written.append(
                {
                    "event": "checkpoint",
                    "step": step,
                    "path": f"checkpoints/step-{step:08d}",
                    "elapsed_s": elapsed,
                }
            )
        if plan.tensors and (step == 1 or step % 20 == 0):
            written += tensor_events(step, plan)
        if plan.nonfinite_at is not None and plan.nonfinite_at - 2 <= step:
            written.append(
                {
                    "event": "nonfinite_amax",
                    "step": step,
                    "module": MODULES[2],
                    "role": "gy",
                    "count": 3,
                }
            )
            if step >= plan.nonfinite_at:
                break
    if plan.steps > 1:
        text = REFERENCE_TEXT if plan.recipe == "bf16" else SAMPLE_TEXT
        written.append(
            {"event": "sample", "step": written[-1]["step"], "prompt": SAMPLE_PROMPT, "text": text}
        )
    if plan.done is not None:
        written.append(
            {
                "event": "done",
                "step": step,
                "reason": plan.done,
                "exit_code": 5 if plan.done == "nonfinite" else 0,
            }
        )
    return written


def tensor_events(step: int, plan: Plan) -> list[dict[str, Any]]:
    """One reading of three modules, with a scale that was set for the tensors of a few steps before."""
    written = []
    for place, module in enumerate(MODULES):
        for role, (start, end, outliers) in TENSORS.items():
            generator = torch.Generator().manual_seed(1000 * step + 10 * place + len(role))
            name = "e5m2" if role == "gy" and plan.format == "e4m3" and place < 2 else plan.format
            largest, smallest = FORMATS[name]
            deviation = start * (end / start) ** (step / 300) * (1 + 0.6 * place)
            x = torch.randn(128, 256, generator=generator) * deviation
            if role == "gy":
                x *= torch.exp(1.8 * torch.randn(128, 1, generator=generator))
            x[torch.rand(128, 256, generator=generator) < outliers] *= 8
            x[torch.rand(128, 256, generator=generator) < 0.01] = 0.0
            scale = (
                float(x.abs().max()) / largest * (0.82 if step % 60 == 0 and role != "w" else 1.3)
            )
            found = tensor_statistics(x, largest, smallest, scale)
            written.append(
                {
                    "event": "tensor",
                    "step": step,
                    "module": module,
                    "role": role,
                    "format": name,
                    "scale": scale,
                    **found,
                }
            )
    return written
