"""Segments of blocks and selective checkpointing on ranks (exact): what no checkpointing gives, under DDP and with shards."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from tests.distributed.models import build, state, train

RECIPES = ("fp8-delayed", "mxfp8", "nvfp4", "int4-hq-bs")
STEPS, BLOCKS = 2, 6


def _trained(policy, recipe, how):
    torch.manual_seed(3)
    model = build(recipe, blocks=BLOCKS)
    lengths = ng.memory.checkpoint(model, policy).segments
    calls = [0] * BLOCKS
    for number, block in enumerate(model):
        block.up.register_forward_hook(
            lambda *_, number=number: calls.__setitem__(number, calls[number] + 1)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a segment that falls apart
        if how == "ddp":
            model = DistributedDataParallel(ng.distribute(model))
        else:
            for module in [*model, model]:
                fully_shard(module)
            model = ng.distribute(model, weights=how)
        losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
    return losses, state(model), lengths, [count // STEPS for count in calls]


def _each():
    return {
        (recipe, how): [_trained(policy, recipe, how) for policy in (None, "sqrt", "selective")]
        for recipe in RECIPES
        for how in ("ddp", "16bit", "codes")
    }


@pytest.mark.slow
def test_segments_on_ranks(ranks):
    """Five of six blocks in segments of 3 and 2: of both all but the last run three times, those of shards with gathered parameters."""
    for found in ranks(2)(_each):
        for name, (plain, segments, selective) in found.items():
            assert plain[2] == () and segments[2] == (3, 2) and segments[3] == [3, 3, 2, 3, 2, 1], (
                name
            )
            for losses, tensors, _, _ in (segments, selective):
                assert losses == plain[0], name
                assert [
                    key for key in tensors if not torch.equal(tensors[key], plain[1][key])
                ] == [], name
