"""The named recipes: their rules as the literature states them, row by row (exact), and how they are found."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.recipe import (
    CURRENT,
    GEMMS,
    WHOLE,
    ClippedRms,
    DelayedScaling,
    Gemm,
    Hadamard,
    LearnedStep,
    LeverageScore,
    Recipe,
)
from tests.raising import raises

# Recipes from the literature; others need no entry.
# name -> (format, tile, scale) of x, w | gy, w | gy, x. TransformerEngine's defaults, torchao's, DeepSeek-V3's, OCP MX.
TENSOR, ROW, VECTOR, SQUARE, MX = (WHOLE, WHOLE), (1, WHOLE), (1, 128), (128, 128), (1, 32)
NV_X, NV_W = ("e2m1", (1, 16), "e4m3-two-level"), ("e2m1", (16, 16), "e4m3-two-level")
NV_GY = ("e2m1", (1, 16), "e4m3-two-level-ceil")
INT4, SPLIT = ("int4", TENSOR, "fp32"), ("int4x2", ROW, "fp32")
FORWARD, BACKWARD = ("e4m3", TENSOR, "fp32"), ("e5m2", TENSOR, "fp32")
MX6, MX6_GY = ("e2m3", MX, "e8m0-ceil"), ("e3m2", MX, "e8m0-ceil")
CASTS = {
    "bf16": [None] * 6,
    "fp8-delayed": [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD],
    "fp8-current": [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD],
    "fp8-current-fast": [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD],
    "fp8-row": [("e4m3", ROW, "pow2")] * 6,
    "fp8-block": [
        ("e4m3", tile, "pow2") for tile in (VECTOR, SQUARE, VECTOR, SQUARE, VECTOR, VECTOR)
    ],
    "mxfp8": [("e4m3", MX, "e8m0-ceil")] * 6,
    "mxfp6": [MX6, MX6, MX6_GY, MX6, MX6_GY, MX6],
    "int8": [("int8", ROW, "fp32")] * 6,
    "int4-hq-bs": [INT4, INT4, SPLIT, INT4, SPLIT, INT4],
    "int4-hq-lss": [INT4, INT4, SPLIT, INT4, SPLIT, INT4],
    "int4-lsq-luq": [INT4, INT4, ("e3m0", TENSOR, "fp32"), INT4, ("e3m0", TENSOR, "fp32"), INT4],
    "int4-minmax-sr": [INT4] * 6,
    "int4-row-sr": [INT4, INT4, ("int4", ROW, "fp32"), INT4, ("int4", (WHOLE, 1), "fp32"), INT4],
    "nvfp4": [NV_X, NV_W, NV_GY, NV_W, NV_GY, NV_X],
    "mxfp4": [("e2m1", MX, "e8m0-ceil")] * 2 + [("e2m1", MX, "e8m0-floor")] * 4,
}
# Four bits: x and w to nearest, straight-through; gradients stochastically. name -> block, x and w, sampled.
FOUR_BIT = {
    "int4-hq-bs": (32, ClippedRms(clip=2.475), False),
    "int4-hq-lss": (32, LearnedStep(), True),
    "int4-lsq-luq": (None, LearnedStep(), False),
    "int4-minmax-sr": (32, ClippedRms(clip=2.475), False),
    "int4-row-sr": (32, ClippedRms(clip=2.475), False),
}
STOCHASTIC = {  # the operands that are rounded stochastically
    "nvfp4": [False, False, True, False, True, False],
    "mxfp4": [False, False, True, True, True, True],
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_are_those_of_the_literature(name):
    recipe = recipes.get(name)
    casts = [
        cast for gemm in GEMMS for cast in (recipe.gemms()[gemm].lhs, recipe.gemms()[gemm].rhs)
    ]
    assert [cast and (str(cast.format), cast.tile, str(cast.scale)) for cast in casts] == CASTS[
        name
    ]
    if name in FOUR_BIT:
        return
    stochastic = [cast is not None and cast.rounding == "stochastic" for cast in casts]
    assert stochastic == STOCHASTIC.get(name, [False] * 6)
    assert all(
        cast is None or (cast.calibrate == CURRENT) == (name != "fp8-delayed") for cast in casts
    )
    assert recipe.backward == "recast"


@pytest.mark.parametrize("name", FOUR_BIT)
def test_four_bit_recipes_are_those_of_the_paper(name):
    """Rotation in the forward product only, LUQ without one; rounding to nearest forward, stochastic for gradients only."""
    recipe, (block, calibrate, sampled) = recipes.get(name), FOUR_BIT[name]
    assert recipe.backward == "straight-through" and recipe.save == "quantized"
    assert recipe.output.rotate == (None if block is None else Hadamard(block=block))
    for cast in (
        recipe.output.lhs,
        recipe.output.rhs,
        recipe.grad_input.rhs,
        recipe.grad_weight.rhs,
    ):
        assert cast.rounding == "nearest" and cast.calibrate == calibrate
    for gemm in (recipe.grad_input, recipe.grad_weight):
        assert gemm.lhs.rounding == "stochastic" and gemm.lhs.calibrate == CURRENT
        assert gemm.sample == (LeverageScore(keep=0.5, max_variance=0.02) if sampled else None)


def test_tetrajet2_is_the_papers_without_its_outer_blocks() -> None:
    """Forward to nearest and not rotated; backward all four operands stochastic, rotated in 16 with new signs."""
    recipe = recipes.get("tetrajet2")
    assert recipe.backward == "recast-codes" and recipe.wide_blocks is None
    for cast in (recipe.output.lhs, recipe.output.rhs):
        assert (str(cast.format), cast.tile, str(cast.scale), cast.rounding) == (*NV_X, "nearest")
    assert recipe.output.rotate is None
    for gemm in (recipe.grad_input, recipe.grad_weight):
        assert gemm.rotate == Hadamard(block=16, signs="random")
        for cast in (gemm.lhs, gemm.rhs):
            assert (str(cast.format), cast.tile, str(cast.scale)) == NV_GY
            assert cast.rounding == "stochastic"


def test_accumulation_is_fast_in_output_at_most_but_where_the_name_says_it():
    """Hopper's FP8 accumulator keeps about 14 bits; errors of gradients would compound over steps."""
    fast = {
        recipe.name: [gemm.fast_accumulate for gemm in recipe.gemms().values()]
        for recipe in recipes.ALL
    }
    all_three = fast.pop("fp8-current-fast")
    assert {name for name, flags in fast.items() if flags[0]} == {
        "fp8-delayed",
        "fp8-current",
        "fp8-row",
    }
    assert not any(flag for flags in fast.values() for flag in flags[1:])
    assert all_three == [True, True, True]
    differs = replace(
        recipes.get("fp8-current-fast"), **recipes.get("fp8-current").gemms(), name="fp8-current"
    )
    assert differs == recipes.get("fp8-current"), "nothing else"


