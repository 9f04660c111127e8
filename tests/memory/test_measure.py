"""Counting what forward keeps (exact): one storage once, parameters never, nothing disturbed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.memory import freeze, saved_bytes
from tests.compare import assert_same
from tests.memory.models import batch, llama
from tests.raising import coded, raises


class Twice(nn.Module):
    """Two operations that save the same tensor, and one that saves a view of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(100, 8))

    def forward(self, x):
        y = x * 2.0
        return (
            (y @ self.weight).sum()
            + (y.view(-1) ** 2 * self.weight.sum()).sum()
            + (self.table * self.weight[0]).sum()
        )


def test_a_storage_counts_once_and_parameters_do_not():
    saved = saved_bytes(Twice(), torch.randn(100, 8))
    # y once (matmul and its square's input share it), y^2 [800] as the factor of weight.sum(); sums are scalars.
    scalars = 64
    assert 2 * 800 * 4 <= saved.total <= 2 * 800 * 4 + scalars
    assert set(saved.by_module) == {""}


def test_modules_and_their_sum():
    saved = saved_bytes(llama(), {**batch(), "use_cache": False})
    assert (
        saved.total
        == sum(saved.by_module.values())
        == saved.below("model") + saved.below("lm_head")
    )
    tokens, hidden, intermediate = 4 * 32, 32, 48
    # Input of gate and up; gate, silu(gate), up, their product.
    assert saved.below("model.layers.1.mlp") == 4 * tokens * (hidden + 4 * intermediate)
    assert str(saved).splitlines()[-1].startswith("all")


def test_the_loss_counts_if_given():
    model, inputs = llama(), {**batch(), "use_cache": False}
    plain = saved_bytes(model, inputs).total
    logits = 4 * 32 * 64 * 4
    with_loss = saved_bytes(
        model, inputs, lambda output: output.logits.log_softmax(-1).square().sum()
    ).total
    assert with_loss - plain == logits  # log_softmax and square keep one and the same result


def test_nothing_is_disturbed():
    model = llama(attention_dropout=0.1)
    ng.convert(model, "fp8-delayed")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    saved_bytes(model, {**batch(), "use_cache": False})
    assert_same(torch.rand(4), expected)
    assert_same(dict(model.state_dict()), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_without_a_gradient_there_is_nothing_to_count():
    model = nn.Linear(4, 4)
    model.requires_grad_(False)
    with raises(ConfigError, "saved-bytes.no-gradient", "Linear"):
        saved_bytes(model, torch.randn(2, 4))


def test_a_frozen_model_below_counts_from_the_first_trainable_layer():
    model = llama()
    whole = saved_bytes(model, {**batch(), "use_cache": False}).total
    freeze(model, "embed*,layers.0-2")
    assert saved_bytes(model, {**batch(), "use_cache": False}).total < whole / 3


def test_codes_of_weights_count_before_the_first_step_too():
    """A run measures a budget before its first `advance`; from there on its layers keep them."""
    model = ng.convert(llama(), "fp8-row", weight_codes="step")
    inputs = {**batch(), "use_cache": False}
    before = saved_bytes(model, inputs).total
    assert not any(
        layer.cached_casts() for layer in model.modules() if isinstance(layer, ng.QLinear)
    )
    ng.advance(model)
    assert saved_bytes(model, inputs).total == before
    weights = sum(
        layer.weight.numel()
        for layer in model.modules()
        if isinstance(layer, ng.QLinear) and layer.recipe
    )
    recast = ng.convert(llama(), "fp8-row", weight_codes="recast")
    assert before - saved_bytes(recast, inputs).total >= weights


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: ng.memory.checkpoint(model, 3.5), coded("checkpointing.policy", "3.5")),
        (lambda model: ng.memory.checkpoint(model, "full", blocks=3), coded("blocks.names", "= 3")),
        (
            lambda model: ng.memory.checkpoint(model, "full", blocks=[]),
            coded("blocks.names", "= []"),
        ),
        (
            lambda model: ng.memory.freeze(model, None),
            coded("pattern.not-a-string", "freeze", "None"),
        ),
        (
            lambda model: ng.memory.freeze(model, ["model", 3]),
            coded("pattern.not-a-string", "freeze: 3"),
        ),
        (
            lambda model: ng.memory.compress_activations(model, 5),
            coded("compression.arguments", "= 5"),
        ),
        (
            lambda model: ng.memory.compress_activations(model, smallest="a"),
            coded("compression.arguments", "smallest = 'a'"),
        ),
    ],
)
def test_arguments_of_other_types_are_refused_in_words(call, words):
    with raises(ConfigError, words):
        call(llama())


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss"])
@pytest.mark.parametrize("place", ["before", "between passes"])
def test_counting_in_the_middle_of_training_changes_no_number(recipe, place):
    """The cast of a weight that counting makes is not what the next pass finds: that pass would show its window nothing."""
    found = []
    for counts in (False, True):
        torch.manual_seed(0)
        model = ng.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            for micro in range(2):
                if counts and step == 3 and micro == (place == "between passes"):
                    saved_bytes(model, x)
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.state_dict())
    assert_same(*found)


@pytest.mark.parametrize("way", ["counted", "compressed"])
def test_a_forward_pass_without_backward_holds_nothing(way):
    """An operation that saves its own result is not to hold itself through a hook."""
    model, passed = (
        nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(2)]),
        [],
    )
    for block in model:
        block[1].register_forward_hook(
            lambda module, given, output: passed.append(weakref.ref(output))
        )
    x = torch.randn(48, 64)
    if way == "counted":
        saved_bytes(model, x)
    else:
        ng.memory.compress_activations(model, smallest=10**9)
        model(x)
    gc.collect()
    assert len(passed) == 2 and all(each() is None for each in passed)
