"""Steps that do not count: afterwards a run is what it was, and ends as the run that took none (exact)."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from narrowgauge.conversion.switching import switched
from narrowgauge.errors import ConfigError
from narrowgauge.lab import probe, training
from tests.raising import raises
from tests.selection import quick, slow_on_a_plain_cpu
from tests.train import tiny
from tests.train.test_deferred import late, seen  # noqa: F401
from tests.train.test_loop import Poison, in_forward, installed  # noqa: F401

RUNS = [
    {"recipe": "int4-hq-lss", "micro_batches": 2},
    {"recipe": "fp8-delayed", "precision": "amp-fp16"},
    {"recipe": "fp8-delayed", "states": "8bit", "precision": "bf16-o3"},
    {
        "recipe": "fp8-current",
        "optimizer": "lion",
        "states": "4bit",
        "precision": "bf16-o2",
        "held_gradients": "fp8",
    },
    {"recipe": "int4-hq-bs", "optimizer": "sgd"},
    {
        "recipe": "mxfp8",
        "states": "8bit",
        "held_gradients": "none",
        "clip_by": "previous",
        "micro_batches": 2,
    },
    {"recipe": "fp8-row", "states": "8bit", "held_gradients": "none", "clip_by": "two-pass"},
    {"recipe": "nvfp4", "precision": "bf16-o2", "master": "stochastic", "fuse": True},
]


@pytest.fixture
def stretches(before_step):
    """stretches(4, n): before step 4 of a run it takes a stretch of n steps, and a control; returns the list of both."""

    def install(number, steps, change=probe.suspended):
        found = []

        def take(trainer):
            if trainer.queue is not None and trainer.queue.steps:
                trainer._read(NoConsole())
            for other_order in (False, True):
                found.append(probe.run_probe(trainer, steps, change, other_order=other_order))

        before_step(number, take)
        return found

    return install


class NoConsole:
    def step(self, *_, **__):
        pass


def same(config, reference):
    assert tiny.losses(Path(config.output)) == tiny.losses(Path(reference.output))
    assert tiny.digests(Path(config.output)) == tiny.digests(Path(reference.output))


@pytest.mark.slow
@slow_on_a_plain_cpu
@pytest.mark.parametrize("settings", quick(RUNS[1:2], RUNS), ids=str)
def test_a_run_with_a_stretch_is_the_run_without(make, stretches, settings, cpu):
    reference, config = make("reference", **settings), make("stretched", **settings)
    assert training.run(reference) == 0
    found = stretches(3, 3)
    assert training.run(config) == 0
    same(config, reference)
    wide, control = found
    assert wide.begun == 2 and [len(each.steps) for each in found] == [3, 3] and not wide.lost
    own = list(tiny.losses(Path(config.output)).values())[2:5]
    assert wide.losses != own and all(
        abs(loss - other) < 0.3 for loss, other in zip(wide.losses, own, strict=True)
    )
    assert control.losses == pytest.approx(wide.losses, abs=0.02)
    # Weights that step in backward are nudged, by units in the last place of float32, of which a model this small may show none.
    assert control.losses != wide.losses or settings.get("held_gradients") == "none"


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["bf16", "fp8-delayed"])
def test_without_a_change_a_stretch_is_what_the_run_does_next(make, stretches, settings):
    """Loss and norm of each step, to the bit."""
    config = make(recipe=settings, micro_batches=2)
    found = stretches(2, 4, nothing)
    assert training.run(config) == 0
    own = tiny.events(Path(config.output), "step")[1:5]
    assert found[0].losses == [event["loss"] for event in own]
    assert found[0].grad_norms == [event["grad_norm"] for event in own]
    assert [each["lr"] for each in found[0].steps] == [event["lr"] for event in own]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
def test_a_stretch_with_one_product_in_16_bits(make, stretches, recipe):
    reference, config = make("reference", recipe=recipe), make("stretched", recipe=recipe)
    assert training.run(reference) == 0
    found = stretches(
        3, 2, lambda model: switched(model, "bf16", "model.layers.1.mlp.down_proj", ["grad_weight"])
    )
    assert training.run(config) == 0
    same(config, reference)
    own = list(tiny.losses(Path(config.output)).values())[2:4]
    assert (
        found[0].losses[0] == own[0] and found[0].losses[1] != own[1]
    )  # the forward pass is the recipe's


def test_a_stretch_in_a_recipe_that_remembers_is_refused(make, stretches):
    stretches(3, 2, lambda model: switched(model, "fp8-delayed"))
    with raises(ConfigError, "switched.has-memory", "'fp8-delayed'"):
        training.run(make(recipe="int4-hq-bs"))


def test_a_stretch_beyond_the_run_is_refused(make, stretches):
    stretches(3, 5)
    with raises(ConfigError, "probe.past-end", "of 5", "step 2", "has 6", "5 steps"):
        training.run(make())


@contextmanager
def nothing(model):
    yield model
