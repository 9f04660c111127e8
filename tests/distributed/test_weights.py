"""Weights of fully_shard as codes: to the bit what gathers of the original give, at a byte per weight, and nothing is kept (exact)."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.distributed import agreement_of
from narrowgauge.nn.linear import QLinear
from tests.distributed.models import build, micro_batch, state, train

STEPS = 3
NEED_THE_ORIGINAL = ("bf16", "int4-hq-lss", "int4-lsq-luq", "mxfp4")
# One of each kind: a window, one set of codes, two sets, tiles, 4 bits in tiles and straight-through.
KINDS = ("fp8-delayed", "fp8-block", "mxfp8", "int8", "nvfp4", "int4-hq-bs")


def _shard(model, weights, parts=None, **options):
    for module in [*(model if parts is None else parts), model]:
        fully_shard(module, **options)
    return ng.distribute(model, weights=weights)


def _both(compute, *given):
    """What a function of (weights, ...) gives with gathers of the original and with codes."""
    found = []
    for weights in ("16bit", "codes"):
        torch.manual_seed(0)
        found.append(compute(weights, *given))
    return found


def differing(here, there):
    assert here.keys() == there.keys()
    return [name for name, tensor in here.items() if not torch.equal(tensor, there[name])]


class Watch:
    """Sees the weight of each layer in its forward pass: whether all of it reads as NaN."""

    def __init__(self, model):
        self.poisoned = set()
        for layer in model.modules():
            if isinstance(layer, QLinear):
                layer.register_forward_hook(self.look)

    def look(self, layer, *_):
        self.poisoned.add(bool(layer.weight.isnan().all()))


def _trained(weights, recipe):
    model = _shard(build(recipe), weights)
    watch = Watch(model)
    losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
    return losses, state(model), watch.poisoned


def _each(names):
    return {name: _both(_trained, name) for name in names}


@pytest.mark.parametrize("world", [2, 3])
def test_codes_are_to_the_bit_gathers_of_the_original(ranks, world):
    """Three ranks share 64 and 128 rows unevenly. A layer whose codes travel has no weight to read."""
    for found in ranks(world)(_each, ng.recipes.names()):
        for name, ((losses, tensors, wide), (own_losses, own, narrow)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name
            assert wide == {False} and narrow == {name not in NEED_THE_ORIGINAL}, name


class Ragged(nn.Sequential):
    """Layers with fewer rows than three ranks have shares, and with rows and columns that no tile divides."""

    def __init__(self):
        torch.manual_seed(7)
        super().__init__(nn.Linear(64, 2), nn.GELU(), nn.Linear(2, 75), nn.GELU(), nn.Linear(75, 64))


def _ragged(weights, recipe):
    model = ng.convert(Ragged(), recipe)
    _shard(model, weights, parts=[each for each in model if isinstance(each, nn.Linear)])
    losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
    return losses, state(model)


def _each_ragged(names):
    return {name: _both(_ragged, name) for name in names}


@pytest.mark.parametrize("world", [2, 3])
def test_ragged_and_empty_shards(ranks, world):
    names = [name for name in ng.recipes.names() if name not in NEED_THE_ORIGINAL]
    for found in ranks(world)(_each_ragged, names):
        for name, ((losses, tensors), (own_losses, own)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        for block in self.inner:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _checkpointed(weights, recipe, reentrant):
    model = Checkpointed(build(recipe), reentrant)
    _shard(model, weights, parts=model.inner)
    model.inner.requires_grad_(True)
    losses = train(_InputWithGradient(model) if reentrant else model, [dist.get_rank()], STEPS, dist.get_world_size())
    return losses, state(model), dict(agreement_of(model).messages)


class _InputWithGradient(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.requires_grad_())


def _each_checkpointed(names):
    return {(name, way): _both(_checkpointed, name, way) for name in names for way in (False, True)}


def test_activation_checkpointing(ranks):
    for found in ranks(2)(_each_checkpointed, KINDS):
        for name, ((losses, tensors, _), (own_losses, own, _)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


def _accumulated(weights, recipe, kept):
    """Two micro-batches of each rank; gradients are reduced after the second. kept: weights stay gathered until the step."""
    model = _shard(build(recipe), weights, reshard_after_forward=not kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        for turn in range(2):
            model.set_requires_gradient_sync(turn == 1)
            model.set_reshard_after_backward(turn == 1 or not kept)
            losses.append(_backward(model, step, dist.get_rank() + 2 * turn))
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return losses, state(model)


def _backward(model, step, number):
    x, y = micro_batch(step, number)
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.item()


def _each_accumulated(names):
    return {(name, kept): _both(_accumulated, name, kept) for name in names for kept in (False, True)}


def test_gradient_accumulation_and_weights_that_stay(ranks):
    for found in ranks(2)(_each_accumulated, KINDS):
        for name, ((losses, tensors), (own_losses, own)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


def _disturbed(weights, recipe):
    """Steps end while the root is gathered, modes change, weights and states are loaded and written by hand."""
    model = _shard(build(recipe), weights, parts=[], reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, x = [], micro_batch(9, 9)[0]

    def look():
        with torch.no_grad():
            losses.append(model(x).square().mean().item())

    look()
    for step in range(STEPS):
        losses.append(_backward(model, step, dist.get_rank()))
        ng.advance(model)
        look()
        model.eval()
        look()
        model.train()
        losses.append(_backward(model, step, dist.get_rank() + 2))
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses.append(_backward(model, 7, dist.get_rank()))
    optimizer.step()
    model.load_state_dict(kept)
    losses.append(_backward(model, 7, dist.get_rank()))
    optimizer.zero_grad()
    ng.advance(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, QLinear):
                layer.weight.mul_(1.5)
    losses.append(_backward(model, 8, dist.get_rank()))
    return losses, state(model)


def _each_disturbed(names):
    return {name: _both(_disturbed, name) for name in names}


def test_changes_between_passes_are_followed(ranks):
    for found in ranks(2)(_each_disturbed, KINDS):
        for name, ((losses, tensors), (own_losses, own)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name
