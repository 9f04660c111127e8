"""nn.MultiheadAttention with a recipe: torch's results in every option, QLinears' numbers, and the module that it was."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.conversion.coverage import coverage
from narrowgauge.nn.attention import PROJECTIONS, QMultiheadAttention, adopt
from narrowgauge.nn.linear import QLinear
from tests.compare import assert_same
from tests.small_model import recipe_names

E, HEADS, L, S, B = 32, 4, 5, 7, 3
# float32 sums of at most 32 products, in another order: some of the 2**-24 of each addition.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

OPTIONS = [
    {},
    {"kdim": 16, "vdim": 48},
    {"bias": False, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True},
]


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(E, HEADS, **options)
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn_like(each) / 4)
    return made


def inputs(module: nn.MultiheadAttention, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((L, B, E), (S, B, module.kdim), (S, B, module.vdim))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    if not batched:
        drawn = [each[:, 0] for each in drawn]
    elif module.batch_first:
        drawn = [each.transpose(0, 1).contiguous() for each in drawn]
    return drawn[0], drawn[1], drawn[2]


def masks(batched: bool) -> dict[str, dict[str, Any]]:
    square = torch.ones(L, S, dtype=torch.bool).triu(1)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[:, -2:] = True
    per_head = torch.randn(
        (B if batched else 1) * HEADS, L, S, generator=torch.Generator().manual_seed(2)
    )
    hidden = torch.zeros(B, S).masked_fill(padding, -9.0)
    return {
        "none": {},
        "causal": {"attn_mask": square, "is_causal": True},
        "padding": {"key_padding_mask": padding if batched else padding[0]},
        "both": {
            "attn_mask": per_head,
            "key_padding_mask": (hidden if batched else hidden[0]),
        },
    }


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_its_own_pass_computes_what_torch_computes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layout, mask and option, results, weights and gradients, with projections without a recipe (bounded)."""
    plain, own = attention(**options), attention(**options)
    adopt(own)
    monkeypatch.setattr(QMultiheadAttention, "is_narrow", True)
    for batched, needs, averages in itertools.product((True, False), (True, False), (True, False)):
        for name, mask in masks(batched).items():
            results = []
            for module in (plain, own):
                given = [each.clone().requires_grad_() for each in inputs(module, batched)]
                y, weights = module(
                    *given, need_weights=needs, average_attn_weights=averages, **mask
                )
                leaves = [*given, *module.parameters()]
                grads = torch.autograd.grad(y.square().sum(), leaves)
                results.append([y, *([] if weights is None else [weights]), *grads])
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(other, one, **CLOSE, msg=f"{name}, {batched}, {needs}")


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "int4-hq-bs"])
def test_projections_have_the_numbers_of_a_linear(recipe: str) -> None:
    """A QLinear with the rows of the packed weight, and its gradient in these rows."""
    model = ng.convert(nn.ModuleList([attention()]), recipe)
    module: Any = model[0]
    for index, name in enumerate((*PROJECTIONS, "out_proj")):
        layer = getattr(module, name)
        assert isinstance(layer, QLinear)
        linear = nn.Linear(E, E)
        linear.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
        ng.convert(linear, {"*": recipe})
        results = []
        for each in (layer, linear):
            torch.manual_seed(3)
            x = torch.randn(2, 24, E, generator=torch.Generator().manual_seed(4)).requires_grad_()
            y = each(x)
            y.square().sum().backward()
            results.append((y.detach(), x.grad))
        assert_same(*results)
        if name in PROJECTIONS:
            rows = slice(index * E, (index + 1) * E)
            assert_same(module.in_proj_weight.grad[rows].clone(), linear.weight.grad)


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


