"""Layers with a recipe that no forward pass reaches: told where their weight is multiplied without them, and nowhere else."""

from __future__ import annotations

import copy
import io
import random
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.nn.bypassed_weights import PATIENCE, WATCHED
from tests.compare import assert_same
from tests.raising import require, with_code
from tests.selection import quick

WIDTH = 32
READS = {
    "F.linear": lambda x, layer: F.linear(x, layer.weight, layer.bias),
    "matmul": lambda x, layer: x @ layer.weight.T,
    "sum (SHiRA)": lambda x, layer: F.linear(x, layer.weight.clone() + 0.01),
    "product (HRA)": lambda x, layer: F.linear(x, torch.mm(layer.weight.data, torch.eye(WIDTH))),
    "cast": lambda x, layer: F.linear(x.double(), layer.weight.double()).float(),
    "einsum": lambda x, layer: torch.einsum("bi,oi->bo", x, layer.weight),
}
SKIPS = {
    "not at all": lambda x, layer: x,
    "norm of the weight": lambda x, layer: x + layer.weight.norm() * 0.01,
    "evaluation alone": lambda x, layer: x if torch.is_grad_enabled() else layer(x),
    "every other time": lambda x, layer: layer(x) if random.random() < 0.3 else x,
}


pytestmark = pytest.mark.usefixtures("nothing_was_compiled")


class Model(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.first(x), self.second)


def trained(model: nn.Module, steps: int, frozen: bool) -> list[str]:
    """What was warned of in so many steps."""
    random.seed(0)
    if frozen:
        model.second.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2
    )
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)
            with torch.no_grad():
                model(torch.randn(8, WIDTH))
    return with_code(told, "advance.bypassed")


@pytest.mark.parametrize("frozen", quick([False], [False, True]))
@pytest.mark.parametrize("how", READS)
def test_a_weight_that_is_multiplied_without_its_layer_is_told_once(how: str, frozen: bool) -> None:
    torch.manual_seed(0)
    plain = Model(READS[how])
    model = ng.convert(copy.deepcopy(plain), "fp8-delayed")
    twin = ng.convert(copy.deepcopy(plain), {"*": "fp8-delayed", "second": None})
    told = trained(model, 12, frozen)
    assert len(told) == 1
    values = "'second'", "fp8-delayed", "narrowgauge.convert(model, {'second': None})"
    require(told[0], "advance.bypassed", *values)
    marked = [row.name for row in ng.describe(model) if with_code(row.notes, "bypassed")]
    assert marked == ["second"]
    assert not trained(twin, 12, frozen)
    assert type(model.second.weight) is nn.Parameter
    assert_same(
        model.second.weight.detach(), twin.second.weight.detach()
    )  # watching changes no number
    assert_same(model.first.weight.detach(), twin.first.weight.detach())


@pytest.mark.parametrize("how", SKIPS)
def test_a_layer_that_is_skipped_for_good_reasons_is_not_told(how: str) -> None:
    torch.manual_seed(0)
    model = ng.convert(Model(SKIPS[how]), "fp8-current")
    assert not trained(model, 16, frozen=False)
    assert type(model.second.weight) is nn.Parameter


def test_nothing_is_told_of_suspended_layers_nor_before_there_is_evidence() -> None:
    model = ng.convert(Model(READS["F.linear"]), "fp8-current")
    assert not trained(model, PATIENCE, frozen=False)
    model.second.is_suspended = True
    assert not trained(model, 2 * WATCHED, frozen=False)


def test_nothing_is_told_of_a_recipe_that_casts_nothing() -> None:
    """`narrowgauge train` gives `bf16` to an output head whose weight the chunked loss multiplies."""
    model = ng.convert(Model(READS["F.linear"]), {"first": "fp8-current", "second": "bf16"})
    assert not trained(model, 12, frozen=False)


def test_while_it_is_watched_a_model_is_copied_and_saved_as_ever() -> None:
    model = ng.convert(Model(READS["F.linear"]), "fp8-current")
    trained(model, PATIENCE, frozen=True)
    assert type(model.second.weight) is not nn.Parameter
    assert type(copy.deepcopy(model).second.weight) is nn.Parameter
    file = io.BytesIO()
    torch.save([model.state_dict(), model.second.weight.data, model.second.weight + 0], file)
    file.seek(0)
    state, *others = torch.load(file, weights_only=True)
    assert type(model.state_dict()["second.weight"]) is Tensor
    assert all(type(each) is Tensor for each in (*state.values(), *others))
    expected = model.second.weight.detach().clone()
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert_same(other.second.weight.detach(), expected)
