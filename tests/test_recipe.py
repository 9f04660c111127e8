"""Recipes as data: what is refused and in which words, and that they are values (exact)."""

from __future__ import annotations

import importlib
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.formats import E2M1, E4M3, E5M2, E8M0, INT4, INT4X2
from narrowgauge.recipe import (
    CURRENT,
    GEMMS,
    WHOLE,
    Cast,
    ClippedRms,
    CurrentScaling,
    DelayedScaling,
    Gemm,
    Hadamard,
    HighPrecisionBlocks,
    LearnedStep,
    LeverageScore,
    Recipe,
)
from narrowgauge.scaling import E4M3_TWO_LEVEL, E8M0_CEIL, POW2
from tests.raising import raises

ROWS = Cast(format=E4M3, tile=(1, WHOLE), scale=POW2)
DELAYED = Cast(format=E4M3, calibrate=DelayedScaling(length=16))


# --- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(0, 1), (1, 0), (-2, 1), (1, -3), (1,), (1, 2, 3), ()], ids=str)
def test_a_tile_has_two_sizes_or_the_whole_axis(tile):
    with raises(ConfigError, "cast.tile", tile):
        Cast(format=E4M3, tile=tile)


def test_a_window_needs_one_scale_per_tensor():
    for tile in ((1, WHOLE), (1, 128), (WHOLE, 1)):
        with raises(ConfigError, "cast.window-tile", tile):
            Cast(format=E4M3, tile=tile, calibrate=DelayedScaling())


@pytest.mark.parametrize(
    ("build", "code", "value"),
    [
        (lambda: Cast(format=E4M3, rounding="up"), "cast.rounding", "'up'"),
        (lambda: DelayedScaling(length=0), "window.length", 0),
        (lambda: DelayedScaling(length=-1), "window.length", -1),
        (lambda: DelayedScaling(algorithm="mean"), "window.algorithm", "'mean'"),
        (lambda: Recipe(name="r", save="codes"), "recipe.save", "'codes'"),
        (lambda: Recipe(name="r", save="quantized"), "recipe.quantized-uncast", "grad_weight.rhs"),
    ],
)
def test_settings_that_cannot_work_are_refused(build, code, value):
    with raises(ConfigError, code, value):
        build()


@pytest.mark.parametrize("role", ["x", "w", "gy"])
@pytest.mark.parametrize(
    "other",
    [
        Cast(format=E4M3, calibrate=DelayedScaling(length=8)),
        Cast(format=E5M2, calibrate=DelayedScaling(length=16)),
    ],
    ids=str,
)
def test_a_tensor_has_one_window(role, other):
    """Both casts of one tensor read the same history of amax, so window and format must agree."""
    gemms = {
        "x": {"output": Gemm(lhs=DELAYED), "grad_weight": Gemm(rhs=other)},
        "w": {"output": Gemm(rhs=DELAYED), "grad_input": Gemm(rhs=other)},
        "gy": {"grad_input": Gemm(lhs=DELAYED), "grad_weight": Gemm(lhs=other)},
    }[role]
    with raises(ConfigError, "recipe.two-windows", "'r'", f" {role} "):
        Recipe(name="r", **gemms)
    allowed = {
        name: Gemm(lhs=g.lhs and DELAYED, rhs=g.rhs and DELAYED) for name, g in gemms.items()
    }
    assert Recipe(name="r", **allowed).delayed_scaling() == {
        role: (DelayedScaling(length=16), E4M3)
    }


def test_a_tensor_may_be_delayed_in_one_product_and_current_in_the_other():
    recipe = Recipe(name="r", output=Gemm(lhs=DELAYED), grad_weight=Gemm(rhs=ROWS))
    assert recipe.delayed_scaling() == {"x": (DelayedScaling(length=16), E4M3)}


# --- values -----------------------------------------------------------------------------------------------------------------


