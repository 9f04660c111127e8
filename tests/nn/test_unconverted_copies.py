"""A second copy of a converted model that computes without its recipes: told as the reference of a policy, and nowhere else."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.ops.registry import Device
from narrowgauge.plan import Step, count

pytestmark = pytest.mark.usefixtures("nothing_was_compiled")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def told(policy: nn.Module, reference: nn.Module, *, trains: bool = False) -> list[str]:
    """What is warned of in five steps in which both compute."""
    both = [*policy.parameters(), *(reference.parameters() if trains else [])]
    optimizer = torch.optim.SGD(both, lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            x = torch.randn(4, 32)
            y = policy(x)
            with torch.set_grad_enabled(trains):
                z = reference(x)
            (y - z).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "convert_like" in str(each.message)]


def two() -> tuple[Model, Model]:
    policy = Model()
    return policy, copy.deepcopy(policy)


def test_a_reference_without_recipes_is_told_once_and_computes_on() -> None:
    policy, reference = two()
    ng.convert(policy, "fp8-current")
    found = told(policy, reference)
    assert (
        len(found) == 1
        and "A second Model with the weights of the one that trains in recipe 'fp8-current'"
        in found[0]
    )
    assert not told(policy, reference) and not reference._forward_pre_hooks


def test_what_is_no_reference_is_not_told() -> None:
    policy, reference = two()
    ng.convert_like(ng.convert(policy, "fp8-current"), reference)
    assert not told(policy, reference)
    policy, other = ng.convert(Model(), "fp8-current"), Model()  # of other weights
    assert not told(policy, other)
    policy, twin = two()
    assert not told(ng.convert(policy, "fp8-current"), twin, trains=True)
    assert not twin._forward_pre_hooks


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-minmax-sr"])
def test_a_copy_of_the_converted_model_has_its_recipes(recipe: str) -> None:
    policy = ng.convert(Model(), recipe)
    assert not told(policy, copy.deepcopy(policy))


def test_a_copy_beside_a_model_that_is_counted_is_not_compared() -> None:
    """The search reads all of the process's models, and what is counted has no numbers."""

    def build() -> Step:
        wide = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        model = ng.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "fp8-current")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.zeros(4, 16)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)

        return Step(model, lambda: model(x).sum(), update, list, (x, wide))

    assert count(build, Device("cpu")).trace.allocations
