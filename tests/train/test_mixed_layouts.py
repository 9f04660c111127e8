"""Stages of a pipeline beside copies, shards and shared products (`--parallel fsdp=2,pp=2`).

Exact: with as many micro-batches, two groups of ranks in stages compute what the same two groups compute without stages, and the first
loss of one process. Of the other steps, whose gradients one process adds up in another order, losses are within 1e-3.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
import torch

from narrowgauge import recipes
from narrowgauge.train import loop
from narrowgauge.train.config.settings import replace
from tests.distributed.conftest import ranks  # noqa: F401
from tests.train import faulty_run, tiny
from tests.train.test_torchrun import PROGRAM, same_run, trained

COMMON = {"micro_batches": 2, "steps": 3, "eval_every": 2, "sample_tokens": 4, "checkpoint_every": 2}


def both(ranks, make, layout, **changes):  # noqa: F811
    """The folders of a run in two stages, and of one without stages."""
    config = make("stages", parallel=f"{layout},pp=2", **{**COMMON, **changes})
    assert ranks(4)(trained, config) == [0] * 4
    whole = make("whole", parallel=layout, **{k: v for k, v in {**COMMON, **changes}.items() if k != "schedule"})
    assert ranks(2)(trained, whole) == [0] * 2
    return Path(config.output), Path(whole.output)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes.names())
def test_stages_of_shards_are_the_shards(ranks, make, recipe):  # noqa: F811
    ours, theirs = both(ranks, make, "fsdp=2", recipe=recipe)
    same_run(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed"])
@pytest.mark.parametrize("layout", ["dp=2", "tp=2"])
def test_stages_of_others(ranks, make, recipe, layout):  # noqa: F811
    ours, theirs = both(ranks, make, layout, recipe=recipe)
    same_run(ours, theirs)


SETTINGS = [
    {"schedule": "ZBVZeroBubble", "layers": 4, "micro_batches": 4, "batch_size": 8},
    {"schedule": "Interleaved1F1B", "layers": 4, "micro_batches": 4, "batch_size": 8, "weights": "codes", "recipe": "fp8-current"},
    {"schedule": "InterleavedZeroBubble", "layers": 4, "micro_batches": 4, "batch_size": 8},
    {"weights": "codes", "recipe": "fp8-row"},
    {"gradients": "fp8"},
    {"optimizer": "lion", "states": "4bit", "precision": "bf16-o2", "hidden_size": 64, "checkpointing": "full"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_so_with_other_settings(ranks, make, settings):  # noqa: F811
    ours, theirs = both(ranks, make, "fsdp=2", **settings)
    same_run(ours, theirs)
