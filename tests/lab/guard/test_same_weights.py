"""What the first step of a check shows, where both continuations have the same weights (exact; the evidence over checks too)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.diagnose import runs
from narrowgauge.diagnose.verdict import EQUIVALENT, UNKNOWN, WORSE
from narrowgauge.lab.guard.check import PAIRS, noise
from narrowgauge.lab.guard.evidence import Evidence
from narrowgauge.lab.guard.same_weights import (
    HIGH,
    LOW,
    SAMPLE,
    FirstGradients,
    _sample,
    outside,
    slopes,
    unseen,
    words,
)
from tests.lab.guard.test_evidence import LOSS, first
from tests.raising import require
from tests.small_model import Model

NAMES = ("a", "b", "c", "d", "e")


def gradients(**factors):
    """Samples of five weights, and the same times a factor."""
    source = torch.Generator().manual_seed(0)
    wide = {name: torch.randn(SAMPLE, generator=source) for name in NAMES}
    return {name: factors.get(name, 1.0) * each for name, each in wide.items()}, wide


def test_the_slope_is_what_the_gradient_was_multiplied_by():
    narrow, wide = gradients(b=0.0, c=-2.0, d=7.0)
    found = slopes(narrow, wide)
    assert found == {
        name: pytest.approx(factor)
        for name, factor in zip(NAMES, (1.0, 0.0, -2.0, 7.0, 1.0), strict=True)
    }
    assert list(outside(found)) == ["b", "c", "d"]


def test_a_slope_is_not_moved_by_noise():
    """Unbiased noise as large as the gradient leaves the slope at 1 +- 0.016."""
    narrow, wide = gradients()
    added = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(1))
    found = slopes({name: each + added for name, each in narrow.items()}, wide)
    assert all(abs(slope - 1) < 0.1 for slope in found.values()) and not outside(found)


def test_a_factor_that_all_share_is_that_of_clipping():
    narrow, wide = gradients(d=100.0)
    clipped = {name: each / 300 for name, each in narrow.items()}
    assert list(outside(slopes(clipped, wide))) == ["d"]
    assert not outside(slopes({name: each / 300 for name, each in wide.items()}, wide))
    dead, wide = gradients(a=0.0, b=0.0, c=0.0)
    assert list(outside(slopes(dead, wide))) == ["a", "b", "c"], "most of them dead"
    dead, wide = gradients(**dict.fromkeys(NAMES, 0.0))
    assert list(outside(slopes(dead, wide))) == list(NAMES), "all of them"


def test_what_has_no_slope_is_left_out():
    narrow, wide = gradients()
    wide["a"], narrow["b"][3], wide["c"][3] = torch.zeros(SAMPLE), math.nan, math.inf
    del narrow["d"]
    assert list(slopes(narrow, wide)) == ["e"]
    assert slopes({}, wide) == {} == outside({})


@pytest.mark.parametrize(
    "shape",
    [(64, 64), (192, 64), (64, 192), (512, 512), (96, 4096), (3, 5000), (1, 1), (0, 8), (300_000,)],
)
def test_a_sample_meets_every_column(shape):
    """Exact: no more than SAMPLE elements, spread over the rows, and where there are enough of them over all columns."""
    places = torch.arange(math.prod(shape)).view(shape)
    found = _sample(places.double()).long()
    assert len(found) == min(len(found), SAMPLE) and len(found) >= min(
        math.prod(shape), SAMPLE // 2
    )
    columns = min(shape[-1], len(found)) if shape[0] != 0 else 0
    assert len((found % max(shape[-1], 1)).unique()) >= (columns if shape[-1] <= SAMPLE else 0)
    assert not len(found) or found[-1] >= 0.99 * (math.prod(shape) - 1) - 1


# --- in a loop


class Small:
    """A loop of four layers of two products each, with clipping."""

    def __init__(self, sick=None, **options):
        torch.manual_seed(0)
        self.model = ng.convert(Model(), "fp8-current")
        self.sick = sick
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.guard = ng.Guard("every=2,steps=2", self.model, self.optimizer, self.step, **options)
        if sick:
            layer = self.model.layers[1].down_proj
            layer.register_forward_hook(
                lambda layer, _, output: output if layer.is_suspended else sick(output)
            )

    def step(self, ids):
        loss = F.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, steps):
        for ids in torch.randint(48, (steps, 4, 12), generator=torch.Generator().manual_seed(1)):
            self.guard(ids)
        return self.guard.events


def test_a_dead_layer_is_an_alarm_at_the_second_check(cpu):
    with pytest.warns(
        UserWarning,
        match="The gradient of .* is not that of BF16 .* at two checks in a row: .*layers.1",
    ):
        events = Small(lambda output: output * 0).run(6)
    assert [(each["verdict"], each["seen_on"]) for each in events] == [
        (UNKNOWN, ""),
        (WORSE, "gradient"),
    ]
    assert (
        "layers.1.down_proj" in events[0]["outside"]
        and events[0]["outside"]["layers.1.down_proj"] == 0
    )
    assert "layers.1.down_proj" in events[1]["sick"]


def test_a_gradient_that_is_blown_is_named_in_spite_of_clipping(cpu):
    """Of the layer alone: what all others lose by clipping is not theirs."""
    sick = Small()
    layer = sick.model.layers[1].down_proj
    layer.weight.register_hook(lambda gradient: gradient if layer.is_suspended else 100 * gradient)
    with pytest.warns(UserWarning, match="The gradient of 1 weight is not"):
        events = sick.run(6)
    assert list(events[0]["outside"]) == ["layers.1.down_proj"]


def test_a_sound_loop_has_slopes_near_one_and_no_hooks_left(cpu):
    loop = Small()
    events = loop.run(6)
    assert all(
        each["weights"]
        == len([m for m in loop.model.modules() if isinstance(m, ng.QLinear) and m.recipe])
        for each in events
    )
    assert all(
        LOW < low <= high < HIGH and (low, high) != (1, 1)
        for low, high in (each["slopes"] for each in events)
    )
    assert all(each["outside"] == {} and each["same"] != 0 for each in events)
    hooks = loop.optimizer._optimizer_step_pre_hooks
    assert not hooks
    loop.guard.before_step()
    assert len(hooks) == 1, "a check waits for its first step"
    with pytest.raises(TypeError):
        loop.guard(None)
    assert not hooks


def test_the_first_losses_differ_by_the_forward_pass_alone(cpu):
    loop = Small()
    held, seen = loop.guard._steps.step, []

    def step(ids):
        seen.append(float(loss := held(ids)))
        return loss

    loop.guard._steps.step = step
    [event] = loop.run(4)
    narrow, control, wide = seen[2], seen[4], seen[6]
    assert event["same"] == narrow - wide and abs(control - wide) < 1e-4


def test_where_gradients_cannot_be_had_it_is_said():
    model = ng.convert(Model(), "fp8-current")
    optimizer = ng.optim.AdamW(model, lr=1e-3, states="8bit")
    assert unseen(model, optimizer) == "" and "gradients of" in words(model, optimizer)
    stepping = ng.optim.in_backward(optimizer)
    assert words(model, optimizer).code == "in-backward"
    assert FirstGradients(model, optimizer)._handles == []
    stepping.remove()
    optimizer.holding = object()  # a model this small has no matrix to hold
    assert "held in FP8" in ng.Guard("every=4,steps=2", model, optimizer, print).words()
    require(unseen(model, object()), "no-hook", "object")
    learning = ng.convert(Model(), "int4-hq-lss")
    plain = torch.optim.SGD(learning.parameters())
    assert words(learning, plain).code == "learned-steps"


# --- over the checks


def judged(differences, same, outside=()):
    evidence, outside = Evidence(), [*outside, *[{}] * len(differences)]
    checks = zip(differences, same, outside[: len(differences)], strict=True)
    return [evidence.add(d, loss=LOSS, same=s, outside=o) for d, s, o in checks]


def test_a_gap_on_the_same_weights_is_an_alarm_that_says_so():
    """A stretch sees nothing of it, since training has grown used to the fault."""
    verdicts = judged([0.0002] * 3, [-0.1] * 3)
    assert first(verdicts, WORSE) == 2
    found = verdicts[1]
    assert (found.seen_on, found.detail) == ("same weights", "lower")
    assert (
        found.sentence.startswith(
            "On the same weights and batch the loss is lower than that of BF16"
        )
        and "0.1000 nats" in found.sentence
    )
    assert found.e_worse == (found.e_worse_stretch + found.e_worse_same) / 2


def test_steps_that_follow_say_how_far_one_batch_scatters():
    """The same two numbers decide where batches agree, and nothing where they scatter as far. Less than three steps say nothing."""
    assert noise([5.0, 2.03, 2.01, 1.9, 1.9], [2.0, 2.0, 2.0, 1.9, 1.9]) == pytest.approx(
        [0.02 / math.sqrt(2), 0.0]
    )
    assert noise([2.0, 1.9], [2.0, 1.9]) == [] == noise([2.0], [])
    assert len(noise([2.0] * 50, [1.0] * 50)) == PAIRS
    for scatter, name in ((0.001, WORSE), (0.03, UNKNOWN)):
        evidence = Evidence()
        for same in (0.03, 0.025):
            verdict = evidence.add(0.0, loss=LOSS, same=same, noise=[scatter] * PAIRS)
        assert verdict.outcome == name


def test_within_needs_both_numbers_inside():
    assert first(judged([0.0002] * 8, [0.0003] * 8), EQUIVALENT) is not None
    assert first(judged([0.0002] * 8, [0.005] * 8), EQUIVALENT) is None
    assert first(judged([0.0002] * 8, [0.0003] * 8, [{"a": 0.0}] * 8), EQUIVALENT) is None
    alternating = [{"a": 0.0}, {}] * 4
    assert [each.outcome for each in judged([0.0] * 8, [0.0] * 8, alternating)][-2:] == [
        UNKNOWN,
        EQUIVALENT,
    ]


def test_a_weight_is_sick_at_two_checks_in_a_row():
    verdicts = judged(
        [0.0] * 5,
        [0.0] * 5,
        [{"a": 0.0}, {"b": 9.0}, {"b": 9.0, "a": 0.1}, {"c": 0.0, "b": 8.0}, {}],
    )
    assert [each.sick for each in verdicts] == [(), (), ("b",), ("b",), ()]
    assert [each.detail for each in verdicts[2:4]] == ["gradient", "gradient"] and verdicts[
        4
    ].outcome != WORSE
    many = {f"layers.{i}": 0.0 for i in range(5)}
    said = judged([0.0] * 2, [0.0] * 2, [many, many])[-1].sentence
    assert (
        said.endswith("at two checks in a row: layers.0, layers.1, layers.2 and 2 more.")
        and "5 weights" in said
    )


def test_numbers_of_the_first_step_go_through_json():
    evidence = Evidence()
    for same, sick in (
        (0.001, {"a": 0.0}),
        (math.nan, None),
        (-0.1, {"a": 0.0}),
        (None, {"a": 0.0, "b": 7.5}),
    ):
        evidence.add(0.001, loss=LOSS, same=same, outside=sick)
    resumed = Evidence()
    resumed.load_state_dict(runs.decode(runs.encode(evidence.state_dict())))
    assert resumed.result() == evidence.result() and evidence.result().sick == ("a",)


def test_checks_of_older_states_are_judged_by_the_stretch_alone():
    old, new = Evidence(), Evidence()
    old.load_state_dict({"checks": [{"difference": 0.02, "loss": LOSS, "control": None}] * 3})
    for _ in range(3):
        new.add(0.02, loss=LOSS)
    assert (
        old.result() == new.result()
        and old.result().e_worse_same is None
        and old.result().outcome == WORSE
    )
