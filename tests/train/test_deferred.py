"""Runs whose numbers are read late, as on a GPU, are those that are read step by step (exact); no step looks at a tensor."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.errors import ConfigError, NumericsError
from narrowgauge.ops.registry import Device
from narrowgauge.optim import backends
from narrowgauge.optim.skipped_steps import SkippedSteps
from narrowgauge.plan.trace import recording
from narrowgauge.train import deferred, loop, step
from narrowgauge.train import trainer as trainer_module
from narrowgauge.train.config.settings import replace, resolved
from tests.raising import raises
from tests.selection import quick
from tests.train import tiny
from tests.train.planning.test_plan import source
from tests.train.test_loop import NORM, Poison, in_forward, in_weight_gradient, installed  # noqa: F401
from tests.train.test_torchrun import trained

HOPPER = Device("cuda", (9, 0), cuda=(12, 9))
RUNS = [
    {"recipe": "fp8-delayed", "states": "8bit", "precision": "bf16-o3"},
    {
        "recipe": "fp8-row",
        "optimizer": "lion",
        "states": "4bit",
        "precision": "bf16-o2",
        "held_gradients": "fp8",
    },
    {"recipe": "fp8-current"},
    {"recipe": "int4-hq-lss", "optimizer": "sgd", "precision": "fp32"},
    {"recipe": "fp8-delayed", "precision": "amp-fp16"},
    {"recipe": "fp8-delayed", "precision": "amp-fp16", "states": "8bit"},
]


def test_flags_are_the_float32_numbers_that_kernels_read():
    """An overflow skips one update; a loss that is not finite ends the run for good."""
    flags = deferred.SkipFlags(torch.device("cpu"), 1, scales=True, most=2, skipped=0)
    for readings, found_inf, halted in (
        ([1.0, 2.0], 0, 0), ([1.0, math.inf], 1, 0), ([1.0, 2.0], 0, 0), ([math.nan, 1.0], 0, 1), ([1.0, 2.0], 0, 1),
    ):  # fmt: skip
        flags.see(torch.tensor(readings))
        assert flags.found_inf.dtype == flags.halted.dtype == torch.float32
        assert (float(flags.found_inf), float(flags.halted)) == (found_inf, halted)


@pytest.fixture
def late(monkeypatch):
    """late(): from now on the device decides; also for the optimizer, whose host would look on a CPU."""

    chosen = backends.choose  # its kernel on a CPU is for a host that looks

    def begin() -> None:
        monkeypatch.setattr(trainer_module, "waits", lambda device: True)
        monkeypatch.setattr(SkippedSteps, "seen_by_host", lambda self, flag: False)
        monkeypatch.setattr(
            backends, "choose", lambda param_step, backend: chosen(param_step, "torch")
        )

    return begin


def seen(folder: Path) -> list[dict[str, Any]]:
    """All events of a run but what a clock says, and the file of a checkpoint."""
    clocks = ("elapsed_s", "tokens_per_s", "peak_bytes", "save_s")
    kinds = (
        "step",
        "eval",
        "checkpoint",
        "switch",
        "nonfinite",
        "done",
        "tensor",
        "nonfinite_amax",
    )
    found = [event for event in read_metrics(folder / "metrics.jsonl") if event["event"] in kinds]
    return [{key: value for key, value in event.items() if key not in clocks} for event in found]


@pytest.mark.slow
@pytest.mark.parametrize("settings", RUNS, ids=str)
def test_a_run_that_is_read_late_is_the_run(make, late, settings):
    common = {
        **settings,
        "micro_batches": 2,
        "clip": 0.3,
        "log_every": 3,
        "checkpoint_every": 4,
        "eval_every": 5,
        "steps": 7,
    }
    early, delayed = make("early", **common), make("late", **common)
    assert loop.run(early) == 0
    late()
    assert loop.run(delayed) == 0
    assert seen(Path(delayed.output)) == seen(Path(early.output))
    assert tiny.digests(Path(delayed.output)) == tiny.digests(Path(early.output))
    times = [event["elapsed_s"] for event in tiny.events(Path(delayed.output), "step")]
    assert times == sorted(times) and times[0] > 0


def test_numbers_are_read_where_they_are_told(make, late, monkeypatch):
    late()
    counts = []
    real = deferred.StepQueue.read
    monkeypatch.setattr(
        deferred.StepQueue, "read", lambda self: counts.append(self.steps[-1].number) or real(self)
    )
    config = make(recipe="bf16", steps=9, log_every=4, eval_every=6, checkpoint_every=7)
    assert loop.run(config) == 0
    assert counts == [4, 6, 7, 8, 9]


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_as_if_it_was_not(make, late, before_step):
    late()
    common = {"recipe": "fp8-delayed", "states": "8bit", "log_every": 100}
    reference, config = make("reference", **common), make("stopped", **common)
    assert loop.run(reference) == 0
    before_step(3, lambda trainer: signal.raise_signal(signal.SIGTERM))
    assert loop.run(config) == 75
    assert loop.run(replace(config, resume=True)) == 0
    assert tiny.losses(Path(config.output)) == tiny.losses(Path(reference.output))
    assert tiny.digests(Path(config.output)) == tiny.digests(Path(reference.output))


@pytest.mark.parametrize("recipe", quick(["fp8-delayed"], ["fp8-delayed", "bf16"]))
def test_a_step_that_is_not_finite_ends_the_run_at_the_same_place(make, late, installed, recipe):  # noqa: F811
    """It is seen three steps later; weights, log and place are those of a run that saw it at once."""
    folders, words, weights = [], [], []
    for name in ("early", "late"):
        if name == "late":
            late()
        models: list[Any] = []
        installed(
            lambda model, models=models: (
                models.append(model),
                in_forward(model, Poison(math.nan, first=3)),
            )
        )
        with pytest.raises(NumericsError) as caught:
            loop.run(make(name, recipe=recipe, micro_batches=1, log_every=6, checkpoint_every=0))
        folders.append(make(name).output)
        words.append(str(caught.value))
        weights.append([each.detach().clone() for each in models[0].parameters()])
    assert words[0] == words[1] and words[0].startswith("step 3: loss nan") and NORM in words[0]
    assert seen(Path(folders[1])) == seen(Path(folders[0]))
    assert all(map(torch.equal, *weights))


@pytest.mark.slow
@pytest.mark.parametrize("states", ["8bit", "fp32"])
def test_float16_leaves_out_steps_as_the_scaler_does(make, late, installed, states):  # noqa: F811
    """Weights, states, counters, windows, loss scale and random streams after steps that were left out, one and two in a row."""
    folders = []
    for name in ("early", "late"):
        if name == "late":
            late()
        installed(
            lambda model: [
                in_weight_gradient(model, Poison(math.inf, first=n, last=m))
                for n, m in ((2, 2), (4, 5))
            ]
        )
        common = {
            "recipe": "fp8-delayed",
            "precision": "amp-fp16",
            "states": states,
            "micro_batches": 1,
            "steps": 8,
        }
        config = make(name, **common, log_every=8)
        assert loop.run(config) == 0
        folders.append(Path(config.output))
    norms = [event["grad_norm"] for event in tiny.events(folders[0], "step")]
    assert [step for step, norm in enumerate(norms, 1) if not math.isfinite(norm)] == [2, 4, 5]
    assert seen(folders[1]) == seen(folders[0])
    assert tiny.digests(folders[1]) == tiny.digests(folders[0])


@pytest.mark.slow
def test_float16_gives_up_where_it_did(make, late, installed, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trainer_module, "MOST_SKIPPED_STEPS", 2)
    late()
    installed(lambda model: in_weight_gradient(model, Poison(math.inf, first=2)))
    config = make(precision="amp-fp16", log_every=6)
    with pytest.raises(NumericsError, match=r"step 4: .*product grad_weight"):
        loop.run(config)
    assert list(tiny.losses(Path(config.output))) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_that_are_read_late_are_the_run(ranks, make, parallel):
    """Each rank's device decides by what all have; loss and norm of each step are those of ranks that read at once."""
    common = {
        "recipe": "fp8-delayed",
        "precision": "amp-fp16",
        "parallel": parallel,
        "batch_size": 4,
        "micro_batches": 2,
    }
    early, delayed = make("early", **common), make("late", **common, log_every=6)
    assert ranks(2)(trained, early) == [0, 0]
    assert ranks(2)(trained_late, delayed) == [0, 0]
    assert seen(Path(delayed.output)) == seen(Path(early.output))
    assert tiny.digests(Path(delayed.output)) == tiny.digests(Path(early.output))


