"""A small model with what conversion treats in its own way: an embedding, numbered blocks, gates, and a tied head."""

from __future__ import annotations

import torch
from torch import nn

import narrowgauge as ng


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up_proj = nn.Linear(32, 64)
        self.down_proj = nn.Linear(64, 32)
        self.gate = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x)))) * self.gate(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(32, 48, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


IDS = torch.arange(24).reshape(2, 12)


def recipe_names(model: nn.Module) -> dict[str, str]:
    return {row.name: row.recipe for row in ng.describe(model)}
