"""Casts of weights that the optimizer's step leaves: the numbers of a run without them, whatever happens between two steps (exact).

On a GPU a kernel leaves them and a kernel takes them up; here the definition does both, through the same seams. The kernels themselves
are compared in tests/ops/triton/casting.py.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge import cuda_graphs
from narrowgauge.errors import ConfigError
from narrowgauge.formats import E4M3
from narrowgauge.nn import plan as settings
from narrowgauge.ops.mm import plan
from narrowgauge.ops.quantize import precast_weight
from narrowgauge.ops.registry import Kernel, KernelChoice
from narrowgauge.optim import AdamW, in_backward, precast_weights
from narrowgauge.optim.step import step_in_torch
from narrowgauge.recipe import Cast, DelayedScaling
from tests.compare import assert_same
from tests.raising import coded, raises, require

RECIPES = ("fp8-delayed", "fp8-current")


def step_and_write(param_steps, kept) -> None:
    step_in_torch(param_steps)
    for param_step in param_steps:
        if param_step.stepped is not None:
            precast_weight.write(param_step.stepped, param_step.weight)


WRITING = Kernel("triton", lambda spec: None, step_and_write)


@pytest.fixture
def codes(monkeypatch):
    """As on a device whose products read codes, and whose kernels take up what a step leaves."""
    monkeypatch.setattr(
        settings, "plan", lambda gemm, device: replace(plan(gemm, device), expand=None)
    )
    monkeypatch.setattr(precast_weights, "refuse_here", lambda weight, cast: "")


class Run:
    """Two layers and an optimizer whose step leaves casts, or does not."""

    def __init__(self, recipe, casts: bool, frozen: bool = False) -> None:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        self.model = ng.convert(layers, recipe)
        if frozen:
            self.model[0].weight.requires_grad_(False)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = AdamW(trained, lr=3e-2, weight_decay=0.1, backend="torch")
        if casts:
            self.optimizer._kernel = self.kernel
            self.optimizer.cast_weights(self.model)
        ng.advance(self.model)
        self.outputs: list[torch.Tensor] = []
        self.batches = torch.Generator().manual_seed(11)

    def kernel(self, param_step):
        param_step.backend = None, KernelChoice(WRITING, ())
        return WRITING

    def forward(self) -> torch.Tensor:
        y = self.model(torch.randn(6, 32, generator=self.batches))
        self.outputs.append(y.detach())
        return y

    def step(self, micro_batches: int = 1, advances: bool = True) -> None:
        for _ in range(micro_batches):
            self.forward().square().mean().backward()
        self.optimizer.step()
        if advances:
            ng.advance(self.model)
        self.optimizer.zero_grad()

    @property
    def everything(self):
        return self.outputs, dict(self.model.state_dict()), self.optimizer.state_dict()["state"]

    @property
    def taken(self) -> int:
        return sum(
            link.stepped.taken
            for link in self.optimizer.casting._links.values()
            if link.stepped is not None
        )


def both(recipe, story, frozen: bool = False) -> Run:
    """The story told twice, with casts that the step leaves and without; the run with them, if nothing differs."""
    runs = [Run(recipe, casts, frozen) for casts in (True, False)]
    for run in runs:
        story(run)
    assert_same(runs[0].everything, runs[1].everything)
    return runs[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_are_those_without_and_no_weight_is_cast_twice(
    codes, monkeypatch, recipe, micro_batches
):
    made = []
    whole = settings.OperandPlan.quantize

    def counting(self, x, *rest):
        made.append(tuple(x.shape))
        return whole(self, x, *rest)

    run = both(recipe, lambda run: [run.step(micro_batches) for _ in range(3)])
    assert run.taken == 4  # two layers, all steps but the first
    monkeypatch.setattr(settings.OperandPlan, "quantize", counting)
    run.step(micro_batches)
    weights = {(48, 32), (32, 48)}
    assert made and not weights & set(made), (
        "the first forward pass after a step reads no weight to cast it"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_changed_after_the_step_is_cast_anew(codes, recipe):
    def story(run: Run) -> None:
        run.step()
        for advances in (True, False):
            run.step(advances=advances)
            with torch.no_grad():
                run.model[0].weight.mul_(1.5)
            if not advances:
                ng.advance(run.model)
        run.step()

    run = both(recipe, story)
    assert run.taken == 2 + 1 + 1, "the other layer's serve"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_that_is_loaded_between_steps_is_followed(codes, recipe):
    def story(run: Run) -> None:
        run.step()
        state = copy.deepcopy(run.model.state_dict())
        run.step()
        run.model.load_state_dict(state)
        run.step()
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        run.step()
        run.step()

    assert both(recipe, story).taken == 6


def test_a_window_that_moves_otherwise_than_foretold_is_followed(codes):
    """Loaded, not ended, ended twice, made anew: codes by an amax that is not in use are never used."""

    def story(run: Run) -> None:
        for _ in range(2):
            run.step()
        state = {name: x.clone() for name, x in run.model.state_dict().items() if "scaling" in name}
        run.step()
        run.model.load_state_dict(state, strict=False)  # windows alone: the weight's version stays
        run.step(advances=False)
        run.step()
        ng.advance(run.model)
        run.step()
        for window in (run.model[0].amax_history("w"), run.model[2].amax_history("w")):
            window.reset_parameters()
        run.step()
        run.step()

    assert both("fp8-delayed", story).taken == 2 * 7


def test_each_is_recorded_once_per_step(codes):
    """The history of the weight's window is that of its amax after each step."""
    run = Run("fp8-delayed", casts=True)
    largest = []
    for _ in range(4):
        largest.append(run.model[0].weight.detach().abs().max())
        run.step(micro_batches=2)
    history = run.model[0].amax_history("w").history
    assert_same(history[:4], torch.stack(largest[::-1]))
    assert int((history > 0).sum()) == 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_between_steps_leaves_the_numbers_alone(codes, recipe):
    def story(run: Run) -> None:
        for _ in range(3):
            run.step()
            run.model.eval()
            run.forward()
            with torch.no_grad():
                run.forward()
            run.model.train()
            with torch.no_grad():
                run.forward()

    both(recipe, story)


