"""Every task on two ranks is that of one process with two micro-batches (exact): batches by length, metrics, the best weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.train import loop
from tests.distributed.conftest import ranks  # noqa: F401
from tests.selection import quick
from tests.train import tiny
from tests.train.test_torchrun import trained

JOBS = ["classification", "chat", "t5", "pairs of a decoder", "completion", "packed", "marian"]


@pytest.mark.parametrize("layout", quick(["dp"], ["dp", "fsdp"]))
@pytest.mark.parametrize("job", quick(JOBS[1:2], JOBS))
def test_a_task_on_two_ranks_is_that_of_one_process(ranks, make, job, layout):  # noqa: F811
    same_on_two_ranks(ranks, make, job, layout)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["t5", "marian"])
def test_what_all_blocks_of_a_decoder_read_gets_its_gradient_in_one_order(ranks, make, job):  # noqa: F811
    """In float32, where the order of every sum shows."""
    same_on_two_ranks(ranks, make, job, "fsdp", precision="fp32")


def same_on_two_ranks(ranks, make, job, layout, **changes):  # noqa: F811
    reference = make(job, "reference", micro_batches=2, **changes)
    assert loop.run(reference) == 0
    config = make(job, "ranks", parallel=layout, **changes)
    assert ranks(2)(trained, config) == [0, 0]
    first, second = Path(config.output), Path(reference.output)
    for kind in ("step", "eval"):
        keys = {"loss", "grad_norm", "tokens", "positions", "inputs", "examples", "mcc", "accuracy", "perplexity"}
        ours, theirs = (
            [{key: event[key] for key in keys & event.keys()} for event in tiny.events(folder, kind)]
            for folder in (first, second)
        )
        assert ours == theirs
    assert tiny.digests(first) == tiny.digests(second)
    assert (first / "final" / "model.safetensors").read_bytes() == (second / "final" / "model.safetensors").read_bytes()
