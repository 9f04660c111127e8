"""The setting `switch`: its grammar and refusals (exact), and that a run resumed across a switch is the run that never stopped."""

from __future__ import annotations

import json
import signal
from fractions import Fraction
from pathlib import Path

import pytest

from narrowgauge.cli import main
from narrowgauge.errors import ConfigError
from narrowgauge.report import page
from narrowgauge.train import loop
from narrowgauge.train.config import switch_syntax
from narrowgauge.train.config.settings import replace
from tests.raising import coded, raises, require
from tests.selection import quick
from tests.train import tiny

BACKWARD = ("grad_input", "grad_weight")


@pytest.mark.parametrize(
    ("written", "layers", "recipe", "after", "products"),
    [
        ("fp8-current@80%", "*", "fp8-current", Fraction(4, 5), switch_syntax.ALL),
        ("bf16@82.5%:forward", "*", "bf16", Fraction(33, 40), ("output",)),
        ("bf16@240:backward", "*", "bf16", Fraction(240), BACKWARD),
        (
            "layers.[0-3].*=bf16@1:grad_weight",
            "layers.[0-3].*",
            "bf16",
            Fraction(1),
            ("grad_weight",),
        ),
        (" *.q_proj = bf16 @ 50 % : forward ", "*.q_proj", "bf16", Fraction(1, 2), ("output",)),
    ],
)
def test_an_entry_says_what_when_and_where(written, layers, recipe, after, products):
    [entry] = switch_syntax.parse(written)
    assert (entry.layers, entry.recipe, entry.after, entry.products) == (
        layers,
        recipe,
        after,
        products,
    )


def test_a_share_is_of_the_steps_rounded_down():
    [entry] = switch_syntax.parse("bf16@82%")
    assert [entry.after_step(steps) for steps in (100, 10, 300, 7)] == [82, 8, 246, 5]
    # Floats would give 28, 57.
    assert [entry.after_step(100) for entry in switch_syntax.parse("bf16@29%, bf16@58%")] == [
        29,
        58,
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("80%", coded("switch.syntax", "'80%'")),
        ("bf16", coded("switch.syntax", "'bf16'")),
        ("bf16@", coded("switch.syntax", "'bf16@'")),
        ("@80%", coded("switch.syntax", "'@80%'")),
        ("bf16@80%,", coded("switch.syntax", "''")),
        ("bf16@80%:sideways", coded("switch.products", "'sideways'", "forward, backward")),
        ("bf16@120%", coded("switch.start-share", "120%")),
        ("bf16@0%", coded("switch.start-share", "0%")),
        ("bf16@half", coded("switch.start", "'half'")),
        ("bf16@-5", coded("switch.start", "'-5'")),
        ("bf16@0.8", coded("switch.start", "'0.8'")),
        ("bf16@6", coded("switch.after-last", "step 6", "6 steps")),
        ("bf16@10%", coded("switch.before-first", "6 steps")),
        ("bf16@50%, fp8-row@3", coded("switch.twice", "'bf16@50%, fp8-row@3'")),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_read(make, written, expected):
    with raises(ConfigError, "config.switch", *expected.values):
        make("refused", recipe="mxfp4", switch=written)
    [problem] = switch_syntax.problems(written, 6)
    require(problem, expected.code, *expected.values)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "fp8-row", "switch": "nvfp4@50%"}, coded("switch.refused", "'nvfp4'")),
        ({"recipe": "fp8-row", "switch": "fp8-row@50%"}, coded("switch.refused", "'fp8-row'")),
        (
            {"recipe": "fp8-row", "switch": "layers.9.*=bf16@50%"},
            coded("switch.refused", "'layers.9.*'"),
        ),
        (
            {"recipe": "fp8-row", "switch": "bf16@2, bf16@4:forward"},
            coded("switch.refused", "'bf16@4:forward'", "'bf16'"),
        ),
    ],
)
def test_switches_that_fit_no_layer_are_refused_before_the_first_step(make, changes, words):
    config = make("refused", **changes)
    with raises(ConfigError, words):
        loop.run(config)
    assert not tiny.events(Path(config.output), "step")


