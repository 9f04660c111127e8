"""What a checkpoint holds of a run, put back bit for bit or refused (exact)."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from narrowgauge import advance, convert
from narrowgauge.errors import CheckpointError
from narrowgauge.train.checkpoint import state
from tests.compare import assert_same
from tests.raising import raises


def made(recipe="fp8-delayed", width=32, dtype=torch.float32):
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(width, 32), nn.Linear(32, 32)), recipe).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, model[0].in_features, generator=generator)
        model(x.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        advance(model)


def through_json(tensors, rest):
    return {
        g: {n: t.clone() for n, t in members.items()} for g, members in tensors.items()
    }, json.loads(json.dumps(rest))


@pytest.mark.parametrize(
    "tree",
    [
        {}, [], (), None, 3, "text", 0.1, True,
        {0: {"step": torch.tensor(3.0)}, "betas": (0.9, 0.95), "groups": [{"lr": 1e-3, "params": [0, 1]}]},
        {"a": [torch.ones(2), (torch.zeros(()), [None, {"b": torch.arange(3)}])]},
        {"list": {"tensor": "no tensor", "value": [1]}, "items": {}},
    ],
    ids=lambda tree: str(tree)[:20],
)  # fmt: skip
def test_flatten_and_back(tree):
    tensors, rest = state.flatten(tree)
    assert_same(state.unflatten(json.loads(json.dumps(rest)), tensors), tree)


def test_flatten_gives_every_tensor_a_name_of_its_own():
    tree = {"a": {"b": torch.zeros(1), 0: torch.ones(1)}, "c": [torch.full((1,), 2.0)]}
    tensors, _ = state.flatten(tree)
    assert {name: float(value) for name, value in tensors.items()} == {"a.b": 0, "a.0": 1, "c.0": 2}


def test_restored_state_goes_on_as_if_it_had_never_stopped():
    model, optimizer = made()
    train(model, optimizer, 3)
    saved = through_json(*state.collect(model, optimizer, None))
    train(model, optimizer, 2, seed=2)
    fresh, fresh_optimizer = made()
    state.restore(fresh, fresh_optimizer, None, *saved, "here")
    train(fresh, fresh_optimizer, 2, seed=2)
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(
        state.flatten(fresh_optimizer.state_dict())[0], state.flatten(optimizer.state_dict())[0]
    )


def test_groups_hold_what_their_names_say():
    model, optimizer = made()
    train(model, optimizer, 1)
    tensors, _ = state.collect(model, optimizer, None)
    assert list(tensors["weights"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(tensors["scaling"]) == 2 * 3 * 3 and all(
        ".scaling." in name for name in tensors["scaling"]
    )
    assert "rng" in tensors and "torch" in tensors["rng"]


def test_generators_come_back():
    model, optimizer = made("bf16")
    saved = through_json(*state.collect(model, optimizer, None))
    drawn = (
        torch.rand(3),
        np.random.rand(3),
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
    )
    np.random.randn()  # leaves half of a pair in numpy's generator
    state.restore(model, optimizer, None, *saved, "here")
    assert_same(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])
    assert [random.random() for _ in range(3)] == drawn[2]
    assert random.gauss(0, 1) == drawn[3]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"width": 48}, "0.weight is float32 [32, 32], here float32 [32, 48]"),
        ({"recipe": "bf16"}, "0.scaling"),
        ({"dtype": torch.bfloat16}, "0.weight is float32 [32, 32], here bfloat16 [32, 32]"),
    ],
    ids=["shape", "recipe", "dtype"],
)
def test_another_model_is_refused_before_anything_changes(other, words):
    model, optimizer = made()
    train(model, optimizer, 1)
    saved = through_json(*state.collect(model, optimizer, None))
    receiver, its_optimizer = made(**other)
    train(receiver, its_optimizer, 1)
    before = {name: tensor.clone() for name, tensor in receiver.state_dict().items()}
    generator = torch.get_rng_state()
    with raises(CheckpointError, "checkpoint.other-model", words):
        state.restore(receiver, its_optimizer, None, *saved, "here")
    assert_same(receiver.state_dict(), before)
    assert_same(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    ("count", "words"), [(3, "c is missing. Resume"), (4, "c is missing; and 1 more. Resume")]
)
def test_three_differences_are_named_and_the_others_counted(count, words):
    own = {name: torch.zeros(1) for name in "abcd"[:count]}
    with pytest.raises(CheckpointError, match=re.escape(f"a is missing; b is missing; {words}")):
        state.refuse_other_model(own, {}, "here")


def test_a_plain_checkpoint_lacks_the_windows():
    model, optimizer = made("fp8-current")
    saved = through_json(*state.collect(model, optimizer, None))
    delayed, its_optimizer = made("fp8-delayed")
    with raises(CheckpointError, "checkpoint.other-model", "15"):
        state.restore(delayed, its_optimizer, None, *saved, "here")


def test_second_moments_of_8_bit_floats_are_looked_at():
    """torch has no minimum of them."""
    squares = torch.tensor([0.0, 2.0, 448.0]).to(torch.float8_e4m3fn)
    assert list(state._impossible_tensors({"state.0.exp_avg_sq": squares})) == []
    squares[1] = -2.0
    assert list(state._impossible_tensors({"state.0.exp_avg_sq": squares})) == [
        "state.0.exp_avg_sq holds -2, and is never negative"
    ]


@pytest.mark.parametrize(
    ("scale", "fits"), [(2.0**-149, True), (2.0**127, True), (2.0**128, False), (0.0, False)]
)
def test_the_scale_of_a_loss_scaler_is_a_number_of_float32(scale, fits):
    own = torch.amp.GradScaler("cpu").state_dict()
    assert (list(state._impossible_scaler(own, {**own, "scale": scale})) == []) is fits
