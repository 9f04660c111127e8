"""The end of an optimizer step, with `advance` and without it, and casts of weights that were written unseen (exact)."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.nn import step_end
from narrowgauge.nn.linear import QLinear
from tests.compare import assert_same
from tests.selection import quick

RECIPES = ("fp8-current", "fp8-delayed", "int4-hq-lss", "nvfp4")


def built(recipe: str = "fp8-delayed") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    ng.convert(model, recipe)
    return model


def accumulated(model: nn.Module, micro_batches: int = 2) -> list[torch.Tensor]:
    losses = []
    for _ in range(micro_batches):
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def trained(
    recipe: str, line: bool, optimizers: int = 1, steps: int = 4, **options
) -> dict[str, object]:
    """Losses and state; options: of torch's AdamW, of which each layer may have its own."""
    model = built(recipe)
    parts = [model] if optimizers == 1 else [model[0], model[2]]
    owned = [torch.optim.AdamW(part.parameters(), lr=1e-2, **options) for part in parts]
    losses = []
    for _ in range(steps):
        losses += accumulated(model)
        for optimizer in owned:
            optimizer.step()
            optimizer.zero_grad()
        if line:
            ng.advance(model)
    return {"losses": losses, "state": dict(model.state_dict())}


@pytest.mark.parametrize("optimizers", quick([2], [1, 2]))
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loop_without_the_line_is_one_with_it(recipe, fused, optimizers):
    assert_same(
        trained(recipe, False, optimizers, fused=fused),
        trained(recipe, True, optimizers, fused=fused),
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_line_alone_is_what_it_was(recipe, monkeypatch):
    """As before torch's optimizers ended steps: theirs ends nothing, `advance` does."""
    both = trained(recipe, True)
    monkeypatch.setattr(step_end, "follow_layer", lambda layer: None)
    monkeypatch.setattr(step_end, "follow_model", lambda model: None)
    assert_same(trained(recipe, True), both)


def test_the_line_forgets_casts_of_weights_written_by_hand_after_the_step():
    model, x = built("fp8-current"), torch.randn(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulated(model)
    optimizer.step()
    model(x)  # its casts are kept from here on
    model[0].weight.data.mul_(10)
    ng.advance(model)
    found = model(x)
    model[0].empty_cache()
    assert_same(found, model(x))


def test_the_line_ends_a_step_that_began_after_the_optimizers():
    """As where an optimizer steps first, and something that torch does not tell of steps later."""
    model = built("fp8-delayed")
    accumulated(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    history = model[0].amax_history("x").history.clone()
    ng.advance(model)
    assert_same(model[0].amax_history("x").history, history)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    accumulated(model)
    with torch.no_grad():
        model[0].weight.mul_(0.9)
    ng.advance(model)
    assert float(model[0].amax_history("x").live[1]) == 0 and float(
        model[0].amax_history("x").history[1]
    ) == float(history[0])


@pytest.mark.slow
def test_layers_are_made_in_one_thread_while_an_optimizer_steps_in_another():
    model = built("fp8-current")
    optimizer, stop, failed = torch.optim.SGD(model.parameters(), lr=0.0), threading.Event(), []

    def make() -> None:
        kept: list[QLinear] = []
        while not stop.is_set():
            kept = [*kept[-200:], QLinear(1, 1)]

    makers = [threading.Thread(target=make) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in makers:
            each.start()
        for _ in range(300):
            optimizer.step()
    except RuntimeError as error:
        failed.append(error)
    finally:
        stop.set()
        sys.setswitchinterval(before)
        for each in makers:
            each.join()
    assert not failed


def test_fused_optimizers_do_not_train_on_frozen_casts():
    """They leave the version of a weight as it was."""
    model = built("fp8-current")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    accumulated(model)
    optimizer.step()
    x = torch.randn(16, 32)
    model(x)  # its casts are kept from here on
    accumulated(model)
    optimizer.step()
    kept = model(x)
    for layer in (model[0], model[2]):
        layer.empty_cache()
    assert_same(kept, model(x))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "int4-hq-bs"])
def test_without_gradients_no_kept_cast_is_read(recipe):
    """As PEFT merges an adapter: into `weight.data`, whose version stands still."""
    model = built(recipe)
    ng.advance(model)
    x = torch.randn(16, 32)
    accumulated(model)
    with torch.no_grad():
        model(x)
    model[0].weight.data += 0.5
    with torch.no_grad():
        merged = model(x)
    for layer in (model[0], model[2]):
        layer.empty_cache()
    with torch.no_grad():
        assert_same(merged, model(x))


def test_adapters_end_the_steps_of_frozen_layers():
    """LoRA: the optimizer holds no parameter of the converted layers."""
    model = built("fp8-delayed").requires_grad_(False)
    model.append(nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    model(torch.randn(16, 32)).sum().backward()
    assert float(model[0].amax_history("x").live[1]) > 0
    optimizer.step()
    assert (
        float(model[0].amax_history("x").live[1]) == 0
        and float(model[0].amax_history("x").live[0]) > 0
    )


def test_only_models_of_the_optimizer_end_their_step():
    first, second = built(), built()
    for model in (first, second):
        accumulated(model)
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    assert (
        float(first[0].amax_history("x").live[1]) == 0 < float(second[0].amax_history("x").live[1])
    )


def test_models_whose_layers_have_the_same_names_all_end_their_step():
    """Two models, or two parts of one, in one optimizer: what `advance` would do after it is done for each."""
    first, second = built("fp8-delayed"), built("fp8-delayed")
    for model in (first, second):
        accumulated(model)
    torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1).step()
    for model in (first, second):
        assert (
            float(model[0].amax_history("x").live[1])
            == 0
            < float(model[0].amax_history("x").history[0])
        )


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_ends_where_the_optimizer_is_called(fused):
    """torch's fused optimizers take the loss scale themselves, so a GradScaler calls them for a skipped step too."""
    model = built("fp8-delayed")
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    histories, weights = [], []
    for is_finite in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(16, 32)).square().sum()).backward()
        if not is_finite:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        histories.append(model[0].amax_history("x").history.clone())
        weights.append(model[0].weight.detach().clone())
    assert_same(weights[0], weights[1])
    assert torch.equal(histories[0], histories[1]) is not fused
    assert histories[1].isfinite().all()


