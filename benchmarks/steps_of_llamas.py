"""Training steps of language models, for counting them (`narrowgauge.plan`): transformers' Llama, and the OLMo that COAT measures.

`llama_step` takes the options of a run that change memory. OLMo is written down from its source, operation by operation as far as
autograd keeps something of it: fused q, k, v and gate, up; LayerNorm without weights; autocast to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention, silu

import narrowgauge as ng
from narrowgauge.plan import Step

LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """What of a run changes its memory. states "torch": torch's fused AdamW; loss: "whole", "chunks" or "slices"."""

    recipe: str = "none"
    convert: dict[str, Any] = field(default_factory=dict)  # further arguments of ng.convert
    states: str = "torch"
    master: str | None = None
    embeddings: str = "fp32"
    in_backward: bool = False
    checkpointing: str | None = None
    loss: str = "whole"
    rows: int = 1
    tokens: int = 4096
    dtype: torch.dtype = torch.bfloat16
    model: dict[str, int] = field(default_factory=lambda: dict(LLAMA_8B))


def llama_step(run: Run) -> Callable[[], Step]:
    """For `count`: a causal model of transformers, whose rows are whole."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from narrowgauge.train.attention import use_attention_of_whole_rows

    def build() -> Step:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**run.model, dtype=run.dtype)).train()
        if run.recipe != "none":
            ng.convert(model, run.recipe, **run.convert)
        if run.checkpointing:
            ng.memory.checkpoint(model, run.checkpointing)
        use_attention_of_whole_rows(model, {"input_ids": torch.empty(0)})
        ids = torch.zeros(run.rows, run.tokens, dtype=torch.int64)

        def loss() -> Tensor:
            if run.loss == "whole":
                return model(input_ids=ids, labels=ids, use_cache=False).loss
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            total, valid = ng.memory.chunked_cross_entropy(
                hidden[:, :-1],
                model.lm_head.weight,
                ids[:, 1:],
                checked=True,
                slices=run.loss == "slices",
            )
            return total / valid

        return step_of(model, loss, ids, optimizer_of(model, run), converted=run.recipe != "none")

    return build


def optimizer_of(model: nn.Module, run: Run) -> Any:
    if run.states == "torch":
        return torch.optim.AdamW(model.parameters(), fused=True)
    named: dict[str, Any] = {"master": run.master} if run.master else {}
    optimizer = ng.optim.AdamW(
        ng.optim.groups(model, embeddings=run.embeddings), states=run.states, **named
    )
    if run.in_backward:
        ng.optim.in_backward(optimizer)
    return optimizer


def step_of(
    model: nn.Module,
    loss: Callable[[], Tensor],
    batch: Any,
    optimizer: Any,
    converted: bool = False,
) -> Step:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        if converted:
            ng.advance(model)

    def states() -> Iterable[Tensor]:
        return [
            each
            for state in optimizer.state.values()
            for each in state.values()
            if torch.is_tensor(each)
        ]

    return Step(model, loss, update, states, batch)


@contextmanager
def bfloat16_weights() -> Iterator[None]:
    """Weights are made in it: a fake model cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- OLMo ---


class _OlmoBlock(nn.Module):
    def __init__(self, width: int, middle: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.gate_up, self.down = (
            nn.Linear(width, 2 * middle, bias=False),
            nn.Linear(middle, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            each.view(rows, tokens, self.heads, -1).transpose(1, 2)
            for each in self.qkv(_plain_norm(x)).split(width, dim=-1)
        )
        q, k = (_halves_turned(each) for each in (q, k))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).contiguous().view(rows, tokens, width))
        up, gate = self.gate_up(_plain_norm(x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


def _plain_norm(x: Tensor) -> Tensor:
    """What autocast makes of LayerNorm: in float32, rounded by the Linear that reads it."""
    return layer_norm(x.float(), x.shape[-1:]).to(x.dtype)


def _halves_turned(x: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    cos = sin = torch.ones(1, 1, x.shape[-2], x.shape[-1], dtype=torch.float32)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


class _Olmo(nn.Module):
    """OLMo 7B: 32 blocks of 4,096."""

    def __init__(
        self, vocabulary: int = 50304, width: int = 4096, middle: int = 11008, blocks: int = 32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_OlmoBlock(width, middle, 32) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(_plain_norm(x))


def olmo_step() -> Callable[[], Step]:
    """2 rows of 2,048 tokens, bfloat16 weights as FSDP's mixed precision gathers them."""

    def build() -> Step:
        with bfloat16_weights():
            model = _Olmo().train()
        ids = torch.zeros(2, 2048, dtype=torch.int64)

        def loss() -> Tensor:
            logits = model(ids)[:, :-1].contiguous()
            return cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1))

        return step_of(model, loss, ids, optimizer_of(model, Run()))

    return build
