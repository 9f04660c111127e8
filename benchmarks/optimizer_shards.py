"""How even are an optimizer's states over ranks: whole tensors given greedily (`ng.optim.zero`), and rows as FSDP2 cuts them?

    python -m benchmarks.optimizer_shards            Llamas of 8 and 70 billion parameters on 8 to 1,024 ranks, on paper: 5 s
    python -m benchmarks.optimizer_shards --quick    the small one on 8, nothing recorded

Shapes are those of Llama 3 (embedding and head untied), on the device "meta". Bytes of AdamW's `8bit` states with scales; embeddings in
float32, as is the default, or like the others. `fullest` is the fullest rank over the mean; `ranks_with_nothing` keep no state.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import nn

from benchmarks.harness import RESULTS, record
from narrowgauge.optim import AdamW, state_bytes, zero_balance
from narrowgauge.optim.shards import pieces

# hidden size, width of the MLP, layers, rows of keys and values
SIZES = {"8B": (4096, 14336, 32, 1024), "70B": (8192, 28672, 80, 1024)}
VOCABULARY = 128256
RANKS = (8, 16, 32, 64, 256, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.optimizer_shards", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--quick", action="store_true", help="the small model on 8 ranks, nothing recorded"
    )
    options = parser.parse_args()
    lines = []
    print(
        f"{'model':6} {'embeddings':10} {'ranks':>6} {'GB in all':>10} {'whole tensors':>14} {'with nothing':>13} {'rows':>6}"
    )
    for name in list(SIZES)[: 1 if options.quick else None]:
        groups = groups_of(*SIZES[name])
        for embeddings in ("fp32", "same"):
            for ranks in RANKS[: 1 if options.quick else None]:
                line = case(name, groups, embeddings, ranks)
                lines.append(line)
                print(
                    f"{name:6} {embeddings:10} {ranks:6} {line['state_bytes'] / 1e9:10.2f} {line['fullest']:14.2f} "
                    f"{line['ranks_with_nothing']:13} {line['fullest_of_rows']:6.3f}"
                )
    if not options.quick:
        record("optimizer-shards", lines, RESULTS / "optimizer_shards.jsonl")


def case(name: str, groups: list[dict[str, Any]], embeddings: str, ranks: int) -> dict[str, Any]:
    chosen = [{**group, "params": list(group["params"])} for group in groups]
    if embeddings == "same":
        chosen = [
            {"params": [each for group in chosen for each in group["params"]], "embeddings": "same"}
        ]
    told = zero_balance(chosen, ranks, states="8bit")
    return {
        "case": f"{name} on {ranks}",
        "model": name,
        "embeddings": embeddings,
        "ranks": ranks,
        "state_bytes": sum(told.state_bytes),
        "fullest": told.ratio,
        "ranks_with_nothing": sum(not count for count in told.parameters),
        "fullest_of_rows": of_rows(chosen, ranks),
    }


def of_rows(groups: list[dict[str, Any]], ranks: int) -> float:
    """The fullest rank over the mean where each tensor's first axis is cut: a row's bytes times the rows of the first rank."""
    sizes = state_bytes(AdamW([dict(group) for group in groups], states="8bit"))
    counts = [0.0] * ranks
    for group in groups:
        for _, parameter in group["params"]:
            for rank, (_, rows) in enumerate(pieces(len(parameter), [ranks])):
                counts[rank] += sizes.of(parameter) * rows / len(parameter)
    return max(counts) * ranks / math.fsum(counts)


def groups_of(hidden: int, width: int, layers: int, narrow: int) -> list[dict[str, Any]]:
    """The parameters of a Llama as `narrowgauge.optim.groups` makes them: the embedding apart."""
    shapes = {
        "q": (hidden, hidden),
        "k": (narrow, hidden),
        "v": (narrow, hidden),
        "o": (hidden, hidden),
    }
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    shapes |= {"input_norm": (hidden,), "post_norm": (hidden,)}
    named = {
        f"layers.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()
    }
    named |= {"norm": (hidden,), "lm_head": (VOCABULARY, hidden)}

    def made(items: dict[str, tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in items.items()
        ]

    return [
        {"params": made(named), "embeddings": "same"},
        {
            "params": made({"embed_tokens": (VOCABULARY, hidden)}),
            "states": "fp32",
            "why": "embedding",
        },
    ]


if __name__ == "__main__":
    main()
