"""Spikes of a run: what is to blame, and the run that leaves a batch out (exact, but for the last loss)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.train import loop
from narrowgauge.train.tasks.left_out import LeavingOut
from narrowgauge.train.tasks.task import Feed, StepBatch
from tests.train import tiny

LONG = {"steps": 104, "warmup_steps": 4, "checkpoint_every": 20, "learning_rate": 3e-3, "batch_size": 4}
PLANTED = 94


class Counted(Feed):
    """Batches are their numbers, and the position counts what was drawn."""

    def __init__(self):
        self.drawn = 0

    def draw(self, step):
        assert step == self.drawn
        self.drawn += 1
        return StepBatch([], step + 1)

    def probe(self):
        return {}

    def state(self):
        return {"drawn": self.drawn}

    def restore(self, state):
        self.drawn = state["drawn"]


def test_batches_that_are_left_out_are_dropped_and_the_next_take_their_steps():
    feed = LeavingOut(Counted())
    assert [feed.draw(step).inputs for step in range(3)] == [1, 2, 3]
    assert feed.state() == {"drawn": 3}, "positions are as ever where nothing is left out"
    feed.leave_out([5, 6, 9])
    assert [feed.draw(step).inputs for step in range(3, 5)] == [4, 7]
    held = feed.state()
    assert held == {"drawn": 7, "left_out": [5, 6, 9]}
    rest = [feed.draw(step).inputs for step in range(5, 8)]
    again = LeavingOut(Counted())
    again.restore(held)
    assert [again.draw(step).inputs for step in range(5, 8)] == rest == [8, 10, 11]
    assert [again.number(step) for step in range(8)] == [1, 2, 3, 4, 7, 8, 10, 11]


@pytest.fixture
def corrupt(monkeypatch):
    """The batch of step PLANTED is noise."""
    from narrowgauge.train.tasks import writing

    real = writing.TextFeed.draw

    def draw(feed, step):
        found = real(feed, step)
        if step + 1 == PLANTED:
            for batch in found.batches:
                noise = torch.Generator().manual_seed(3)
                batch["input_ids"] = torch.randint(0, 300, batch["input_ids"].shape, generator=noise)
                batch["labels"] = torch.randint(0, 300, batch["labels"].shape, generator=noise)
        return found

    monkeypatch.setattr(writing.TextFeed, "draw", draw)


@pytest.fixture
def saturating(before_step):
    """The windows of step PLANTED saturate."""

    def shrink(trainer):
        for window in trainer.model.modules():
            if isinstance(window, AmaxHistory):
                window.live[0] /= 4096
                window.history /= 4096

    before_step(PLANTED, shrink)


def spikes(config):
    return tiny.events(Path(config.output), "spike")


@pytest.mark.slow
def test_a_corrupt_batch_is_said_to_be_data(make, corrupt):
    config = make("warned", recipe="fp8-delayed", on_spike="warn", **LONG)
    assert loop.run(config) == 0
    [event] = spikes(config)
    assert (event["step"], event["cause"], event["checkpoint"], event["left_out"]) == (PLANTED, "data", 80, [])
    plain = make("plain", recipe="fp8-delayed", **LONG)
    assert loop.run(plain) == 0
    assert tiny.losses(Path(plain.output)) == tiny.losses(Path(config.output)), "judging it changes nothing"
    assert tiny.digests(Path(plain.output)) == tiny.digests(Path(config.output))


@pytest.mark.slow
def test_a_window_that_saturates_is_said_to_be_the_format(make, saturating):
    config = make("run", recipe="fp8-delayed", layers_recipe={"lm_head": "fp8-delayed"}, on_spike="skip", **LONG)
    assert loop.run(config) == 0
    event = spikes(config)[0]
    assert (event["cause"], event["left_out"]) == ("format", [])
    assert PLANTED <= event["step"] <= PLANTED + 1 and event["wide"] < event["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoint_every", "begun"), [(20, [45, 90]), (23, [45])])
def test_a_check_of_the_guard_that_saw_the_batch_is_dropped(make, corrupt, checkpoint_every, begun):
    """The run goes back to before the check, or into it: its steps in BF16 had the batch that is left out."""
    settings = {**LONG, "checkpoint_every": checkpoint_every, "guard": "every=45,steps=8,margin=5%,then=stay"}
    config = make("run", recipe="fp8-delayed", on_spike="skip", **settings)
    assert loop.run(config) == 0
    assert [event["left_out"] for event in spikes(config)] == [[PLANTED]]
    found = tiny.events(Path(config.output), "guard")
    assert [event["begun"] for event in found] == begun and all(event["verdict"] != "worse" for event in found)


@pytest.mark.slow
def test_a_skipped_run_ends_near_the_clean_one(make, request):
    clean = make("clean", recipe="fp8-delayed", on_spike="skip", **LONG)
    assert loop.run(clean) == 0 and spikes(clean) == []
    request.getfixturevalue("corrupt")
    config = make("skipped", recipe="fp8-delayed", on_spike="skip", **LONG)
    assert loop.run(config) == 0
    [event] = spikes(config)
    assert (event["step"], event["cause"], event["left_out"]) == (PLANTED, "data", [PLANTED])
    assert [each["why"] for each in tiny.events(Path(config.output), "rewind")] == ["spike"]
    losses, expected = tiny.losses(Path(config.output)), tiny.losses(Path(clean.output))
    assert list(losses) == list(range(1, 105))
    assert all(losses[step] == expected[step] for step in range(1, PLANTED)), "until there it is the clean run"
    ends = [tiny.events(Path(each.output), "eval")[-1]["loss"] for each in (config, clean)]
    other = make("seed", recipe="fp8-delayed", seed=1, **LONG)
    assert loop.run(other) == 0
    noise = abs(tiny.events(Path(other.output), "eval")[-1]["loss"] - ends[1])
    assert abs(ends[0] - ends[1]) <= noise


@pytest.mark.slow
def test_a_skipped_run_resumes_to_the_bit(make, corrupt):
    whole = make("whole", recipe="fp8-delayed", on_spike="skip", **LONG)
    assert loop.run(whole) == 0
    losses, digests = tiny.losses(Path(whole.output)), tiny.digests(Path(whole.output))
    shutil.rmtree(Path(whole.output) / "checkpoints" / "step-00000104")
    assert loop.run(replace(whole, resume=True)) == 0
    assert (tiny.losses(Path(whole.output)), tiny.digests(Path(whole.output))) == (losses, digests)
    assert len(spikes(whole)) == 1


def test_graphs_are_refused(make):
    with pytest.raises(ConfigError, match="on_spike = 'warn': cuda_graph"):
        make(on_spike="warn", cuda_graph=True)