def test_an_encoder_trains_with_every_product_and_stays_what_it_was() -> None:
    model, plain = encoder(), encoder()
    x = torch.randn(B, L, E, generator=torch.Generator().manual_seed(1))
    names = list(plain.state_dict())
    parameters = [id(each) for each in model.parameters()]
    ng.convert(model, "fp8-delayed")
    assert set(recipe_names(model).values()) == {"fp8-delayed"}
    assert [name for name in model.state_dict() if ".scaling." not in name] == names
    assert [id(each) for each in model.parameters()] == parameters
    with ng.suspended(model):
        assert_same(model(x), plain(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    history = model.layers[0].self_attn.q_proj.amax_history("x")
    assert float(history.history.abs().max()) > 0, "the optimizer's step ended that of q_proj"
    # A fused kernel in evaluation would skip the recipes.
    with torch.no_grad():
        narrow = model.eval()(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert_same(other(x), narrow)
        assert (
            other.layers[0].self_attn.q_proj.parameter is other.layers[0].self_attn.in_proj_weight
        )
    reference = encoder()
    reference.load_state_dict({name: model.state_dict()[name] for name in names})
    ng.convert_like(model, reference)
    with torch.no_grad():
        assert_same(reference.eval()(x), narrow)
    ng.convert(model, None)
    assert {type(each) for each in model.modules()} == {type(each) for each in plain.modules()}
    assert list(model.state_dict()) == names
    model.load_state_dict(plain.state_dict())
    assert_same(model.train()(x), plain(x))


def test_patterns_name_the_projections_and_coverage_counts_them() -> None:
    model = encoder()
    ng.convert(model, {"*": "fp8-current", "self_attn.out_proj": None, "layers.1.*": None})
    names = recipe_names(model)
    assert names["layers.0.self_attn.q_proj"] == "fp8-current"
    assert type(model.layers[1].self_attn) is nn.MultiheadAttention
    whole = coverage(ng.convert(encoder(), "fp8-current"), torch.randn(B, L, E))
    # Three products each in two layers, but nobody needs the gradient of the first input.
    linears = 6 * (4 * E * E + 2 * E * 64) - 3 * E * E
    assert whole.share == pytest.approx(linears / (linears + 6 * 2 * L * E))
    assert list(whole.wide["fp32"]) == ["attention"]


def test_a_refused_conversion_leaves_torchs_class() -> None:
    model = encoder()
    with pytest.raises(ng.errors.ConfigError):
        ng.convert(model, {"*": "fp8-current", "nowhere": "fp8-current"})
    assert {type(each) for each in model.modules()} == {type(each) for each in encoder().modules()}


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def parametrized(module: nn.MultiheadAttention, name: str) -> None:
    nn.utils.parametrize.register_parametrization(module, name, Halved())


def replaced(module: nn.MultiheadAttention, name: str) -> None:
    """As PEFT's adapters and DataParallel's replicas leave it: an attribute and no parameter."""
    whole = module._parameters.pop(name)
    setattr(module, name, whole / 2)


def halved(module: nn.MultiheadAttention, name: str) -> None:
    getattr(module, name).data /= 2


@pytest.mark.parametrize("change", [parametrized, replaced])
@pytest.mark.parametrize("name", ["in_proj_weight", "k_proj_weight", "in_proj_bias"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_tensors_that_are_no_parameters_are_read(change: Any, name: str, recipe: str) -> None:
    options = {"kdim": 16, "vdim": 48} if name == "k_proj_weight" else {}
    model = ng.convert(nn.ModuleDict({"a": attention(**options)}), recipe)
    module, expected = model["a"], copy.deepcopy(model["a"])
    halved(expected, name)
    change(module, name)
    for each in (module, expected):
        each.train()
    given = inputs(module, batched=True)
    y = module(*given)[0]
    y.sum().backward()
    assert_same(y, expected(*given)[0])
    kept = dict(module.named_parameters())
    assert change is replaced or kept[f"parametrizations.{name}.original"].grad.any()
    assert "fp8" in str(ng.describe(model))  # which asks for shapes outside of a pass
    ng.advance(model)


@pytest.mark.parametrize("needs_weights", [True, False])
def test_an_empty_batch_has_an_empty_result(needs_weights: bool) -> None:
    module = attention(batch_first=True)
    ng.convert(nn.ModuleDict({"a": module}), "fp8-current")
    x, hidden = torch.zeros(0, L, E), torch.zeros(0, L, dtype=torch.bool)
    y, weights = module(x, x, x, key_padding_mask=hidden, need_weights=needs_weights)
    assert y.shape == (0, L, E)
    assert weights is None or weights.shape == (0, L, L)