def test_unknown_recipes_are_refused_by_the_command_line(tmp_path, capsys):
    assert main(["train", "--recipe.switch=fp8-rows@50%", f"--output={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert "'fp8-rows'" in told and "Closest: 'fp8-row'" in told
    assert not (tmp_path / "run").exists()


def stop(trainer):
    signal.raise_signal(signal.SIGTERM)


SWITCHES = ["fp8-delayed@50%", "layers.0.*=fp8-current@2:backward, bf16@4:forward"]


@pytest.mark.slow
@pytest.mark.parametrize("switch", quick(SWITCHES[1:], SWITCHES))
@pytest.mark.parametrize("stopped", quick([3], [2, 3, 4]))
def test_a_run_resumed_across_a_switch_is_the_run_that_never_stopped(
    make, before_step, switch, stopped
):
    """Before, at and after it: losses and every tensor of the checkpoint, amax windows included (exact)."""
    common = {"recipe": "mxfp4", "switch": switch}
    reference, config = make("reference", **common), make("stopped", **common)
    assert loop.run(reference) == 0
    before_step(stopped, stop)
    assert loop.run(config) == 75
    assert loop.run(replace(config, resume=True)) == 0
    folders = Path(config.output), Path(reference.output)
    assert tiny.losses(folders[0]) == tiny.losses(folders[1])
    assert tiny.digests(folders[0]) == tiny.digests(folders[1])
    assert tiny.events(folders[0], "switch") == tiny.events(folders[1], "switch")


def test_a_switch_changes_its_step_and_none_before(make):
    """The loss of a step is computed before its update, so the switched forward shows in the first switched step (exact)."""
    plain, switched = (
        make("plain", recipe="mxfp4"),
        make("switched", recipe="mxfp4", switch="bf16@3:forward"),
    )
    for config in (plain, switched):
        assert loop.run(config) == 0
    left, right = (tiny.losses(Path(config.output)) for config in (plain, switched))
    assert [step for step in left if left[step] != right[step]] == [4, 5, 6]


@pytest.mark.slow
def test_a_switch_is_told_everywhere(make, capsys):
    """Console, metrics, run.json, config.toml and the report."""
    config = make("told", recipe="mxfp4", switch="fp8-row@50%:backward")
    assert loop.run(config) == 0
    folder, said = Path(config.output), capsys.readouterr().err
    sentence = "step 4: switch fp8-row@50%:backward: 14 layers from mxfp4 to mxfp4+fp8-row:grad_input,grad_weight"
    assert f"To come at {sentence}" in said and f"\n{sentence}" in said
    event = {
        "step": 4, "switch": "fp8-row@50%:backward", "layers": 14, "before": ["mxfp4"],
        "after": ["mxfp4+fp8-row:grad_input,grad_weight"],
    }  # fmt: skip
    assert tiny.events(folder, "switch") == [{"event": "switch", **event}]
    assert json.loads((folder / "run.json").read_text("utf-8"))["switches"] == [event]
    assert 'switch = "fp8-row@50%:backward"' in (folder / "config.toml").read_text("utf-8")
    assert "then fp8-row@50%:backward from step 4 on " in page.write(folder).read_text("utf-8")


@pytest.mark.slow
def test_other_steps_may_not_move_what_has_happened(make, before_step):
    """A share of more steps is a later step; a number stays where it is."""
    config = make("moved", recipe="mxfp4", switch="bf16@50%")
    before_step(5, stop)
    assert loop.run(config) == 75
    with raises(ConfigError, "resume.switches", "training.steps = 12", "step 5", "['bf16@50%']"):
        loop.run(replace(config, resume=True, steps=12))
    with raises(ConfigError, "resume.changed", "recipe.switch = ''"):
        loop.run(replace(config, resume=True, switch=""))
    assert loop.run(replace(config, resume=True)) == 0


@pytest.mark.slow
def test_the_reference_of_a_comparison_is_not_switched(make):
    config = make("compared", recipe="mxfp4", switch="fp8-row@50%", compare="bf16")
    assert loop.run(config) == 0
    assert not tiny.events(Path(config.output) / "compare-bf16", "switch")