def trained_late(config: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "waits", lambda device: True)
        return trained(config)


@pytest.mark.slow
@pytest.mark.parametrize("states", ["8bit", "fp32"])
def test_a_step_looks_at_no_tensor(make, states):
    """On tensors without numbers, of which each look would be an error: forward, backward, norm, decision, clipping, step and windows."""
    config = resolved(make(recipe="fp8-delayed", precision="bf16-o2", states=states, clip=0.3))
    looks, readings = [], []
    with recording(HOPPER), Looks() as mode:
        built = source(config).builder()()
        decision = deferred.SkipFlags(torch.device("cpu"), 1, scales=False, most=20, skipped=0)
        with pytest.MonkeyPatch.context() as patch:
            real = step.update
            patch.setattr(step, "update", lambda *call: real(*call, decision))
            for _ in range(2):
                loss = built.loss()
                loss.backward()
                readings.append(torch.stack((loss.detach(), torch.zeros(()))))
                decision.see(readings[-1])
                built.update()
        looks.append(mode.count)
        with raises(ConfigError, "plan.reads-values"):
            bool(decision.halted)
    assert looks == [0] and mode.count == 1


class Looks(TorchDispatchMode):
    """Counts what would wait for a device: a number of a tensor, as .item(), bool() and .tolist() ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