def test_accumulating_without_a_step_ends_none_and_a_skipped_step_neither():
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.full((4, 32), 1e20)).square().sum()).backward()
    seen = float(model[0].amax_history("x").live[1])
    scaler.step(optimizer)  # its gradients are not finite
    scaler.update()
    assert float(model[0].amax_history("x").live[1]) == seen > 0
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4, 32)).square().sum()).backward()
    scaler.step(optimizer)
    assert float(model[0].amax_history("x").live[1]) == 0


def test_a_step_inside_backward_ends_nothing_and_forgets_casts():
    """An optimizer per parameter: layers further ahead have not seen their gradients yet, and checkpointing repeats forward passes."""
    model = built("fp8-delayed")
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(lambda each: own[each].step())
    ng.advance(model)
    accumulated(model, 1)
    assert float(model[0].amax_history("x").live[1]) > 0 and not model[0].state.step_ended
    assert model[0].state.cache.casts.is_empty
    ng.advance(model)
    assert float(model[0].amax_history("x").live[1]) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_followed_too(copied):
    model = built()
    accumulated(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    twin = copied(model)
    assert not twin[0].state.step_ended
    accumulated(twin)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert float(twin[0].amax_history("x").live[1]) == 0 and twin[0].state.step_ended


def test_layers_that_are_gone_are_not_kept_and_restored_ones_are_left_alone():
    layer = QLinear(32, 32, recipe="fp8-delayed")
    assert layer in step_end._LAYERS
    kept = weakref.ref(layer)
    model = built()
    ng.convert(model, None)
    assert model[0] not in step_end._LAYERS
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    del layer
    gc.collect()
    assert kept() is None


@pytest.mark.slow
def test_importing_registers_nothing():
    program = "import narrowgauge.nn.linear; from narrowgauge.nn import step_end; print(step_end._registered)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8")
    assert done.stdout == "[]\n", done.stderr
