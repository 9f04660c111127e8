"""Ranks that read other data compute, to the bit, what one process computes with the same micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from tests.distributed.models import build, state, train

STEPS = 3


def _sum_gradients(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def _ddp(recipe):
    model = DistributedDataParallel(build(recipe))
    model.register_comm_hook(None, _sum_gradients)
    return model


def _fsdp(recipe, mesh=None):
    model = build(recipe)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _hsdp(recipe):
    return _fsdp(
        recipe, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    )


WRAPPED = {"ddp": _ddp, "fsdp": _fsdp, "hsdp": _hsdp}


def _trained(wrap, recipe, per_rank=1):
    model = ng.distribute(WRAPPED[wrap](recipe))
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = [rank + world * turn for turn in range(per_rank)]
    losses = train(model, numbers, STEPS, world * per_rank)
    return losses, state(model)


def alone(recipe, count):
    torch.manual_seed(0)
    model = ng.distribute(build(recipe))
    return train(model, range(count), STEPS, count), state(model)


def differing(here, there):
    assert here.keys() == there.keys()
    return [name for name, tensor in here.items() if not torch.equal(tensor, there[name])]


@pytest.mark.parametrize("recipe", ng.recipes.names())
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_two_ranks_are_one_process_to_the_bit(ranks, wrap, recipe):
    losses, whole = alone(recipe, 2)
    found = ranks(2)(_trained, wrap, recipe)
    assert [losses[0::2], losses[1::2]] == [own for own, _ in found]
    for _, tensors in found:
        assert differing(tensors, whole) == []
