"""Runs with cuda_graph, fuse and what they say: refused where they cannot be, the same losses where a recorder stands in (exact)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from narrowgauge.diagnose import gpu_idle
from narrowgauge.errors import ConfigError
from narrowgauge.train import launches, loop, passes, trainer
from tests.raising import raises
from tests.test_cuda_graphs import Recorder
from tests.train.tiny import events, losses, settings


@contextmanager
def recorded(monkeypatch, recorder: Recorder) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(
            launches, "graphed_step", functools.partial(launches.graphed_step, recorder=recorder)
        )
        yield


@pytest.mark.slow
def test_a_run_through_graphs_learns_what_an_eager_one_does(text, tmp_path, monkeypatch, capsys):
    """Micro-batches, delayed scaling and a recipe that is switched on the way."""
    changes = {"recipe": "fp8-delayed", "micro_batches": 2, "steps": 8, "switch": "bf16@6:backward"}
    loop.run(settings(text, tmp_path / "eager", **changes))
    recorder = Recorder()
    with recorded(monkeypatch, recorder):
        loop.run(settings(text, tmp_path / "graphs", cuda_graph=True, **changes))
    assert losses(tmp_path / "graphs") == losses(tmp_path / "eager")
    norms = [
        [event["grad_norm"] for event in events(tmp_path / name, "step")]
        for name in ("graphs", "eager")
    ]
    assert norms[0] == norms[1] and recorder.captures >= 3
    assert "CUDA graphs captured: 1 of forward and backward" in capsys.readouterr().err


def test_a_run_without_a_gpu_refuses_before_it_trains(text, tmp_path):
    with raises(ConfigError, "cuda-graphs.unsupported", "cuda_graph"):
        loop.run(settings(text, tmp_path / "run", cuda_graph=True))
    assert not events(tmp_path / "run", "step")


def test_checkpointing_and_graphs_exclude_each_other(text, tmp_path):
    with pytest.raises(ConfigError, match=r"does not work with memory.checkpointing = 'full'"):
        settings(text, tmp_path / "run", cuda_graph=True, checkpointing="full")


def test_a_step_reads_once_from_the_device(text, tmp_path, monkeypatch):
    calls = []
    real = passes.read
    monkeypatch.setattr(
        passes, "read", lambda readings: calls.append(readings.shape) or real(readings)
    )
    loop.run(settings(text, tmp_path / "run", micro_batches=2))
    assert calls == [(3,)] * 6  # the loss of each micro-batch, and the norm


@pytest.mark.slow
def test_a_fused_run_learns_what_another_does(text, tmp_path):
    """Nearly: kernels of a CPU round once where torch rounds between operations."""
    for fuse in (False, True):
        loop.run(settings(text, tmp_path / str(fuse), recipe="fp8-delayed", fuse=fuse))
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor_every", "step"), [(0, 3), (3, 4)])  # step 3 is the one asked for
def test_the_idle_time_of_a_step_is_logged_and_said(
    text, tmp_path, monkeypatch, capsys, with_report, tensor_every, step
):
    """With a made-up trace of one step, on a device that it is measured on."""

    @contextmanager
    def made_up() -> Iterator[list[gpu_idle.Interval]]:
        yield [(i * 40e-6, i * 40e-6 + 10e-6) for i in range(100)]

    monkeypatch.setattr(gpu_idle, "watched", made_up)
    real = launches.LaunchMonitor.measures

    def measures(self, number):
        self.device = torch.device("cuda")
        return real(self, number)

    monkeypatch.setattr(launches.LaunchMonitor, "measures", measures)
    loop.run(
        settings(text, tmp_path / "run", launches_at=3, micro_batches=2, tensor_every=tensor_every)
    )
    [event] = events(tmp_path / "run", "launches")
    assert (
        event["step"] == step
        and event["kernels"] == 100
        and event["idle"] == pytest.approx(0.75, abs=0.01)
    )
    assert len(losses(tmp_path / "run")) == 6, "the step that is measured counts"
    for sentence, value in zip(
        event["advice"], ("--device.cuda-graph", "micro_batches =", "--device.compile"), strict=True
    ):
        assert value in sentence
    said = capsys.readouterr().err
    assert f"step {step}: {event['words']}" in said and "--device.cuda-graph" in said
    assert event["words"] in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_graphs_that_are_compiled_anew_are_counted(monkeypatch, capsys):
    counts = iter([1, 1, 3])
    monkeypatch.setattr(launches, "compiled_graphs", lambda: next(counts))
    config = type("Config", (), {"compile": True})()
    watched, said = launches.LaunchMonitor(config, torch.device("cpu"), None, ""), []
    show = type("Show", (), {"say": lambda self, words: said.append(words)})()
    for number in (1, 2, 3):
        watched.report(number, show)
    assert said == [
        "step 3: torch.compile made 2 graphs anew, 3 so far: shapes or settings changed. TORCH_LOGS=recompiles names them."
    ]


def test_the_counter_counts_what_was_compiled():
    before = launches.compiled_graphs()

    @functools.partial(torch.compile, backend="eager", dynamic=False)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    for length in (3, 3, 4):
        twice(torch.zeros(length))
    assert launches.compiled_graphs() == before + 2


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"fuse": True}, {"cuda_graph": True}], ids=str)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "bf16"])
def test_a_step_waits_for_the_device_where_it_reads_and_nowhere_else(
    text, tmp_path, monkeypatch, recipe, changes
):
    """torch.cuda.set_sync_debug_mode("error") from the third step on, but for the one read."""
    step, read = trainer.Trainer._optimizer_step, passes.read

    def guarded(self):
        torch.cuda.set_sync_debug_mode(
            "error" if self.step >= 2 and self.step != 3 else "default"
        )  # step 4 captures
        try:
            return step(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def reading(readings):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(readings)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(trainer.Trainer, "_optimizer_step", guarded)
    monkeypatch.setattr(passes, "read", reading)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "steps": 8, "launches_at": 0}
    loop.run(settings(text, tmp_path / "run", device="cuda", recipe=recipe, **sizes, **changes))
    assert len(losses(tmp_path / "run")) == 8
