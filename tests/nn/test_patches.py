"""Convolutions without overlap as Linears: a Linear's bits in every recipe, and the module that they were (exact)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.conversion.coverage import coverage
from narrowgauge.conversion.disguises import reason_to_leave_convolution
from narrowgauge.errors import ConfigError
from narrowgauge.nn.patches import PatchConvolution
from narrowgauge.ops import rng
from narrowgauge.ops.patches import as_linear, patches_of
from tests.compare import assert_same
from tests.raising import raises


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Renamed(nn.Conv2d):
    """The same function, with a method of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)

    def size(self) -> int:
        return self.weight.numel()


class Normalized(nn.Conv2d):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gain = nn.Parameter(torch.ones(()))


PATCHES = {
    "pictures": (nn.Conv2d(3, 32, 4, 4), (2, 3, 16, 12)),
    "ragged": (nn.Conv2d(3, 32, (4, 2), (4, 2), bias=False), (2, 3, 15, 13)),
    "series": (nn.Conv1d(8, 16, 3, 3), (2, 8, 20)),
    "films": (nn.Conv3d(2, 16, (2, 4, 4), (2, 4, 4)), (1, 2, 5, 8, 8)),
    "pixels": (nn.Conv2d(16, 32, 1), (2, 16, 5, 7)),
    "some pixels": (nn.Conv2d(16, 32, 1, stride=(2, 3)), (2, 16, 5, 7)),
    "valid": (nn.Conv2d(3, 16, 4, 4, padding="valid"), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", PATCHES)
def test_sums_that_are_exact_are_equal(name):
    """Small integers, whose sums are exact in every order: the same function as torch's."""
    layer, size = PATCHES[name]
    assert reason_to_leave_convolution(layer) is None
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.randint(-4, 5, each.shape))
    x = torch.randint(-4, 5, size).float()
    assert_same(as_linear(x, layer.weight, layer.bias, layer.stride), layer(x))
    unbatched = ng.convert(nn.Sequential(layer), {"0": "bf16"})
    assert_same(unbatched(x[0]), unbatched(x)[0])


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        (nn.Conv1d(8, 16, 10, stride=5), "convolution"),  # wav2vec 2's
        (nn.Conv1d(8, 16, 3, padding=1), "convolution"),  # Whisper's
        (nn.Conv2d(3, 16, 4, 4, padding=2), "convolution"),
        (nn.Conv2d(3, 16, 1, padding="same"), "convolution"),
        (nn.Conv2d(4, 16, 2, 2, groups=2), "convolution"),
        (nn.Conv2d(4, 16, 2, 2, dilation=2), "convolution"),
        (nn.ConvTranspose2d(4, 16, 2, 2), "convolution"),
        (Doubled(3, 16, 4, 4), "own-forward"),
        (Normalized(3, 16, 4, 4), "own-parameters"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 16, 4, 4)), "own-parameters"),
    ],
    ids=lambda each: each if isinstance(each, str) else str(each)[:40],
)
def test_what_computes_something_else_stays(layer, code):
    found = reason_to_leave_convolution(layer)
    assert found is not None and found.code == code and type(layer).__name__ in found


def steps(layer: nn.Module, recipe: str) -> list[Tensor]:
    """Results and gradients of two steps of two micro-batches, the weight as [out, K]."""
    model = nn.Sequential(layer)
    ng.convert(model, {"0": recipe})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng.seed_all(1)
    found = []
    for step in range(2):
        for batch in range(2):
            generator = torch.Generator().manual_seed(10 * step + batch)
            x = torch.randn(4, 3, 16, 16, generator=generator)
            is_linear = type(layer) is ng.QLinear
            y = model(patches_of(x, (4, 4), (4, 4)) if is_linear else x)
            y = y if is_linear else y.movedim(1, -1)
            (y * torch.randn(y.shape, generator=generator)).sum().backward()
            found.append(y.detach())
        found += [layer.weight.grad.flatten(1).clone(), layer.bias.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
        ng.advance(model)
    with torch.no_grad():
        model.eval()
        found.append(layer.weight.detach().flatten(1).clone())
    return found


@pytest.mark.parametrize("recipe", ng.recipes.names())
def test_it_has_the_bits_of_a_linear_over_patches(recipe):
    torch.manual_seed(0)
    convolution, linear = nn.Conv2d(3, 32, 4, 4), nn.Linear(48, 32)
    with torch.no_grad():
        linear.weight.copy_(convolution.weight.flatten(1))
        linear.bias.copy_(convolution.bias)
    assert_same(steps(convolution, recipe), steps(linear, recipe))
    assert isinstance(convolution, nn.Conv2d) and isinstance(convolution, PatchConvolution)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Renamed(3, 32, 4, 4), nn.Flatten(2), nn.Linear(16, 32))


