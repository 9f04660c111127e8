"""A small model, its micro-batches and a training step, on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng

WIDTH, TOKENS = 64, 32


class Block(nn.Module):
    """A residual block: norm, up, GELU, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(recipe: Any, blocks: int = 2, width: int = WIDTH) -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(7)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    return ng.convert(model, recipe)  # type: ignore[return-value]


def micro_batch(step: int, number: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets; magnitudes differ from one to the next, so that ranks see different amaxes."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x, y = (torch.randn(TOKENS, width, generator=generator) for _ in range(2))
    return x * (1 + number), y


def train(
    model: nn.Module,
    numbers: Iterable[int],
    steps: int,
    count: int,
    optimizer: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """`steps` steps over these of `count` micro-batches, the loss divided by all targets. -> [loss of a rank's own micro-batches]."""
    made = (optimizer or _sgd)([each for each in model.parameters() if each.requires_grad])
    losses = []
    for step in range(steps):
        for number in numbers:
            x, y = micro_batch(step, number)
            loss = (model(x) - y).square().sum() / (count * y.numel())
            loss.backward()
            losses.append(loss.item())
        made.step()
        ng.advance(model)
        made.zero_grad()
    return losses


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def state(model: nn.Module) -> dict[str, Tensor]:
    """All tensors, whole, by their plain names."""
    from narrowgauge.structure import plain_name

    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[plain_name(name)] = whole.detach().clone()
    return found
