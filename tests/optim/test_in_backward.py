"""Who holds whom when the optimizer steps inside backward; and clipping there by the norm of the whole gradient (exact)."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError
from tests.compare import assert_same
from tests.raising import coded, raises


def trained(steps: int = 2) -> tuple[nn.Module, ng.optim.AdamW]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = ng.optim.AdamW(model.parameters(), lr=1e-3, states="8bit")
    ng.optim.in_backward(optimizer)
    for _ in range(steps):
        model(torch.randn(8, 16)).sum().backward()
    return model, optimizer


def test_weights_and_states_are_freed_with_the_model():
    model, optimizer = trained()
    kept = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)


def test_backward_says_that_its_optimizer_is_gone():
    model, optimizer = trained()
    before = model[0].weight.detach().clone()
    del optimizer
    gc.collect()
    with raises(ConfigError, "in-backward.no-optimizer"):
        model(torch.randn(8, 16)).sum().backward()
    assert torch.equal(model[0].weight, before)


def test_gradients_whose_squares_overflow_are_clipped_and_not_lost():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = ng.optim.SGD([weight], lr=1.0, momentum=0.0, backend="torch")
    ng.optim.in_backward(optimizer, clip_parameter_norm=1.0)
    (weight * 1e20).sum().backward()
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5))


def test_what_in_backward_returns_holds_it():
    model = nn.Linear(16, 4)
    stepping = ng.optim.in_backward(ng.optim.AdamW(model.parameters(), lr=1e-3))
    before = model.weight.detach().clone()
    gc.collect()
    model(torch.randn(8, 16)).sum().backward()
    assert not torch.equal(model.weight, before)
    stepping.remove()


# --- clipping by the norm of the whole gradient ------------------------------------------------------------------------------------


def deep(recipe: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(64, 96),
        nn.Dropout(0.2),
        nn.LayerNorm(96),
        nn.Linear(96, 64),
        nn.Dropout(0.2),
        nn.Linear(64, 80),
    ).to(dtype)
    return model if recipe is None else ng.convert(model, recipe)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    return model(batch(step, dtype)).float().square().mean() * 10.0**step


def by_place(optimizer: ng.optim.AdamW) -> dict[int, Any]:
    return dict(sorted(optimizer.state_dict()["state"].items()))


def ordinary(
    model: nn.Module, options: dict[str, Any], dtype: torch.dtype, steps: int = 4
) -> list[Any]:
    """Losses, norms, then all that a step leaves: weights, states and the generator."""
    optimizer = ng.optim.AdamW(model, lr=1e-2, **options)
    found: list[Any] = []
    for step in range(steps):
        loss = loss_of(model, step, dtype)
        loss.backward()
        norm = ng.optim.clip_gradients(model.parameters(), 0.5, wide=True)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), norm]
    return [*found, model.state_dict(), by_place(optimizer), torch.get_rng_state()]


def in_two_passes(
    model: nn.Module, options: dict[str, Any], dtype: torch.dtype, steps: int = 4
) -> list[Any]:
    optimizer = ng.optim.AdamW(model, lr=1e-2, **options)
    stepping = ng.optim.in_backward(optimizer, clip_norm=0.5, clip="two-pass")
    found: list[Any] = []
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            loss = loss_of(model, step, dtype)
            loss.backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            return loss

        found += [optimizer.step(closure).detach(), stepping.norm]
    return [*found, model.state_dict(), by_place(optimizer), torch.get_rng_state()]


CASES = [
    (None, {"states": "8bit"}, torch.float32),
    ("fp8-delayed", {"states": "4bit/fp16", "master": "stochastic"}, torch.bfloat16),
    ("int8", {"states": "fp8-lm", "master": "bf16-remainder"}, torch.bfloat16),
]


@pytest.mark.parametrize(("recipe", "options", "dtype"), CASES, ids=str)
def test_two_passes_are_the_ordinary_clipped_step(recipe, options, dtype):
    """Exact, with dropout: losses, norms, weights, windows, states and the generator."""
    options = {**options, "embeddings": "same"}
    torch.manual_seed(7)
    expected = ordinary(deep(recipe, dtype), options, dtype)
    torch.manual_seed(7)
    assert_same(in_two_passes(deep(recipe, dtype), options, dtype), expected)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ng.recipes.ALL)
def test_two_passes_of_every_recipe_are_the_ordinary_clipped_step(recipe):
    expected = ordinary(deep(recipe), {"states": "8bit"}, torch.float32, 3)
    assert_same(in_two_passes(deep(recipe), {"states": "8bit"}, torch.float32, 3), expected)


def chain(options: dict[str, Any] | None = None) -> tuple[nn.Module, ng.optim.SGD]:
    """Weights whose gradients are what the batch says, each the first of its own; plain SGD of rate 1 subtracts what it is given."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
    return model, ng.optim.SGD(list(model), lr=1.0, momentum=0.0)


