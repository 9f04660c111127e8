"""convert_like: two copies of one model compute the same bits (exact), whatever recipe, state and wrapping the first one has."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Recipe
from tests.compare import assert_same
from tests.raising import raises, warns

WORDS, WIDTH = 40, 32
PATTERNS: list[object] = [
    *(each.name for each in recipes.ALL),
    {"*": "fp8-row", "blocks.0.*": "bf16", "blocks.1.up": "fp8-delayed"},
    {"*": "int8", "head": "fp8-current", "blocks.1.down": None},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapted(nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 16, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Outer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.base_model.model(ids)


def two() -> tuple[Model, Model]:
    torch.manual_seed(0)
    policy = Model()
    return policy, copy.deepcopy(policy).eval().requires_grad_(False)


def batch(seed: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(seed))


def trained(policy: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for step in range(steps):
        ids = batch(step)
        F.cross_entropy(policy(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def dpo_loss(policy: nn.Module, reference: nn.Module, beta: float = 0.1) -> float:
    """arXiv 2305.18290, eq. 7, of two batches as chosen and rejected completions, which pass the model together as in TRL."""
    ids = torch.cat((batch(10), batch(11)))

    def log_probability(model: nn.Module) -> Tensor:
        found = model(ids[:, :-1]).float().log_softmax(-1)
        return found.gather(-1, ids[:, 1:, None]).sum((1, 2))

    with torch.no_grad():
        theirs = log_probability(reference)
    chosen, rejected = (log_probability(policy) - theirs).chunk(2)
    return float(-F.logsigmoid(beta * (chosen - rejected)).detach().mean())


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("recipe", PATTERNS, ids=str)
def test_the_first_loss_of_dpo_is_ln_2(recipe: object, steps: int) -> None:
    """Also where the policy was trained before, whose weights the reference then has, and both are in one mode.

    In training mode delayed scaling takes its amax from the steps before, in evaluation mode from the tensor at hand.
    """
    policy, reference = two()
    ng.convert(policy, recipe)
    trained(policy, steps)
    reference.load_state_dict(
        {name: each for name, each in policy.state_dict().items() if name in reference.state_dict()}
    )
    assert ng.convert_like(policy, reference) is reference
    for mode in (True, False):
        policy.train(mode)
        reference.train(mode and steps > 0)
        assert dpo_loss(policy, reference) == pytest.approx(math.log(2), abs=1e-7)
        with torch.no_grad():
            assert_same(reference(batch(7)), policy(batch(7)).detach())


@pytest.mark.parametrize("seed", range(12))
def test_wrapped_models_match_by_name(seed: int) -> None:
    """Random recipes by layer, adapters around some layers, either model wrapped, some layers suspended, embeddings with codes."""
    draw = random.Random(seed)
    policy, reference = two()
    names = [name for name, each in policy.named_modules() if isinstance(each, nn.Linear)]
    patterns = {"*": "fp8-current"} | {
        name: draw.choice([None, *(each.name for each in recipes.ALL)]) for name in names
    }
    ng.convert(policy, patterns, embeddings=draw.choice([None, "int8"]))
    trained(policy, draw.randrange(3))
    reference.load_state_dict(
        {name: each for name, each in policy.state_dict().items() if name in reference.state_dict()}
    )
    if draw.random() < 0.5:
        ng.convert(reference, draw.choice(["int8", "fp8-delayed"]))
    for block in policy.blocks:
        if draw.random() < 0.6:
            block.up = Adapted(block.up)
        for layer in block.modules():
            if isinstance(layer, QLinear) and draw.random() < 0.2:
                layer.is_suspended = True
    one = Outer(policy) if draw.random() < 0.5 else policy
    other = nn.Sequential(reference) if draw.random() < 0.5 else reference
    ng.convert_like(one, other)
    with torch.no_grad():
        assert_same(other.eval()(batch(5)), one.eval()(batch(5)))
    assert [row.recipe for row in ng.describe(policy) if "lora" not in row.name] == [
        row.recipe for row in ng.describe(reference)
    ]


def test_the_state_is_a_copy() -> None:
    policy, reference = two()
    ng.convert_like(ng.convert(policy, "fp8-delayed"), reference)
    before = copy.deepcopy(reference.state_dict())
    trained(policy, 2)
    for name, each in reference.state_dict().items():
        assert_same(each, before[name])
    assert policy.head.recipe if isinstance(policy.head, QLinear) else True


def test_what_cannot_follow_is_refused_before_anything_changes() -> None:
    policy, reference = two()
    with raises(ConfigError, "convert-like.not-converted", "Model"):
        ng.convert_like(policy, reference)
    ng.convert(policy, "fp8-current")
    with raises(ConfigError, "convert-like.same-model"):
        ng.convert_like(policy, policy)
    reference.blocks[0].extra = nn.Linear(32, 32)
    with raises(ConfigError, "convert-like.missing-in-first", "Linear"):
        ng.convert_like(policy, reference)
    del reference.blocks[0].extra
    reference.blocks[1].down = nn.Linear(WIDTH, WIDTH)
    with raises(ConfigError, "convert-like.shape", "[32, 32]", "[32, 64]"):
        ng.convert_like(policy, reference)
    del reference.blocks[1].down
    with raises(ConfigError, "convert-like.missing-in-second", "Linear"):
        ng.convert_like(policy, reference)
    assert not any(isinstance(each, QLinear) for each in reference.modules())


def test_noise_in_forward_is_told() -> None:
    policy, reference = two()
    nearest: Recipe = recipes.get("int8")
    cast = nearest.output.lhs
    assert cast is not None
    from dataclasses import replace

    noisy = nearest.with_gemm(
        output=replace(nearest.output, lhs=replace(cast, rounding="stochastic"))
    )
    ng.convert(policy, noisy)
    with warns("convert-like.noise"):
        ng.convert_like(policy, reference)