def test_another_recipe_is_followed(codes):
    def story(run: Run) -> None:
        for recipe in (
            "fp8-current",
            "fp8-current",
            "fp8-row",
            "fp8-delayed",
            "bf16",
            None,
            "fp8-delayed",
        ):
            run.step()
            run.model[0].recipe = recipe
        run.step()
        ng.convert(run.model, None)
        run.step()
        ng.convert(run.model, "fp8-delayed")
        ng.advance(run.model)
        run.step()
        run.step()

    run = both("fp8-delayed", story)
    words = run.optimizer.casting
    require(words["0"], "codes", "1 of 2 steps")
    run.model[0].recipe = "bf16"
    run.step()
    assert words["0"].code == "high-precision"


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_memory_and_other_weights_are_followed(codes, recipe):
    def story(run: Run) -> None:
        run.step()
        run.model._apply(lambda x: x.clone())  # as model.to another device and back
        run.step()
        run.step()
        run.model[2].weight.data = run.model[2].weight.data.clone()
        run.step()
        run.step()

    both(recipe, story)


def test_a_frozen_layer_and_one_that_is_not_stepped_stay_as_they_are(codes):
    run = both("fp8-delayed", lambda run: [run.step() for _ in range(3)], frozen=True)
    assert run.optimizer.casting["0"].code == "no-parameter"
    assert run.taken == 2


def test_a_step_that_is_left_out_leaves_nothing_to_take(codes):
    """What a GradScaler does after an overflow: no step, but the next one begins."""

    def story(run: Run) -> None:
        run.step()
        run.forward().square().mean().backward()
        run.optimizer.zero_grad()
        ng.advance(run.model)
        run.step()

    assert both("fp8-delayed", story).taken == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_in_backward_leaves_casts_too(codes, recipe):
    """Each weight is written as soon as its gradient is whole, while the layers before it are still to be passed."""

    def story(run: Run) -> None:
        in_backward(run.optimizer)
        for _ in range(3):
            run.forward().square().mean().backward()
            ng.advance(run.model)

    assert both(recipe, story).taken == 4


def test_checkpointed_layers_take_them_once(codes):
    def story(run: Run) -> None:
        for _ in range(3):
            x = torch.randn(6, 32, generator=run.batches)
            y = checkpoint(run.model, x, use_reentrant=False)
            run.outputs.append(y.detach())
            y.square().mean().backward()
            run.optimizer.step()
            ng.advance(run.model)
            run.optimizer.zero_grad()

    assert both("fp8-delayed", story).taken == 4


def test_copies_take_nothing_of_the_original(codes):
    run, alone = Run("fp8-delayed", casts=True), Run("fp8-delayed", casts=False)
    for each in (run, alone):
        each.step()
        each.step()
    twin, expected = copy.deepcopy(run.model), copy.deepcopy(alone.model)
    run.step()
    x = torch.ones(3, 32)
    assert_same(twin(x).detach(), expected(x).detach())
    optimizer = pickle.loads(pickle.dumps(run.optimizer))
    assert optimizer.casting is None and run.optimizer.casting is not None