X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_the_model_stays_the_one_that_it_was():
    made, plain = model(), model()
    names = list(made.state_dict())
    ng.convert(made, "fp8-current")
    assert (
        list(made.state_dict()) == names and [name for name, _ in made.named_parameters()] == names
    )
    assert isinstance(made[0], Renamed) and made[0].size() == 32 * 48
    narrow = made(X)
    assert not torch.equal(narrow, plain(X))
    with ng.suspended(made):
        assert_same(made(X), plain(X))
    assert_same(copy.deepcopy(made)(X), narrow)
    assert_same(pickle.loads(pickle.dumps(made))(X), narrow)
    made.load_state_dict(plain.state_dict())
    assert_same(made(X), narrow)
    ng.convert(made, None)
    assert type(made[0]) is Renamed and not made[0]._modules
    assert_same(made(X), plain(X))


def test_patterns_find_it_by_the_convolutions_name():
    for pattern in ("0", "0.linear", "*.linear"):
        made = ng.convert(model(), {"*": "bf16", pattern: "fp8-row"})
        assert made[0].product.recipe.name == "fp8-row" and made[2].recipe.name == "bf16"
    made = ng.convert(model(), {"*": "fp8-row", "0": None})
    assert type(made[0]) is Renamed
    with raises(ConfigError, "pattern.no-match", "1"):
        ng.convert(model(), {"1": "fp8-row"})


def test_it_is_described_and_counted():
    made = ng.convert(model(), "fp8-current")
    described = ng.describe(made, batch=X)
    row = described[0]
    assert (row.name, row.shape, row.recipe) == ("0.linear", "48 -> 32", "fp8-current")
    assert described.coverage.share == 1
    before = coverage(ng.convert(model(), {"2": "fp8-current"}), X)
    assert before.operations == described.coverage.operations and before.share < 1


def test_state_of_a_recipe_is_saved_and_follows():
    made = ng.convert(model(), "fp8-delayed")
    made(X).sum().backward()
    ng.advance(made)
    state = made.state_dict()
    assert "0.linear.scaling.x.history" in state
    again = ng.convert(model(), "fp8-delayed")
    again.load_state_dict(state)
    assert_same(again(X), made(X))
    reference = ng.convert_like(made, model())
    assert reference[0].product.recipe.name == "fp8-delayed"
    partly = ng.convert(model(), {"2": "fp8-row"})
    assert type(ng.convert_like(partly, model())[0]) is Renamed


def test_a_change_of_type_and_new_parameters_are_read():
    made = ng.convert(model(), "bf16").to(torch.float64)
    assert made[0].product.weight.dtype == torch.float64
    made[0].weight = nn.Parameter(torch.zeros_like(made[0].weight))
    assert (made[0](X.double()) - made[0].bias[:, None, None]).abs().max() == 0


def test_a_parametrization_that_comes_later_is_refused():
    """It keeps the weight out of `_parameters`. In 16 bits it is torch's convolution, and undone it is narrow again."""
    made = ng.convert(model(), "fp8-current")
    before = made[0](X)
    nn.utils.parametrize.register_parametrization(made[0], "weight", Half())
    for call in (lambda: made[0](X), lambda: ng.convert(made, "fp8-row")):
        with raises(ConfigError, "patches.reparametrized"):
            call()
    nn.utils.parametrize.remove_parametrizations(made[0], "weight")
    with torch.no_grad():
        made[0].weight.mul_(2)
    assert_same(made[0](X), before)


@pytest.mark.parametrize("setting", [("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (2, 2))])
def test_settings_that_are_changed_later_are_refused(setting):
    made = ng.convert(model(), "fp8-current")
    setattr(made[0], *setting)
    with raises(ConfigError, "patches.changed"):
        made[0](X)
    with ng.suspended(made):
        made[0](X)


def test_its_result_can_be_viewed():
    """Contiguous, as torch's own is."""
    made = ng.convert(model(), "fp8-current")
    assert made[0](X).view(len(X), -1).shape == (len(X), made[0](X)[0].numel())


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("size", [(0, 3, 16, 16), (2, 3, 3, 16)])
def test_no_patch_at_all(size):
    """An empty batch, and pictures smaller than a patch: as torch answers."""
    made, plain = ng.convert(model(), "fp8-current"), model()
    x = torch.randn(size)
    if size[0]:
        for each in (plain, made):
            with pytest.raises(RuntimeError, match="Kernel size"):
                each[0](x)
    else:
        assert made[0](x).shape == plain[0](x).shape


def test_our_optimizer_leaves_its_casts_to_the_layer():
    made = ng.convert(model(), "fp8-current")
    optimizer = ng.optim.AdamW(made.parameters(), lr=1e-3)
    before = made[0].weight.detach().clone()
    made(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(made[0].weight, before)
    # The cast of the old weight is not read again.
    fresh = model()
    fresh.load_state_dict(made.state_dict())
    assert_same(made(X), ng.convert(fresh, "fp8-current")(X))
