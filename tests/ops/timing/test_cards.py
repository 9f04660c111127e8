"""The table of cards: what belongs together, names as people write them, refusals that say what to write."""

from __future__ import annotations

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.ops.timing.cards import CARDS, CONTEXT, GiB, card, of_memory
from tests.raising import raises


@pytest.mark.parametrize("name", CARDS)
def test_figures_belong_together(name):
    """A card has less than its name says and more than nine tenths of it; narrower types multiply no slower."""
    found, named = (
        CARDS[name],
        {
            "a100-40": 40,
            "l4": 24,
            "l40s": 48,
            "mi300x": 192,
            "b200": 186,
            "h200": 141,
            "rtx-5090": 32,
        },
    )
    gb = named.get(name, 24 if "90" in name else 80)
    assert 0.9 * gb * GiB < found.memory <= gb * GiB and found.usable == found.memory - CONTEXT
    assert (found.device is None) == (name == "mi300x") == (not found.peak)
    rates = [
        found.peak[kind] for kind in ("fp32", "tf32", "bf16", "fp8", "fp4") if kind in found.peak
    ]
    assert rates == sorted(rates)
    if found.device is not None:
        assert ("fp8" in found.peak) == (found.device.capability >= (8, 9))
        assert ("fp4" in found.peak) == (found.device.capability >= (10, 0))


@pytest.mark.parametrize("name", ["h100", "H100", " h100-sxm ", "H100 SXM"])
def test_names_as_people_write_them(name):
    assert card(name) is CARDS["h100"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("rtx-4090-24gb", "rtx-4090"),
        ("a100-40gb", "a100-40"), ("nvidia-a100-sxm4-40gb", "a100-40"), ("A100 80GB", "a100-80"), ("a100", "a100-80"),
        ("H100 SXM5 80GB", "h100"), ("H100 PCIe 80GB", "h100-pcie"), ("L40S 48GB", "l40s"),
    ],
)  # fmt: skip
def test_makers_sockets_and_sizes_may_stand_in_a_name(name, key):
    assert card(name) is CARDS[key]


@pytest.mark.parametrize("name", ["h100-94gb", "a100-60gb", "rtx 3090 ti", "h100 nvl"])
def test_a_name_of_another_card_is_not_taken_for_one_that_is_known(name):
    with raises(ConfigError, "card.unknown"):
        card(name)


def test_an_unknown_card_is_told_its_neighbours():
    with raises(ConfigError, "card.unknown", "card = 'h1000'", "'h100'", "--memory"):
        card("h1000")
    with raises(ConfigError, "card.unknown", "card = 'abacus'", "-40"):
        card("abacus")


def test_any_memory_is_a_card():
    assert of_memory("24GiB").memory == 24 * GiB and of_memory("80 GB").memory == 80 * 10**9
    assert of_memory("0.5tib").usable == 512 * GiB - CONTEXT
    like = of_memory("48GiB", card("h100"))
    assert like.peak == card("h100").peak and like.memory == 48 * GiB
    for bad in ("24 Gigs", "much", "", "-1GiB", "1e3", "nanGiB"):
        with raises(ConfigError, "card.memory"):
            of_memory(bad)
    with raises(ConfigError, "card.memory-too-small"):
        of_memory("24")
