"""A run in stages of a pipeline is the run of one process with as many micro-batches (exact)."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.train import loop
from tests.distributed.conftest import ranks  # noqa: F401
from tests.train.test_torchrun import same_run, trained


def test_first(ranks, make):  # noqa: F811
    common = {"recipe": "fp8-delayed", "steps": 3, "eval_every": 2, "micro_batches": 2, "sample_tokens": 4}
    reference = make("reference", **common)
    assert loop.run(reference) == 0
    config = make("ranks", parallel="pp=2", **common)
    assert ranks(2)(trained, config) == [0, 0]
    same_run(Path(config.output), Path(reference.output))
