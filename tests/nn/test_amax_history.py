"""Delayed scaling (exact): the window, micro-batches, recomputation, and what a non-finite amax may do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge import recipes
from narrowgauge.conversion import advance, nonfinite_amax
from narrowgauge.errors import ConfigError
from narrowgauge.nn.amax_history import AmaxHistory, roll_history
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.quantize.amax_state import IN_USE, update_amax
from narrowgauge.recipe import DelayedScaling, Gemm, Recipe
from tests.raising import raises


def window(**settings: object) -> AmaxHistory:
    return AmaxHistory(DelayedScaling(**settings), torch.device("cpu"))  # type: ignore[arg-type]


def step(state: AmaxHistory, *readings: float) -> list[float]:
    """Micro-batches of one step; returns the amax that each was scaled by, then rolls."""
    used = [float(update_amax(state.live, torch.tensor([[reading]]))) for reading in readings]
    roll_history([state])
    return used


def test_first_step_uses_the_tensor_and_later_ones_the_window() -> None:
    state = window(length=4)
    assert step(state, 3.0) == [3.0]
    assert step(state, 5.0) == [3.0]
    assert step(state, 1.0) == [5.0]


def test_maximum_of_the_window_is_forgotten_after_its_length() -> None:
    state = window(length=2)
    assert [step(state, reading)[0] for reading in (8.0, 1.0, 1.0, 1.0)] == [8.0, 8.0, 8.0, 1.0]


def test_most_recent_takes_the_last_step() -> None:
    state = window(length=8, algorithm="most_recent")
    assert [step(state, reading)[0] for reading in (8.0, 1.0, 2.0, 4.0)] == [8.0, 8.0, 1.0, 2.0]


def test_margin_leaves_head_room_in_powers_of_two() -> None:
    state = window(length=2, margin=2)
    assert [step(state, reading)[0] for reading in (3.0, 3.0)] == [3.0, 12.0]


def test_micro_batches_count_by_their_maximum() -> None:
    """marin#7659: a peer kept the last micro-batch only."""
    state = window(length=4)
    step(state, 9.0, 1.0, 2.0)
    assert float(state.history[0]) == 9.0
    assert float(state.live[IN_USE]) == 9.0


def test_zero_and_unseen_tensors_keep_history_and_scale() -> None:
    state = window(length=2)
    step(state, 4.0)
    before = state.history.clone()
    step(state, 0.0)
    step(state)
    assert torch.equal(state.history, before)
    assert step(state, 7.0) == [4.0]


@pytest.mark.parametrize("length", [1, 16, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_nonfinite_amax_never_enters_and_recovery_takes_one_step(
    length: int, algorithm: str, poison: float
) -> None:
    """A peer keeps its old scale for length - 1 steps after one infinity (fp8-numerics, section 2.1)."""
    state = window(length=length, algorithm=algorithm)
    step(state, 1.0)
    [used] = step(state, poison)
    assert not torch.tensor(used).isfinite(), "the poisoned step itself must show"
    assert step(state, 10.0) == [1.0], "the next step is scaled by the old window"
    assert step(state, 10.0) == [10.0], "and one step later by the new amax"
    assert state.history.isfinite().all()
    assert int(state.nonfinite) == 1


def test_poison_in_one_micro_batch_keeps_the_finite_maximum_of_the_others() -> None:
    state = window(length=4)
    step(state, 2.0, float("nan"), 6.0)
    assert step(state, 1.0) == [6.0]
    assert int(state.nonfinite) == 1


def test_layer_counts_and_names_nonfinite_readings() -> None:
    model = torch.nn.Sequential(QLinear(16, 16, recipe=recipes.FP8_DELAYED))
    for value in (1.0, float("inf"), 2.0, float("nan")):
        model(torch.full((4, 16), value))
        advance(model)
    assert nonfinite_amax(model) == {("0", "x"): 2}


def test_evaluation_leaves_the_window_alone() -> None:
    layer = QLinear(16, 16, recipe=recipes.FP8_DELAYED)
    layer(torch.ones(4, 16))
    advance(layer)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.eval()
    layer(torch.full((4, 16), 100.0))
    advance(layer)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_gradient_window_is_fed_by_backward() -> None:
    layer = QLinear(16, 16, recipe=recipes.FP8_DELAYED)
    layer(torch.ones(4, 16, requires_grad=True)).mul(3).sum().backward()
    advance(layer)
    assert layer.scaling is not None
    assert float(layer.scaling["gy"].live[IN_USE]) == 3.0


def test_windows_stay_in_float32_when_the_model_changes_type() -> None:
    layer = QLinear(16, 16, recipe=recipes.FP8_DELAYED)
    layer(torch.full((4, 16), 1.2345))
    advance(layer)
    assert layer.scaling is not None
    before = layer.scaling["x"].live.clone()
    layer.to(torch.bfloat16)
    assert torch.equal(layer.scaling["x"].live, before)


def test_many_windows_roll_as_one_would() -> None:
    together = [window(length=4) for _ in range(3)]
    alone = [window(length=4) for _ in range(3)]
    for reading in (2.0, 0.0, 5.0, float("inf"), 1.0, 1.0, 1.0, 1.0):
        for index, (left, right) in enumerate(zip(together, alone, strict=True)):
            amax = torch.tensor([[reading * (index + 1)]])
            update_amax(left.live, amax)
            update_amax(right.live, amax)
            roll_history([right])
        roll_history(together)
    for left, right in zip(together, alone, strict=True):
        assert torch.equal(left.history, right.history)
        assert torch.equal(left.live, right.live)


def test_two_windows_for_one_tensor_are_refused() -> None:
    forward = recipes.FP8_DELAYED.output.lhs
    assert forward is not None
    other = replace(forward, calibrate=DelayedScaling(length=16))
    with raises(ConfigError, "recipe.two-windows"):
        Recipe(
            name="two",
            output=Gemm(lhs=forward, rhs=forward),
            grad_weight=Gemm(lhs=forward, rhs=other),
        )


def test_windows_are_float32_whatever_the_default_type() -> None:
    """Models are often built under a default of bfloat16, which would round every amax."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = QLinear(16, 16, recipe=recipes.FP8_DELAYED)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.scaling is not None
    for name, value in layer.scaling.state_dict().items():
        assert value.dtype == (torch.int64 if name.endswith("nonfinite") else torch.float32), name


@pytest.mark.usefixtures("poisoned_memory")
def test_windows_made_on_meta_begin_empty() -> None:
    """to_empty brings them as whatever was in memory."""
    layer = QLinear(16, 16, device="meta", recipe=recipes.FP8_DELAYED).to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.scaling is not None
    assert all(not value.any() for value in layer.scaling.state_dict().values())
    layer(torch.full((4, 16), 3.0))
    advance(layer)
    layer.scaling["x"].reset_parameters()
    assert not layer.scaling["x"].history.any() and not layer.scaling["x"].live.any()
