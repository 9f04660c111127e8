"""Products of experts in one parameter against transformers' loop and against a loop of QLinears. exact

The loop over experts is transformers' own ("eager"). With a recipe, each expert's two matrices are QLinears of their own,
called for the experts that have rows: first all of the first product, then all of the second one.
"""

from __future__ import annotations

import copy
import io
import sys
from concurrent.futures import ThreadPoolExecutor
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

# Rows of the gate fill whole steps of torch's vectorized sigmoid on AVX-512, two registers of 16: its last elements take another
# exponential, and which are last depends on how many rows are together.
E, K, WIDE = 6, 32, 64
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
        rows = routing.gather(x).split(routing.counts.on_host)
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


def test_rows_of_experts_of_another_rank_are_zero() -> None:
    """Index E is transformers' mark for them; their weights are zero there."""
    model = experts()
    x, index, weights, gy = inputs()
    elsewhere = torch.where(index == 1, E, index)
    kept = torch.where(index == 1, 0.0, weights.detach())
    grouped = converted(copy.deepcopy(model), "bf16")
    found = passed(grouped, (x, elsewhere, kept, gy))
    assert_same(found[:2], passed(grouped, (x, index, kept, gy))[:2])
    assert not found[2][
        index == 1
    ].any()  # no gradient of the router comes from another rank's expert
    adopted = adopt(copy.deepcopy(model))
    given = x, elsewhere, kept, gy
    assert_same(passed(adopted, given), passed(model, given))


@pytest.mark.parametrize("count", [0, 1])
def test_a_batch_of_one_token_or_none(count: int) -> None:
    grouped = converted(experts(), "fp8-current")
    x, index, weights, gy = (each[:count] for each in inputs())
    y, gx, gw = (
        passed(grouped, (x, index, weights, gy)) if count else (grouped(x, index, weights),) * 3
    )
    assert y.shape == (count, K) and y.isfinite().all()
    assert not count or (gx.any() and gw.all())


def test_one_product_without_a_recipe_keeps_the_dtype_of_the_weights() -> None:
    """The first product in a recipe, the second one as the model has it."""
    model = experts("gpt_oss", torch.bfloat16)
    ng.convert(nn.ModuleDict({"experts": model}), {"experts.gate_up_proj": "bf16"})
    y, gx, _ = passed(model, inputs(dtype=torch.bfloat16))
    assert y.dtype == gx.dtype == torch.bfloat16
    assert {each.recipe is None for each in model.slices("down_proj")} == {True}


def test_writes_to_the_parameter_are_seen_by_its_slices() -> None:
    """Through `.data` too: casts of a step are reused while the bytes of a slice are the same."""
    grouped, given = converted(experts(), "fp8-current"), inputs()
    ng.advance(grouped)
    first = passed(grouped, given)[0]
    assert_same(passed(grouped, given)[0], first)
    grouped.down_proj.data[4] *= 2
    changed = passed(grouped, given)[0]
    other = (given[1] == 4).any(dim=1)
    assert (changed != first).any(dim=1)[other].all()
    assert_same(changed[~other], first[~other])


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def parametrized(module: Any, name: str) -> None:
    """As PEFT's adapters of a parameter (`target_parameters`) do during a pass."""
    nn.utils.parametrize.register_parametrization(module, name, Halved())


def replaced(module: Any, name: str) -> None:
    """As pruning and DataParallel's replicas leave it: an attribute and no parameter."""
    setattr(module, name, module._parameters.pop(name) / 2)


@pytest.mark.parametrize("change", [parametrized, replaced])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_stacks_that_are_no_parameters_are_read(change: Any, kind: str, recipe: str) -> None:
    """So are biases; outside of a pass, the rows of `describe` need shapes alone."""
    grouped, given = converted(experts(kind), recipe), inputs()
    expected = copy.deepcopy(grouped)
    for name in list(grouped._parameters):
        expected._parameters[name].data /= 2
        change(grouped, name)
    x, index, weights, gy = given
    y = grouped(x, index, weights)
    y.backward(gy)
    assert_same(y, expected(x, index, weights))
    if change is parametrized:
        assert all(each.grad.any() for each in grouped.parameters())
    assert "fp8" in str(ng.describe(nn.ModuleDict({"experts": grouped})))
    ng.advance(grouped)


def test_threads_share_experts() -> None:
    """Each thread has matrices of its own pass, whatever the others call in between."""
    grouped = converted(experts(), "fp8-current").eval()
    given = [inputs(seed=seed)[:3] for seed in range(3)]
    with torch.no_grad():
        expected = [grouped(*each) for each in given]

    def passes(number: int) -> list[Tensor]:
        with torch.no_grad():
            return [grouped(*given[number]) for _ in range(10)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(passes, range(3)))
    finally:
        sys.setswitchinterval(before)
    for each, own in zip(found, expected, strict=True):
        for y in each:
            assert_same(y, own)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # Dynamo, at the break of its graph
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_compiled_code_leaves_the_experts_to_eager_code(recipe: str) -> None:
    class Model(nn.Module):
        def __init__(self, own: nn.Module) -> None:
            super().__init__()
            self.experts = own

        def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return self.experts(x * 2.0, index, weights) + 1.0

    model = ng.convert(Model(experts()), recipe)
    expected = passed(copy.deepcopy(model), inputs())
    assert_same(passed(torch.compile(model, backend="aot_eager"), inputs()), expected)
