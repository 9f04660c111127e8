"""Pipelines."""
from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import narrowgauge as ng
from tests.distributed.models import build
from tests.distributed.pipelines import SCHEDULES, run_alone, run_pipeline, stages_of

STEPS, MICRO_BATCHES, BLOCKS = 3, 4, 4


def _each(schedule, names):
    found = {}
    for name in names:
        stages = stages_of(schedule, partial(build, name, BLOCKS))
        for stage in stages:
            ng.distribute(stage.submod)
        found[name] = run_pipeline(stages, schedule, STEPS, range(MICRO_BATCHES), MICRO_BATCHES)
    return found


def alone(name):
    torch.manual_seed(0)
    return run_alone(ng.distribute(build(name, BLOCKS)), STEPS, MICRO_BATCHES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_are_one_process_to_the_bit(ranks, schedule):
    found = ranks(2)(_each, schedule, ng.recipes.names())
    bad = []
    for name in ng.recipes.names():
        losses, whole, gradients = alone(name)
        own = [each[name] for each in found]
        got = [each[0] for each in own if each[0]][0]
        tensors = own[0][1] | own[1][1]
        assert tensors.keys() == whole.keys()
        if got != losses: bad.append((name, "loss", got[:4], losses[:4]))
        d = [k for k in whole if not torch.equal(whole[k], tensors[k])]
        if d: bad.append((name, "state", len(d), d[:3]))
        for s in range(STEPS):
            g = own[0][2][s] | own[1][2][s]
            assert g.keys() == gradients[s].keys(), name
            d = [k for k in g if not torch.equal(g[k], gradients[s][k])]
            if d: bad.append((name, "grad", s, len(d), d[:3]))
    for b in bad: print(b)
    assert not bad
