"""How rows of a gradient and channels of an activation differ: hand-made tensors whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from narrowgauge.diagnose.spreads import channel_spread, row_spread
from narrowgauge.ops.quantize import quantize
from narrowgauge.recipe import Hadamard
from narrowgauge.recipes import get
from narrowgauge.report import page
from narrowgauge.train import loop
from narrowgauge.train.tensor_stats import operand_statistics
from tests.train import tiny
from tests.train.conftest import make, text  # noqa: F401 (fixtures)


def test_equal_rows_all_carry_the_gradient() -> None:
    found = row_spread(torch.ones(40, 8) * 1e-30)
    assert (
        found["effective"] == pytest.approx(1)
        and found["top"] == pytest.approx(0.1)
        and found["count"] == 40
    )
    assert found["norms"]["counts"] == [40] and found["norms"]["lowest_exponent"] in (-1, 0)


def test_one_large_row_carries_it_alone() -> None:
    gy = torch.full((1000, 4), 1e-6)
    gy[17] = 1e30
    gy[18:20] = 0
    gy[20, 0] = math.inf
    found = row_spread(gy)
    assert found["effective"] == pytest.approx(1 / 998, rel=1e-3) and found["top"] == pytest.approx(
        1
    )
    assert found["count"] == 1000 and sum(found["norms"]["counts"]) == 998


def test_zeros_have_no_spread() -> None:
    assert row_spread(torch.zeros(3, 4))["norms"]["counts"] == []
    assert channel_spread(torch.zeros(3, 32))["largest"] == 1


def test_a_rotation_spreads_the_outlier_of_a_channel() -> None:
    """One channel of 64 at 100, the others at 1: after blocks of 32 its block is at 100 / sqrt(32), so every second channel is."""
    x = torch.ones(16, 64)
    x[:, 1:2] = 100
    found = channel_spread(x, Hadamard(block=32))
    assert (found["count"], found["largest"], found["outliers"]) == (64, 100, 1)
    assert found["peaks"]["counts"][0] == 63 and sum(found["rotated_peaks"]["counts"]) <= 64
    random = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    random[:, 3] *= 50
    found = channel_spread(random)
    assert found["largest"] > 40 and found["rotated_largest"] < 8


@pytest.mark.parametrize("signs", ["fixed", "random"])
def test_the_spread_is_that_of_the_rotation_with_its_signs(signs) -> None:
    """What all channels have in common goes into one element of a block without signs. For it no number of torch's generator is drawn."""
    x = 1 + 0.1 * torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    found, plain = (
        channel_spread(x, Hadamard(block=32, signs=each))["rotated_largest"]
        for each in (signs, "none")
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert plain > 15 and found < 4.5  # |s H| is 0.71, 1.41 or 2.83


@pytest.mark.slow
def test_a_run_notes_the_spread_of_all_layers_and_the_report_shows_it(make) -> None:  # noqa: F811
    config = make(recipe="int4-hq-bs", steps=2, tensor_every=2)
    assert loop.run(config) == 0
    events = tiny.events(Path(config.output), "spread")
    layers = {event["module"] for event in events}
    assert len(layers) == 14 and len(events) == 28 and {event["step"] for event in events} == {2}
    assert all(
        ("rows" in event) == (event["role"] == "gy") != ("channels" in event) for event in events
    )
    shown = page.write(Path(config.output)).read_text(encoding="utf-8")
    assert (
        "How rows and channels differ" in shown and shown.count('class="mono">model.layers') >= 14
    )


def test_the_scale_of_rows_of_zeros_is_not_told() -> None:
    """A row of zeros has the scale 1, which is no reading."""
    gy = torch.full((4, 32), 1e-5)
    gy[0] = 0
    cast = get("int4-hq-bs").grad_input.lhs
    assert (
        operand_statistics(gy, quantize(gy, cast, noise=torch.full_like(gy, 0.5)))["scale"] < 1e-6
    )
