"""The audit of a check: codes, products and random numbers that are not those of the recipe are an alarm at the first check (exact)."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from torch.nn import functional as F

import narrowgauge as ng
from benchmarks.planted_faults import BROKEN, plant
from narrowgauge.diagnose.verdict import UNKNOWN, WORSE
from narrowgauge.lab.guard.audit import Audited
from narrowgauge.lab.guard.evidence import Evidence
from narrowgauge.lab.guard.result import KERNEL, NUMBERS, STALE, STUCK, UNCAST
from tests.compare import assert_same
from tests.selection import quick
from tests.small_model import Model

NARROW = [name for name in ng.recipes.names() if name != "bf16"]


class Loop:
    """Two micro-batches a step, SGD."""

    def __init__(self, recipe, guard="every=4,steps=3", advances=True, before=None):
        torch.manual_seed(0)
        self.model, self.advances, self.before = Model(), advances, before
        plant(self.model, recipe)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard = (
            ng.Guard(guard, self.model, self.optimizer, self.step, tell=lambda event: None)
            if guard
            else None
        )
        self.batches = torch.randint(48, (9, 2, 4, 12), generator=torch.Generator().manual_seed(1))

    def step(self, batch):
        if self.before:
            self.before(self)
        losses = []
        for ids in batch:
            loss = F.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        if self.advances:
            ng.advance(self.model)
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def run(self):
        for batch in self.batches:
            (self.guard or self.step)(batch)
        return self

    @property
    def event(self):
        return self.guard.events[0]


def kinds(event):
    return {kind for kind, _ in event["unlike"].values()}


@pytest.mark.parametrize(
    "recipe",
    quick(
        ["fp8-delayed", "nvfp4"],
        ["fp8-current", "fp8-delayed", "mxfp8", "nvfp4", "mxfp4", "int8", "int4-row-sr"],
    ),
)
def test_a_sound_recipe_is_as_it_says_and_keeps_its_bits(recipe):
    loop = Loop(recipe).run()
    assert (
        not loop.event["unlike"] and loop.event["unseen"] == "" and loop.event["outcome"] == UNKNOWN
    )
    assert loop.event["compared"] == 3 * len(
        [each for each in loop.model.modules() if isinstance(each, ng.QLinear)]
    )
    assert all(
        each.observer is None for each in loop.model.modules() if isinstance(each, ng.QLinear)
    )
    assert_same(loop.model.state_dict(), Loop(recipe, guard="").run().model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NARROW)
def test_every_recipe_is_as_it_says_and_keeps_its_bits(recipe):
    test_a_sound_recipe_is_as_it_says_and_keeps_its_bits(recipe)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("stale-codes", STALE),
        ("stuck-noise", STUCK),
        ("lost-tokens", KERNEL),
        ("short-amax", UNCAST),
    ],
)
def test_a_fault_that_a_stretch_may_not_show_is_an_alarm_at_the_first_check(fault, kind):
    assert fault in BROKEN
    event = Loop(fault).run().event
    assert (event["outcome"], event["seen_on"]) == (WORSE, NUMBERS) and kinds(event) == {kind}
    name, (_, detail) = next(iter(event["unlike"].items()))
    assert name in event["sentence"] and detail in event["sentence"]


def given_for_good(loop):
    """Casts that were made before the step and are used whatever the weight says, as a CUDA graph's are."""
    from narrowgauge.cuda_graphs import cast_weight

    layer = loop.model.layers[1].down_proj
    if not hasattr(loop, "casts"):
        loop.casts = cast_weight(layer)
    layer.use_casts(loop.casts)


def test_codes_that_were_handed_over_once_are_stale_one_step_later():
    loop = Loop("fp8-current", before=given_for_good).run()
    assert kinds(loop.event) == {STALE}
    assert set(loop.event["unlike"]) == {
        "layers.1.down_proj:output",
        "layers.1.down_proj:grad_input",
    }
    assert "narrowgauge.advance(model)" in loop.event["sentence"]


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-row-sr", "fp8-block"])
def test_stale_codes_are_found_under_every_kind_of_scale(recipe):
    loop = Loop(recipe)
    BROKEN["stale-codes"](loop.model)
    found = loop.run().event
    assert kinds(found) == {STALE} and found["verdict"] == WORSE


def test_a_seed_at_every_step_is_found():
    event = Loop("nvfp4", before=lambda loop: torch.manual_seed(7)).run().event
    assert kinds(event) == {STUCK} and "torch's generator" in event["sentence"]


@pytest.mark.usefixtures("nothing_was_compiled")
def test_a_layer_that_cannot_be_seen_is_named_and_not_passed():
    loop = Loop("fp8-current")
    layer = loop.model.layers[0].up_proj
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)
    with pytest.warns(
        UserWarning, match=r"'layers.0.up_proj' is multiplied without calling the layer"
    ):
        event = loop.run().event
    assert "layers.0.up_proj the first" in event["unseen"] and not event["unlike"]


def test_an_observer_of_the_user_stays():
    loop, seen = Loop("fp8-current"), []
    layer = loop.model.layers[0].up_proj
    layer.observer = lambda *given: seen.append(given[:2])
    event = loop.run().event
    assert seen and callable(layer.observer) and "layers.0.up_proj" in event["unseen"]


def test_numbers_that_are_not_finite_are_no_alarm():
    """A step that float16 skips has gradients that are not finite: their codes are NaN by definition."""

    loop = Loop("fp8-current")
    loop.model.layers[2].register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * float("nan"), *inputs[1:])
    )
    loop.optimizer.param_groups[0]["lr"] = 0.0
    assert not loop.run().event["unlike"]


def test_what_was_seen_lies_in_a_checkpoint():
    found = Audited(
        unlike={"a:output": (STALE, "w")}, compared=["a:output"], unseen=["b"], carried=["c"]
    )
    again = Audited(**json.loads(json.dumps(asdict(found))))
    again.take(Audited(compared=["b:output"]))
    assert again.unseen == [] and again.carried == ["c"] and again.event()["compared"] == 2
    evidence = Evidence()
    evidence.add(0.0, loss=2.0, unlike=found.unlike)
    other = Evidence()
    other.load_state_dict(json.loads(json.dumps(evidence.state_dict())))
    assert other.result().sentence == evidence.result().sentence
    old = evidence.state_dict()
    del old["checks"][0]["unlike"]  # of a run from before
    other.load_state_dict(old)
    assert other.result().outcome == UNKNOWN


def test_a_loss_that_stands_still_is_said():
    evidence = Evidence()
    assert not evidence.add(0.0, loss=3.0).is_plateau
    standing = evidence.add(0.0001, loss=2.99)
    assert standing.is_plateau and standing.event()["plateau"]
    assert "hardly" in standing.sentence and "3.0000, now 2.9900" in standing.sentence
    moving = evidence.add(0.0001, loss=2.5)
    assert not moving.is_plateau and "hardly" not in moving.sentence
