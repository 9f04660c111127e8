"""Words that torch.optim knows: followed or refused in groups and saved states; and states that travel from and to torch (exact)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.optim import SGD, AdamW
from narrowgauge.optim.optimizers import OPTIMIZERS
from tests.compare import assert_same
from tests.raising import raises

OURS: dict[type, set[str]] = {
    each: set(inspect.signature(each).parameters) for each in OPTIMIZERS.values()
}
THEIRS = {
    name: parameter.default
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
    for name, parameter in inspect.signature(kind).parameters.items()
    if name not in ("params", "self", "args", "kwargs")
}


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))


def asked(default: Any) -> list[Any]:
    """Values that ask for something."""
    if isinstance(default, bool) or default is None:
        return [True]
    return [0.25] if isinstance(default, int | float) else [default or 1.0]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("word", sorted(THEIRS))
def test_every_word_of_torchs_optimizers_is_followed_or_refused(kind, word):
    """In a group as the keyword is; but decoupled weight decay, which AdamW and Lion have."""
    for value in asked(THEIRS[word]):
        if word in OURS[kind] or word == "decoupled_weight_decay":
            continue
        with pytest.raises(TypeError, match="unexpected keyword"):
            kind([matrix()], **{word: value})
        for add in (
            lambda value=value: kind([{"params": [matrix()], word: value}]),
            lambda value=value: kind([matrix()]).add_param_group(
                {"params": [matrix()], word: value}
            ),
        ):
            with pytest.raises(ConfigError, match=f"a group has '?{word}") as caught:
                add()
            assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "word", ["maximize", "amsgrad", "foreach", "fused", "capturable", "differentiable"]
)
def test_a_word_that_asks_for_nothing_is_taken(word):
    """As in the groups of a state that torch saved."""
    for nothing in (False, None):
        AdamW([{"params": [matrix()], word: nothing, "name": "a label", "layer": 3}])


@pytest.mark.parametrize("word", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_a_state_saved_with_such_a_word_is_refused(word):
    saved = torch.optim.AdamW([matrix()], **{word: True}).state_dict()
    with raises(CheckpointError, "optim.state", word):
        AdamW([matrix()]).load_state_dict(saved)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"states": "9bit"},
        {"backend": "no"},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_a_value_error_too(wrong):
    with pytest.raises(ConfigError) as caught:
        AdamW([matrix()], **wrong)
    assert isinstance(caught.value, ValueError)


def stepped(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, first: int, last: int
) -> None:
    for step in range(first, last):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("from_ours", [True, False])
def test_a_state_travels_between_torchs_optimizer_and_ours(ours, theirs, from_ours):
    """Three steps of one, three of the other: within float32 of six steps of torch's."""
    options = {"lr": 0.1, "momentum": 0.9} if ours is SGD else {"lr": 0.1}
    parameter, truth = matrix(), matrix()
    first, second = (ours, theirs) if from_ours else (theirs, ours)
    one = first([parameter], **options)
    stepped(one, parameter, 0, 3)
    other = second([parameter], **options)
    other.load_state_dict(one.state_dict())
    stepped(other, parameter, 3, 6)
    stepped(theirs([truth], **options), truth, 0, 6)
    torch.testing.assert_close(parameter.detach(), truth.detach(), rtol=1e-5, atol=1e-6)


def test_torchs_sgd_without_a_momentum_buffer_loads():
    parameter = matrix()
    plain = torch.optim.SGD([parameter], lr=0.1)
    stepped(plain, parameter, 0, 1)
    SGD([parameter], lr=0.1).load_state_dict(plain.state_dict())


def test_a_step_count_that_is_a_number_is_taken():
    found = []
    for number in (True, False):
        parameter = matrix()
        optimizer = AdamW([parameter])
        stepped(optimizer, parameter, 0, 2)
        saved = optimizer.state_dict()
        if number:
            saved["state"][0]["step"] = 2
        again = AdamW([parameter])
        again.load_state_dict(saved)
        stepped(again, parameter, 2, 3)
        found.append((parameter.detach(), again.state_dict()["state"]))
    assert_same(*found)
