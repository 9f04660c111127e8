"""What a recipe adds to a layer (amax windows, learned steps, readings): loaded, of another recipe, and in a loop without `advance`."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import narrowgauge as ng
from narrowgauge.qlinear import PATIENCE
from tests.compare import assert_same


@pytest.mark.parametrize("name", ["int4-hq-lss", "int4-lsq-luq", "fp8-delayed"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_of_an_unconverted_model_leaves_what_the_recipe_added(name: str, assign: bool) -> None:
    """Exact: converting first and loading then is loading first and converting then."""
    torch.manual_seed(0)
    saved = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 64))
    plain = saved.state_dict()
    converted = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 64)), name)
    with pytest.warns(
        UserWarning,
        match=f"has no (learned steps|amax).* for recipe '{name}': it was saved before the model was converted",
    ):
        assert not any(converted.load_state_dict(copy.deepcopy(plain), assign=assign))
    assert set(plain) < set(converted.state_dict())
    expected = ng.convert(saved, name)
    assert_same(converted.state_dict(), expected.state_dict())
    x = torch.randn(20, 64)
    assert_same(converted(x).detach(), expected(x).detach())
    trained = converted.state_dict()
    assert not any(converted.load_state_dict(trained))  # and of a converted one says nothing


def test_loading_stays_strict_where_something_would_be_lost() -> None:
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 48)), "int4-lsq-luq")
    whole = model.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.steps.w"'):
        model.load_state_dict({name: value for name, value in whole.items() if name != "0.steps.w"})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        model.load_state_dict({"0.bias": whole["0.bias"]})
    ordinary = torch.nn.Sequential(torch.nn.Linear(64, 48))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*steps"):
        ordinary.load_state_dict(whole)


@pytest.mark.parametrize("other", ["int4-hq-bs", "fp8-delayed", "int4-hq-lss"])
def test_a_state_of_another_recipe_is_refused_once_in_words(other: str) -> None:
    """int4-hq-lss has the steps of int4-lsq-luq and more: what is loaded lacks a part, and torch names it."""

    def model(recipe: str) -> torch.nn.Module:
        return ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 64)), recipe)

    whole, target = model("int4-lsq-luq").state_dict(), model(other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with pytest.raises(RuntimeError, match=r"Unexpected key|Missing key"):
            target.load_state_dict(whole)
    said = [str(each.message) for each in caught]
    if other == "int4-hq-lss":
        assert said == []
    else:
        [words] = said
        assert f"was saved with another recipe than '{other}', which has no place for learned steps" in words
        assert f"Convert the model as the one that was saved was, load, and convert again to '{other}'" in words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.load_state_dict(whole, strict=False)
    assert_same(target[0].weight.detach(), whole["0.weight"])


@pytest.mark.parametrize("name", ["int4-hq-lss", "int4-lsq-luq", "fp8-delayed"])
def test_a_training_loop_without_advance_is_told(name: str) -> None:
    """And one with many micro-batches, or evaluation, or `advance`, is left alone."""
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 48)), name)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(8, 64)

    def steps(count: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                model(x).square().mean().backward()
                optimizer.step()
        return [str(each.message) for each in caught]

    for _ in range(PATIENCE + 4):  # no optimizer step between them
        model(x).sum().backward()
    assert steps(PATIENCE) == []
    [words] = steps(10)
    assert "narrowgauge.advance was not called" in words and "Call narrowgauge.advance(model) after each" in words
    ng.advance(model)
    assert steps(PATIENCE) == []
    ng.advance(model)
    model.eval()
    assert steps(2 * PATIENCE) == []


def test_what_is_converted_in_inference_mode_can_be_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    with torch.inference_mode():
        ng.convert(model, "int4-hq-lss")
    model(torch.randn(8, 64)).square().mean().backward()
    ng.advance(model)
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())
