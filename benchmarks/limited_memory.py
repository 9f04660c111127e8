"""The road from a big card to a small one: what each technique saves of a Llama of 8 billion parameters, and what it costs.

    python -m benchmarks.limited_memory            two minutes; prints the table at the top of docs/limited-memory.md

Each row has what the rows above it have. Counted with 3 and 4 of 32 layers, segments with all (`narrowgauge.plan.forecast`), second
step, bfloat16 weights, one sequence; the time is that of the roofline on an H100 (`narrowgauge.plan.roofline`), which leaves out slow
kernels. To add a technique, add a line to ROAD.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.steps_of_llamas import LLAMA_8B, Run, llama_step
from narrowgauge.ops.timing.cards import card, of_memory
from narrowgauge.plan.forecast import Forecast, forecast
from narrowgauge.plan.roofline import time

GIB = 2**30
TOKENS = (4096, 8192)
H100 = card("h100")
ROOM = {
    "24 GB": card("rtx-4090"),
    "48 GB": of_memory("47.5GiB"),
    "80 GB": H100,
}  # as drivers report them


@dataclass(frozen=True)
class Technique:
    """name and what to write; change: of `Run`; words: what it costs, and what it changes in numbers."""

    name: str
    code: str
    change: dict[str, Any] = field(default_factory=dict)
    words: str = ""


ROAD = (
    Technique("bfloat16", "transformers, `torch.optim.AdamW(fused=True)`"),
    Technique(
        "FP8 products", '`convert(model, "fp8-current")`', {"recipe": "fp8-current"},
        "operands of products in E4M3 and E5M2; weights are cast twice a step",
    ),
    Technique(
        "fused producers", "`convert(..., fuse=True)`", {"convert": {"fuse": True}},
        "none: norms and SwiGLU write codes, and compute again what backward needs",
    ),
    Technique(
        "saves in FP8", '`convert(..., fuse=True, save="fp8")`', {"convert": {"fuse": True, "save": "fp8"}},
        "what norms and SwiGLU keep is in FP8: gradients of `down` lose 1.8 dB, others up to 1.3",
    ),
    Technique(
        "8-bit states", '`ng.optim.AdamW(groups(model, embeddings="same"), states="8bit", master="stochastic")`',
        {"states": "8bit", "master": "stochastic", "embeddings": "same"},
        "moments in 8 bits, weights rounded stochastically ([measured](optimizers.md))",
    ),
    Technique(
        "loss in chunks", "`chunked_cross_entropy(...)`", {"loss": "chunks"}, "the head's gradient is summed in float32"
    ),
    Technique(
        "loss over slices", "`chunked_cross_entropy(..., slices=True)`", {"loss": "slices"},
        "a fourth product with the head; its gradient is rounded once",
    ),
    Technique(
        "step in backward", "`ng.optim.in_backward(optimizer)`", {"in_backward": True},
        "none without clipping, or with that of two passes; micro-batches are summed in FP8",
    ),
    Technique(
        "checkpointing", '`ng.memory.checkpoint(model, "full")`', {"checkpointing": "full"},
        "none; blocks are computed twice",
    ),
    Technique("4-bit states", '`states="4bit"`', {"states": "4bit"}, "moments in 4 bits ([measured](optimizers.md))"),
    Technique(
        "segments", '`ng.memory.checkpoint(model, "sqrt")`', {"checkpointing": "sqrt"},
        "none; most blocks are computed three times",
    ),
)  # fmt: skip


def planned(run: Run) -> Forecast:
    assert H100.device is not None
    layers = run.model["num_hidden_layers"]
    return forecast(
        lambda depth: llama_step(replace(run, model=run.model | {"num_hidden_layers": depth or layers})), H100.device, layers
    )  # fmt: skip


def lines(run: Run) -> list[dict[str, Any]]:
    """One for each technique."""
    found: list[dict[str, Any]] = []
    for each in ROAD:
        run = replace(run, **each.change)
        line: dict[str, Any] = {"case": each.name, "code": each.code, "words": each.words}
        for tokens in TOKENS:
            counted = planned(replace(run, tokens=tokens))
            timed = time(counted.work, H100)
            cards = [name for name, each in ROOM.items() if counted.allocated <= each.usable]
            sizes = {
                "gib": round(counted.allocated / GIB, 2),
                "reserved_gib": round(counted.reserved / GIB, 2),
            }
            line[str(tokens)] = sizes | {"seconds": round(timed.seconds, 4), "cards": cards}
        found.append(line)
        print(
            f"{each.name:20}", *(f"{tokens}: {line[str(tokens)]}" for tokens in TOKENS), flush=True
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Markdown."""
    rows = [
        "| step | what to write | 4,096 | 8,192 | smallest card | time | in numbers, and what it costs |",
        "|---|---|---|---|---|---|---|",
    ]
    first = found[0]
    for line in found:
        sizes = [f"{line[str(tokens)]['gib']:.1f}" for tokens in TOKENS]
        cards = " / ".join(next(iter(line[str(tokens)]["cards"]), "–") for tokens in TOKENS)
        times = " / ".join(
            f"{line[str(tokens)]['seconds'] / first[str(tokens)]['seconds']:.2f}"
            for tokens in TOKENS
        )
        plus = "" if line is first else "+ "
        rows.append(
            f"| {plus}{line['case']} | {line['code']} | {sizes[0]} | {sizes[1]} | {cards} | {times} | {line['words']} |"
        )
    return "\n".join(rows)


def main() -> None:
    argparse.ArgumentParser(
        prog="benchmarks.limited_memory", description=__doc__.splitlines()[0]
    ).parse_args()  # type: ignore[union-attr]
    found = lines(Run(model=dict(LLAMA_8B)))
    record("limited_memory", found, RESULTS / "limited_memory.jsonl")
    print(table(found))


if __name__ == "__main__":
    main()
