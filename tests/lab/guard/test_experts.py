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
from narrowgauge.lab.guard import audit
from narrowgauge.lab.guard.result import KERNEL, STALE
from narrowgauge.recipe import GEMMS
from tests.lab.blame.planted import dropping
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


@pytest.mark.parametrize("product", quick(["output"], GEMMS))
@pytest.mark.parametrize("expert", quick(["2"], ["0", "2", "3"]))
def test_a_kernel_that_drops_columns_of_one_expert_is_seen_at_the_first_check(
    product: str, expert: str
) -> None:
    model = mixture()
    name = EXPERT.replace(".2.", f".{expert}.")
    with dropping(model.get_submodule(name), product, columns=8):  # type: ignore[arg-type]
        event = first_check(model)
    assert event["outcome"] == WORSE
    assert {key: kind for key, (kind, _) in event["unlike"].items()} == {
        f"{name}:{product}": KERNEL
    }


def test_experts_beyond_the_limit_have_their_turn_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each parameter two experts a check, and dense layers beside them (exact)."""
    monkeypatch.setattr(audit, "EXPERTS", 2)
    model = mixture()
    layers = audit.converted(model)
    chosen = [audit.Audit(model, number)._chosen(layers) for number in (0, 1, 2)]
    experts = [{name for name in each if ".experts." in name} for each in chosen]
    assert experts[0] == experts[2] and len(experts[0]) == len(experts[1]) == 8
    assert not experts[0] & experts[1] and f"{EXPERT}" in experts[1]
    assert all(
        each - own == chosen[0] - experts[0] for each, own in zip(chosen, experts, strict=True)
    )
    monkeypatch.setattr(audit, "LAYERS", 3)
    few = [audit.Audit(model, number)._chosen(layers) for number in range(8)]
    assert len(set.union(*few)) == len(set.union(*chosen))
