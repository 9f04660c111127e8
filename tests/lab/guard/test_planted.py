"""A guard over real training (statistical, fixed seeds): a planted fault is an alarm by the third check, a sound recipe never.

The model and the faults are those of benchmarks/guard_planted.py, where all faults and four seeds are measured.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowgauge as ng
from benchmarks.guard_planted import SETTINGS, Run, batches, build
from benchmarks.planted_faults import plant
from narrowgauge.diagnose.verdict import EQUIVALENT, UNKNOWN, WORSE

pytestmark = pytest.mark.slow

EVERY, STEPS = 40, 200  # warm-up, and four checks


def text() -> torch.Tensor:
    """Bytes that can be learnt: words drawn at random."""
    words = (b"the ", b"quick ", b"brown ", b"fox ", b"jumps ", b"over ", b"a ", b"lazy ", b"dog. ")
    drawn = torch.randint(
        len(words), (20_000,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return torch.frombuffer(
        bytearray(b"".join(words[each] for each in drawn)), dtype=torch.uint8
    ).long()


def checks(recipe: str, steps: int = STEPS) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = build(SETTINGS)
    plant(model, recipe)
    run, events = Run(model, SETTINGS["rate"], EVERY, steps), list[dict[str, Any]]()
    guard = ng.Guard(
        f"every={EVERY},steps={EVERY}",
        model,
        run.optimizer,
        run.step,
        also=[run.scheduler],
        warmup_steps=EVERY,
        tell=events.append,
    )
    for ids in batches(text(), 0, steps, SETTINGS):
        guard(ids)
    return events


@pytest.mark.parametrize("fault", ["e2m1-tensor", "saturating", "dropped-columns", "dead-layer"])
def test_a_planted_fault_is_an_alarm_by_the_third_check(fault):
    """On which number it is seen first depends on the last bits of a machine, but of a layer that gives nothing."""
    found = [event for event in checks(fault)[:3] if event["outcome"] == WORSE]
    assert found
    if fault == "dead-layer":
        assert (
            found[0]["seen_on"] == "gradient" and "model.layers.1.mlp.down_proj" in found[0]["sick"]
        )


def test_a_sound_recipe_is_never_alarmed_and_nears_its_certificate():
    """The first check is while this small text is still learnt steeply, so eight checks are not always enough here."""
    found = checks("fp8-current", steps=2 * STEPS)
    assert {event["outcome"] for event in found} <= {UNKNOWN, EQUIVALENT} and found[-1][
        "e_within"
    ] > 1
