"""Linears under another class: the bits of a Linear in every recipe, and the module that they were (exact)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.conversion.disguises import reason_to_leave
from narrowgauge.conversion.switching import switch
from narrowgauge.errors import ConfigError
from narrowgauge.nn.disguised import adopt
from narrowgauge.ops import rng
from narrowgauge.structure import blocks
from tests.compare import assert_same
from tests.raising import raises
from tests.small_model import recipe_names

transformers = pytest.importorskip("transformers")
Conv1D = transformers.pytorch_utils.Conv1D
IN, OUT = 48, 80


class Scaled(nn.Linear):
    """Another function than a Linear's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Written(nn.Linear):
    """Falcon's way to write it, with a setting and a method of its own."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.factor = 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.factor * x @ self.weight.T
        return y if self.bias is None else y + self.bias

    def size(self) -> int:
        return self.weight.numel()


class Straight(nn.Linear):
    """A Linear's results with another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 2 * y - y.detach()


class Adapted(nn.Linear):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lora = nn.Linear(4, 4)


class Kept(nn.Linear):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * scale


def pair(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Linear]:
    """A Conv1D, and the Linear with its weight transposed."""
    torch.manual_seed(0)
    conv, linear = Conv1D(OUT, IN), nn.Linear(IN, OUT)
    with torch.no_grad():
        conv.bias.normal_()
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return conv.to(dtype), linear.to(dtype)