def test_delayed_scaling_remembers_every_role():
    windows = recipes.get("fp8-delayed").delayed_scaling()
    assert {role: str(format) for role, (_, format) in windows.items()} == {
        "x": "e4m3",
        "w": "e4m3",
        "gy": "e5m2",
    }
    assert {window for window, _ in windows.values()} == {
        DelayedScaling(length=1024, margin=0, algorithm="max")
    }
    assert all(
        not recipe.delayed_scaling() for recipe in recipes.ALL if recipe.name != "fp8-delayed"
    )


def test_codes_are_saved_where_one_cast_is_that_of_both_products_and_no_signs_are_new():
    """Of tiles it is a second cast, along the other axis and from the original, rotated by fixed signs or not at all."""
    for recipe in recipes.ALL:
        serves_both = recipe.output.lhs is not None and (
            not recipe.grad_weight.rotate
            or recipe.grad_weight.rotate.signs == "fixed"
            or recipe.backward != "recast"
        )
        assert (recipe.save == "quantized") == (
            serves_both and recipe.output.lhs == recipe.grad_weight.rhs
        )
        turn = recipe.grad_weight.rotate
        if recipe.grad_weight.rhs is not None and not (turn and turn.signs == "random"):
            assert replace(recipe, save="quantized").gemms() == recipe.gemms()


