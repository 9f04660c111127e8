"""A small model whose products are healthy, and faults in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.recipe import Cast
from tests.small_model import Model

IDS = torch.arange(96).reshape(4, 24) * 7 % 48


def converted(recipe: Any = "fp8-current") -> Model:
    """Six Linears in three blocks; gates and the head stay wide."""
    return ng.convert(Model(), recipe)  # type: ignore[return-value]


def compute(model: nn.Module, ids: Tensor = IDS) -> Callable[[], Tensor]:
    """Forward and backward of a step."""

    def step() -> Tensor:
        torch.manual_seed(5)
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return step


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        optimizer.zero_grad()
        compute(model, (IDS + number) % 48)()
        optimizer.step()
        ng.advance(model)
    optimizer.zero_grad()


def recast(layer: ng.QLinear, product: str, side: str, cast: Cast) -> None:
    assert layer.recipe is not None
    layer.compute_as(
        layer.recipe.with_gemm(**{product: replace(getattr(layer.recipe, product), **{side: cast})})
    )


@contextmanager
def dropping(layer: ng.QLinear, product: str, columns: int = 16) -> Iterator[None]:
    """The kernel of this product leaves out the first columns of the contracted axis."""
    plan_of = layer.plan

    def plan(*given: Any) -> Any:
        whole = plan_of(*given)
        own = getattr(whole, product)

        def run(lhs: Any, *rest: Any) -> Tensor:
            data = lhs.data.clone()
            data[:, :columns] = 0
            return own.choice.kernel.run(replace(lhs, data=data), *rest)  # type: ignore[no-any-return]

        return replace(
            whole,
            **{
                product: replace(
                    own, choice=replace(own.choice, kernel=replace(own.choice.kernel, run=run))
                )
            },
        )

    layer.plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.plan
