"""A Llama small enough for a test of milliseconds, with and without dropout, and a batch for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    } | changes  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes)).train()


def batch(rows: int = 4, tokens: int = 32) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids}


def step(model: Any, **arguments: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients by name, from the same generator state at every call."""
    torch.manual_seed(5)
    model.zero_grad()
    logits = model(**batch(), use_cache=False, **arguments).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch()["input_ids"].flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}
