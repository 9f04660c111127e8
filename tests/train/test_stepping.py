"""A run that steps in backward: two passes are the ordinary run, a resumed run is the one that never stopped (exact); refusals."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from narrowgauge.errors import ConfigError, NumericsError
from narrowgauge.train import loop, stepping
from narrowgauge.train.config.parallel_syntax import layout
from narrowgauge.train.config.settings import replace
from tests.raising import raises
from tests.selection import quick
from tests.train import tiny
from tests.train.test_torchrun import trained

SIZES = {
    "hidden_size": 64,
    "heads": 2,
    "intermediate_size": 96,
    "steps": 4,
    "clip": 0.3,
}  # matrices of 4,096 and more
INSIDE = {"held_gradients": "none"}
RUNS = [
    {"recipe": "nvfp4", "precision": "bf16-o3", "states": "8bit/fp16", "checkpointing": "full"},
    {"recipe": "fp8-delayed", "states": "8bit"},
    {"recipe": "int4-hq-lss", "precision": "fp32", "states": "4bit", "optimizer": "lion"},
]


def assert_resumed(config, reference, before_step):
    """Stopped before its third step and resumed, a run has the bits of one that was not."""
    before_step(3, lambda trainer: signal.raise_signal(signal.SIGTERM))
    assert loop.run(config) == 75
    assert loop.run(replace(config, resume=True)) == 0
    assert tiny.losses(Path(config.output)) == tiny.losses(Path(reference.output))
    assert tiny.digests(Path(config.output)) == tiny.digests(Path(reference.output))


@pytest.mark.slow
@pytest.mark.parametrize("settings", RUNS, ids=str)
def test_two_passes_are_the_ordinary_run(make, settings):
    folders = []
    for name, changes in (("after", {}), ("inside", {**INSIDE, "clip_by": "two-pass"})):
        config = make(name, **SIZES, **settings, **changes)
        assert loop.run(config) == 0
        folders.append(Path(config.output))
    assert tiny.losses(folders[0]) == tiny.losses(folders[1])
    norms = [[event["grad_norm"] for event in tiny.events(folder, "step")] for folder in folders]
    assert norms[0] == norms[1] and max(norms[0]) > SIZES["clip"]
    assert tiny.digests(folders[0]) == tiny.digests(folders[1])


@pytest.mark.parametrize("clip_by", quick(["previous"], ["previous", "two-pass", "parameter", ""]))
def test_a_resumed_run_is_the_one_that_never_stopped(make, before_step, clip_by):
    common = {
        **SIZES,
        **INSIDE,
        "clip_by": clip_by,
        "states": "8bit",
        "recipe": "fp8-current",
        "clip": 0.3 if clip_by else 0.0,
    }
    reference, config = make("reference", **common), make("stopped", **common)
    assert loop.run(reference) == 0
    assert_resumed(config, reference, before_step)
    assert all(event["grad_norm"] > 0 for event in tiny.events(Path(config.output), "step"))


@pytest.mark.slow
def test_two_ranks_with_shards_sum_in_fp8(ranks, make):
    common = {
        **SIZES,
        "states": "8bit",
        "recipe": "fp8-current",
        "parallel": "fsdp",
        "micro_batches": 2,
    }
    for name, changes in (
        ("inside", {**INSIDE, "clip_by": "previous"}),
        ("held", {"held_gradients": "fp8"}),
    ):
        assert ranks(2)(trained, make(name, **common, **changes)) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("clip_by", ["previous", "two-pass"])
def test_two_ranks_with_shards_are_clipped_alike(ranks, make, clip_by):
    """The ranks compare their norms each step; two passes are the ordinary run of two ranks."""
    common = {**SIZES, "states": "8bit", "recipe": "fp8-current", "parallel": "fsdp"}
    inside = make("inside", **common, **INSIDE, clip_by=clip_by)
    after = make("after", **common)
    for config in (inside, after):
        assert ranks(2)(trained, config) == [0, 0]
    if clip_by == "two-pass":
        assert tiny.losses(Path(inside.output)) == tiny.losses(Path(after.output))
        assert tiny.digests(Path(inside.output)) == tiny.digests(Path(after.output))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"held_gradients": "fp8"}, {**INSIDE, "clip_by": "two-pass"}],
    ids=str,
)
def test_sums_in_fp8_resume_exactly_and_learn_as_sums_of_16_bits(make, before_step, changes):
    """Two micro-batches. Losses of the first steps are those of an ordinary run within one part in a hundred."""
    common = {
        **SIZES,
        "states": "fp8-lm",
        "recipe": "fp8-current",
        "precision": "bf16-o3",
        "micro_batches": 2,
    }
    ordinary, reference, config = (
        make("ordinary", **common),
        make("reference", **common, **changes),
        make("stopped", **common, **changes),
    )
    for each in (ordinary, reference):
        assert loop.run(each) == 0
    assert_resumed(config, reference, before_step)
    truth, found = tiny.losses(Path(ordinary.output)), tiny.losses(Path(reference.output))
    assert truth != found and all(
        found[step] == pytest.approx(truth[step], rel=0.01) for step in truth
    )


def poison(trainer):
    weight = trainer.model.get_submodule("model.layers.1.mlp.up_proj").weight
    weight.register_hook(lambda gradient: gradient * math.nan)


@pytest.mark.parametrize("clip_by", ["previous", "two-pass"])
def test_a_gradient_that_is_not_finite_ends_the_run(make, before_step, reports, clip_by):
    config = make(
        **SIZES, **INSIDE, clip_by=clip_by, states="8bit", checkpoint_every=1, recipe="fp8-current"
    )
    before_step(3, poison)
    words = "clip_by =" if clip_by == "previous" else "The weights are those of step 2"
    with raises(NumericsError, "loss.not-finite", words):
        loop.run(config)
    folder = Path(config.output)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-00000001",
        "step-00000002",
    ]
    [event] = tiny.events(folder, "nonfinite")
    assert event["step"] == 3 and reports == [folder]


def test_what_steps_in_backward_cannot_have_is_refused(make):
    config = make(**INSIDE, clip_by="previous")
    for text, world in (("dp", 2), ("tp=2", 2), ("pp=2", 2), ("fsdp=2,tp=2", 4)):
        with raises(ConfigError, "in-backward.parallel"):
            stepping.refuse(config, layout(text, world))
    stepping.refuse(config, layout("fsdp", 2))
    stepping.refuse(make(micro_batches=2), layout("dp", 2))
    with raises(
        ConfigError, "in-backward.parallel", "optimizer.held_gradients = 'fp8'", "parallel = 'dp=2'"
    ):
        stepping.refuse(make(held_gradients="fp8"), layout("dp", 2))
