"""Messages of sequence parallelism in FP8: gathered codes (exact), two-step sums (bounded), whole models against 16-bit messages."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.distributed import sequence_messages, tensor_parallel
from narrowgauge.errors import ConfigError, Reason
from narrowgauge.nn.plan import OperandPlan
from tests.compare import assert_same
from tests.distributed.llama import TOKENS, WIDTH, Llama, batch, parallelize
from tests.raising import require
from tests.selection import quick

EIGHT_BITS = ["fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "int8"]
BLOCKS = 2


def _model(recipe: str | None, gather: str = "", scatter: str = "", seed: int = 0) -> Llama:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize(Llama(layers=BLOCKS), mesh, True, gather, scatter)
    return model if recipe is None else ng.convert(model, {"layers.*": recipe})


def _step(model: Llama) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits, gradients)."""
    torch.manual_seed(0)
    ids, targets = batch(0)
    logits = model(ids)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    return logits.detach(), {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in gradients.items()
    }


def _sent(model: Llama) -> Counter[str]:
    total: Counter[str] = Counter()
    for module in model.modules():
        if (each := tensor_parallel.messages_of(module)) is not None:
            total += each.bytes_sent
    return total


def _forward_of_both(recipe: str) -> bool:
    return torch.equal(_step(_model(recipe))[0], _step(_model(recipe, gather="fp8"))[0])


@pytest.mark.parametrize("recipe", quick(["fp8-current", "fp8-delayed", "mxfp8"], EIGHT_BITS))
def test_gathered_codes_are_those_that_gathering_first_would_give(ranks, recipe):
    """Exact: the forward pass. Backward reads x.T, which is cast from decoded values."""
    assert ranks(2)(_forward_of_both, recipe) == [True, True]


def _gather(recipe: str, tokens: int) -> tuple[Tensor, Tensor]:
    """(what arrives, what one rank with all tokens would decode)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, tokens, 96, generator=torch.Generator().manual_seed(0))
    layer = ng.convert(nn.Sequential(nn.Linear(96, 64)), recipe)[0]
    found = sequence_messages.gather(
        distribute_tensor(x, mesh, [Shard(1)]), 1, "x", [layer], Counter()
    )
    assert found.placements == (Replicate(),)
    return found.to_local(), x


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", "int8"])
@pytest.mark.parametrize("tokens", [7, 6, 2])
def test_ranks_may_have_unequal_numbers_of_tokens(ranks, recipe, tokens):
    """One may have none. Exact."""
    cast = recipes.get(recipe).output.lhs
    for found, x in ranks(3)(_gather, recipe, tokens):
        assert_same(found, ng.dequantize(ng.quantize(x.flatten(0, 1), cast)).view(x.shape))


def _casts(recipe: str) -> Counter[str]:
    """Role -> how often a layer cast by itself in a step."""
    seen: Counter[str] = Counter()
    own = OperandPlan.quantize

    def counted(self: OperandPlan, x: Tensor, cast: Any, *rest: Any) -> Any:
        seen[self.role] += 1
        return own(self, x, cast, *rest)

    model = _model(recipe, gather="fp8", scatter="fp8")
    OperandPlan.quantize = counted
    try:
        _step(model)
    finally:
        OperandPlan.quantize = own
    return seen


def test_layers_take_what_was_gathered(ranks):
    """Of a block's seven layers o and down alone cast x, the other five alone gy: the rest came with a message."""
    for seen in ranks(2)(_casts, "fp8-current"):
        assert seen["x"] == 2 * BLOCKS and seen["gy"] == 5 * BLOCKS


def _bytes_of_a_step(recipe: str) -> tuple[Counter[str], int]:
    model = _model(recipe, gather="fp8", scatter="fp8")
    _step(model)
    return _sent(model), batch(0)[0].numel() * WIDTH


@pytest.mark.parametrize(
    ("recipe", "most"),
    [("fp8-row", 1.04), ("fp8-current", 1.001), ("mxfp8", 1.04), ("nvfp4", 1.01)],
)
def test_a_number_takes_a_byte(ranks, recipe, most):
    """Each block gathers x twice and gy twice, and scatters y twice and the gradient of x twice."""
    for sent, numbers in ranks(2)(_bytes_of_a_step, recipe):
        assert numbers <= sent["all-gather"] / (4 * BLOCKS) <= most * numbers
        assert sent["all-to-all"] / (4 * BLOCKS) == numbers * 129 / 128