def given(model: nn.ParameterList, *gradients: tuple[float, float]) -> list[torch.Tensor]:
    """Backward with these gradients, in the order in which they come: what each weight was moved by, under the last norm."""
    before = [each.detach().clone() for each in model]
    for weight, gradient in zip(model, gradients, strict=True):
        weight.backward(torch.tensor(gradient))
    return [a - b.detach() for a, b in zip(before, model, strict=True)]


def test_a_step_is_clipped_by_the_norm_before_it_or_by_what_has_been_seen():
    model, optimizer = chain()
    stepping = ng.optim.in_backward(optimizer, clip_norm=1.0, clip="previous")
    # The first step knows none before: 5 is limited by 5, then by sqrt(25 + 144), then by that and 0.
    moved = given(model, (3.0, 4.0), (0.0, 12.0), (0.0, 0.0))
    torch.testing.assert_close(
        moved, [torch.tensor([0.6, 0.8]), torch.tensor([0.0, 12 / 13]), torch.zeros(2)]
    )
    optimizer.step()
    assert float(stepping.norm) == 13.0 and optimizer.norm_before == 13.0
    # A small gradient after a large one is clipped by the norm before.
    moved = given(model, (1.3, 0.0), (0.0, 2.6), (0.0, 0.0))
    torch.testing.assert_close(
        moved, [torch.tensor([0.1, 0.0]), torch.tensor([0.0, 0.2]), torch.zeros(2)]
    )
    optimizer.step()
    assert float(stepping.norm) == pytest.approx((1.3**2 + 2.6**2) ** 0.5)
    for _ in range(2):  # small ones: not clipped once the norm before is small
        moved = given(model, (0.1, 0.0), (0.0, 0.2), (0.2, 0.0))
        optimizer.step()
    torch.testing.assert_close(
        moved, [torch.tensor([0.1, 0.0]), torch.tensor([0.0, 0.2]), torch.tensor([0.2, 0.0])]
    )
    # A spike after a small norm: each is limited by what has been seen, with itself.
    moved = given(model, (1000.0, 0.0), (0.0, 0.1), (0.1, 0.0))
    torch.testing.assert_close(
        moved, [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1e-4]), torch.tensor([1e-4, 0.0])]
    )


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_clips_no_later_step(poison):
    """Its own step is poisoned where it is seen, as every step is; the next one knows no norm before it."""
    model, optimizer = chain()
    stepping = ng.optim.in_backward(optimizer, clip_norm=1.0, clip="previous")
    given(model, (0.5, 0.0), (poison, 0.0), (0.1, 0.0))
    optimizer.step()
    assert not stepping.norm.isfinite() and optimizer.norm_before == 0.0
    assert optimizer.state_dict()["param_groups"][0]["norm_before"] == 0.0
    moved = given(model, (0.5, 0.0), (0.0, 0.0), (0.0, 0.0))
    torch.testing.assert_close(moved[0], torch.tensor([0.5, 0.0]))


def test_a_step_without_gradients_keeps_the_norm_before():
    model, optimizer = chain()
    ng.optim.in_backward(optimizer, clip_norm=1.0, clip="previous")
    given(model, (3.0, 4.0), (0.0, 0.0), (0.0, 0.0))
    optimizer.step()
    optimizer.step()
    assert optimizer.norm_before == 5.0


def test_a_resumed_run_is_clipped_by_the_norm_before_it_was_saved():
    def train(stops: bool) -> list[Any]:
        model = deep()
        optimizer = ng.optim.AdamW(model, lr=1e-2, states="8bit")
        ng.optim.in_backward(optimizer, clip_norm=0.01, clip="previous")
        for step in range(4):
            if stops and step == 2:
                saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
                model = deep()
                optimizer = ng.optim.AdamW(model, lr=1e-2, states="8bit")
                ng.optim.in_backward(optimizer, clip_norm=0.01, clip="previous")
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            torch.manual_seed(step)
            loss_of(model, 3 - step, torch.float32).backward()
            optimizer.step()
        return [model.state_dict(), by_place(optimizer), optimizer.norm_before]

    assert_same(train(True), train(False))


