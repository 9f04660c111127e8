"""A guard of a mixture of experts names the expert whose product is not that of its recipe (exact)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.cuda_graphs import cast_weight
from narrowgauge.diagnose.verdict import UNKNOWN, WORSE
from narrowgauge.lab.guard.result import STALE
from tests.lab.blame.test_experts import EXPERT, expert_of, mixture
from tests.selection import quick


def first_check(model: nn.Module, before: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Steps of SGD up to the first check's event. before: called before each forward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: Tensor) -> Tensor:
        before()
        loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        return loss.detach()

    guard = ng.Guard("every=2,steps=2", model, optimizer, step, tell=lambda event: None)
    for ids in torch.randint(48, (4, 4, 12), generator=torch.Generator().manual_seed(1)):
        guard(ids)
    event: dict[str, Any] = guard.events[0]
    return event


@pytest.mark.parametrize("recipe", quick(["fp8-current"], ["fp8-current", "mxfp8", "nvfp4"]))
def test_sound_experts_are_as_their_recipe_says(recipe: str) -> None:
    event = first_check(mixture(recipe))
    assert not event["unlike"] and event["unseen"] == "" and event["outcome"] == UNKNOWN


def test_codes_of_one_expert_that_are_a_step_old_are_named() -> None:
    """A check compares the codes of every weight, and products of some layers alone."""
    model = mixture()
    expert = expert_of(model)
    casts = cast_weight(expert)
    event = first_check(model, before=lambda: expert.use_casts(casts))
    assert event["outcome"] == WORSE
    assert {name: kind for name, (kind, _) in event["unlike"].items()} == {
        f"{EXPERT}:output": STALE,
        f"{EXPERT}:grad_input": STALE,
    }
    assert f"{EXPERT}:output" in event["sentence"]