EXAMPLES = [
    CURRENT,
    DelayedScaling(length=3, margin=1, algorithm="most_recent"),
    ROWS,
    DELAYED,
    Gemm(lhs=ROWS, rhs=DELAYED, fast_accumulate=True),
    Recipe(name="r", output=Gemm(lhs=ROWS), grad_weight=Gemm(rhs=ROWS), save="quantized"),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_recipes_and_their_parts_are_values(value):
    """Equal to their copy, hashable, frozen: they are cache keys and travel between processes."""
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value and hash(copy) == hash(value) and {value: 1}[copy] == 1
    with pytest.raises((FrozenInstanceError, TypeError)):
        value.name = "other"
    assert replace(value) == value


def test_replace_validates_again():
    with raises(ConfigError, "cast.window-tile", (1, 32)):
        replace(DELAYED, tile=(1, 32))
    with raises(ConfigError, "recipe.quantized-uncast"):
        replace(EXAMPLES[-1], grad_weight=Gemm())


def test_equality_sees_every_field():
    assert CurrentScaling() == CURRENT
    variants = [
        ROWS,
        replace(ROWS, format=E5M2),
        replace(ROWS, tile=(1, 32)),
        replace(ROWS, scale=E8M0_CEIL),
        replace(ROWS, rounding="stochastic"),
        DELAYED,
    ]
    assert len(set(variants)) == len(variants)
    assert Gemm(lhs=ROWS) != Gemm(rhs=ROWS) and Gemm(lhs=ROWS) != Gemm(
        lhs=ROWS, fast_accumulate=True
    )


# --- words ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Cast(format=E4M3), "e4m3 tensor fp32"),
        (ROWS, "e4m3 row pow2"),
        (Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL), "e4m3 1x32 e8m0-ceil"),
        (Cast(format=E4M3, tile=(WHOLE, 1)), "e4m3 allx1 fp32"),
        (
            Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL, rounding="stochastic"),
            "e2m1 1x16 e4m3-two-level stochastic",
        ),
        (DELAYED, "e4m3 tensor fp32 delayed (max of 16)"),
        (
            DelayedScaling(length=8, margin=2, algorithm="most_recent"),
            "delayed (most_recent of 8, margin 2)",
        ),
        (CURRENT, "current"),
        (Gemm(), "16-bit"),
        (Gemm(lhs=ROWS), "e4m3 row pow2 x 16-bit"),
        (Gemm(lhs=ROWS, rhs=Cast(format=E5M2)), "e4m3 row pow2 x e5m2 tensor fp32"),
    ],
    ids=str,
)
def test_words(value, words):
    assert str(value) == words


def test_symmetric_casts_serve_both_orientations():
    assert Cast(format=E4M3).is_symmetric
    assert Cast(format=E4M3, tile=(128, 128)).is_symmetric
    assert not ROWS.is_symmetric
    assert not Cast(format=E4M3, rounding="stochastic").is_symmetric, (
        "the transposed draw would be another one"
    )


# --- products ---------------------------------------------------------------------------------------------------------------


def test_roles_name_the_two_casts_of_each_tensor():
    casts = {name: Cast(format=E4M3, tile=(1, i + 1)) for i, name in enumerate("abcdef")}
    recipe = Recipe(
        name="r",
        output=Gemm(lhs=casts["a"], rhs=casts["b"]),
        grad_input=Gemm(lhs=casts["c"], rhs=casts["d"]),
        grad_weight=Gemm(lhs=casts["e"], rhs=casts["f"]),
    )
    assert recipe.roles() == {
        "x": (casts["a"], casts["f"]),
        "w": (casts["b"], casts["d"]),
        "gy": (casts["c"], casts["e"]),
    }
    assert tuple(recipe.gemms()) == GEMMS
    assert recipe.gemms() == {
        "output": recipe.output,
        "grad_input": recipe.grad_input,
        "grad_weight": recipe.grad_weight,
    }
    assert recipe.delayed_scaling() == {}


def test_one_product_can_be_replaced():
    gemm = Gemm(lhs=ROWS, rhs=ROWS)
    recipe = Recipe(name="rows", output=gemm, grad_input=gemm, grad_weight=gemm, save="quantized")
    changed = recipe.with_gemm(grad_input=Gemm())
    assert changed.grad_input == Gemm() and changed.output == changed.grad_weight == gemm
    assert changed.save == "quantized" and changed.name == "rows+grad_input:16-bit"
    custom = recipe.with_gemm(output=Gemm(lhs=ROWS), grad_input=Gemm())
    assert custom.name == "rows+output:custom+grad_input:16-bit"
    assert recipe.with_gemm() == recipe


def test_replacing_grad_weight_by_16_bits_keeps_x_as_it_is():
    """Codes of x would have no reader."""
    gemm = Gemm(lhs=ROWS, rhs=ROWS)
    recipe = Recipe(name="rows", output=gemm, grad_input=gemm, grad_weight=gemm, save="quantized")
    assert recipe.with_gemm(grad_weight=Gemm()).save == "original"
    assert recipe.with_gemm(grad_weight=Gemm(rhs=ROWS)).save == "quantized"


def test_with_gemm_rejects_other_names():
    with raises(ConfigError, "recipe.gemm-name", "['wgrad']"):
        Recipe(name="r").with_gemm(wgrad=Gemm())


