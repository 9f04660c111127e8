"""What each policy of checkpointing needs and computes again: the step of an 8B Llama, counted for an H100 without one.

    python -m benchmarks.checkpointing [--layers 32] [--tokens 32768]

bfloat16 weights, recipe fp8-current, fused, 8-bit states, the optimizer in backward, the loss over slices of the vocabulary, one
sequence: so that what blocks keep is most of what there is. `peak_bytes`: the most that is alive in the second step (narrowgauge.plan).
`repeats`: forward passes of a block in backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from narrowgauge.ops.registry import Device
from narrowgauge.plan import Step, count
from narrowgauge.train.attention import use_attention_of_whole_rows

HOPPER = Device("cuda", (9, 0), cuda=(12, 9))
POLICIES = ("none", "selective", "full", "every-2", "every-4", "every-8", "sqrt")
SIZES = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.checkpointing", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    lines = []
    for policy in POLICIES:
        reports: list[ng.memory.CheckpointReport] = []
        found = count(builder(policy, options.layers, options.tokens, reports), HOPPER)
        most, parts = found.peak(found.second)
        report = reports[-1]
        line = {
            "case": policy,
            "layers": options.layers,
            "tokens": options.tokens,
            "peak_bytes": most,
            "parts": parts,
        }
        lines.append(line | {"repeats": report.extra_forwards, "segments": report.segments})
        print(
            f"{policy:<10} {most / 2**30:7.2f} GiB   {report.extra_forwards:3} of {options.layers} blocks again   {parts}",
            flush=True,
        )
    record("checkpointing", lines, RESULTS / "checkpointing.jsonl")


def builder(policy: str, layers: int, tokens: int, reports: list[Any]) -> Callable[[], Step]:
    def build() -> Step:
        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, dtype=torch.bfloat16)
        model: Any = transformers.AutoModelForCausalLM.from_config(config).train()
        ng.convert(model, "fp8-current", fuse=True)
        reports.append(ng.memory.checkpoint(model, policy))
        use_attention_of_whole_rows(model, {"input_ids": torch.empty(0)})
        optimizer = ng.optim.AdamW(model, states="8bit", master="stochastic", embeddings="same")
        ng.optim.in_backward(optimizer)
        ids = torch.zeros(1, tokens, dtype=torch.int64)

        def loss() -> Tensor:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            head = model.lm_head.weight
            total, valid = ng.memory.chunked_cross_entropy(
                hidden[:, :-1], head, ids[:, 1:], slices=True, checked=True
            )
            return total / valid.clamp(min=1)

        def states() -> list[Tensor]:
            return [
                each
                for state in optimizer.state.values()
                for each in state.values()
                if torch.is_tensor(each)
            ]

        return Step(model, loss, lambda: ng.advance(model), states, ids)

    return build


if __name__ == "__main__":
    main()
