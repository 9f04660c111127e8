"""Spikes on several ranks: all judge alike and leave out the same batch (exact)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.lab import training
from tests.lab import spiking_run
from tests.lab.spiking_run import corrupt, saturate
from tests.processes import PYTHON, run
from tests.train import tiny
from tests.train.test_torchrun import same_run, told, trained

SHORT = spiking_run.LONG | {"steps": 52, "checkpoint_every": 12, "on_spike": "skip"}
PLANTED = 45
LAYOUTS = ["dp", "fsdp", "tp=2", "pp=2"]


def of_layout(make, parallel, name="ranks", **changes):
    """A pipeline needs two micro-batches."""
    return make(
        name, **SHORT, parallel=parallel, micro_batches=2 if parallel == "pp=2" else 1, **changes
    )


def trained_with(config, fault):
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, PLANTED)
        return trained(config)


def spikes(config):
    return tiny.events(Path(config.output), "spike")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_a_corrupt_batch_is_skipped_by_all_ranks(ranks, make, monkeypatch, parallel):
    config = of_layout(make, parallel)
    assert ranks(2)(trained_with, config, corrupt) == [0, 0]
    [event] = spikes(config)
    assert (event["step"], event["cause"], event["checkpoint"], event["left_out"]) == (
        PLANTED,
        "data",
        36,
        [PLANTED],
    )
    assert list(tiny.losses(Path(config.output))) == list(range(1, 53))
    if parallel in ("dp", "fsdp"):
        corrupt(monkeypatch, PLANTED)
        alone = make("alone", **SHORT, micro_batches=2)
        assert training.run(alone) == 0
        same_run(Path(config.output), Path(alone.output))
        assert [event] == spikes(alone)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_windows_that_saturate_are_the_format_on_all_ranks(ranks, make, parallel):
    config = of_layout(make, parallel, layers_recipe={"lm_head": "fp8-delayed"})
    assert ranks(2)(trained_with, config, saturate) == [0, 0]
    event = spikes(config)[0]
    assert (event["cause"], event["left_out"]) == ("format", [])
    assert PLANTED <= event["step"] <= PLANTED + 1 and event["wide"] < event["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_a_rank_that_is_killed_while_it_judges_is_named_and_the_run_goes_on(
    ranks, make, text, parallel
):
    """SIGKILL at the fourth step of the judgement, of rank 1; the rest of the run is that of a run that nobody killed."""
    config, killed = of_layout(make, parallel, "whole"), of_layout(make, parallel, "killed")
    assert ranks(2)(trained_with, config, corrupt) == [0, 0]
    names = ("learning_rate", "on_spike", "parallel", "micro_batches")
    more = [f"--{name.replace('_', '-')}={getattr(killed, name)}" for name in names]
    launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [spiking_run.__file__, "1", "4", str(PLANTED)]
    done = run([*launch, *program, "train", *tiny.flags(killed, text), *more])
    [line] = told(done.stderr)
    assert "rank 1 of 2 ended without a word" in line and "--resume" in line, done.stderr
    assert spikes(killed) == [] and max(tiny.losses(Path(killed.output))) == PLANTED
    assert ranks(2)(trained_with, replace(killed, resume=True), corrupt) == [0, 0]
    same_run(Path(killed.output), Path(config.output))
    assert spikes(killed) == spikes(config)