# --- wrong types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "code", "value"),
    [
        (lambda: Cast(format="e4m3"), "cast.format", "'e4m3'"),
        (lambda: Cast(format=E4M3, tile=None), "cast.tile", None),
        (lambda: Cast(format=E4M3, tile=[1, 128]), "cast.tile", [1, 128]),
        (lambda: Cast(format=E4M3, tile=(1.5, 2)), "cast.tile", (1.5, 2)),
        (lambda: Cast(format=E4M3, tile=(True, 2)), "cast.tile", (True, 2)),
        (lambda: Cast(format=E4M3, tile="ab"), "cast.tile", "'ab'"),
        (lambda: Cast(format=E4M3, scale="fp32"), "cast.scale", "'fp32'"),
        (lambda: Cast(format=E4M3, calibrate="current"), "cast.calibrate", "'current'"),
        (lambda: Cast(format=E4M3, calibrate=DelayedScaling), "cast.calibrate", "DelayedScaling"),
        (lambda: DelayedScaling(length=1.5), "window.length", 1.5),
        (lambda: DelayedScaling(length=None), "window.length", None),
        (lambda: DelayedScaling(margin=1.5), "window.margin", 1.5),
        (lambda: DelayedScaling(margin=float("nan")), "window.margin", "nan"),
        (lambda: DelayedScaling(margin=5000), "window.margin", 5000),
        (lambda: Gemm(lhs="e4m3"), "gemm.lhs", "'e4m3'"),
        (lambda: Gemm(rhs=E4M3), "gemm.rhs", E4M3),
        (lambda: Gemm(fast_accumulate="yes"), "gemm.fast_accumulate", "'yes'"),
        (lambda: Recipe(name="r", output=ROWS), "recipe.output", "'r'"),
        (lambda: Recipe(name="r", grad_weight=None), "recipe.grad_weight", None),
        (lambda: Recipe(name=3), "recipe.name", 3),
        (lambda: Recipe(name="r").with_gemm(output="x"), "recipe.output", "'x'"),
        (
            lambda: Recipe(name="r", output=Gemm(lhs=Cast(format=E8M0))),
            "recipe.unsigned-format",
            "e8m0",
        ),
    ],
)
def test_wrong_types_are_refused_where_they_are_made(build, code, value):
    """They once passed, and came to light in the first forward, if at all."""
    with raises(ConfigError, code, value):
        build()


# --- 4 bits: rotation, calibration, straight-through ------------------------------------------------------------------------

STEP = Cast(format=INT4, calibrate=LearnedStep())
RMS = Cast(format=INT4, calibrate=ClippedRms())
SPLIT = Cast(format=INT4X2, rounding="stochastic")


