"""Embeddings with codes on two ranks, bounded: within sums in another order they are one process with both ranks' batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from tests.distributed.models import state
from tests.raising import raises

STEPS = 4


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48))
    return ng.convert(model, "bf16", embeddings="int4")


def _trained(model, ids):
    """(losses, tensors) after STEPS steps on these rows; gradients of ranks are averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, state(model)


def _ids():
    return torch.arange(24).reshape(2, 3, 4) * 5 % 48


def _on_a_rank(wrap):
    model = _made()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model[0])
        fully_shard(model)
    return _trained(model, _ids()[dist.get_rank()])


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_two_ranks_are_one_process(ranks, wrap):
    """The rounding of a row may fall to the other side where its weight moved by a rounding: a step of 0.1 of one element of 3,072."""
    losses, whole = _trained(_made(), _ids().flatten(0, 1))
    found = ranks(2)(_on_a_rank, wrap)
    means = torch.tensor([own for own, _ in found]).mean(0)
    assert torch.allclose(means, torch.tensor(losses), rtol=2e-3)
    assert whole["0.steps.cold_left"] == 0
    for _, tensors in found:
        assert torch.allclose(tensors["0.steps.w"], whole["0.steps.w"], atol=1e-5)
        assert torch.allclose(tensors["0.weight"], whole["0.weight"], atol=1e-3)
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, found[1][1][name]), name


def _spread():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Embedding(48, 32), nn.Linear(32, 48))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    with raises(ConfigError, "convert.embedding-codes", "'0'"):
        ng.convert(model, "bf16", embeddings="int4")
    return True


@pytest.mark.slow
def test_a_table_that_is_spread_is_refused(ranks):
    assert all(ranks(2)(_spread))
