"""Experts in one parameter under fully_shard, whose ranks hold some of the experts each. exact

Both ranks have the same tokens, so their mean gradient is that of one process, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import narrowgauge as ng
from narrowgauge.distributed import distribute
from tests.compare import assert_same

transformers = pytest.importorskip("transformers", minversion="5")

IDS = torch.arange(40).reshape(2, 20) % 64


def trained(recipe: str, is_sharded: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = ng.convert(transformers.MixtralForCausalLM(config), recipe)
    if is_sharded:
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        distribute(model)
        if dist.get_rank() == 0:  # reads no weight, so it waits for no other rank
            assert "experts" in str(ng.describe(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8"])
def test_sharded_experts_train_as_in_one_process(ranks, recipe: str) -> None:
    alone = trained(recipe, False)
    for found in ranks(2)(trained, recipe, True):
        assert_same(found, alone)
