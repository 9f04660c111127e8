"""Which rung comes next, and what follows from how they went (exact: the losses are made)."""

from __future__ import annotations

import json
import math

import pytest

from narrowgauge import recipes
from narrowgauge.conversion.switching import bits
from narrowgauge.diagnose.runs import decode, encode
from narrowgauge.lab.ladder import AGAIN, CONTROL, WIDE, Ladder, Rung, chain
from tests.raising import require

BASE = [3.0] * 40


def climbed(recipe="fp8-delayed", **gaps):
    """A ladder whose rungs are as far above BF16 as `gaps` says (0 where it says nothing); a text refuses one, NaN loses it."""
    ladder = Ladder(
        recipe=recipe,
        begun=100,
        steps=40,
        asked=110,
        logged=dict.fromkeys(range(101, 141), 3.0 + gaps.get("again", 0.0)),
    )
    order = []
    while name := ladder.next():
        order.append(name)
        gap = gaps.get(name.replace(":", "_").replace("-", "_"), 0.0005 if name == CONTROL else 0.0)
        if isinstance(gap, str):
            ladder.rungs[name] = Rung(name=name, refused=gap)
        elif math.isnan(gap):
            ladder.rungs[name] = Rung(name=name, losses=BASE[:7], lost=108)
        else:
            ladder.rungs[name] = Rung(name=name, losses=[loss + gap for loss in BASE], spent_s=1.0)
    return ladder, order


def test_the_same_curve_in_bf16_ends_the_ladder():
    ladder, order = climbed()
    assert order == [AGAIN, WIDE, CONTROL]
    assert (
        "the cause is not the number format. Look at the data of these steps" in ladder.conclusion()
    )
    assert "It repeats: the losses that the run has logged of 40 steps, to the bit." in list(
        ladder.report()
    )


def test_the_first_change_that_mends_it_is_named():
    ladder, order = climbed(
        again=0.1,
        recipe_fp8_current=0.1,
        product_output=0.1,
        product_grad_input=0.1,
        recipe_fp8_row=0.05,
    )
    products = ["product:output", "product:grad_input", "product:grad_weight"]
    assert order == [
        AGAIN,
        WIDE,
        CONTROL,
        "recipe:fp8-current",
        "recipe:fp8-row",
        "recipe:mxfp8",
        *products,
    ]
    assert ladder.mended() == ["recipe:mxfp8", "product:grad_weight"]
    require(ladder.conclusion(), "mended", "recipe mxfp8.")


def test_one_product_may_mend_what_no_recipe_does():
    bad = {f"recipe_{name}": 0.1 for name in ("int4_hq_bs", "int8")}
    ladder, _ = climbed(
        "int4-row-sr", again=0.1, product_output=0.1, product_grad_input="it cannot", **bad
    )
    require(ladder.conclusion(), "mended", "grad_weight alone")
    assert "product:grad_input: not taken: it cannot" in list(ladder.report())
    ladder, _ = climbed(
        "int4-row-sr",
        again=0.1,
        product_output=0.1,
        product_grad_input=0.1,
        product_grad_weight=0.1,
        **bad,
    )
    require(ladder.conclusion(), "bf16-alone")


def test_a_gap_below_the_margin_is_laid_at_the_product_that_takes_most_of_it():
    """What is left is the price of the sound products, above control."""
    ladder, _ = climbed(
        "int8",
        again=0.006,
        product_output=0.0061,
        product_grad_input=0.0012,
        product_grad_weight=0.005,
    )
    assert ladder.mended() == ["product:grad_input"]
    require(ladder.conclusion(), "small-by-most", "grad_input alone", "+0.0012 of +0.0060")
    ladder, _ = climbed(
        "fp8-row",
        again=0.006,
        recipe_mxfp8=0.0025,
        product_output=0.0013,
        product_grad_input=0.006,
        product_grad_weight=0.006,
    )
    # the change that leaves least
    require(ladder.conclusion(), "small-by-most", "output alone", "+0.0013 of +0.0060")
    ladder, _ = climbed(
        "int8",
        again=0.006,
        product_output=0.004,
        product_grad_input=0.004,
        product_grad_weight=0.004,
    )
    assert not ladder.mended() and ladder.conclusion().code == "small-by-none"


@pytest.mark.parametrize(
    ("gap", "near"), [(0.008, 0.0074), (0.0011, 0.0009)], ids=["margin", "control"]
)
def test_a_rung_that_falls_just_below_a_limit_mends_nothing(gap, near):
    """The margin is 0.0075, and twice the control 0.001."""
    ladder, _ = climbed(
        "int8", again=gap, product_output=near, product_grad_input=0.0001, product_grad_weight=gap
    )
    assert ladder.mended() == ["product:grad_input"]


def test_what_lost_its_loss():
    ladder, order = climbed(again=math.nan)
    assert (
        "run alone stops being finite: the number format" in ladder.conclusion()
        and "recipe:fp8-current" in order
    )
    ladder, _ = climbed(again=math.nan, bf16=math.nan)
    assert ladder.conclusion().code == "same" and ladder.rungs[WIDE].lost
    ladder, order = climbed(bf16=math.nan)
    require(ladder.conclusion(), "reference-diverges", ladder.rungs[WIDE].lost)


def test_a_run_without_narrow_products_and_one_that_is_lower():
    ladder, order = climbed("")
    assert (
        order == [AGAIN, CONTROL]
        and ladder.conclusion().code == "no-low-precision"
        and list(ladder.report())
    )
    ladder, order = climbed(again=-0.004)
    assert order == [AGAIN, WIDE, CONTROL] and ladder.conclusion().code == "not-behind"


def test_a_ladder_goes_on_from_its_file():
    ladder, _ = climbed(again=0.1, recipe_fp8_current=math.nan)
    again = Ladder(recipe="fp8-delayed", begun=100, steps=40, asked=110)
    again.take_up(json.loads(json.dumps(decode(encode(ladder.facts())))))
    assert again.rungs == ladder.rungs and not again.next()


def test_a_log_that_differs_is_said():
    ladder, _ = climbed()
    ladder.logged = {101: 3.25, 102: 3.0}
    require(ladder.repeats(), "differs", "0.25 nats", "step 101")
    ladder.logged = {}
    assert ladder.repeats().code == "no-loss"


@pytest.mark.parametrize("recipe", [each for each in recipes.ALL if each.name != "bf16"], ids=str)
def test_recipes_of_the_ladder_are_more_conservative(recipe):
    """The next one is no narrower in any product, and remembers nothing, so that a stretch can begin with it.

    A recipe without a next one is followed by bf16.
    """
    for name in chain(recipe.name):
        target = recipes.get(name)
        assert not target.has_state
        assert all(
            bits(gemm) >= bits(recipe.gemms()[product]) for product, gemm in target.gemms().items()
        )