def _sum(tokens: int, poisoned: bool) -> tuple[Tensor, Tensor]:
    """(the two-step sum, that of float64), both of all tokens."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    part = torch.randn(2, tokens, 256, generator=torch.Generator().manual_seed(rank)) * 2.0 ** (
        3 * rank
    )
    if poisoned and rank == 1:
        part[1, 0, 5] = torch.inf
    exact = part.to(torch.float64)
    dist.all_reduce(exact)
    given = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    summed = sequence_messages.reduce_scatter(given, 1, Counter())
    assert summed.placements == (Shard(1),) and summed.shape == given.shape
    return summed.full_tensor(), exact


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("tokens", [6, 7, 1])
def test_a_two_step_sum_is_near_the_exact_one(ranks, world, tokens):
    """E4M3's 3 bits of mantissa: an error of 2**-4 / sqrt(3) of the value at most on average, 28.9 dB; Gaussian numbers have 31."""
    for found, exact in ranks(world)(_sum, tokens, False):
        assert 10 * math.log10(float(exact.square().sum() / (found - exact).square().sum())) >= 30


def test_a_number_that_is_not_finite_stays_visible(ranks):
    for found, exact in ranks(2)(_sum, 4, True):
        assert found[1, 0, 5].isnan() and found[0].isfinite().all() and torch.isinf(exact[1, 0, 5])


def _gradients(recipe: str, scatter: str) -> dict[str, Tensor]:
    return _step(_model(recipe, gather=scatter, scatter=scatter))[1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", quick(["fp8-current", "int4-hq-bs"], recipes.names()))
def test_messages_add_less_than_the_recipe_does(ranks, recipe):
    """To the gradient, which narrow products have moved already; of bf16 and int8, which move it less: than fp8-current does."""
    wide, base = ranks(2)(_gradients, "bf16", "16bit")[0], ranks(2)(_gradients, recipe, "16bit")[0]
    narrow = ranks(2)(_gradients, "fp8-current", "16bit")[0] if recipe in ("bf16", "int8") else base
    found = ranks(2)(_gradients, recipe, "fp8")
    added = sum(float((found[0][name] - base[name]).square().sum()) for name in wide)
    recipes_own = sum(float((narrow[name] - wide[name]).square().sum()) for name in wide)
    assert added < recipes_own, (recipe, math.sqrt(added / recipes_own))
    assert all(torch.equal(found[0][name], found[1][name]) for name in wide)


def _checkpointed(recipe: str) -> bool:
    plain, repeated = _model(recipe, "fp8", "fp8"), _model(recipe, "fp8", "fp8")
    ng.memory.checkpoint(repeated, "full")
    ours, others = _step(plain)[1], _step(repeated)[1]
    return all(torch.equal(ours[name], others[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-row"])
def test_activation_checkpointing_changes_nothing(ranks, recipe):
    assert all(ranks(2)(_checkpointed, recipe))


def _compiled(model: Llama, fullgraph: bool) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(model.layers[0], backend="eager", fullgraph=fullgraph)(
        torch.randn(1, TOKENS, WIDTH)
    )


def _refusals() -> list[str]:
    words = []
    model = _model("fp8-row", gather="fp8", scatter="fp8")
    for refused in (
        lambda: tensor_parallel.install(_model("fp8-row"), "fp8"),
        lambda: tensor_parallel.install(model, "fp4"),
        *(partial(_compiled, model, fullgraph) for fullgraph in (True, False)),
    ):
        with pytest.raises(Exception) as raised:
            refused()
        said = f"{type(raised.value).__name__}: {raised.value}"
        words.append(Reason(getattr(raised.value, "code", ""), said))
    return words


@pytest.mark.slow
def test_what_cannot_be_done_is_said(ranks):
    for none, format, *compiled in ranks(2)(_refusals):
        require(none, "tensor-parallel.no-module", ConfigError.__name__)
        assert "it must be one of fp8, 16bit" in format
        assert len(compiled) == 2 and all("ConfigError" in each for each in compiled)
        assert all("tensor parallelism: " in each for each in compiled)


def _switched() -> list[bool]:
    """Whether installed as 16 bits the gradients are those of torch's styles, and nothing is counted."""
    model = _model("fp8-row", "fp8", "fp8")
    tensor_parallel.install(model, "16bit")
    ours, stock = _step(model)[1], _step(_model("fp8-row"))[1]
    return [*(torch.equal(ours[name], stock[name]) for name in stock), not _sent(model)]


def test_sixteen_bits_are_torchs_own(ranks):
    assert all(all(each) for each in ranks(2)(_switched))


def test_words_say_how_an_input_travels():
    for recipe, begins, ends in (
        ("mxfp8", "e4m3 1x32", "e8m0-ceil"),
        ("nvfp4", "e4m3 1x128", "its input"),
    ):
        layer = ng.convert(nn.Sequential(nn.Linear(64, 64)), {"0": ng.recipes.get(recipe)})[0]
        words = sequence_messages.describe_traffic(layer, "x")
        assert words.startswith(begins) and words.endswith(ends), words
