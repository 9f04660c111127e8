"""Products of experts in one parameter against transformers' loop and against a loop of QLinears. exact

The loop over experts is transformers' own ("eager"). With a recipe, each expert's two matrices are QLinears of their own,
called for the experts that have rows: first all of the first product, then all of the second one.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.nn.experts import adopt, stacks
from narrowgauge.nn.grouped_linear import Routing
from tests.compare import assert_same

transformers = pytest.importorskip("transformers", minversion="5")

E, K, WIDE = 6, 32, 48
QUICK = ("fp8-current", "fp8-delayed", "mxfp8", "int4-hq-lss")
# Rows of experts: expert 3 has one, expert 5 none, the others uneven numbers.
PAIRS = [(0, 1)] * 7 + [(1, 2)] * 6 + [(4, 0)] * 5 + [(2, 4)] * 3 + [(3, 1)]


def experts(kind: str = "mixtral", dtype: torch.dtype = torch.float32) -> nn.Module:
    """An experts module of transformers: "mixtral", or "gpt_oss" with transposed weights, biases and a gate of its own."""
    sizes = {"hidden_size": K, "intermediate_size": WIDE, "num_local_experts": E}
    if kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

        config = transformers.MixtralConfig(**sizes)
    elif kind == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

        config = transformers.GptOssConfig(**sizes)
    config._experts_implementation = "eager"
    module = Experts(config)
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module.to(dtype)


def inputs(
    pairs: list[tuple[int, ...]] = PAIRS, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, experts, their weights, gradient of the result)."""
    torch.manual_seed(seed + 1)
    index = torch.tensor(pairs)
    x = torch.randn(len(pairs), K, dtype=dtype, requires_grad=True)
    weights = torch.rand(index.shape, dtype=dtype, requires_grad=True)
    return x, index, weights, torch.randn(len(pairs), K, dtype=dtype)


def passed(module: nn.Module, given: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor | None]:
    """Result and gradients of a pass; zero for a parameter without one. -0.0 becomes 0.0, which sums of zeros lose."""
    x, index, weights, gy = given
    x, weights = (each.detach().clone().requires_grad_() for each in (x, weights))
    y = module(x, index, weights)
    y.backward(gy)
    return [each + 0.0 for each in (y.detach(), x.grad, weights.grad)]


class Loop(nn.Module):
    """The same experts as a list of QLinears."""

    def __init__(self, module: Any, recipe: str) -> None:
        super().__init__()
        self.of, self.names = [module], stacks(module)
        for name in self.names:
            stack = module._parameters[name].detach()
            stack = stack.transpose(1, 2) if module.is_transposed else stack
            layers = nn.ModuleList()
            for index, matrix in enumerate(stack):
                layer = ng.QLinear(matrix.shape[1], matrix.shape[0], module.has_bias, recipe=recipe)
                layer.weight.data = matrix.clone()
                if module.has_bias:
                    layer.bias.data = module._parameters[f"{name}_bias"][index].detach().clone()
                layers.append(layer)
            self.add_module(name, layers)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        routing = Routing.of(index, E)
        rows = routing.gather(x).split(routing.counts)
        for number, name in enumerate(self.names):
            layers = self.get_submodule(name)
            rows = [
                layer(each) if len(each) else None for layer, each in zip(layers, rows, strict=True)
            ]
            if number == 0:
                rows = [None if each is None else self.of[0]._apply_gate(each) for each in rows]
                rows = [each if each is not None else torch.zeros(0, WIDE) for each in rows]
        y = torch.cat([each for each in rows if each is not None])
        return routing.combine(y * routing.weights(weights))

    def gradients(self) -> list[Tensor]:
        module, found = self.of[0], []
        for name in self.names:
            layers = self.get_submodule(name)
            for own in ("weight", "bias")[: 1 + module.has_bias]:
                parameters = [getattr(layer, own) for layer in layers]
                stack = torch.stack(
                    [
                        torch.zeros_like(each) if each.grad is None else each.grad
                        for each in parameters
                    ]
                )
                turned = module.is_transposed and own == "weight"
                found.append(stack.transpose(1, 2) if turned else stack)
        return found


def gradients(module: nn.Module) -> list[Tensor]:
    own = dict(module.named_parameters(recurse=False))
    names = [
        f"{name}{end}" for name in stacks(module) for end in ("", "_bias") if f"{name}{end}" in own
    ]
    return [own[name].grad for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_without_a_recipe_the_bits_are_those_of_the_loop_of_transformers(
    kind: str, dtype: torch.dtype
) -> None:
    given = inputs(
        [(5, 1, 2, 0), (0, 1, 3, 4), (2, 4, 5, 1), (0, 5, 1, 2), (4, 2, 1, 0)] * 5, dtype
    )
    model = experts(kind, dtype)
    grouped = adopt(copy.deepcopy(model))
    assert_same(passed(grouped, given), passed(model, given))
    assert_same([each.grad + 0.0 for each in grouped.parameters()], [each.grad + 0.0 for each in model.parameters()])  # fmt: skip


def converted(model: nn.Module, recipe: str) -> nn.Module:
    """ng.convert of the experts alone, which need a model around them."""
    ng.convert(nn.ModuleDict({"experts": model}), {"experts": recipe})
    return model


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in recipes.names()
    ],
)
def test_with_a_recipe_the_bits_are_those_of_a_loop_of_layers(recipe: str, kind: str) -> None:
    """Three steps of two micro-batches, of which one has other idle experts; the third from a state dict."""
    model = experts(kind)
    loop = Loop(model, recipe)
    grouped = converted(copy.deepcopy(model), recipe)
    steppers = [(grouped, gradients), (loop, Loop.gradients)]
    for step in range(3):
        found = []
        for module, read in steppers:
            torch.manual_seed(step)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            made = []
            for micro, pairs in enumerate((PAIRS, PAIRS[:20])):
                made += passed(module, inputs(pairs, seed=2 * step + micro))
            found.append(made + [each + 0.0 for each in read(module)])
            optimizer.step()
            ng.advance(module)
            optimizer.zero_grad()
        assert_same(*found, at=f"step {step}")
        if step == 1:
            file = io.BytesIO()
            torch.save(grouped.state_dict(), file)
            file.seek(0)
            grouped = converted(experts(kind), recipe)
            grouped.load_state_dict(torch.load(file))
            steppers[0] = grouped, gradients
