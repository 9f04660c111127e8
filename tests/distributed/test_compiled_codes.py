"""Compiled blocks of fully_shard whose weights travel as codes: the graph takes what was gathered, and computes what eager mode does (exact)."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.distributed import agreement_of, codes_in_graphs
from narrowgauge.nn.linear import QLinear
from tests.distributed.llama import Llama, loss_of, parallelize
from tests.distributed.models import build, micro_batch, state, train
from tests.distributed.test_weights import NEED_THE_ORIGINAL, STEPS, differing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not codes_in_graphs.WORKS, reason="before torch 2.13 a layer computes between two graphs"),
]

RECIPES = [name for name in ng.recipes.names() if name not in NEED_THE_ORIGINAL]
FORMS = ("fp8-current", "mxfp8")  # one set of codes, and two


class Graphs(list):
    """A backend that notes which inputs each graph has: bytes that are [rows, columns]."""

    def __call__(self, graph, given):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values = [node.meta["example_value"] for node in inputs]
        self.append(sum(value.dtype == torch.uint8 and value.ndim == 2 for value in values))
        return aot_eager(graph, given)


def _sharded(recipe, weights, compiles=None, way="method", inner=lambda block: block, **options):
    """compiles: the backend, or None. Blocks are compiled before they are sharded, in torch's two ways, without a break allowed."""
    torch._dynamo.reset()
    counters.clear()
    model = build(recipe)
    for place, block in enumerate(model):
        block = inner(block)
        if compiles is not None and way == "method":
            block.compile(backend=compiles, fullgraph=True)
        elif compiles is not None:
            block = torch.compile(block, backend=compiles, fullgraph=True)
        model[place] = fully_shard(block, **options)
    return ng.distribute(fully_shard(model), weights=weights)


def _state(model):
    """Of the plain model, whatever wraps its blocks."""
    return {name.replace("_orig_mod.", "").replace("inner.", ""): tensor for name, tensor in state(model).items()}


def _trained(recipe, compiles, way="method"):
    model = _sharded(recipe, "codes", compiles, way)
    losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
    layers = [layer for layer in model.modules() if isinstance(layer, QLinear)]
    carriers = [layer.gathered.parameter for layer in layers]
    return losses, _state(model), dict(counters["graph_break"]), len(carriers)


def _compiled_and_eager(recipe, way):
    graphs = Graphs()
    return _trained(recipe, graphs, way), _trained(recipe, None), graphs


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_takes_the_codes_of_its_block(ranks, recipe):
    """Two blocks of two layers: two graphs without a break, each with two inputs of codes."""
    way = ("method", "wrapper")[RECIPES.index(recipe) % 2]
    for (losses, tensors, breaks, layers), (own_losses, own, _, _), graphs in ranks(2)(
        _compiled_and_eager, recipe, way
    ):
        assert losses == own_losses and differing(tensors, own) == []
        assert breaks == {} and layers == 4 and graphs == [2, 2]


def _by_inductor(recipe):
    with torch._inductor.config.patch(emulate_precision_casts=True):
        model = _sharded(recipe, "codes", "inductor")
        losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
        other = _sharded(recipe, "16bit", "inductor")
        return losses, _state(model), train(other, [dist.get_rank()], STEPS, dist.get_world_size()), _state(other)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "fp8-delayed"])
def test_inductor_computes_what_it_does_with_16_bits(ranks, recipe):
    for losses, tensors, own_losses, own in ranks(2)(_by_inductor, recipe):
        assert losses == own_losses and differing(tensors, own) == []


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class CheckpointedOutside(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _disturbed(recipe, how, compiles):
    """What is at hand is not what the product reads: repeated forward passes, weights that stay gathered."""
    inner = Checkpointed if how == "checkpoint inside" else (lambda block: block)
    model = _sharded(recipe, "codes", compiles, inner=inner, reshard_after_forward=how != "kept")
    if how == "checkpoint outside":
        model.forward = partial(CheckpointedOutside.forward, model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        for turn in range(2):
            model.set_requires_gradient_sync(turn == 1)
            model.set_reshard_after_backward(turn == 1 or how != "kept")
            x, y = micro_batch(step, dist.get_rank() + 2 * turn)
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model.eval()(x).sum().item())
        model.train()
    return losses, _state(model), agreement_of(model).messages["weights"]


def _both_disturbed(recipe, how):
    return _disturbed(recipe, how, "aot_eager"), _disturbed(recipe, how, None)


@pytest.mark.parametrize("recipe", [*FORMS, "fp8-delayed"])
@pytest.mark.parametrize("how", ["checkpoint inside", "checkpoint outside", "kept"])
def test_codes_that_are_not_at_hand_are_gathered(ranks, recipe, how):
    for (losses, tensors, sent), (own_losses, own, own_sent) in ranks(2)(_both_disturbed, recipe, how):
        assert losses == own_losses and differing(tensors, own) == [] and sent == own_sent


def _large(least):
    """Bytes of the memories of tensors that hold as much."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:
            storage = each.untyped_storage()
            if storage.size() >= least:
                found[storage.data_ptr()] = storage.size()
    return found


def _kept(recipe):
    """Bytes that a compiled forward pass leaves, of tensors that are not smaller than a weight's codes, and whether carriers have memory."""
    model = _sharded(recipe, "codes", "aot_eager")
    x = micro_batch(0, 0)[0]
    model(x).sum().backward()
    model.zero_grad()
    ng.advance(model)
    before, seen = _large(64 * 128), []
    for layer in model.modules():
        if isinstance(layer, nn.LayerNorm):  # called inside of a graph, so looked at from outside
            continue
        if isinstance(layer, QLinear):
            seen.append(layer)
    loss = model(x).sum()
    left = sum(size for place, size in _large(64 * 128).items() if place not in before)
    loss.backward()
    return left


@pytest.mark.parametrize("recipe", FORMS)
def test_nothing_is_kept_after_resharding(ranks, recipe):
    """Each weight is 64 x 128; activations are smaller, 32 x 128 in float32 apart."""
    assert ranks(2)(_kept, recipe) == [0, 0]


def _beside_tensor_parallelism(recipe, compiles):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(ng.convert(Llama(layers=2), {"layers.*": recipe}), mesh["tp"])
    for layer in model.layers:
        if compiles:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    ng.distribute(model, weights="codes")
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), []
    for step in range(2):
        loss = loss_of(model, step, mesh["dp"].get_local_rank(), 2)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return losses, _state(model)


def _both_beside_tensor_parallelism(recipe):
    return _beside_tensor_parallelism(recipe, True), _beside_tensor_parallelism(recipe, False)


@pytest.mark.parametrize("recipe", FORMS)
def test_beside_tensor_parallelism(ranks, recipe):
    for (losses, tensors), (own_losses, own) in ranks(4)(_both_beside_tensor_parallelism, recipe):
        assert losses == own_losses and differing(tensors, own) == []
