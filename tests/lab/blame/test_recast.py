"""Codes against a fresh cast: equal to the bit in sound models, and any factor before a cast is found where it is (exact, searched)."""

from __future__ import annotations

import random

import pytest
import torch

import narrowgauge as ng
from benchmarks.planted_faults import shrinking
from narrowgauge import formats
from narrowgauge.lab.blame import Blame, blame
from narrowgauge.lab.blame.recast import Recast, recast
from narrowgauge.lab.blame.watch import OPERANDS, LayerWatch, converted
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.ops.random import Key
from narrowgauge.recipe import Cast
from tests.compare import assert_same
from tests.lab.blame.planted import compute, train
from tests.lab.blame.planted import converted as converted_model
from tests.selection import quick

NARROW = [name for name in ng.recipes.names() if name != "bf16"]
RECAST = [name for name in NARROW if ng.recipes.get(name).backward == "recast"]


def readings(found: Blame):
    return [
        (each.name, one) for each in found.findings for one in (each.lhs, each.rhs) if one.is_narrow
    ]


@pytest.mark.parametrize("name", quick(["fp8-delayed", "fp8-block", "nvfp4"], NARROW))
def test_codes_of_a_sound_model_are_a_fresh_cast_to_the_bit(name):
    """Every operand of every product, after some steps: stochastic casts too, with the numbers that they drew."""
    model = converted_model(name)
    train(model, 2)
    seen = readings(blame(model, compute(model), confirm=0))
    assert seen
    for where, each in seen:
        numbers = (
            each.distance,
            each.scale_off if each.is_by_amax else 0.0,
            each.slope - each.own_slope,
        )
        assert numbers == (0.0, 0.0, 0.0), (where, each)


@pytest.mark.parametrize("seed", quick([0, 1, 2], range(12)))
def test_a_factor_before_a_cast_is_found_at_rank_one(seed):
    """A search: any recipe, layer, product, operand and factor from 0.95 to 0.995."""
    draw = random.Random(seed)
    recipe, product = draw.choice(RECAST), draw.choice(list(OPERANDS))
    role, factor = draw.choice(OPERANDS[product]), draw.uniform(0.95, 0.995)
    model = converted_model(recipe)
    train(model, 1)
    name, layer = draw.choice(converted(model))
    with shrinking(layer, product, role, factor) as right:
        found = blame(model, compute(model), confirm=0)
    first = found.findings[0]
    case = recipe, name, product, role, factor
    assert (
        first.is_suspect
        and first.layer == name
        and first.product in right
        and first.worse.role == role
    ), case
    others = [each for each in found.suspects if each.layer != name or each.product not in right]
    assert all(role == "x" and each.worse.role == "x" for each in others), case
    assert "not a cast" in first.reason and first.name in found.sentences()[1]


def test_where_random_numbers_are_not_known_the_slope_is_judged_by_their_noise(monkeypatch):
    monkeypatch.delattr(LayerWatch, "drew")
    model = converted_model("nvfp4")
    train(model, 1)
    assert not blame(model, compute(model), confirm=0).suspects
    name, layer = converted(model)[1]
    with shrinking(layer, "grad_input", "gy", 0.9):
        assert blame(model, compute(model), confirm=0).findings[0].layer == name


CASTS = [
    Cast(format=each, rounding=rounding, tile=tile)
    for each in (formats.E4M3, formats.E5M2, formats.E2M1, formats.INT8, formats.INT4)
    for rounding in ("nearest", "stochastic")
    for tile in ((-1, -1), (1, -1), (1, 16), (16, 16))
]


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_a_cast_by_the_scales_of_a_cast_is_that_cast(cast):
    """Ragged, empty, zeros, an outlier, NaN in a tile."""
    torch.manual_seed(3)
    for shape in ((1, 1), (33, 47), (16, 64), (0, 16)):
        x = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
        if x.numel() > 100:
            x[0, 0], x[1], x[2, 3] = 1e6, 0.0, float("nan")
        noise = Key((5, 7)) if cast.draws else None
        made = quantize(x, cast, noise=noise)
        assert_same(
            *(each.nan_to_num(nan=777.0) for each in (recast(x, made, noise), dequantize(made)))
        )  # NaN has many bits
        seen = Recast()
        seen.add(x, made, None if noise is None else noise.uniform(shape))
        if not x.isnan().any():
            assert (seen.over, seen.differ) == (0.0, 0)


def test_stale_codes_differ():
    x = torch.randn(32, 64)
    made, seen = quantize(x, Cast(format=formats.E4M3)), Recast()
    seen.add(x + 1e-2 * torch.randn_like(x), made, None)
    assert seen.over > 1 and seen.differ
