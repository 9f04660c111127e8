"""How far is the roofline from steps that others timed, and what do narrow recipes gain by it?

    python -m benchmarks.planned_time            half a minute; rows appended to benchmarks/results/planned_time.jsonl

Steps are counted with 3 and 4 layers, their work lies on a line with the number of layers (`plan.tally`). Published, all of eager mode:

    torchtune   README of 2024-11-18, Llama 3.2 3B, packed: 7,075 tokens/s on an A100
    TE          docs/examples/te_llama of TransformerEngine, the baseline without it: Llama 3 8B of transformers, bfloat16, fused AdamW,
                8 rows of at most 256 tokens on an H100: 270 ms
    torchtitan  benchmarks/llama3_h100_202412_torchtitan.md, Llama 3.1 8B, 2 rows of 8,192 on each of 8 H100 (2.4 TB/s, 500 W), FSDP,
                selective checkpointing: 5,762 tokens/s each. Counted as one GPU, without messages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.steps_of_llamas import LLAMA_8B, Run, llama_step
from benchmarks.steps_of_torchtune import Torchtune, torchtune_step
from narrowgauge.ops.timing.cards import Card, card
from narrowgauge.plan import Step, count
from narrowgauge.plan.roofline import Time, time
from narrowgauge.plan.tally import deeper, tally

FEW = 3


def deep(step: Callable[[int], Callable[[], Step]], layers: int, on: Card) -> Time:
    assert on.device is not None
    few, more = (tally(count(step(number), on.device)) for number in (FEW, FEW + 1))
    return time(deeper(few, more, layers - FEW), on)


def llama(run: Run) -> Callable[[int], Callable[[], Step]]:
    return lambda layers: llama_step(replace(run, model=run.model | {"num_hidden_layers": layers}))


def published() -> Iterator[tuple[str, Callable[[int], Callable[[], Step]], int, Card, int, float]]:
    """(name, step, layers, card, tokens, published seconds)."""
    h100 = card("h100")
    yield "torchtune, packed", partial(_torchtune, Torchtune()), 28, card("a100-80"), 8192, 8192 / 7075
    yield "TE's baseline", llama(Run(rows=8, tokens=256)), 32, h100, 2048, 0.270
    slow = replace(h100, name="H100 of 2.4 TB/s", bandwidth=2.4e12)
    titan = Run(rows=2, tokens=8192, checkpointing="selective")
    yield "torchtitan, FSDP", llama(titan), 32, slow, 16384, 16384 / 5762


def _torchtune(flags: Torchtune, layers: int) -> Callable[[], Step]:
    return torchtune_step(replace(flags, layers=layers))


RECIPES: list[tuple[str, Run]] = [
    ("bf16", Run()),
    ("fp8-current", Run(recipe="fp8-current")),
    ("fp8-current, fused", Run(recipe="fp8-current", convert={"fuse": True})),
    ("fp8-delayed, fused", Run(recipe="fp8-delayed", convert={"fuse": True})),
    ("fp8-row", Run(recipe="fp8-row")),
    ("fp8-block", Run(recipe="fp8-block")),
    ("int8", Run(recipe="int8")),
]


def main() -> None:
    lines: list[dict[str, Any]] = []
    for name, step, layers, on, tokens, seconds in published():
        found = deep(step, layers, on)
        lines.append({"case": name, "published_s": round(seconds, 4), **row(found, on, tokens)})
        lines[-1]["of_published"] = round(found.seconds / seconds, 3)
        print(
            f"{name:22} {found.seconds:7.3f} s, published {seconds:7.3f}: {found.seconds / seconds:.2f} of it",
            flush=True,
        )
    for key, tokens in (("h100", 4096), ("h100", 8192), ("rtx-4090", 4096)):
        on, plain = card(key), 0.0
        for name, run in RECIPES:
            found = deep(llama(replace(run, tokens=tokens)), LLAMA_8B["num_hidden_layers"], on)
            plain = plain or found.seconds
            line = {"case": name, **row(found, on, tokens), "gain_over_bf16": round(plain / found.seconds, 3)}
            lines.append(line)
            print(
                f"{key:9} {tokens:5} {name:22} {found.seconds:7.3f} s  {line['gain_over_bf16']:.2f}  {line['by_kind_ms']}",
                flush=True,
            )
    record("planned_time", lines, RESULTS / "planned_time.jsonl")


def row(found: Time, on: Card, tokens: int) -> dict[str, Any]:
    return {
        "card": on.name, "tokens": tokens, "seconds": round(found.seconds, 4), "tokens_per_s": round(tokens / found.seconds),
        "host_s": round(found.host, 4), "launches": found.launches, "utilisation": round(found.utilisation(on), 3),
        "by_kind_ms": {kind: round(1e3 * seconds, 1) for kind, seconds in found.by_kind.items()},
        "by_phase_ms": {phase: round(1e3 * seconds, 1) for phase, seconds in found.by_phase.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
