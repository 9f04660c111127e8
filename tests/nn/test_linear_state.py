"""Fields of a converted layer have one owner, `layer.state`: a new one needs no list (exact).

Each test plants a field that no code of the package names, in a subclass of LinearState.
"""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.nn import linear
from narrowgauge.nn.converted_state import ATTACHED, CACHE, SUBMODULES, ConvertedState
from narrowgauge.nn.linear_state import LinearState
from narrowgauge.snapshot import Scope, Snapshot, Training, undisturbed
from tests.compare import assert_same


@dataclass(eq=False, kw_only=True)
class PlantedState(LinearState):
    planted: int = 0
    planted_tensor: torch.Tensor | None = None
    planted_cache: int = field(default=0, metadata=CACHE)
    planted_owner: int = field(default=0, metadata=ATTACHED)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(linear, "LinearState", PlantedState)
    made = ng.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "fp8-delayed")
    for layer in made:
        layer.state.planted, layer.state.planted_tensor = 1, torch.ones(3)
        layer.state.planted_cache = layer.state.planted_owner = 1
    return made


def changed(model):
    for layer in model:
        layer.state.planted, layer.state.planted_later = 2, 3
        layer.state.planted_tensor += 1
        layer.state.planted_cache = layer.state.planted_owner = 2


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_of_the_model_has_a_planted_field(model, duplicate):
    twin = duplicate(model)
    changed(model)
    for layer in twin:
        assert layer.state.planted == 1
        assert_same(layer.state.planted_tensor, torch.ones(3))
        assert layer.state.planted_cache == layer.state.planted_owner == 0


def test_a_shallow_copy_of_a_layer_has_its_own_state(model):
    twin = copy.copy(model[0])
    model[0].state.planted = 2
    assert twin.state is not model[0].state and twin.state.planted == 1


@pytest.mark.parametrize("scope", [Scope.STEPS, Scope.PASS], ids=str)
def test_a_snapshot_restores_a_planted_field(model, scope):
    before = Snapshot.take(Training(model=model), scope)
    changed(model)
    before.restore()
    for layer in model:
        assert layer.state.planted == 1 and not hasattr(layer.state, "planted_later")
        assert_same(layer.state.planted_tensor, torch.ones(3))
        assert layer.state.planted_owner == 2


def test_two_swaps_leave_a_planted_field_as_it_was(model):
    before = Snapshot.take(Training(model=model))
    changed(model)
    before.swap()
    assert [layer.state.planted for layer in model] == [1, 1]
    before.swap()
    assert [layer.state.planted for layer in model] == [2, 2]
    assert_same([layer.state.planted_tensor for layer in model], [torch.full((3,), 2.0)] * 2)


def test_undisturbed_restores_a_planted_field(model):
    with undisturbed(model):
        changed(model)
    for layer in model:
        assert layer.state.planted == layer.state.planted_cache == 1
        assert_same(layer.state.planted_tensor, torch.ones(3))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss", "bf16"])
def test_nothing_stays_on_a_layer_that_is_no_longer_converted(recipe):
    plain = nn.Linear(32, 32)
    names = set(vars(plain))
    model = ng.convert(nn.Sequential(plain), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
    assert set(vars(plain)) == names | {"state"}
    ng.convert(model, None)
    assert type(plain) is nn.Linear and set(vars(plain)) == names
    assert not plain._modules.keys() & set(SUBMODULES)


def test_an_embedding_keeps_its_fields_in_its_state():
    table = nn.Embedding(16, 32)
    names = set(vars(table))
    model = ng.convert(nn.Sequential(table, nn.Linear(32, 32)), "int8", embeddings="int4")
    assert set(vars(table)) == names | {"state"} and isinstance(table.state, ConvertedState)
    assert str(copy.deepcopy(model)[0].format) == "int4"
    ng.convert(model, None)
    assert type(table) is nn.Embedding and set(vars(table)) == names


def test_a_copy_of_a_compiled_layer_has_weights_of_its_own() -> None:
    """`layer.compile()` binds the call to the layer; a copy that kept it would read the original."""
    layer = linear.QLinear(32, 32, recipe="fp8-current")
    layer.compile(backend="eager")
    own = copy.deepcopy(layer)
    assert own._compiled_call_impl is None
    rows = ng.convert(nn.Sequential(nn.Embedding(4, 32), layer), "bf16", embeddings="int8")[0]
    rows.compile(backend="eager")
    assert copy.deepcopy(rows)._compiled_call_impl is None
    with torch.no_grad():
        own.weight.zero_()
        own.bias.zero_()
        assert not own(torch.ones(1, 32)).any()
