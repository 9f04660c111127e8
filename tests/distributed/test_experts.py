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


def trained(recipe: str, weights: str) -> dict[str, Tensor]:
    """State after two steps. weights: as in `distribute`, or "" for one process."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = ng.convert(transformers.MixtralForCausalLM(config), recipe)
    if weights:
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        distribute(model, weights=weights)
        if dist.get_rank() == 0:  # reads no weight, so it waits for no other rank
            rows = {row.name: row.shape for row in ng.describe(model)}
            assert rows["model.layers.1.mlp.experts.3.down_proj"] == "48 -> 32"
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
@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("fp8-current", "16bit"),
        ("fp8-delayed", "16bit"),
        ("mxfp8", "16bit"),
        ("fp8-current", "codes"),
    ],
)
def test_sharded_experts_train_as_in_one_process(ranks, recipe: str, weights: str) -> None:
    alone = trained(recipe, "")
    for found in ranks(2)(trained, recipe, weights):
        assert_same(found, alone)
