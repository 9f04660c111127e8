"""How long is an AdamW step with narrow states on the CPU, and how many bytes do the states take?

    make bench-optimizer                       23.5 M parameters, two threads
    make bench-optimizer ARGS="--quick"        one tenth of it, without the slow peers

The model is that of the question asked of us: 23.5 M parameters, of which 11.9 M are an embedding (MiniLM's sizes: 6 layers of 384,
1536 in the middle, 30,522 tokens). Two sets of weights:

    all       every tensor in the format named, embeddings too (small and one-axis tensors in float32, as each library does)
    default   each library's own rule; ours keeps embeddings in float32

Cases, interleaved round by round: torch's fused AdamW (float32, the baseline), ours in every format, bitsandbytes' and torchao's
8-bit AdamW where they are installed and run. `floor_s` is the bytes that a step must move (weights and states read and
written, gradients read) over the bandwidth of a copy, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.harness import RESULTS, measure, record, rows, table

BASELINE = "torch-fused-fp32"
STATES = ("fp32", "8bit", "fp8", "fp8-lm", "4bit")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_optimizer", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=20, help="even")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--skip", nargs="*", default=[], help="cases to leave out, e.g. torchao-8bit"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of the size, 4 rounds, no peers, nothing recorded",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layers, vocabulary = (1, 2048) if options.quick else (6, 30522)
    if options.quick:
        options.rounds, options.skip = 4, [*options.skip, "bitsandbytes-8bit", "torchao-8bit"]
    steps: dict[str, Callable[[], object]] = {}
    sizes: dict[str, dict[str, Any]] = {}
    for name, build in cases().items():
        if name not in options.skip:
            steps[name], sizes[name] = prepared(build, weights(layers, vocabulary))
    source = torch.randn(sizes[BASELINE]["parameters"])
    target = torch.empty_like(source)
    steps["copy"] = lambda: target.copy_(source)
    timings = measure(steps, rounds=options.rounds, warmup=3)
    print(table(timings, baseline=BASELINE), end="\n\n")
    bytes_per_s = 8 * source.numel() / timings["copy"].median_s
    lines = []
    for line in rows(timings, baseline=BASELINE):
        size = sizes.get(line["case"], {})
        if size:
            line |= size | {
                "floor_s": size["moved_bytes"] / bytes_per_s,
                "threads_asked": options.threads,
            }
            print(
                f"{line['case']:22} {size['state_bytes_per_parameter']:.3f} B/parameter", end="  "
            )
            print(
                f"floor {line['floor_s'] * 1e3:.1f} ms, took {line['median_s'] / line['floor_s']:.2f} of it"
            )
        lines.append(line)
    if not options.quick:
        record("optimizer", lines, RESULTS / "optimizer.jsonl")


def weights(layers: int, vocabulary: int) -> nn.ModuleDict:
    """MiniLM's tensors."""
    torch.manual_seed(0)
    blocks = [
        nn.ModuleDict(
            {name: nn.Linear(384, 384) for name in ("q", "k", "v", "o")}
            | {
                "up": nn.Linear(384, 1536),
                "down": nn.Linear(1536, 384),
                "n1": nn.LayerNorm(384),
                "n2": nn.LayerNorm(384),
            }
        )
        for _ in range(layers)
    ]
    return nn.ModuleDict(
        {
            "wte": nn.Embedding(vocabulary, 384),
            "wpe": nn.Embedding(512, 384),
            "blocks": nn.ModuleList(blocks),
        }
    )


def cases() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Name -> how its optimizer is built."""
    from narrowgauge.optim import AdamW, groups

    settings: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.01}
    found: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        BASELINE: lambda model: torch.optim.AdamW(model.parameters(), **settings, fused=True)
    }

    def ours(states: str, embeddings: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: AdamW(groups(model, embeddings=embeddings), **settings, states=states)  # type: ignore[arg-type]

    for states in STATES:
        found[f"ours-{states}"] = ours(states, "same")
    found["ours-8bit-default"] = ours("8bit", "fp32")
    if find_spec("bitsandbytes"):
        found["bitsandbytes-8bit"] = _bitsandbytes(settings)
    if find_spec("torchao"):
        found["torchao-8bit"] = _torchao(settings)
    return found


def _bitsandbytes(settings: dict[str, Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(model.parameters(), **settings)

    return build


def _torchao(settings: dict[str, Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), **settings)

    return build


def prepared(
    build: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module
) -> tuple[Callable[[], object], dict[str, Any]]:
    """A step with fixed gradients, and what its first one left in memory."""
    from narrowgauge.optim import state_bytes

    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peers
        optimizer = build(model)
        optimizer.step()
    size = state_bytes(optimizer)
    facts = {
        "parameters": size.parameters,
        "state_bytes": size.total,
        "state_bytes_per_parameter": size.per_parameter,
        "moved_bytes": 12 * size.parameters + 2 * size.total,
        "by_rule": {row.rule: row.state_bytes for row in size.rows},
    }
    return optimizer.step, facts


if __name__ == "__main__":
    main()
