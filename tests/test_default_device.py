"""A default device other than the tensors' own, as torch.set_default_device("cuda") sets it, changes nothing: exact.

The default is "meta" here, so that whatever is made on it by mistake has no numbers and fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge import formats, recipes
from narrowgauge.ops import selfcheck
from narrowgauge.optim.moments import STATES
from narrowgauge.recipe import Recipe
from tests.compare import assert_same

CPU = torch.device("cpu")


def both(compute: Callable[[], Any]) -> None:
    """The same result under either default device, and on the CPU."""
    torch.manual_seed(0)
    expected = compute()
    formats._table.cache_clear()
    formats._boundaries.cache_clear()
    torch.manual_seed(0)
    with torch.device("meta"):
        found = compute()
    assert_same(found, expected)


@pytest.mark.parametrize("recipe", recipes.ALL, ids=lambda recipe: recipe.name)
def test_two_steps_of_a_layer(recipe: Recipe) -> None:
    def compute() -> list[torch.Tensor]:
        layer = ng.QLinear(96, 80, device=CPU, recipe=recipe)
        found = []
        for _ in range(2):
            x = torch.randn(48, 96, device=CPU, requires_grad=True)
            y = layer(x)
            y.square().mean().backward()
            assert x.grad is not None and layer.weight.grad is not None
            found += [y.detach(), x.grad, layer.weight.grad.clone()]
            ng.advance(layer)
        return [*found, *layer.state_dict().values()]

    both(compute)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", ["fp32", "fp16-scaled", "bf16-remainder", "stochastic", None])
def test_two_steps_of_an_optimizer(states: str, master: str | None) -> None:
    def compute() -> list[torch.Tensor]:
        dtype = torch.float32 if master is None else torch.bfloat16
        weight = torch.nn.Parameter(torch.randn(64, 96, device=CPU).to(dtype))
        optimizer = ng.optim.AdamW([weight], lr=1e-2, states=states, master=master)
        for _ in range(2):
            weight.grad = torch.randn(64, 96, device=CPU).to(dtype)
            optimizer.step()
        return [weight.detach()]

    both(compute)


@pytest.mark.parametrize("name", formats.NAMES)
def test_formats(name: str) -> None:
    format = formats.get(name)
    x = torch.randn(32, 32) * 3

    def compute() -> list[torch.Tensor]:
        codes = format.encode(x)
        return [codes, format.decode(codes), format.values()]

    both(compute)


def test_checks_compute_their_truth_on_the_cpu() -> None:
    def compare(
        run: object, kind: object, device: torch.device
    ) -> list[selfcheck.OutputComparison]:
        return [selfcheck.OutputComparison("number", torch.ones(3, device=device), torch.ones(3))]

    check: selfcheck.KernelCheck[None] = selfcheck.KernelCheck(
        lambda spec: None, compare, lambda: ()
    )
    with torch.device("meta"):
        result = selfcheck.examine("op", print, check, None, CPU)
    assert result.reason is None


def test_chunked_loss() -> None:
    hidden, weight = torch.randn(20, 16), torch.randn(40, 16)
    labels = torch.randint(0, 40, (20,))

    def compute() -> list[torch.Tensor]:
        w = weight.clone().requires_grad_()
        loss, _ = ng.memory.chunked_cross_entropy(hidden, w, labels)
        loss.backward()
        return [loss.detach(), w.grad]  # type: ignore[list-item]

    both(compute)