def test_recipes_are_found_by_name():
    assert recipes.names() == tuple(recipe.name for recipe in recipes.ALL)
    assert len(set(recipes.names())) == len(recipes.ALL) and set(CASTS) <= set(recipes.names())
    assert all(recipes.get(name).name == name for name in recipes.names())
    with raises(ConfigError, "recipes.unknown", "'fp8-rows'", "'fp8-row'"):
        recipes.get("fp8-rows")
    with raises(ConfigError, "recipes.unknown", "bf16, fp8-delayed"):
        recipes.get("zzz")
    for given in (None, []):
        with raises(ConfigError, "recipes.not-a-name", "bf16, "):
            recipes.get(given)


@pytest.mark.parametrize(
    "name", [each for each in recipes.names() if "nvfp4" in each or each == "int8"]
)
def test_a_name_says_that_scales_are_shared(name):
    found = recipes.get(f"{name}+shared-scales")
    assert found == recipes.get(name).with_shared_scales() != recipes.get(name)
    assert recipes.get(found.name) == found  # a table's or a log's name is one to type


def test_a_recipe_without_scales_to_share_is_refused_with_those_that_have_some():
    for name in ("bf16", "fp8-row", "mxfp4"):
        with raises(ConfigError, "recipes.no-shared-scales", "nvfp4", "int8"):
            recipes.get(f"{name}+shared-scales")
    with raises(ConfigError, "recipes.unknown"):
        recipes.get("nvfp5+shared-scales")


def test_every_constant_is_in_the_registry():
    """A new recipe is one constant in one file. The positive control is none that a user is offered."""
    constants = [value for value in vars(recipes).values() if isinstance(value, Recipe)]
    assert constants == [*recipes.ALL, recipes.POSITIVE_CONTROL]


def test_every_recipe_has_a_summary_of_its_own():
    """One line each: `narrowgauge recipes` prints it. A changed recipe is not described by it."""
    summaries = [recipe.summary for recipe in recipes.ALL]
    assert all(summaries) and len(set(summaries)) == len(summaries)
    assert not any("\n" in summary for summary in summaries)
    assert recipes.FP8_ROW.with_gemm(output=Gemm()).summary == ""
    assert replace(recipes.FP8_ROW, summary="other") == recipes.FP8_ROW


@pytest.mark.parametrize("recipe", recipes.ALL, ids=lambda recipe: recipe.name)
def test_recipes_are_values(recipe):
    copy = pickle.loads(pickle.dumps(recipe))
    assert copy == recipe and hash(copy) == hash(recipe)
    assert len({recipe.with_gemm(**{gemm: Gemm()}).name for gemm in GEMMS}) == 3


def test_only_casts_that_cannot_saturate_are_stochastic():
    """Rounding up, or a head-room: else what saturates would bias the gradient."""
    for recipe in recipes.ALL:
        for cast in (
            cast for gemm in recipe.gemms().values() for cast in (gemm.lhs, gemm.rhs) if cast
        ):
            guards = {"e8m0-floor": 4 / 3, "e4m3-two-level": 17 / 16}
            assert cast.rounding == "nearest" or cast.headroom >= guards.get(str(cast.scale), 1)
            assert cast.rounding == "stochastic" or cast.headroom == 1


def test_rotations_are_those_of_the_literature():
    """NVFP4: 16 with fixed signs, on grad_weight alone. MXFP4: 64 with new signs in both backward products."""
    turned = {
        recipe.name: [str(gemm.rotate) for gemm in recipe.gemms().values()]
        for recipe in recipes.ALL
    }
    assert turned["nvfp4"] == ["None", "None", "Hadamard 16, fixed signs"]
    assert turned["mxfp4"][1:] == ["Hadamard 64, random signs"] * 2


def test_nvfp4_alone_keeps_blocks_wide():
    """In both of its scale rules."""
    wide = [recipe.name for recipe in recipes.ALL if recipe.wide_blocks]
    assert wide == ["nvfp4", "nvfp4-46"]
