"""Segments of blocks: inputs kept and calls made, counted; gradients as without checkpointing to the last bit (exact)."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.memory import checkpoint, compile_blocks, compress_activations, freeze, saved_bytes
from narrowgauge.memory.segments import equal_lengths, most_inputs, sqrt_lengths
from narrowgauge.ops.registry import Device
from narrowgauge.plan import Step, count
from tests.compare import assert_same
from tests.memory.models import batch, llama, step
from tests.raising import raises, with_code
from tests.selection import quick

HOPPER = Device("cuda", (9, 0), cuda=(12, 9))
INPUTS = {**batch(), "use_cache": False}


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.calls = 0

    def forward(self, x, scale=None):
        self.calls += 1
        y = self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.2))
        return x + (y if scale is None else y * scale)


def blocks(number):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(number)))


def gradients(model, compute=None, x=None):
    """Of a loss of the model's output and of the input."""
    x = torch.linspace(-1, 1, 128).view(8, 16) if x is None else x
    x.requires_grad_()
    x.grad = None
    model.zero_grad()
    torch.manual_seed(2)
    (compute or model)(x).square().sum().backward()
    return [x.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]


def test_lengths_are_the_shortest_that_hold_them():
    for number in range(1, 200):
        lengths = sqrt_lengths(number)
        most = most_inputs(lengths)
        assert sum(lengths) == number and most * (most + 1) // 2 >= number > most * (most - 1) // 2
        assert most <= min(
            most_inputs(equal_lengths(number, length)) for length in range(1, number + 1)
        )
    assert (
        sqrt_lengths(31) == [8, 7, 6, 5, 4, 1]
        and equal_lengths(11, 4) == [4, 4, 3]
        and sqrt_lengths(0) == []
    )


def inputs_at_the_peak(policy, number, keep_last=False):
    """Inputs of blocks that are there at the largest moment of a step, counted; weights are small beside them."""
    rows, width = 2**17, 16

    def build():
        model = blocks(number)
        checkpoint(model, policy, keep_last=keep_last)
        x = torch.zeros(rows, width)
        return Step(model, lambda: model(x).square().mean(), model.zero_grad, list, x)

    found = count(build, HOPPER)
    return found.peak(found.second)[0] / (rows * width * 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [(4, 16), pytest.param((4, 8, 16, 32, 64), marks=pytest.mark.slow)],
    ids=["4 and 16", "4 to 64"],
)
def test_memory_grows_with_the_square_root(numbers):
    """By the whole step, allocation by allocation: the inputs of `most_inputs` and, whatever the depth, one block at work."""
    block = inputs_at_the_peak("full", numbers[0]) - numbers[0]
    kept = {number: inputs_at_the_peak("sqrt", number) - block for number in numbers}
    assert {number: round(found) for number, found in kept.items()} == {
        number: most_inputs(sqrt_lengths(number)) for number in numbers
    }
    assert inputs_at_the_peak("full", numbers[-1]) - block == pytest.approx(numbers[-1], rel=0.02)
    x, y = ([math.log(each) for each in side] for side in (kept.keys(), kept.values()))
    mean = sum(x) / len(x), sum(y) / len(y)
    exponent = sum((a - mean[0]) * (b - mean[1]) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean[0]) ** 2 for a in x
    )
    assert 0.4 < exponent < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("number", [12, pytest.param(32, marks=pytest.mark.slow)])
def test_every_4_keeps_less_than_every_2_and_sqrt_no_more(number):
    peaks = {
        policy: inputs_at_the_peak(policy, number, True)
        for policy in ("full", "every-2", "every-4", "sqrt")
    }
    little = 0.2  # gradients of weights that are there or not, in inputs of a block
    assert peaks["sqrt"] <= peaks["every-4"] + little
    assert peaks["every-4"] < peaks["every-2"] - 1 < peaks["full"] - 2
    model, kept = blocks(number), {}
    for policy in peaks:
        checkpoint(model, policy)
        kept[policy] = saved_bytes(model, torch.randn(64, 16)).total
    assert kept["every-4"] < kept["every-2"] < kept["full"]


@pytest.mark.parametrize("policy", ["full", "every-2", "sqrt"])
def test_calls_are_those_that_the_report_counts(policy):
    model = blocks(7)
    expected, calls = gradients(model), 7
    assert [block.calls for block in model] == [1] * 7
    report = checkpoint(model, policy, keep_last=False)
    for block in model:
        block.calls = 0
    assert_same(gradients(model), expected)
    assert sum(block.calls for block in model) == calls + report.extra_forwards
    assert [block.calls for block in model] == {
        "full": [2] * 7, "every-2": [3, 2, 3, 2, 3, 2, 2], "sqrt": [3, 3, 3, 2, 3, 3, 2],
    }[policy]  # fmt: skip
    if policy == "sqrt":
        assert (
            "7 of 7 blocks are computed again in backward, 5 of them twice, in 2 segments of 4, 3 blocks"
            in str(report)
        )


