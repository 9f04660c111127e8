"""How much faster is a step in INT8 and INT4, of BERT- and GPT-shaped models, at which width? Against BF16, eager, equal batch.

BERT and GPT-NeoX of transformers (whose Linears are nn.Linear) with a vocabulary of 32,000: widths 1024, 2560, 5120 and 8960, as many
layers as make about 0.1 to 1 billion parameters, 8,192 tokens. On Hopper and later, INT4 codes are multiplied as INT8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.alone import compared
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import converted
from benchmarks.gpu.step import training_step

WIDTHS = {
    2560: 4,
    1024: 8,
    5120: 2,
    8960: 1,
}  # width -> layers; first those that the claim begins with
ROWS, LENGTH = 16, 512
CONTENDERS = ("int8", "int4-hq-bs")


def main(bench: Bench) -> None:
    widths = {64: 1, 128: 1} if bench.dry else WIDTHS
    for width, layers in widths.items():
        for family in ("gpt", "bert"):

            def build(
                name: str, family: str = family, width: int = width, layers: int = layers
            ) -> Callable[[], None]:
                rows, length = bench.size(ROWS, 2), bench.size(LENGTH, 16)
                model = converted(shaped(bench, family, width, layers), name, bench, rows * length)
                return training_step(bench, model, model, rows, length)

            facts = {
                "family": family,
                "width": width,
                "layers": layers,
                "tokens": bench.size(ROWS * LENGTH, 32),
            }
            compared(bench, "integers", CONTENDERS, build, facts | {"mode": "eager"})


def shaped(bench: Bench, family: str, width: int, layers: int) -> Any:
    """A model of the family, in bfloat16, without dropout: heads of 64, an MLP four times as wide."""
    from transformers import BertConfig, BertForMaskedLM, GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {
        "vocab_size": bench.size(32_000, 256),
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64 or 1,
        "max_position_embeddings": LENGTH,
    }
    with torch.device(bench.device):
        if family == "bert":
            config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
            return BertForMaskedLM(config).to(torch.bfloat16)
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, use_cache=False)).to(torch.bfloat16)
