"""A guard over real training (statistical, fixed seeds): a planted fault is an alarm by the third check, a sound recipe is certified.

The model and the faults are those of benchmarks/guard_planted.py, where all faults and four seeds are measured.
"""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from benchmarks.guard_planted import SETTINGS, Continuation, batches, build
from benchmarks.planted_faults import plant
from narrowgauge.diagnose.guard.evidence import UNKNOWN, WITHIN, WORSE

pytestmark = pytest.mark.slow

EVERY, STEPS = 40, 200  # warm-up, and four checks


def text() -> torch.Tensor:
    """Bytes that can be learnt: words drawn at random."""
    words = (b"the ", b"quick ", b"brown ", b"fox ", b"jumps ", b"over ", b"a ", b"lazy ", b"dog. ")
    drawn = torch.randint(len(words), (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.frombuffer(bytearray(b"".join(words[each] for each in drawn)), dtype=torch.uint8).long()


def verdicts(recipe: str) -> list[str]:
    torch.manual_seed(0)
    model = build(SETTINGS)
    plant(model, recipe)
    run = Continuation(model, batches(text(), 0, STEPS, SETTINGS), SETTINGS["rate"], EVERY)
    events: list[dict[str, object]] = []

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach()

    guard = ng.Guard(f"every={EVERY},steps={EVERY}", model, run.optimizer, step, warmup_steps=EVERY, tell=events.append)
    for ids in run.data:
        guard(ids)
    return [str(event["verdict"]) for event in events]


@pytest.mark.parametrize("fault", ["e2m1-tensor", "saturating"])
def test_a_planted_fault_is_an_alarm_by_the_third_check(fault):
    assert WORSE in verdicts(fault)[:3]


def test_a_sound_recipe_is_certified():
    found = verdicts("fp8-current")
    assert found[-1] == WITHIN and set(found) <= {UNKNOWN, WITHIN}
