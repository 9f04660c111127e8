"""Moments of a deep model from those of 3 and 4 layers, against the full count (exact within a thousandth, phase by phase)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.plan import count
from narrowgauge.plan.extrapolate import FEW, MORE, extrapolated
from narrowgauge.plan.moments import MemoryMoment, moments
from tests.plan.test_count import HOPPER, llama
from tests.selection import quick

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "tokens": 256,
    "vocab_size": 4096,
}


def counted(
    layers: int, recipe: str, states: str, checkpointing: str | None, **options: Any
) -> list[MemoryMoment]:
    return moments(
        count(
            llama(recipe, states, checkpointing, num_hidden_layers=layers, **SIZES, **options),
            HOPPER,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "states", "checkpointing", "options"),
    quick(
        [("none", "torch", "full", {"dtype": torch.bfloat16})],
        [
            ("none", "torch", "full", {"dtype": torch.bfloat16}),
            ("fp8-current", "8bit", None, {"fuse": {"fuse": True}}),
            ("fp8-delayed", "4bit", "selective", {}),
            ("fp8-block", "fp8", None, {}),
            ("fp8-row", "fp8-lm", None, {"tokens": 64}),
            ("mxfp4", "torch", "full", {}),
            ("int4-hq-bs", "8bit", None, {}),
            ("int8", "torch", "selective", {}),
        ],
    ),
)
def test_a_deep_model_is_on_the_line_through_two_shallow_ones(
    recipe, states, checkpointing, options
):
    options = dict(options)
    tokens = options.pop("tokens", SIZES["tokens"])
    given = (recipe, states, checkpointing)
    sizes = SIZES | {"tokens": tokens}

    def at(layers: int) -> list[MemoryMoment]:
        build = llama(*given, num_hidden_layers=layers, **sizes, **options)
        return moments(count(build, HOPPER))

    found, whole = extrapolated(at(FEW), at(MORE), 7), at(7)
    assert [each.phase for each in found] == [each.phase for each in whole]
    peak, true = max(found, key=lambda each: each.alive), max(whole, key=lambda each: each.alive)
    assert (
        peak.alive == pytest.approx(true.alive, rel=1e-3)
        and peak.phase == true.phase
        and peak.module == true.module
    )
    # What lies between the ends is on a line as well, but for moments at which another operation is the largest.
    for one, other in zip(found, whole, strict=True):
        assert one.alive == pytest.approx(other.alive, rel=5e-3), one.phase
    assert sum(peak.parts.values()) == pytest.approx(peak.alive, rel=1e-6)


@pytest.mark.slow
def test_shallow_models_with_other_phases_are_refused():
    few = counted(FEW, "none", "torch", None)
    with pytest.raises(ValueError, match="phases of 3 and 4 layers differ"):
        extrapolated(few, few, 8)


@pytest.mark.slow
def test_moments_add_up():
    """By part, and from phase to phase: what is alive when one ends is there when the next begins."""
    found = counted(2, "fp8-current", "8bit", None)
    assert all(sum(each.parts.values()) == each.alive >= each.end for each in found)
    assert all(each.alive <= each.allocated <= each.reserved for each in found)
    assert {each.step for each in found} == {1, 2} and found[-1].phase == "step"
    head = next(each for each in found if each.phase == "head")
    assert {kind for part, kind in head.parts if part == "saved"} >= {
        "mlp.act_fn",
        "self_attn",
        "input_layernorm",
    }
