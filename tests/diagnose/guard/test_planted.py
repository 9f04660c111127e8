"""A guard over real training (statistical, fixed seeds): a planted fault is an alarm by the third check, a sound recipe is certified.

The model and the faults are those of benchmarks/guard_planted.py, where all faults and four seeds are measured.
"""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from benchmarks.guard_planted import SETTINGS, Run, batches, build
from benchmarks.planted_faults import plant
from narrowgauge.diagnose.guard.verdict import UNKNOWN, WITHIN, WORSE

pytestmark = pytest.mark.slow

EVERY, STEPS = 40, 200  # warm-up, and four checks


def text() -> torch.Tensor:
    """Bytes that can be learnt: words drawn at random."""
    words = (b"the ", b"quick ", b"brown ", b"fox ", b"jumps ", b"over ", b"a ", b"lazy ", b"dog. ")
    drawn = torch.randint(len(words), (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.frombuffer(bytearray(b"".join(words[each] for each in drawn)), dtype=torch.uint8).long()


def checks(recipe: str) -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = build(SETTINGS)
    plant(model, recipe)
    run, events = Run(model, SETTINGS["rate"], EVERY, STEPS), list[dict[str, object]]()
    guard = ng.Guard(
        f"every={EVERY},steps={EVERY}",
        model,
        run.optimizer,
        run.step,
        also=[run.scheduler],
        warmup_steps=EVERY,
        tell=events.append,
    )
    for ids in batches(text(), 0, STEPS, SETTINGS):
        guard(ids)
    return events


@pytest.mark.parametrize(
    ("fault", "seen_on"),
    [
        ("e2m1-tensor", "stretch"),
        ("saturating", "same weights"),
        ("dropped-columns", "same weights"),
        ("dead-layer", "gradient"),
    ],
)
def test_a_planted_fault_is_an_alarm_by_the_third_check(fault, seen_on):
    found = [event for event in checks(fault)[:3] if event["verdict"] == WORSE]
    assert found and found[0]["seen_on"] == seen_on
    if fault == "dead-layer":
        assert "model.layers.1.mlp.down_proj" in found[0]["sick"]


def test_a_sound_recipe_is_certified():
    found = [event["verdict"] for event in checks("fp8-current")]
    assert found[-1] == WITHIN and set(found) <= {UNKNOWN, WITHIN}