@pytest.mark.parametrize("norm", [math.nan, -1.0, math.inf, "1", None, True])
def test_a_saved_norm_that_is_none_is_refused(norm):
    _, optimizer = chain()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["norm_before"] = norm
    with raises(CheckpointError, "optim.state", "norm_before"):
        optimizer.load_state_dict(saved)


def test_a_second_backward_pass_of_a_step_is_refused_before_it_changes_anything():
    for clip in ("previous", "two-pass"):
        model, optimizer = chain()
        ng.optim.in_backward(optimizer, clip_norm=1.0, clip=clip)

        def twice() -> None:
            given(model, (3.0, 4.0), (0.0, 0.0), (0.0, 0.0))  # noqa: B023
            given(model, (3.0, 4.0), (0.0, 0.0), (0.0, 0.0))  # noqa: B023

        with raises(ConfigError, "in-backward.too-many", "[2]", "the 1"):
            optimizer.step(twice)
        if clip == "two-pass":
            assert not any(each.any() for each in model)
            with raises(ConfigError, "in-backward.two-pass", "optimizer.step"):
                given(model, (3.0, 4.0), (0.0, 0.0), (0.0, 0.0))
            assert not any(each.any() for each in model)


def test_what_a_clip_cannot_be_is_refused():
    for options, words in (
        ({"clip_norm": 1.0}, coded("in-backward.whole-norm", "clip_norm = 1.0")),
        ({"clip": "previous"}, coded("in-backward.no-norm", "clip = 'previous'", "clip_norm")),
        (
            {"clip": "last", "clip_norm": 1.0},
            coded("in-backward.clip", "clip = 'last'", "'previous', 'two-pass', 'parameter'"),
        ),
        ({"clip": "previous", "clip_norm": 0.0}, coded("in-backward.norm", "clip_norm = 0.0")),
        ({"clip": "previous", "clip_norm": math.nan}, coded("in-backward.norm", "clip_norm = nan")),
        ({"clip": "previous", "clip_parameter_norm": 1.0}, coded("in-backward.two-norms")),
        ({"clip_norm": 1.0, "clip_parameter_norm": 1.0}, coded("in-backward.two-norms")),
    ):
        with raises(ConfigError, words):
            ng.optim.in_backward(chain()[1], **options)


def test_a_copy_and_a_loaded_state_step_where_they_did():
    """A copy has no hooks; an optimizer that takes up a state keeps its own."""
    model, optimizer = chain()
    stepping = ng.optim.in_backward(optimizer, clip_norm=1.0, clip="parameter")
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.stepping is stepping and copy.deepcopy(optimizer).stepping is None
    given(model, (3.0, 4.0), (0.0, 0.0), (0.0, 0.0))
    torch.testing.assert_close(model[0].detach(), torch.tensor([-0.6, -0.8]))


# --- several backward passes of a step, whose sums are held in FP8 ------------------------------------------------------------------


