"""Compiled blocks of fully_shard whose weights travel as codes: graphs take what was gathered, and compute what eager mode does (exact)."""

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
from narrowgauge.distributed import codes_in_graphs, distributed_state
from narrowgauge.nn.linear import QLinear
from tests.distributed.llama import Llama, loss_of, parallelize
from tests.distributed.models import build, micro_batch, state, train
from tests.distributed.test_weights import NEED_THE_ORIGINAL, STEPS, differing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not codes_in_graphs.SUPPORTED,
        reason="before torch 2.13 a layer computes between two graphs",
    ),
]

RECIPES = [name for name in ng.recipes.names() if name not in NEED_THE_ORIGINAL]
# Compiled, their random numbers are torch's generator's.
RANDOM = ("nvfp4", "int4-hq-bs", "int4-minmax-sr", "int4-row-sr")
FORMS = ("fp8-current", "mxfp8")  # one set of codes, and two


class Graphs(list):
    """A backend that notes which inputs each graph has: bytes that are [rows, columns]."""

    def __call__(self, graph, given):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values = [node.meta["example_value"] for node in inputs]
        self.append(sum(value.dtype == torch.uint8 and value.ndim == 2 for value in values))
        return aot_eager(graph, given)


def _sharded(
    recipe, weights, compiles=None, way="method", inner=lambda block: block, width=64, **options
):
    """compiles: the backend, or None. Blocks are compiled before they are sharded, in torch's two ways, without a break allowed."""
    torch._dynamo.reset()
    counters.clear()
    model = build(recipe, width=width)
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
    return {
        name.replace("_orig_mod.", "").replace("inner.", ""): tensor
        for name, tensor in state(model).items()
    }


def _trained(recipe, weights, compiles, way="method"):
    model = _sharded(recipe, weights, compiles, way)
    torch.manual_seed(0)
    losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
    return losses, _state(model), dict(counters["graph_break"])


def _compiled_and_other(recipe, way):
    """With codes; and in eager mode, or for random recipes compiled with gathers of the original."""
    graphs = Graphs()
    found = _trained(recipe, "codes", graphs, way)
    other = (
        _trained(recipe, "16bit", Graphs(), way)
        if recipe in RANDOM
        else _trained(recipe, "codes", None)
    )
    return found, other, list(graphs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_takes_the_codes_of_its_block(ranks, recipe):
    """Two blocks of two layers: two graphs without a break, each with two inputs of codes."""
    way = ("method", "wrapper")[RECIPES.index(recipe) % 2]
    for (losses, tensors, breaks), (own_losses, own, _), graphs in ranks(2)(
        _compiled_and_other, recipe, way
    ):
        assert losses == own_losses and differing(tensors, own) == []
        assert breaks == {} and graphs == [2, 2]


def _by_inductor(recipe):
    with torch._inductor.config.patch(emulate_precision_casts=True):
        model = _sharded(recipe, "codes", "inductor")
        losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
        other = _sharded(recipe, "16bit", "inductor")
        return (
            losses,
            _state(model),
            train(other, [dist.get_rank()], STEPS, dist.get_world_size()),
            _state(other),
        )


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
    return losses, _state(model), distributed_state(model).bytes_sent["weights"]


def _both_disturbed(recipe, how):
    return _disturbed(recipe, how, "aot_eager"), _disturbed(recipe, how, None)


@pytest.mark.parametrize("recipe", [*FORMS, "fp8-delayed"])
@pytest.mark.parametrize("how", ["checkpoint inside", "checkpoint outside", "kept"])
def test_codes_that_are_not_at_hand_are_gathered(ranks, recipe, how):
    for (losses, tensors, sent), (own_losses, own, own_sent) in ranks(2)(
        _both_disturbed, recipe, how
    ):
        assert losses == own_losses and differing(tensors, own) == []
        assert sent <= own_sent  # a graph does not repeat the last product of a block


def _large(least):
    """Bytes of the memories of tensors that hold as much."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:
            storage = each.untyped_storage()
            if (
                storage.device.type != "meta" and storage.size() >= least
            ):  # what tracing leaves has no memory
                found[storage._cdata] = storage.size()
    return found


def _kept(recipe, reshards):
    """Bytes of tensors as large as a weight's codes, or larger, that a compiled forward pass leaves behind, and memory of carriers."""
    width, carriers = 128, []
    model = _sharded(recipe, "codes", "aot_eager", width=width, reshard_after_forward=reshards)

    def look(block, *_):
        layers = [layer for layer in block.modules() if isinstance(layer, QLinear)]
        carriers.extend(
            (bool(each.weight.isnan().all()), each.weight.untyped_storage().size())
            for each in layers
        )

    for block in model:
        block.register_forward_hook(torch.compiler.disable(look), prepend=True)
    x = torch.randn(4, width)
    model(x).sum().backward()
    model.zero_grad()
    ng.advance(model)
    before = _large(2 * width * width)
    loss = model(x).sum()
    left = sum(size for place, size in _large(2 * width * width).items() if place not in before)
    loss.backward()
    return left, set(carriers)


def _each_kept():
    return [_kept(name, True) for name in FORMS] + [_kept("fp8-current", False)]


def test_nothing_is_kept_after_resharding(ranks):
    """Nor has a carrier memory, but for one NaN. The control does not reshard, and keeps the codes of four weights."""
    for one, two, control in ranks(2)(_each_kept):
        assert one == two == (0, {(True, 4)})
        assert control == (4 * 2 * 128 * 128, {(True, 4)})


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
