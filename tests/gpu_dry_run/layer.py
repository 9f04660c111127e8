"""A Llama layer and head of 8B shape, forward and backward, 8,192 tokens: compiled, and eager.

Hidden 4096, MLP 14336, 8 of 32 heads for keys and values, vocabulary 32k, bfloat16; every Linear but the head in the recipe, torchao's
"tensorwise" beside it. Attention without a mask, as `narrowgauge train` has it. Counted is a step after those that compile kernels and
fill windows; its optimizer is left out. Compiled: half a minute to two for each case that no cache holds.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.train.attention import use_attention_of_whole_rows
from tests.gpu_dry_run import log, tally
from tests.gpu_dry_run.log import Summary
from tests.gpu_dry_run.operator_bytes import OperatorBytes
from tests.gpu_dry_run.tally import Case, Numbers

ROWS, LENGTH, VOCABULARY = 2, 4096, 32_000
COMPILED = ("bf16", "torchao-tensorwise", "fp8-current", "fp8-delayed", "fp8-block", "fp8-row")
EAGER = (
    "bf16",
    "fp8-current",
    "fp8-delayed",
    "fp8-block",
    "fp8-row",
    "fp8-current fused",
    "fp8-delayed fused",
)


def measured(name: str, mode: str) -> tuple[Summary, Numbers]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    model = converted(llama("cuda"), name)
    forward = torch.compile(model) if mode == "compiled" else model
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), device="cuda")

    def step() -> None:
        forward(input_ids=ids, labels=ids).loss.backward()
        if not name.startswith("torchao"):
            ng.advance(model)
        model.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    with log.recorded() as seen:
        step()
    beside = {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
    if mode == "eager":
        with OperatorBytes() as operators:
            step()
        beside["torch_gb"] = round(operators.moved_bytes / 1e9, 2)
    return seen, beside


def llama(device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if not use_attention_of_whole_rows(model, {"input_ids": torch.empty(ROWS, LENGTH)}):
        raise RuntimeError("the model keeps its mask, which is dense while it is traced")
    return model


def converted(model: nn.Module, name: str) -> nn.Module:
    recipe, _, option = name.partition(" ")
    if recipe.startswith("torchao-"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe.removeprefix("torchao-"))
        return convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, path: path != "lm_head"
        )
    return model if recipe == "bf16" else ng.convert(model, recipe, fuse=option == "fused")


CASES: dict[str, Case] = {
    **{f"compiled {name}": partial(measured, name, "compiled") for name in COMPILED},
    **{f"eager {name}": partial(measured, name, "eager") for name in EAGER},
}

if __name__ == "__main__":
    tally.told(CASES)
