"""Spikes of a run: what is to blame, and the run that leaves a batch out (exact, but for the last loss)."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from narrowgauge.cli import main
from narrowgauge.diagnose import lineage
from narrowgauge.diagnose.runs import read_run
from narrowgauge.errors import ConfigError
from narrowgauge.lab import spike_watch, training
from narrowgauge.train.tasks.feed import SkippingFeed
from narrowgauge.train.tasks.task import Feed, StepBatch
from narrowgauge.train.tasks.text import TextFeed
from narrowgauge.train.trainer import Trainer
from tests.lab import spiking_run
from tests.lab.spiking_run import LONG, PLANTED
from tests.raising import raises
from tests.train import faulty_run, tiny

MEASURED = ("grad_norm", "expected_loss", "loss_scales", "expected_grad_norm", "grad_norm_scales")


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
    feed = SkippingFeed(Counted())
    assert [feed.draw(step).inputs for step in range(3)] == [1, 2, 3]
    assert feed.state() == {"drawn": 3}, "positions are as ever where nothing is left out"
    feed.leave_out([5, 6, 9])
    assert [feed.draw(step).inputs for step in range(3, 5)] == [4, 7]
    held = feed.state()
    assert held == {"drawn": 7, "left_out": [5, 6, 9]}
    rest = [feed.draw(step).inputs for step in range(5, 8)]
    again = SkippingFeed(Counted())
    again.restore(held)
    assert [again.draw(step).inputs for step in range(5, 8)] == rest == [8, 10, 11]
    assert [again.number(step) for step in range(8)] == [1, 2, 3, 4, 7, 8, 10, 11]


@pytest.fixture
def corrupt(monkeypatch):
    spiking_run.corrupt(monkeypatch)


@pytest.fixture
def saturating(monkeypatch):
    spiking_run.saturate(monkeypatch)


def log_lines(config):
    return (Path(config.output) / "metrics.jsonl").read_text().splitlines()


def spikes(config):
    return tiny.events(Path(config.output), "spike")


@pytest.mark.slow
def test_a_corrupt_batch_is_said_to_be_data(make, corrupt):
    config = make("warned", on_spike="warn", **LONG)
    assert training.run(config) == 0
    [event] = spikes(config)
    assert (event["step"], event["cause"], event["checkpoint"], event["left_out"]) == (
        PLANTED,
        "data",
        80,
        [],
    )
    plain = make("plain", **LONG)
    assert training.run(plain) == 0
    assert tiny.losses(Path(plain.output)) == tiny.losses(Path(config.output)), (
        "judging it changes nothing"
    )
    assert tiny.digests(Path(plain.output)) == tiny.digests(Path(config.output))


@pytest.mark.slow
def test_a_window_that_saturates_is_said_to_be_the_format(make, saturating):
    config = make("run", layers_recipe={"lm_head": "fp8-delayed"}, on_spike="skip", **LONG)
    assert training.run(config) == 0
    event = spikes(config)[0]
    assert (event["cause"], event["left_out"]) == ("format", [])
    assert PLANTED <= event["step"] <= PLANTED + 1 and event["wide"] < event["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoint_every", "begun"), [(20, [45, 90]), (23, [45, 92])])
def test_a_check_of_the_guard_that_saw_the_batch_is_dropped(make, corrupt, checkpoint_every, begun):
    """The run goes back to before the check, or into it: its steps in BF16 had the batch that is left out."""
    guard = "every=45,steps=8,margin=5%,then=stay"
    settings = {
        **LONG,
        "recipe": "fp8-delayed",
        "checkpoint_every": checkpoint_every,
        "guard": guard,
    }
    config = make("run", on_spike="skip", **settings)
    assert training.run(config) == 0
    assert [event["left_out"] for event in spikes(config)] == [[PLANTED]]
    found = tiny.events(Path(config.output), "guard")
    assert [event["begun"] for event in found] == begun and all(
        event["verdict"] != "worse" for event in found
    )


@pytest.mark.slow
def test_a_skipped_run_ends_near_the_clean_one(make, request):
    clean = make("clean", on_spike="skip", **LONG)
    assert training.run(clean) == 0 and spikes(clean) == []
    request.getfixturevalue("corrupt")
    config = make("skipped", on_spike="skip", **LONG)
    assert training.run(config) == 0
    [event] = spikes(config)
    assert (event["step"], event["cause"], event["left_out"]) == (PLANTED, "data", [PLANTED])
    assert len(event["examples"]) == LONG["batch_size"]
    assert (
        "It is the data, examples " + ", ".join(map(str, sorted(event["examples"]))) + "."
        in event["sentence"]
    )
    assert [each["why"] for each in tiny.events(Path(config.output), "rewind")] == ["spike"]
    losses, expected = tiny.losses(Path(config.output)), tiny.losses(Path(clean.output))
    assert list(losses) == list(range(1, 105))
    assert all(losses[step] == expected[step] for step in range(1, PLANTED)), (
        "until there it is the clean run"
    )
    ends = [tiny.events(Path(each.output), "eval")[-1]["loss"] for each in (config, clean)]
    other = make("seed", seed=1, **LONG)
    assert training.run(other) == 0
    noise = abs(tiny.events(Path(other.output), "eval")[-1]["loss"] - ends[1])
    assert abs(ends[0] - ends[1]) <= noise


@pytest.mark.slow
def test_two_corrupt_batches_at_one_step_are_both_told(make, monkeypatch, capsys):
    spiking_run.corrupt(monkeypatch)
    spiking_run.corrupt(monkeypatch, PLANTED + 1)
    config = make("run", on_spike="skip", **LONG)
    assert training.run(config) == 0
    assert [(event["step"], event["left_out"]) for event in spikes(config)] == [
        (PLANTED, [PLANTED]),
        (PLANTED, [PLANTED + 1]),
    ]
    examples = [event["examples"] for event in spikes(config)]
    assert examples[0] and not set(examples[0]) & set(examples[1]), (
        "of the batch that took the step of the first"
    )
    assert "Loss spikes: 2 spikes, 2 of the data." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["warn", "skip"])
def test_a_spike_of_the_format_behind_one_of_the_data_is_no_second_of_the_data(
    make, monkeypatch, mode
):
    """Both since the newest checkpoint, which knows of neither."""
    spiking_run.corrupt(monkeypatch, 88)
    spiking_run.saturate(monkeypatch, 97)
    config = make("run", layers_recipe={"lm_head": "fp8-delayed"}, on_spike=mode, **LONG)
    assert training.run(config) == 0
    first, second = spikes(config)[:2]
    assert (first["step"], first["cause"], first["left_out"]) == (
        88,
        "data",
        [88] if mode == "skip" else [],
    )
    assert 97 <= second["step"] <= 98 and (second["cause"], second["left_out"]) == ("format", [])


@pytest.mark.slow
def test_the_ladder_of_debugging_leaves_out_what_the_run_did(make, corrupt, capsys):
    config = make("run", on_spike="skip", keep=9, **LONG)
    assert training.run(config) == 0 and len(spikes(config)) == 1
    assert main(["debug", config.output, "--at", "96", "--steps", "8"]) == 0
    assert (
        "It repeats: the losses that the run has logged of 24 steps, to the bit."
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_run_that_has_left_out_enough_says_so(make, monkeypatch, corrupt):
    monkeypatch.setattr(spike_watch, "MOST_SKIPS", 0)
    config = make("run", on_spike="skip", **LONG)
    assert training.run(config) == 0
    [event] = spikes(config)
    assert event["left_out"] == [] and f"{spike_watch.MOST_SKIPS} batches" in event["sentence"]
    assert "--guard.on-spike" not in event["sentence"]


@pytest.mark.parametrize("outcome", ["worse", "equivalent"], ids=["format", "data"])
def test_spikes_that_are_read_together_are_all_told(monkeypatch, outcome):
    """As on a GPU, whose losses are read every few steps; once the run goes back, later ones have not happened."""
    trainer = Mock(queue=None, step=100, config=Mock(on_spike="skip"))
    trainer.feed.left_out = []
    watch = spike_watch.SpikeWatch(trainer)
    monkeypatch.setattr(watch, "_judged", lambda spike: spike_watch.Judgement(outcome, "", 80, 3.0))
    monkeypatch.setattr(watch, "_go_back", lambda left_out=(): None)
    watch.found = [
        spike_watch.Spike(step=step, loss=9.0, **dict.fromkeys(MEASURED, 1.0)) for step in (92, 97)
    ]
    watch.after_step(Mock())
    told = [call.args for call in trainer.log.write.call_args_list]
    assert (
        told == [("spike", 92), ("spike", 97)][: 1 if outcome == "equivalent" else 2]
        and watch.found == []
    )


@pytest.mark.slow
def test_a_run_whose_log_is_damaged_meanwhile_is_finished_and_says_so(make, capsys, monkeypatch):
    """The report cannot be written; model and log are."""
    config = make("run", on_spike="warn", **{**LONG, "steps": 4})
    train = Trainer.train

    def damaged(trainer, *given):
        found = train(trainer, *given)
        with trainer.log.path.open("a") as log:
            log.write("{\n")
        return found

    monkeypatch.setattr(Trainer, "train", damaged)
    with raises(ConfigError, "run.event", ":") as caught:
        training.run(config)
    assert str(caught.value) in capsys.readouterr().err
    assert (
        '"event": "done"' in log_lines(config)[-1]
        and (Path(config.output) / "final" / "config.json").exists()
    )


@pytest.mark.slow
def test_a_skipped_run_resumes_to_the_bit(make, corrupt):
    whole = make("whole", on_spike="skip", **LONG)
    assert training.run(whole) == 0
    losses, digests = tiny.losses(Path(whole.output)), tiny.digests(Path(whole.output))
    shutil.rmtree(Path(whole.output) / "checkpoints" / "step-00000104")
    assert training.run(replace(whole, resume=True)) == 0
    assert (tiny.losses(Path(whole.output)), tiny.digests(Path(whole.output))) == (losses, digests)
    assert len(spikes(whole)) == 1
    assert read_run(Path(whole.output) / "run.json")["left_out"] == [PLANTED]


@pytest.mark.slow
def test_a_reference_that_left_out_other_batches_is_no_pair_of_its_steps(make, monkeypatch):
    """The batch is corrupt while the narrow run trains, and whole when its reference does: one leaves it out, the other does not."""
    config = make("pair", on_spike="skip", compare="bf16", **LONG)
    run, reference = Path(config.output), Path(config.output) / "compare-bf16"
    whole = TextFeed.draw
    spiking_run.corrupt(monkeypatch)
    corrupt = TextFeed.draw
    monkeypatch.setattr(
        TextFeed,
        "draw",
        lambda feed, step: (whole if reference.exists() else corrupt)(feed, step),
    )
    assert training.run(config) == 0
    assert [read_run(each / "run.json")["left_out"] for each in (run, reference)] == [[PLANTED], []]
    text = re.sub(r"\s+", " ", (run / "report.html").read_text("utf-8"))
    assert "Not the same batches as bf16" in text and "on the same batches: the mean" not in text
    assert f"Of the data fp8-delayed left out batch {PLANTED} and bf16 left out none" in text
    [judged] = lineage.compare([run, reference]).judged
    assert (
        judged.pair.unpaired == 104 - PLANTED + 1
        and judged.curve.steps == (PLANTED - 1) - (PLANTED - 1) // 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 9])
def test_a_run_that_is_stopped_while_it_judges_skips_the_same_batch(
    make, corrupt, monkeypatch, place
):
    """It goes back to the checkpoint, from which it comes to the spike again."""
    whole, stopped = (make(name, on_spike="skip", **LONG) for name in ("whole", "stopped"))
    assert training.run(whole) == 0
    spiking_run.at_judged_step(
        monkeypatch, place, lambda trainer: faulty_run.apply("stop", trainer)
    )
    assert training.run(stopped) == 130
    assert spikes(stopped) == [] and max(tiny.losses(Path(stopped.output))) == 80
    assert training.run(replace(stopped, resume=True)) == 0
    assert (tiny.losses(Path(stopped.output)), tiny.digests(Path(stopped.output))) == (
        tiny.losses(Path(whole.output)),
        tiny.digests(Path(whole.output)),
    )
    assert spikes(stopped) == spikes(whole)


@pytest.mark.slow
def test_a_check_of_the_guard_begins_anew_after_a_skip(make, corrupt):
    """The spike lies within a check that began after the checkpoint: its losses so far are of steps that do not count any more."""
    config = make("run", on_spike="skip", guard="every=88,steps=10,margin=50%,then=stay", **LONG)
    assert training.run(config) == 0
    [event], [check] = spikes(config), tiny.events(Path(config.output), "guard")
    assert event["left_out"] == [PLANTED] and (check["begun"], check["steps"]) == (88, 10)
    losses = tiny.losses(Path(config.output))
    assert check["narrow"] == pytest.approx(sum(losses[step] for step in range(94, 99)) / 5)


def test_graphs_are_refused(make):
    with pytest.raises(ConfigError, match=r"guard.on_spike = 'warn': device.cuda_graph"):
        make(on_spike="warn", cuda_graph=True)