def test_tied_weights_are_cast_by_their_layers(codes):
    torch.manual_seed(0)
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    model = ng.convert(nn.Sequential(first, second), "fp8-delayed")
    optimizer = AdamW(model.parameters())
    assert optimizer.cast_weights(model)["0"] == "its weight is also that of 1, which casts it too"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("bf16", coded("high-precision")),
        ("fp8-row", coded("tile", (1, -1))),
        ("fp8-block", coded("tile", (128, 128))),
        ("mxfp8", coded("tile", (1, 32))),
        ("nvfp4", coded("tile", (16, 16))),
        ("int4-hq-bs", coded("straight-through", "int4-hq-bs")),
        ("int4-lsq-luq", coded("straight-through", "int4-lsq-luq")),
    ],
)
def test_other_casts_are_refused_with_a_reason(codes, recipe, expected):
    model = ng.convert(nn.Sequential(nn.Linear(32, 48)), recipe)
    casts = AdamW(model.parameters()).cast_weights(model)
    require(casts["0"], expected.code, *expected.values)
    assert casts.summary() == [f"{casts['0']}: 1 layer"]


@pytest.mark.parametrize(
    "change",
    [
        {"rounding": "stochastic"},
        {"tile": (1, -1)},
        {"headroom": 4 / 3},
        {"format": ng.formats.INT4},
        {"format": ng.formats.NF4},
    ],
    ids=str,
)
def test_casts_that_no_step_can_leave(change):
    assert precast_weight.refuse(replace(Cast(format=E4M3), **change))
    assert (
        precast_weight.refuse(Cast(format=E4M3))
        is precast_weight.refuse(Cast(format=E4M3, calibrate=DelayedScaling()))
        is None
    )


def test_where_no_kernel_does_it_the_optimizer_says_so():
    """On a CPU products read decoded values; and a step that is not Triton's leaves nothing, and is made all the same."""
    model = ng.convert(nn.Sequential(nn.Linear(32, 48)), "fp8-current")
    optimizer = AdamW(model.parameters())
    require(optimizer.cast_weights(model)["0"], "decoded")


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("auto", coded("device")), ("torch", coded("caller", "torch"))],
)
def test_a_step_by_another_kernel_leaves_nothing_and_says_so(codes, backend, expected):
    model = ng.convert(nn.Sequential(nn.Linear(32, 48)), "fp8-delayed")
    optimizer = AdamW(model.parameters(), backend=backend)
    casts = optimizer.cast_weights(model)
    assert ", taken" in casts["0"]
    ng.advance(model)
    for _ in range(2):
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        ng.advance(model)
    require(casts["0"], expected.code, *expected.values)


def test_a_weight_that_is_not_contiguous_is_refused_in_words(codes):
    model = ng.convert(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), "fp8-delayed")
    model[0].weight.data = model[0].weight.data.T.contiguous().T
    casts = AdamW(model.parameters()).cast_weights(model)
    assert casts["0"].code == "not-contiguous" and casts["1"].code == "codes"
    assert str(casts) == f"0: {casts['0']}\n1: {casts['1']}" and len(casts) == 2


def test_graphs_cast_for_themselves(codes):
    run = Run("fp8-delayed", casts=True)
    run.step()
    assert run.optimizer.replayable().refuse().code == "casts-weights"
    step = cuda_graphs.GraphedStep(
        run.model,
        run.optimizer,
        lambda x: run.model(x).square().mean(),
        recorder=object(),
        warmup=1,
    )
    assert run.optimizer.casting is None and [each.code for each in step.graphs.notes] == [
        "graphs.weight-casts"
    ]
    assert "cast_weights" not in run.optimizer.replayable().refuse()
    with raises(ConfigError, "optim.not-captured"):
        run.optimizer.replayable().before_replay()


def test_released_layers_cast_for_themselves(codes):
    def story(run: Run) -> None:
        run.step()
        run.step()
        run.optimizer.cast_weights(None)
        run.step()
        run.step()

    run = both("fp8-delayed", story)
    assert run.model[0].state.precast is None


def test_a_poisoned_weight_poisons_its_step_and_no_more(codes):
    """NaN in the weight: the scale is NaN, the window goes on with what it has."""

    def story(run: Run) -> None:
        run.step()
        run.model[0].weight.grad = torch.full_like(run.model[0].weight, float("nan"))
        run.optimizer.step()
        ng.advance(run.model)
        with torch.no_grad():
            run.forward()

    runs = [Run("fp8-delayed", casts) for casts in (True, False)]
    for run in runs:
        story(run)
    assert_same(runs[0].everything, runs[1].everything, any_nan=True)
    assert runs[0].outputs[-1].isnan().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_write_behind_what_the_step_left_is_reported_and_casts_are_right_from_then_on(
    codes, recipe
):
    """Weights that are clamped through `.data` after each step: within 16 steps one sentence, and no cast is taken afterwards."""
    run, words = Run(recipe, True), []
    for number in range(20):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step()
        words += [(number, each.message) for each in caught]
        run.model[0].weight.data.clamp_(-0.05, 0.05)
    [(number, sentence)] = words
    assert number < 16
    require(sentence, "advance.unseen-writes", "1 layers", "'0'")
    assert run.optimizer.casting["0"].code == "unseen-write"
    fresh = copy.deepcopy(run.model)
    x = torch.randn(6, 32)
    assert_same(run.model(x), fresh(x))