@pytest.mark.parametrize("name", quick(["fp8-delayed"], list(ng.recipes.names())))
def test_every_recipe_learns_the_same(name):
    """Three steps: losses, weights, amax windows, learned steps and readings of samplers."""
    found = []
    for policy in (None, "sqrt", "selective"):
        model = ng.convert(llama(num_hidden_layers=5, attention_dropout=0.1), name)
        checkpoint(model, policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(step(model)[0])
            optimizer.step()
            ng.advance(model)
        found.append((losses, {key: value.clone() for key, value in model.state_dict().items()}))
    assert_same(found[1:], found[:1] * 2)


class Stack(nn.Module):
    """Blocks between which something happens, or that are given another tensor that is learned."""

    def __init__(self, between=None, scaled=False):
        super().__init__()
        self.blocks, self.between = blocks(5), between
        self.scale = nn.Parameter(torch.ones(16)) if scaled else None

    def forward(self, x):
        scale = None if self.scale is None else self.scale * 2.0
        for number, block in enumerate(self.blocks):
            x = block(x, scale=scale)
            if number == 1 and self.between:
                x = self.between(x)
        return x


def test_what_every_block_is_given_is_kept_once():
    model = Stack(scaled=True)
    expected = gradients(model)
    checkpoint(model, "sqrt")
    assert_same(gradients(model), expected)


@pytest.mark.parametrize(
    "between", [lambda x: x * 0.5, lambda x: x.mul_(0.5)], ids=["another", "in place"]
)
def test_a_changed_input_is_kept_and_said(between):
    model = Stack(between)
    expected = gradients(model)
    checkpoint(model, "sqrt", keep_last=False)
    with pytest.warns(
        UserWarning,
        match="the input of blocks.2 is not what the block before it returned, so it is kept",
    ):
        found = gradients(model)
    assert_same(found, expected)
    assert_same(gradients(model), expected)  # said once


def test_a_graph_that_is_kept_goes_back_twice():
    model = blocks(5)
    checkpoint(model, "sqrt")
    torch.manual_seed(2)
    loss = model(torch.randn(8, 16)).square().sum()
    found = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)
    ]
    assert_same(found[0], found[1])


def test_two_passes_at_once_are_told_apart():
    """As micro-batches of a pipeline are: both forward passes, then both backward ones."""
    model = blocks(6)
    inputs = [torch.randn(8, 16) for _ in range(2)]
    found = []
    for policy in (None, "sqrt"):
        checkpoint(model, policy)
        torch.manual_seed(1)
        losses = [model(x).square().sum() for x in inputs]
        found.append([torch.autograd.grad(loss, list(model.parameters())) for loss in losses])
    assert_same(found[1], found[0])


def test_graphs_go_when_backward_has_ended():
    model = blocks(6)
    checkpoint(model, "sqrt")
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            x = torch.randn(8, 16).requires_grad_()
            y = model(x * 1.0)
            calls = [
                weakref.ref(block.forward.recompute.args[0].last()) for block in list(model)[:5]
            ]
            if backward:
                y.sum().backward()
            del y
            assert [call() for call in calls] == [None] * 5
    finally:
        gc.enable()


def test_frozen_blocks_are_in_no_segment():
    model = llama(num_hidden_layers=8)
    freeze(model, "embed*,layers.0-2")
    expected = step(model)
    report = checkpoint(model, "sqrt", keep_last=False)
    assert report.segments == (3, 2) and with_code(report.notes, "checkpointing.below")
    assert_same(step(model), expected)


def test_compressed_inputs_of_segments():
    """A segment's input is kept as codes alone; the other blocks of it begin with what those decode to."""
    model = llama(num_hidden_layers=6)
    checkpoint(model, "sqrt")
    exact = saved_bytes(model, INPUTS).total
    loss = step(model)[0]
    compress_activations(model)
    narrow = saved_bytes(model, INPUTS).total
    residual = 4 * 32 * 32 * 4
    assert exact - narrow > 2 * residual * 0.7  # two segments
    again, found = step(model)
    assert_same(again, loss)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


@pytest.mark.slow
def test_the_optimizer_in_backward():
    """A segment's blocks run again before their weights are stepped."""
    found = []
    for policy in (None, "sqrt"):
        model = ng.convert(llama(num_hidden_layers=6), "fp8-delayed")
        checkpoint(model, policy)
        optimizer = ng.optim.AdamW(model, lr=1e-2, states="8bit")
        ng.optim.in_backward(optimizer)
        losses = []
        for _ in range(3):
            losses.append(step(model)[0])
            ng.advance(model)
        found.append((losses, model.state_dict()))
    assert_same(found[1], found[0])


def test_an_encoder_and_a_decoder():
    """Blocks of T5 return a bias for the next one beside the hidden state; those of the decoder are given the encoder's."""
    sizes = {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 5,
        "num_heads": 2,
        "vocab_size": 64,
    }
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    ).train()
    ids, found = batch()["input_ids"], []
    for policy in (None, "sqrt"):
        report = checkpoint(model, policy)
        torch.manual_seed(1)
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert_same(found[1], found[0])
    assert report.segments == (
        3,
        2,
        3,
        1,
    )  # of the encoder, and of the decoder without its last block


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo asks for it itself
def test_compiled_blocks():
    """Each block is compiled by itself; what compiles the whole model leaves them alone, and says where nobody compiled them."""
    model = blocks(3)
    compile_blocks(model, backend="aot_eager")
    expected = gradients(model)
    checkpoint(model, "sqrt")
    assert_same(gradients(model), expected)
    assert_same(gradients(model, torch.compile(model, backend="aot_eager")), expected)
    eager = blocks(3)
    checkpoint(eager, "sqrt")
    with raises(ConfigError, "checkpointing.compiled", "compile_blocks"):
        gradients(eager, torch.compile(eager, backend="aot_eager"))
    compile_blocks(eager, backend="aot_eager")
    assert_same(gradients(eager), expected)