def straight(forward: Cast = RMS, **changes: object) -> Recipe:
    gradient = Gemm(lhs=SPLIT, rhs=forward)
    gemms = {
        "output": Gemm(lhs=forward, rhs=forward, rotate=Hadamard()),
        "grad_input": gradient,
        "grad_weight": gradient,
    }
    return Recipe(name="r", backward="straight-through", **(gemms | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "code", "value"),
    [
        (lambda: Hadamard(block=24), "hadamard.block", 24),
        (lambda: Hadamard(block=1), "hadamard.block", 1),
        (lambda: Hadamard(block=2048), "hadamard.block", 2048),
        (lambda: Hadamard(block=True), "hadamard.block", True),
        (lambda: Hadamard(signs="both"), "hadamard.signs", "'both'"),
        (lambda: LeverageScore(keep=0), "leveragescore.keep", 0),
        (lambda: LeverageScore(keep=-0.5), "leveragescore.keep", -0.5),
        (lambda: LeverageScore(keep=1.01), "leveragescore.keep", 1.01),
        (lambda: LeverageScore(keep=float("nan")), "leveragescore.keep", "nan"),
        (lambda: LeverageScore(max_variance=0.0), "leveragescore.max_variance", 0.0),
        (lambda: LeverageScore(max_variance=float("nan")), "leveragescore.max_variance", "nan"),
        (lambda: ClippedRms(clip=0.0), "clippedrms.clip", 0.0),
        (lambda: ClippedRms(clip=float("inf")), "clippedrms.clip", "inf"),
        (lambda: LearnedStep(cold_steps=0), "learnedstep.cold_steps", 0),
        (lambda: LearnedStep(residual_every=1.5), "learnedstep.residual_every", 1.5),
        (lambda: replace(STEP, tile=(1, -1)), "cast.learned-step", (1, -1)),
        (lambda: replace(STEP, format=E4M3), "cast.learned-step", "e4m3"),
        (lambda: replace(STEP, scale=POW2), "cast.learned-step", "pow2"),
        (lambda: Gemm(rotate=32), "gemm.rotate", 32),
        (lambda: Gemm(sample=0.5), "gemm.sample", 0.5),
        (lambda: Gemm(lhs=DELAYED, rotate=Hadamard()), "gemm.rotated-window", "rotate=None"),
        (
            lambda: Recipe(name="r", grad_input=Gemm(lhs=SPLIT, sample=LeverageScore())),
            "recipe.sampled-recast", "'r'",
        ),
        (lambda: Recipe(name="r", backward="ste"), "recipe.backward", "'ste'"),
        (lambda: Recipe(name="r", output=Gemm(lhs=STEP)), "recipe.learned-step-recast", "'r'"),
        (
            lambda: Recipe(name="r", output=Gemm(lhs=SPLIT, rhs=RMS, sample=LeverageScore())),
            "recipe.sampled-output", "'r'",
        ),
        (
            lambda: Recipe(name="r", save="quantized", grad_weight=Gemm(rhs=ROWS, rotate=Hadamard(signs="random"))),
            "recipe.quantized-random-signs", "grad_weight",
        ),
        (
            lambda: straight(grad_input=Gemm(lhs=SPLIT, rhs=STEP)),
            "recipe.straight-through-codes", "grad_input.rhs",
        ),
        (lambda: straight(replace(RMS, tile=(1, -1))), "recipe.straight-through-cast", "'r'"),
        (lambda: straight(replace(RMS, rounding="stochastic")), "recipe.straight-through-cast", "stochastic"),
        (lambda: straight(Cast(format=E4M3)), "recipe.straight-through-cast", "e4m3"),
        (
            lambda: straight(grad_weight=Gemm(rhs=RMS, rotate=Hadamard())),
            "recipe.straight-through-rotation", "grad_weight",
        ),
        (
            lambda: straight(grad_input=Gemm(lhs=STEP, rhs=RMS)),
            "recipe.straight-through-calibration", "gy is calibrated by 'learned step'",
        ),
        (
            lambda: straight(output=Gemm(lhs=DELAYED), grad_input=Gemm(), grad_weight=Gemm()),
            "recipe.straight-through-calibration", "x is calibrated by 'delayed",
        ),
    ],
)  # fmt: skip
def test_four_bit_settings_that_cannot_work_are_refused(build, code, value):
    with raises(ConfigError, code, value):
        build()


def test_a_straight_through_product_can_be_left_in_16_bits():
    """rhs=None: the original instead of the codes; how one product, or the whole backward pass, is put back."""
    recipe = straight(STEP).with_gemm(grad_input=Gemm())
    assert (
        recipe.backward == "straight-through"
        and recipe.grad_input == Gemm()
        and recipe.grad_weight.rhs == STEP
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (RMS, "int4 tensor fp32 2.475 rms"),
        (STEP, "int4 tensor fp32 learned step"),
        (SPLIT, "int4x2 tensor fp32 stochastic"),
        (Hadamard(), "Hadamard 32"),
        (Hadamard(block=16, signs="random"), "Hadamard 16, random signs"),
        (
            LeverageScore(),
            "50% of rows by leverage score while it adds less than 0.02 relative variance",
        ),
        (LeverageScore(keep=0.25, max_variance=float("inf")), "25% of rows by leverage score"),
        (Gemm(lhs=RMS, rotate=Hadamard()), "int4 tensor fp32 2.475 rms x 16-bit, Hadamard 32"),
    ],
    ids=str,
)
def test_words_of_four_bits(value, words):
    assert str(value) == words
    assert pickle.loads(pickle.dumps(value)) == value and hash(
        pickle.loads(pickle.dumps(value))
    ) == hash(value)


def test_former_names_of_classes_are_understood():
    """Pickles of recipes and users' code hold them; the codes of errors keep them too."""
    former = {
        "Window": DelayedScaling,
        "Current": CurrentScaling,
        "WideBlocks": HighPrecisionBlocks,
    }
    for name, now in former.items():
        # Protocol 0 spells the class out: "narrowgauge.recipe", then the name.
        stored = pickle.dumps(now(), protocol=0)
        renamed = stored.replace(now.__name__.encode(), name.encode())
        assert renamed != stored and pickle.loads(renamed) == now()
    with raises(ConfigError, "wideblocks.share", 2):
        HighPrecisionBlocks(share=2)
    with pytest.raises(AttributeError, match="Windows"):
        importlib.import_module("narrowgauge.recipe").Windows  # noqa: B018
