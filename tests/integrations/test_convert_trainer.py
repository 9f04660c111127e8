"""convert_trainer (exact): both models of a trainer compute the same bits, or neither was touched."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from tests.compare import assert_same
from tests.raising import raises

pytest.importorskip("transformers")  # of whose Trainer the package has a callback

from narrowgauge.integrations import convert_trainer


def trainer(reference=True, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    other = copy.deepcopy(model).eval().requires_grad_(False) if reference else None
    return SimpleNamespace(model=model, ref_model=other, args=SimpleNamespace(**arguments))


def is_plain(model):
    return not any(isinstance(layer, QLinear) for layer in model.modules())


@pytest.mark.parametrize("recipe", ["fp8-delayed", {"*": "nvfp4", "0": None}], ids=str)
def test_the_reference_follows_and_is_restored(recipe):
    given, x = trainer(), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    wide = given.ref_model(x)
    assert convert_trainer(given, recipe) is given
    assert_same(given.model(x).detach(), given.ref_model(x))
    assert not torch.equal(given.ref_model(x), wide)
    assert not any(each.requires_grad for each in given.ref_model.parameters())
    convert_trainer(given, None)
    assert is_plain(given.model) and is_plain(given.ref_model)
    assert_same(given.ref_model(x), wide)


def test_a_trainer_without_a_reference_and_a_wrapped_one():
    alone = trainer(reference=False)
    convert_trainer(alone, "fp8-current")
    assert not is_plain(alone.model)
    bare = SimpleNamespace(model=trainer().model)  # of another library, without args
    assert not is_plain(convert_trainer(bare, "fp8-current").model)
    wrapped = trainer()
    inner, wrapped.ref_model = wrapped.ref_model, nn.Sequential(wrapped.ref_model)
    wrapped.accelerator = SimpleNamespace(
        unwrap_model=lambda model: inner if model is wrapped.ref_model else model
    )
    convert_trainer(wrapped, "fp8-current")
    assert not is_plain(inner)


def test_what_is_refused_leaves_both_models_as_they_were():
    with raises(ConfigError, "convert-trainer.no-model", "SimpleNamespace"):
        convert_trainer(SimpleNamespace(args=None), "fp8-current")
    computed = trainer(precompute_ref_log_probs=True)
    with raises(ConfigError, "convert-trainer.precomputed", "disable_caching"):
        convert_trainer(computed, "fp8-current")
    convert_trainer(computed, None)
    another = trainer()
    another.ref_model[0] = nn.Linear(32, 64, bias=False)
    another.ref_model[2] = nn.Linear(64, 16)
    with raises(ConfigError, "convert-like.shape"):
        convert_trainer(another, "fp8-current")
    for each in (computed, another):
        assert is_plain(each.model) and is_plain(each.ref_model)
    ng.convert(another.model, "int8")
    with raises(ConfigError, "convert-like.shape"):
        convert_trainer(another, "int8")
    assert not is_plain(another.model)  # converted by its owner, and left so
