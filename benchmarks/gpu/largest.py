"""How much memory does a training step take, and what does the memory that is saved buy? A Llama that nearly fills the card in BF16.

Layers of the shape of Llama 3 8B, sequences of 4096, one to a micro-batch at first: that peak is compared. Then each contender takes as
many sequences as its memory holds, and tokens per second are compared. The largest batch is foreseen from the peaks of one and of two
sequences, tried, and lowered until it fits.

bf16-autocast    float32 weights and states, torch's fused AdamW, bfloat16 by autocast: what transformers' Trainer does with bf16=True
bf16-pure        weights, gradients and states in bfloat16: less memory, and updates smaller than a bfloat16's last digit are lost
narrowgauge-...  what narrowgauge has for this: bfloat16 weights with the 16 bits that complete a float32 beside them, 8-bit states, the
                 step taken inside backward, the loss in chunks of tokens, the recipe with fused norms
"-liger"         with liger-kernel's norm and SwiGLU, where it is installed

Eager: the layers would be compiled anew for each number of sequences.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import narrowgauge as ng
from benchmarks import harness
from benchmarks.gpu.bench import SETS, Bench
from benchmarks.gpu.models import converted, llama
from narrowgauge.memory import chunked_cross_entropy

LAYERS, SEQUENCE = 26, 4096
CONTENDERS = (
    "bf16-autocast",
    "narrowgauge-fp8-delayed",
    "bf16-pure",
    "narrowgauge-fp8-current",
    "bf16-autocast-liger",
)
SHARE = 0.96  # of the card's memory that a step may take: the rest is the allocator's, in pieces
STEPS, ROUNDS = 2, 3

Step = Callable[[int], None]  # of so many sequences


@dataclass(frozen=True)
class Reading:
    """rows: the most sequences; one, peak: bytes at most with one and with `rows`; samples_s: seconds of steps with `rows`."""

    rows: int
    one: int
    peak: int
    samples_s: tuple[float, ...]


def main(bench: Bench) -> None:
    facts = {"layers": bench.size(LAYERS, 1), "sequence": bench.size(SEQUENCE, 16), "mode": "eager"}
    lines: list[dict[str, Any]] = []
    for name in CONTENDERS:
        if not bench.has_peer(name) or not bench.has_time(f"largest, {name}"):
            continue
        reading = _read(bench, name)
        if reading is None:
            continue
        spread = harness.Spread.of(reading.samples_s)
        tokens = reading.rows * facts["sequence"]
        lines.append({
            "case": name, "median_s": spread.median, "q1_s": spread.q1, "q3_s": spread.q3, "rounds": ROUNDS, **facts,
            "sequences": reading.rows, "tokens": tokens, "tokens_per_s": tokens / spread.median,
            "peak_bytes": reading.peak, "peak_bytes_of_one_sequence": reading.one,
        })  # fmt: skip
        print(_words(lines[-1], lines[0]), flush=True)
    if lines and lines[0]["case"] == CONTENDERS[0]:
        for line in lines:
            line |= {
                "baseline": CONTENDERS[0],
                "speedup": line["tokens_per_s"] / lines[0]["tokens_per_s"],
                "memory_ratio": lines[0]["peak_bytes_of_one_sequence"]
                / max(line["peak_bytes_of_one_sequence"], 1),
            }
    bench.write("largest", lines)


def _words(line: dict[str, Any], first: dict[str, Any]) -> str:
    speed = f"{line['tokens_per_s']:,.0f} tokens/s (x {line['tokens_per_s'] / first['tokens_per_s']:.2f})"
    words = f"largest: {line['case']:24} at most {line['sequences']} sequences, {speed}"
    if one := line["peak_bytes_of_one_sequence"]:  # on a CPU nothing counts them
        ratio = first["peak_bytes_of_one_sequence"] / one
        words += f", {line['peak_bytes'] / 2**30:.1f} GiB; one sequence {one / 2**30:.1f} GiB (1/{ratio:.2f})"
    return words


def _read(bench: Bench, name: str) -> Reading | None:
    gc.collect()
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    try:
        step = _step(bench, name)
        clock = harness.cuda_clock if on_gpu else harness.host_clock
        limit = (
            SHARE * torch.cuda.get_device_properties(bench.device).total_memory if on_gpu else 0.0
        )
        return largest(
            step, limit, _peak if on_gpu else _no_peak, clock, most=2 if bench.dry else 4096
        )
    except Exception as error:
        bench.fail("largest", name, error)
        return None
    finally:
        gc.collect()


def largest(
    step: Step, limit: float, peak: Callable[[], int], clock: harness.Clock, most: int
) -> Reading:
    """The most sequences that `limit` bytes hold, and the time of such steps.

    peak  bytes taken at most since it was last called
    """
    step(1)  # the optimizer's states are made in the first step
    peak()
    step(1)
    one = peak()
    rows = 1
    if _fits(step, 2):
        rows = min(most, foreseen(one, peak(), limit))
        while not _fits(step, rows):
            rows -= max(1, rows // 16)
    peak()  # forgets what was tried and did not fit
    samples = [clock(lambda: step(rows), STEPS) for _ in range(ROUNDS)]
    return Reading(rows, one, peak(), tuple(samples))


def _fits(step: Step, rows: int) -> bool:
    """Whether the memory holds such a step. It is over the handler's end that the step's tensors are freed."""
    try:
        step(rows)
        return True
    except torch.OutOfMemoryError:
        pass
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def foreseen(one: int, two: int, limit: float) -> int:
    """Sequences that fit if each takes what the second one took; not below 2, which did fit."""
    return 2 if two <= one else max(2, 1 + int((limit - one) / (two - one)))


def _peak() -> int:
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def _no_peak() -> int:
    """On a CPU nothing counts them."""
    return 0


def _step(bench: Bench, name: str) -> Step:
    ours = name.startswith("narrowgauge-")
    wide = name.startswith("bf16-autocast")
    model = llama(bench, LAYERS, torch.float32 if wide else torch.bfloat16)
    if ours:
        model = converted(model, name.removeprefix("narrowgauge-") + "-fused", bench, SEQUENCE)
        optimizer: Any = ng.optim.AdamW(
            model.parameters(), lr=1e-5, states="8bit", master="bf16-remainder"
        )
        ng.optim.in_backward(optimizer)
    else:
        if name.endswith("-liger"):
            model = converted(model, "bf16-liger", bench, SEQUENCE)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-5, fused=bench.device.type == "cuda"
        )
    length, vocabulary = bench.size(SEQUENCE, 16), model.config.vocab_size
    turn = iter(range(10**9))

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        if not ours:
            found: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return found
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        total, count = chunked_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:], checked=True)
        return total / count

    def step(rows: int) -> None:
        generator = torch.Generator(bench.device).manual_seed(next(turn) % SETS)
        ids = torch.randint(vocabulary, (rows, length), device=bench.device, generator=generator)
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=wide):
            loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()

    return step
