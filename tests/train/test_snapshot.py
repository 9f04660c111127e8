"""New state needs no list: every user of `Snapshot` restores a planted buffer, field, counter and generator (exact)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from narrowgauge.lab import branch, training
from narrowgauge.lab.probe import rolled_back
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops import rng
from narrowgauge.snapshot import Snapshot, Training, undisturbed
from narrowgauge.train import assembly, loop, run_checkpoints
from narrowgauge.train.checkpoint_ref import branched
from narrowgauge.train.config.settings import replace
from narrowgauge.train.deferred import StepQueue
from tests.compare import assert_same
from tests.lab.blame.planted import IDS, converted


class Planted:
    """State of kinds that no code of the package names.

    number  state of a generator in rng.SOURCES
    """

    def __init__(self, model, monkeypatch):
        self.model, self.number, self.model.own_generator = model, 1, torch.Generator()
        monkeypatch.setitem(rng.SOURCES, "planted", (self._read, self._write))
        self.windows = [each for each in model.modules() if isinstance(each, AmaxHistory)]
        for each in self.windows:
            each.register_buffer("planted", torch.zeros(2, 3))
            each.planted_field = 1
        model.register_buffer("planted", torch.zeros(5).bfloat16())
        self.layers = [each for each in model.modules() if isinstance(each, QLinear)]
        for each in self.layers:
            each.planted_field = 1

    def _read(self):
        return {"planted": self.number}

    def _write(self, saved):
        self.number = saved["planted"]

    def change(self):
        self.number += 1
        torch.rand(3, generator=self.model.own_generator)
        self.model.planted += 1
        for each in self.windows:
            each.planted += 1
            each.planted_field = 2
        for each in self.layers:
            each.planted_field, each.planted_later = 2, 3

    def of_layer_states(self):
        return [self.number, *(each.planted.clone() for each in self.windows)]

    def of_tensors(self):
        return [
            *self.of_layer_states(),
            self.model.planted.clone(),
            self.model.own_generator.get_state(),
        ]

    def of_fields(self):
        return [
            [each.planted_field for each in (*self.windows, *self.layers)],
            [hasattr(each, "planted_later") for each in self.layers],
        ]


@pytest.fixture
def planted(monkeypatch):
    return lambda model: Planted(model, monkeypatch)


def test_a_fork_restores_it(planted):
    model = converted("fp8-delayed")
    state, fork_of = planted(model), torch.optim.SGD(model.parameters(), lr=0.1)
    fork, before = Snapshot.take(Training(model=model, optimizer=fork_of)), state.of_tensors()
    state.change()
    after = state.of_tensors()
    fork.swap()
    assert_same(state.of_tensors(), before)
    fork.swap()
    assert_same(state.of_tensors(), after)
    fork.swap()
    fork.restore()
    assert_same(state.of_tensors(), after)


def test_undisturbed_restores_it(planted):
    model = converted("fp8-delayed")
    state = planted(model)
    before, fields = state.of_tensors(), state.of_fields()
    versions = [each.history._version for each in state.windows]
    with undisturbed(model):
        model(IDS).square().mean().backward()
        state.change()
    assert_same(state.of_tensors(), before)
    assert state.of_fields() == fields
    assert all(each.grad is None for each in model.parameters())
    # A pass without an optimizer step writes no history, and restoring must not either.
    assert [each.history._version for each in state.windows] == versions


def test_a_queued_step_restores_it(planted):
    from narrowgauge.snapshot import Training

    model, queue, agreement = converted("fp8-delayed"), StepQueue(), run_checkpoints.Counters()
    state = planted(model)
    training = Training(model=model, agreements=[agreement])
    first = queue.snapshot(training)
    begin = state.of_layer_states(), [each.live.clone() for each in state.windows]
    model(IDS).square().mean().backward()
    state.change()
    agreement.step += 1
    second, then = queue.snapshot(training), state.of_layer_states()
    state.change()
    second.restore()
    assert_same(state.of_layer_states(), then)
    assert agreement.step == 1
    first.restore()
    assert_same((state.of_layer_states(), [each.live.clone() for each in state.windows]), begin)
    assert agreement.step == 0


@dataclass
class MoreCounters(run_checkpoints.Counters):
    planted: int = 0


@pytest.mark.slow
def test_a_probe_restores_it(make, before_step, planted, monkeypatch):
    monkeypatch.setattr(assembly, "Counters", MoreCounters)
    seen = []

    def probe(run):
        state = planted(run.model)
        run.counters.planted, before = 1, state.of_tensors()
        with rolled_back(run):
            state.change()
            run.counters.planted = 2
            run.feed.leave_out([7])
        seen.append(run.counters.planted)
        assert_same(state.of_tensors(), before)
        assert run.feed.left_out == []
        for each in state.windows:
            del each.planted
        del run.model.planted

    before_step(2, probe)
    assert loop.run(make(recipe="fp8-delayed", steps=3)) == 0
    assert seen == [1]


@pytest.mark.slow
def test_a_branch_takes_it_over(make, tmp_path, monkeypatch):
    """The counters of the parent, from a field that only one of both has written, and its generator."""
    parent = make("parent", steps=3, checkpoint_every=2)
    assert loop.run(parent) == 0
    number, made, seen, take_over = [1], [], [], branch.take_over

    def counted():
        made.append(MoreCounters(planted=len(made) + 1))
        return made[-1]

    def noted(one, other):
        number[0] = 5
        said = take_over(one, other)
        seen.append((one.counters.planted, other.counters.planted, number[0], other.step))
        return said

    monkeypatch.setitem(
        rng.SOURCES,
        "planted",
        (lambda: {"planted": number[0]}, lambda saved: number.__setitem__(0, saved["planted"])),
    )
    monkeypatch.setattr(assembly, "Counters", counted)
    monkeypatch.setattr(branch, "take_over", noted)
    # A checkpoint holds no planted generator: keep it out of the states that are saved.
    monkeypatch.setattr(
        "narrowgauge.train.checkpoint.state.generators",
        lambda: {k: v for k, v in rng.generators().items() if k != "planted"},
    )
    monkeypatch.setattr(
        "narrowgauge.train.checkpoint.state.set_generators",
        lambda saved: rng.set_generators(saved | {"planted": number[0]}),
    )
    config = replace(branched(f"{parent.output}@2", str(tmp_path / "branch")), steps=3)
    assert training.run(config) == 0
    assert seen == [(1, 1, 1, 2)]
    assert Path(config.output, "final").is_dir()
