"""The checks of a guard on the page: sentences, steps of BF16, and what is drawn (exact)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from narrowgauge.report import guard
from narrowgauge.report.run_data import Recorded


def check(begun, difference, verdict, then="", control=None):
    return {
        "event": "guard", "step": begun + 4, "begun": begun, "steps": 4, "difference": difference, "verdict": verdict, "then": then,
        "mean": difference, "margin": 0.01, "scale": 0.004, "control": control, "sentence": f"It is {verdict}.",
    }  # fmt: skip


def recorded(*events, steps=40):
    taken = [{"event": "step", "step": step, "loss": 1.0} for step in range(1, steps + 1)]
    return Recorded(folder=Path("run"), run={}, events=[*taken, *events], config="")


def rewind(step):
    return {"event": "rewind", "step": step, "steps": 4, "why": "guard"}


def test_a_run_without_checks_has_no_section():
    assert guard.section(recorded()) is None


def test_the_sentences_say_verdict_cost_and_steps_of_bf16():
    alarms = (
        check(16, 0.05, "worse", "stay"),
        rewind(16),
        check(24, 0.04, "worse", "stay"),
        rewind(24),
    )
    run = recorded(check(8, 0.02, "unknown", control=0.001), *alarms, check(32, 0.0, "unknown"))
    found = guard.section(run)
    assert found["sentences"] == [
        "It is unknown.",
        "4 checks took 12 steps that did not count, 30.0\N{NO-BREAK SPACE}% of the run's.",
        "First alarm at step 20; the check there differed by +0.0500 nats.",
        "In BF16 in place of the recipe: steps 17 to 32.",
    ]
    assert [words for words, _, _ in found["legend"]] == ["unknown", "worse"] and found["notice"][
        "kind"
    ] == "open"
    assert found["figure"].count("<svg") == 2 and "margin" in found["figure"]  # a desk and a phone


def test_what_an_alarm_was_laid_at_is_told_with_the_line_to_use():
    seen = {
        "products": ["a.down_proj:output"],
        "hurts": True,
        "words": "in 8 steps all of the loss comes back",
    }
    blame = {
        "event": "blame",
        "step": 20,
        "suspects": ["a.down_proj:output"],
        "confirmations": [seen],
    }
    found = guard.section(
        recorded(check(16, 0.05, "worse"), {**blame, "recipes": ["a.down_proj=bf16:output"]})
    )
    assert found["sentences"][-1] == (
        "Step 20, inaccurate: a.down_proj:output. Confirmed, a.down_proj:output: in 8 steps all of the loss comes back. "
        'In 16 bits: recipe.layers = ["a.down_proj=bf16:output"].'
    )
    found = guard.section(
        recorded(check(16, 0.05, "worse"), {**blame, "suspects": [], "confirmations": []})
    )
    last = found["sentences"][-1]
    assert last.startswith("Step 20:") and "a.down_proj" not in last


@pytest.mark.parametrize(("then", "steps"), [("bf16", "17 to 40"), ("fp8-row", "17 to 20")])
def test_a_wider_recipe_leaves_the_stretch_alone_in_bf16(then, steps):
    [*_, last] = guard.section(recorded(check(16, 0.05, "worse", then), rewind(16)))["sentences"]
    assert last.startswith("In BF16") and last.endswith(f": steps {steps}.")


def test_what_the_first_steps_showed_is_drawn_and_said():
    first = {
        **check(8, 0.001, "unknown"),
        "same": 0.002,
        "weights": 14,
        "slopes": [0.0, 1.25],
        "sick": [],
    }
    second = {
        **check(16, 0.001, "worse", "warn"),
        "same": -0.003,
        "weights": 14,
        "slopes": [-0.5, 1.0],
        "sick": ["a.up"],
    }
    found = guard.section(recorded(first, second | {"seen_on": "gradient"}))
    assert (
        "At the first step of a check, on the same weights, the loss differed by \N{MINUS SIGN}0.0030 to +0.0020 nats, and the "
        "gradients of 14 weights had slopes of \N{MINUS SIGN}0.50 to 1.25; another gradient: a.up."
    ) in found["sentences"]
    assert (
        "First alarm at step 20, seen on the gradient; the check there differed by +0.0010 nats."
        in found["sentences"]
    )
    assert found["figure"].count("first step") == 2  # on a desk and on a phone
    [_, _, unseen, *_] = guard.section(
        recorded({**check(8, 0.001, "unknown"), "same": 0.002, "slopes": None})
    )["sentences"]
    assert "+0.0020 to +0.0020 nats" in unseen and "slopes" not in unseen


def test_a_reference_that_diverged_is_said_and_not_drawn():
    found = guard.section(recorded(check(8, math.nan, "reference")))
    assert (
        found["figure"] == ""
        and "Step 12: the BF16 reference itself was not finite." in found["sentences"]
    )