def steps(layer: nn.Module, recipe: str | None, dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of two steps of two micro-batches, and an evaluation, with the weight [out, in]."""
    model = nn.Sequential(layer)
    if recipe is not None:
        ng.convert(model, {"0": recipe})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng.seed_all(1)
    found = []
    for step in range(2):
        for batch in range(2):
            generator = torch.Generator().manual_seed(10 * step + batch)
            x = torch.randn(2, 40, IN, generator=generator).to(dtype).requires_grad_()
            y = model(x)
            (y.float() * torch.randn(y.shape, generator=generator)).sum().backward()
            found += [y.detach(), x.grad]
        grad = layer.weight.grad
        assert grad.shape == layer.weight.shape
        found += [turned(layer, grad).clone(), layer.bias.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
        ng.advance(model)
    with torch.no_grad():
        found.append(model.eval()(x))
    return [*found, turned(layer, layer.weight.detach()).clone()]


def turned(layer: nn.Module, weight: Tensor) -> Tensor:
    return weight.t().contiguous() if isinstance(layer, Conv1D) else weight


@pytest.mark.parametrize("recipe", [None, *ng.recipes.names()])
def test_a_transposed_layer_has_the_bits_of_a_linear(recipe: str | None) -> None:
    """In every recipe, in forward and the gradients, over steps and micro-batches."""
    conv, linear = pair()
    assert_same(steps(conv, recipe, torch.float32), steps(linear, recipe, torch.float32))
    assert isinstance(conv, Conv1D) and isinstance(conv, ng.QLinear) == (recipe is not None)


@pytest.mark.parametrize("recipe", ["fp8-current", "int4-hq-bs", "mxfp8"])
def test_so_it_has_in_bfloat16(recipe: str) -> None:
    conv, linear = pair(torch.bfloat16)
    assert_same(steps(conv, recipe, torch.bfloat16), steps(linear, recipe, torch.bfloat16))


@pytest.mark.parametrize("bias", [True, False])
def test_a_forward_of_its_own_that_is_a_linears_gets_a_recipe(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Written(IN, OUT, bias=bias), nn.Linear(IN, OUT, bias=bias))
    model[1].load_state_dict(model[0].state_dict())
    before = model[0](torch.ones(3, IN))
    ng.convert(model, "fp8-current")
    assert isinstance(model[0], Written) and model[0].size() == IN * OUT
    x = torch.randn(5, IN)
    assert_same(model[0](x), model[1](x))
    with ng.suspended(model):
        assert_same(model[0](torch.ones(3, IN)), before)
    ng.convert(model, {"0": None})
    assert_same(model[0](torch.ones(3, IN)), before)
    ng.convert(model, None)
    assert type(model[0]) is Written and type(model[1]) is nn.Linear


@pytest.mark.parametrize(
    ("layer", "code", "words"),
    [
        (Scaled(IN, OUT), "own-forward", "Scaled"),
        (Straight(IN, OUT), "own-forward", "Straight"),
        (Kept(IN, OUT), "own-arguments", "TypeError"),
        (Adapted(IN, OUT), "own-parameters", "lora"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_computes_something_else_stays_and_is_named(
    layer: nn.Module, code: str, words: str
) -> None:
    model = nn.Sequential(nn.Linear(IN, 4 * IN), layer)
    ng.convert(model, "fp8-current")
    [row] = [row for row in ng.describe(model) if row.name == "1"]
    assert row.recipe == "none" and [note.code for note in row.notes] == [code]
    assert words in row.note and type(layer).__name__ in row.note


def test_a_setting_of_one_layer_decides_about_that_layer_alone() -> None:
    """Two layers of a class, of which one multiplies by 3."""
    one, other = Written(IN, OUT), Written(IN, OUT)
    other.factor = 3
    assert reason_to_leave(one) is None and reason_to_leave(other) is not None


def test_a_trial_disturbs_nothing_and_needs_no_numbers() -> None:
    """Generators, hooks, meta and fake weights, inference mode, autocast."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def hook(*_: Any) -> None:
        raise AssertionError

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0 * torch.rand(())

    layer = Noisy(IN, OUT, device="meta")
    layer.register_forward_hook(hook)
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert reason_to_leave(layer) is None
    assert_same(torch.get_rng_state(), before)
    with FakeTensorMode():
        fake = Conv1D(OUT, IN)
        assert reason_to_leave(fake) is None
        assert adopt(fake).matrix.shape == (OUT, IN)


class Blocks(nn.Module):
    """Two blocks of transposed layers, as GPT-2's, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, IN)
        self.h = nn.ModuleList(
            nn.ModuleDict({"c_fc": Conv1D(OUT, IN), "c_proj": Conv1D(IN, OUT)}) for _ in range(4)
        )
        self.lm_head = nn.Linear(IN, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = x + block["c_proj"](torch.relu(block["c_fc"](x)))
        y: Tensor = self.lm_head(x)
        return y


IDS = torch.arange(12).reshape(2, 6)


def test_the_model_stays_the_one_that_it_was() -> None:
    model, plain = Blocks(), Blocks()
    names, ids = list(model.state_dict()), [id(each) for each in model.parameters()]
    ng.convert(model, "fp8-delayed")
    assert recipe_names(model)["h.1.c_fc"] == "fp8-delayed"
    assert [name for name in model.state_dict() if ".scaling." not in name] == names
    assert [id(each) for each in model.parameters()][: len(ids)] == ids
    assert_same({name: model.state_dict()[name] for name in names}, dict(plain.state_dict()))
    with ng.suspended(model):
        assert_same(model(IDS), plain(IDS))
    narrow = model.eval()(IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.h[0]["c_fc"]) is type(model.h[0]["c_fc"])
        assert_same(other(IDS), narrow)
    reference = ng.convert_like(model, Blocks())
    assert_same(reference.eval()(IDS), narrow)
    ng.convert(model, None)
    assert {type(block["c_fc"]) for block in model.h} == {Conv1D}
    assert_same(model(IDS), plain(IDS))
    assert str(model) == str(plain)


def test_what_counts_linears_counts_them() -> None:
    """Blocks and policies by block, switches, describe, and the optimizer's precast, which says why not."""
    model = Blocks()
    assert {block.count for block in blocks(model).values()} == {4}
    assert blocks(model)["h.3.c_fc"].index == 3
    ng.convert(model, "nvfp4")
    wide = {name for name, recipe in recipe_names(model).items() if recipe == "bf16"}
    assert wide and wide <= {name for name in blocks(model)}
    changed = switch(model, "fp8-current", "h.0.*")
    assert changed == ["h.0.c_fc", "h.0.c_proj"]
    optimizer = ng.optim.AdamW(model.parameters(), lr=1e-3)
    casts = optimizer.cast_weights(model)
    assert "transposed" in casts["h.0.c_fc"]


def test_frozen_weights_stay_in_16_bits_and_are_named() -> None:
    from narrowgauge.memory import freeze

    model = ng.convert(Blocks(), {"*": "fp8-current", "lm_head": "fp8-current"})
    with raises(ConfigError, "freeze.no-codes", "h.0.c_fc", "transposed"):
        freeze(model, ["h.*"], codes=True)
    freeze(model, ["h.*"])
    assert not model.h[0]["c_fc"].weight.requires_grad
    model(IDS).sum().backward()
    assert model.embed.weight.grad is not None


def test_blame_and_the_guard_see_them() -> None:
    from narrowgauge.lab.blame import blame

    model = ng.convert(Blocks(), "fp8-current")

    found = blame(model, lambda: model(IDS).square().mean().backward())
    assert len(found.findings) == 3 * 8
    assert {"h.0.c_fc", "h.3.c_proj"} <= {finding.layer for finding in found.findings}


@pytest.mark.slow
def test_the_planner_counts_them_as_linears() -> None:
    from narrowgauge.plan import plan

    def with_linears() -> Blocks:
        model = Blocks()
        for block in model.h:
            for name in ("c_fc", "c_proj"):
                block[name] = nn.Linear(block[name].nx, block[name].nf)
        return model

    def bytes_of(make: Any) -> int:
        return plan(
            lambda: ng.convert(make().bfloat16(), "int4-hq-bs"),
            lambda model, ids: model(ids).square().mean(),
            lambda model: torch.optim.AdamW(model.parameters()),
            IDS,
            card="h100",
        ).allocated

    assert bytes_of(Blocks) == bytes_of(with_linears)


def test_float16_weights_and_tensor_statistics_take_them() -> None:
    from narrowgauge.optim.held_gradients import float16_weights
    from narrowgauge.train.tensor_stats import _note

    model = ng.convert(Blocks(), "fp8-current")
    layer, events = model.h[0]["c_fc"], dict[Any, Any]()
    layer.observer = lambda *given: _note(events, "c_fc", layer, True, *given)
    model(IDS).sum().backward()
    # The spread of gy is told apart from its transpose by the number of outputs.
    assert {("c_fc", role) for role in ("x", "w", "gy", "spread of x", "spread of gy")} <= set(
        events
    )
    layer.observer = None
    model.zero_grad()
    assert len(float16_weights(model)) == 8
    model(IDS).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16


def test_shards_along_the_other_axis_are_refused() -> None:
    layer = adopt(Conv1D(OUT, IN))

    class DTensor(Tensor):
        pass

    layer._parameters["weight"] = torch.zeros(IN, OUT).as_subclass(DTensor)
    layer.recipe = "fp8-current"
    with raises(ConfigError, "linear.transposed-shards", str([IN, OUT])):
        layer(torch.zeros(2, IN))


def test_an_adapter_that_would_merge_untransposed_is_told() -> None:
    """PEFT takes the layer for an nn.Linear, by its class. Adapters that were there before are right."""

    class Adapter(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = layer

    model = ng.convert(
        nn.ModuleDict({"square": Conv1D(32, 32), "plain": nn.Linear(32, 32)}), "bf16"
    )
    with pytest.warns(ng.errors.NarrowgaugeWarning) as told:
        Adapter(model["square"])
    assert [each.message.code for each in told] == ["adapter.transposed-base"]
    Adapter(model["plain"])
    before = ng.convert(Adapter(Conv1D(32, 32)), "bf16")
    assert before.base_layer.recipe.name == "bf16"