def accumulated(inside: str, clip: bool = True) -> list[Any]:
    """Two steps of three micro-batches, of which the last leaves the last layer out."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 80))
    optimizer = ng.optim.AdamW(model, lr=1e-2, states="8bit", seed=9)
    options = {"accumulation": 3, "clip_norm": 0.5, "clip": inside}
    handle = (
        ng.optim.in_backward(optimizer, **options)
        if inside
        else ng.optim.hold_gradients(optimizer, clip_norm=0.5)
    )
    for step in range(2):

        def closure(step: int = step) -> None:
            for turn in range(3):
                (model[:3] if turn == 2 else model)(
                    batch(3 * step + turn)
                ).square().mean().backward()

        if inside == "two-pass":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        optimizer.zero_grad()
    return [model.state_dict(), by_place(optimizer), handle.norm]


def test_the_last_of_several_passes_steps():
    """Matrices of 4,096 elements are summed in FP8 until the last pass, which is added in float32: within that cast of the plain sum."""
    held, twice, before = accumulated(""), accumulated("two-pass"), accumulated("previous")
    # The norm is that of the second step. The first one left weights whose 8-bit moments were rounded, and corrected, differently.
    assert float(twice[2]) == pytest.approx(float(held[2]), rel=0.03)
    # Of other weights: the first step was clipped by less.
    assert float(before[2]) == pytest.approx(float(twice[2]), rel=0.2)
    torch.manual_seed(4)
    start = nn.Linear(64, 96).weight.detach()
    for found in (twice, before):
        moved, expected = found[0]["0.weight"] - start, held[0]["0.weight"] - start
        assert float((moved - expected).norm() / expected.norm()) < 0.15
        assert [int(state["step"]) for state in found[1].values()] == [2] * 8
    assert_same(accumulated("two-pass"), twice)


def test_a_pass_too_many_is_refused():
    model, optimizer = chain()
    ng.optim.in_backward(optimizer, clip_norm=1.0, clip="previous", accumulation=2)
    for _ in range(2):
        given(model, (3.0, 4.0), (0.0, 1.0), (0.0, 0.0))
    torch.testing.assert_close(model[0].detach(), torch.tensor([-0.6, -0.8]))
    given(model, (3.0, 4.0), (0.0, 1.0), (0.0, 0.0))
    with raises(ConfigError, "in-backward.too-many", "[2]", "the 2"):
        given(model, (3.0, 4.0), (0.0, 1.0), (0.0, 0.0))


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def data(seed: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def test_a_skipped_pass_is_not_in_the_next_step():
    """`zero_grad` drops the sums of an unfinished step, and its passes are counted anew."""
    found = []
    for skips in (False, True):
        model = two_layers()
        optimizer = ng.optim.AdamW(model, lr=1e-2)
        ng.optim.in_backward(optimizer, accumulation=2)
        if skips:
            (model(data(9)) * float("inf")).square().mean().backward()
            optimizer.zero_grad()
        for seed in (1, 2):
            (model(data(seed)).square().mean() / 2).backward()
        optimizer.step()
        found.append(model.state_dict())
    assert_same(*found)


@pytest.mark.parametrize("holds", [False, True])
def test_what_is_held_is_given_back(holds):
    """`remove` in the middle of a step: the loop's own step then moves every parameter."""
    model = two_layers()
    optimizer = ng.optim.AdamW(model, lr=1e-2, weight_decay=0.0)
    taken = (
        ng.optim.hold_gradients(optimizer)
        if holds
        else ng.optim.in_backward(optimizer, accumulation=2)
    )
    model(data(0)).square().mean().backward()
    taken.remove()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(not torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_two_passes_take_what_was_unfrozen_since():
    """To the bit the step of an optimizer that knew all of them; left out, both passes sum in it, and nothing clips it."""
    found = []
    for late in (False, True):
        model = two_layers()
        model[0].requires_grad_(not late)
        optimizer = ng.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
        ng.optim.in_backward(optimizer, clip_norm=1e-3, clip="two-pass")
        model.requires_grad_(True)
        for seed in range(2):

            def closure(model: nn.Module = model, seed: int = seed) -> torch.Tensor:
                loss = model(data(seed)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        found.append(model.state_dict())
    assert_same(*found)


def test_passes_that_each_stepped_are_told_once():
    """A loop that sums micro-batches, without `accumulation`; one step for each pass is left alone."""
    model = two_layers()
    optimizer = ng.optim.AdamW(model, lr=1e-3)
    ng.optim.in_backward(optimizer)
    for passes, told in ((1, False), (2, True), (2, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(passes):
                model(data(seed)).square().mean().backward()
            optimizer.step()
        assert [
            ("Give accumulation=2 for one step by the sum" in str(each.message)) for each in caught
        ] == [True] * told


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, "previous", "two-pass", "parameter"])
def test_measuring_changes_no_parameter_and_no_state(clip, accumulation):
    """Whatever clips the steps: who observes a step by `measure` leaves the next one as it would have been, and nothing to be told."""
    largest = {None: {}, "parameter": {"clip_parameter_norm": 1.0}}.get(
        clip, {"clip_norm": 1.0, "clip": clip}
    )
    found = []
    for looks in (False, True):
        model = two_layers()
        optimizer = ng.optim.AdamW(model, lr=1e-2)
        inside = ng.optim.in_backward(optimizer, accumulation=accumulation, **largest)

        def closure(model: nn.Module = model) -> None:
            for seed in range(accumulation):
                (model(data(seed)).square().mean() / accumulation).backward()

        for step in range(2):
            if looks and step:
                before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                inside.measure(closure)
                assert_same((model.state_dict(), optimizer.state_dict()), before)
                assert inside.norm is not None and inside.norm > 0
            inside.run(closure)
            optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)
