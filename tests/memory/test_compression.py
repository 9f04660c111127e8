"""Saved activations as codes: forward and what must be exact (exact), error and gradients (bounded)."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.memory import (
    checkpoint,
    compress_activations,
    find_blocks,
    offload,
    offloading,
    saved_bytes,
)
from narrowgauge.memory.blocks import set_technique
from narrowgauge.recipe import Cast, DelayedScaling
from tests.compare import assert_same, assert_sqnr
from tests.memory.models import batch, llama, step
from tests.raising import raises
from tests.selection import quick

INPUTS = {**batch(), "use_cache": False}
# E4M3 rounds to nearest with 4 bits of significand: each normal element is off by at most 2^-4 of itself, uniformly within
# its step on average: error^2 / x^2 = 2^-8 * E[1/12 * 1/m^2 * 4] with m in [1, 2): about 31.5 dB; gradients add several such
# independent errors. 20 dB is the floor of ten of them at their worst phase.
FLOOR_DB = 20.0


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


class Gate(nn.Module):
    """Norm, SwiGLU, GELU and a residual: what a block is made of, with an attention that keeps its own."""

    def __init__(self, width=128):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x):
        y = self.norm(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y)) * self.mask
        return x + F.gelu(y)


@pytest.fixture
def gates():
    return nn.Sequential(*[Gate() for _ in range(2)])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("attention", quick(["sdpa"], ["sdpa", "eager"]))
@pytest.mark.parametrize("recipe", [None, "fp8-row"])
def test_forward_is_exact_and_gradients_are_near(dtype, attention, recipe):
    model = llama(attn_implementation=attention)
    if recipe:
        ng.convert(model, recipe)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss, gradients = step(model)
        expected, whole = flat(gradients).clone(), saved_bytes(model, INPUTS).total
        compression = compress_activations(model, smallest=256)
        again_loss, again = step(model)
        first = flat(again).clone()
        counted = copy.copy(compression)
        assert saved_bytes(model, INPUTS).total < 0.6 * whole
        assert_same(flat(step(model)[1]), first)  # nothing is random
    assert_same(again_loss, loss)
    assert_sqnr(first, expected, FLOOR_DB)
    assert counted.tensors and counted.stored_bytes < 0.55 * counted.original_bytes
    compress_activations(model, None)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_every_activation_of_a_gate_is_a_byte_per_element(gates):
    x = torch.randn(64, 128, requires_grad=True)
    compress_activations(gates, smallest=1024)
    saved = saved_bytes(gates, x)
    # norm in, norm out, gate, silu(gate), up, their product, and what gelu reads: y * mask; nothing else is large.
    encoded = 7 * (64 * 128 + 4 * 64)
    statistics = 2 * 64 * 4
    assert [saved.below(name) for name in find_blocks(gates)] == [encoded + statistics] * 2


def test_the_error_of_an_element_is_bounded():
    """x' of every kept element: within 2^-4 of x, or half of the smallest step, 2^-10, times its group's scale."""
    x = torch.randn(32, 256) * torch.logspace(-6, 3, 32)[:, None]
    x[3], x[5, :200], x[7, 0] = 0.0, 0.0, 1e20
    x.requires_grad_()
    weight = nn.Parameter(torch.randn(8, 256))
    block = Product(weight)
    compress_activations(block, smallest=16, blocks="inner")
    block(x).sum().backward()
    kept = weight.grad[0]  # sum over rows of x', since the gradient of each output is 1
    scale = 2.0 ** torch.ceil(
        torch.log2(x.detach().view(32, 2, 128).abs().amax(-1, keepdim=True) / 448)
    )
    bound = torch.maximum(
        x.detach().abs() * 2**-4, (scale * 2**-10).expand(32, 2, 128).reshape(32, 256)
    )
    assert bool(((kept - x.detach().sum(0)).abs() <= bound.sum(0) * (1 + 1e-6)).all())


def test_groups_run_along_rows_that_no_whole_number_of_groups_covers():
    """Exact: a row of 200 has two groups of 128, the second in part, and 8 rows are no 1,600 / 128."""
    block = Product(nn.Parameter(torch.randn(4, 200)))
    compression = compress_activations(block, smallest=16, blocks="inner")
    block(torch.randn(8, 200, requires_grad=True)).sum().backward()
    assert compression.tensors == 1
    assert compression.stored_bytes == 8 * 200 + 8 * 2 * 4


class Product(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = weight
        self.inner.forward = lambda x: F.linear(x, weight)

    def forward(self, x):
        return self.inner(x)


def test_parameters_masks_and_small_tensors_are_never_encoded(gates):
    compression = compress_activations(gates, smallest=10**6)
    x = torch.randn(64, 128, requires_grad=True)
    gates(x).sum().backward()
    assert compression.tensors == 0
    compress_activations(gates, smallest=16)
    exact = gates(x.detach().requires_grad_())
    weights = {parameter.untyped_storage()._cdata for parameter in gates.parameters()}
    seen = []
    node_tensors(exact.grad_fn, seen)
    found = {tensor.untyped_storage()._cdata for tensor in seen}
    assert weights & found, "weights are saved as they are"


def node_tensors(node, seen):
    for name in dir(node):
        if name.startswith("_saved_") and isinstance(value := getattr(node, name), torch.Tensor):
            seen.append(value)
    for following, _ in node.next_functions:
        if following is not None:
            node_tensors(following, seen)


def test_a_tensor_of_several_operations_is_encoded_once(gates):
    compression = compress_activations(gates, smallest=1024)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gates(torch.randn(64, 128, requires_grad=True)).sum().backward()
        # As in float32: gate and up read one cast of y, although autocast makes two.
        assert compression.tensors == 2 * 7
    compression.reset()
    assert compression.tensors == compression.stored_bytes == 0


def test_codes_go_with_the_graph(gates):
    compress_activations(gates, smallest=1024)
    out = gates(torch.randn(64, 128, requires_grad=True))
    gc.collect()
    held = sum(type(each) is ng.QTensor for each in gc.get_objects())
    out.sum().backward()
    del out
    gc.collect()
    assert held >= 14 and sum(type(each) is ng.QTensor for each in gc.get_objects()) == held - 14


def test_with_checkpointing_the_input_of_the_block_is_encoded():
    model = llama()
    _, gradients = step(model)
    expected = flat(gradients).clone()
    checkpoint(model, "full", keep_last=False)
    compression = compress_activations(model, smallest=256)
    _, again = step(model)
    assert compression.tensors == 4
    assert_sqnr(flat(again), expected, FLOOR_DB)


def test_copies_and_pickles_work(gates):
    compress_activations(gates, smallest=1024)
    x = torch.randn(64, 128, requires_grad=True)
    for other in (copy.deepcopy(gates), pickle.loads(pickle.dumps(gates))):
        assert other[0].forward.block is other[0]
        assert saved_bytes(other, x).total == saved_bytes(gates, x).total


def test_a_poisoned_activation_stays_visible(gates):
    compress_activations(gates, smallest=1024)
    x = torch.randn(64, 128)
    x[0, 0] = torch.nan
    gates(x).sum().backward()
    assert all(parameter.grad.isnan().any() for parameter in gates.parameters())


def test_bad_requests_are_refused_in_words(gates):
    e4m3 = ng.formats.E4M3
    for cast in (
        Cast(format=e4m3, rounding="stochastic"),
        Cast(format=e4m3, calibrate=DelayedScaling(length=4)),
    ):
        with raises(ConfigError, "compression.cast"):
            compress_activations(gates, cast)
    with raises(ConfigError, "compression.group", "= 0"):
        compress_activations(gates, group=0)
    with raises(ConfigError, "offload.device", "0.norm.weight", "cpu"):
        offload(gates)
    compress_activations(gates)
    with raises(ConfigError, "saved-tensors.twice", "compress_activations"):
        offload(gates)


def test_offload_moves_each_activation_once_and_no_parameter(monkeypatch):
    """Exact, with a stand-in for the copy: as torch's save_on_cpu it would move 1.4 times as much, parameters among it."""
    moved = []

    def to_host(tensor):
        moved.append(tensor)  # which also keeps its address
        return tensor.clone

    monkeypatch.setattr(offloading, "to_host", to_host)
    model, technique = llama(), offloading.Offload(smallest_bytes=1024)
    inputs = {"input_ids": batch()["input_ids"], "use_cache": False}
    model(**inputs).logits.square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for block in find_blocks(model, None, "offload").values():
        set_technique(block, "saving", technique)
    model.zero_grad()
    model(**inputs).logits.square().sum().backward()
    assert_same([parameter.grad for parameter in model.parameters()], expected)
    addresses = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in moved]
    assert moved and len(set(addresses)) == len(addresses)
    assert not {place for place, _, _ in addresses} & {
        parameter.data_ptr() for parameter in model.parameters()
    }
    assert min(tensor.nbytes for tensor in moved) >= 1024
    assert technique.moved_bytes == sum(tensor.nbytes for tensor in moved)


@pytest.mark.gpu
def test_offload_gives_the_same_gradients():
    model = llama().cuda()
    inputs = {"input_ids": batch()["input_ids"].cuda(), "use_cache": False}
    found = []
    for enabled in (False, True):
        technique = offload(model, enabled, smallest_bytes=1024)
        model.zero_grad()
        model(**inputs).logits.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert technique.moved_bytes > 0
    assert_same(found[1], found[0])
