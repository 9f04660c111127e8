"""Shares of matrix-product operations: counted by hand, the same with and without fake tensors, and the model undisturbed (exact)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.conversion.coverage import coverage
from narrowgauge.diagnose.lineage import unequal_coverage
from narrowgauge.errors import ConfigError
from narrowgauge.ops import rng
from tests.compare import assert_same
from tests.raising import raises, warns, with_code

TOKENS, WIDTH = 6, 32


class Block(nn.Module):
    """Attention without weights of its own between two Linears, dropout, and a norm with statistics."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.reads_values = reads_values
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_values and x.max() > 1e9:
            raise ValueError
        q, k, v = self.qkv(self.norm(x)).view(2, 1, TOKENS // 2, 3 * WIDTH).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(y.reshape(TOKENS, WIDTH)))


class Model(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.attention = Block(**settings)
        self.lm_head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.attention(self.embed(ids)))


IDS = torch.arange(TOKENS)
LINEARS = 2 * TOKENS * WIDTH * (3 * WIDTH + WIDTH)  # operations of qkv and out, forward
HEAD = 2 * TOKENS * WIDTH * 16
ATTENTION = 2 * 2 * (TOKENS // 2) ** 2 * 2 * WIDTH  # two sequences, two products


def shares(found: Any) -> dict[Any, int]:
    """Operations by bits, and by part."""
    wide = {part: share for parts in found.wide.values() for part, share in parts.items()}
    return {
        part: round(share * found.operations) for part, share in {**found.narrow, **wide}.items()
    }


@pytest.mark.parametrize("reads_values", [False, True], ids=["fake tensors", "computed"])
def test_operations_are_those_counted_by_hand(reads_values: bool) -> None:
    model = ng.convert(Model(reads_values=reads_values), "fp8-current")
    # Forward and both gradients; attention has four products backward for two forward.
    expected = {8: 3 * LINEARS, "lm_head": 3 * HEAD, "attention": 3 * ATTENTION}
    assert shares(coverage(model, IDS)) == expected
    assert shares(coverage(model, {"ids": IDS})) == shares(coverage(model, (IDS,))) == expected


def test_gradients_that_nobody_needs_are_no_operations() -> None:
    model = Model()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    model.attention.out.weight.requires_grad_(True)
    ng.convert(model, "fp8-current")
    out, qkv = LINEARS // 4, LINEARS * 3 // 4
    assert shares(coverage(model, IDS)) == {
        8: qkv + 2 * out,
        "lm_head": 3 * HEAD,
        "attention": ATTENTION,
    }


def test_each_product_counts_by_its_own_recipe() -> None:
    """4-bit operands beside 8-bit ones, and a product in 16 bits."""
    recipe = ng.recipes.get("fp8-current").with_gemm(grad_weight=ng.Gemm())
    model = ng.convert(Model(), {"*": recipe, "out": "mxfp4"})
    found = coverage(model, IDS)
    out, qkv = LINEARS // 4, LINEARS * 3 // 4
    assert shares(found)[4] == 3 * out and shares(found)[8] == 2 * qkv
    assert found.wide["bf16"] == {"qkv": qkv / found.operations}
    assert str(found).startswith(
        f"{100 * found.narrow[4]:.0f} % of matrix-product operations in 4 bits, "
    )


@pytest.mark.parametrize("reads_values", [False, True], ids=["fake tensors", "computed"])
def test_a_count_changes_nothing(reads_values: bool) -> None:
    """Buffers, amax histories, caches, fields of layers, generators, and the next steps' numbers."""

    def steps(counts: bool) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Any]]:
        model = ng.convert(Model(reads_values=reads_values), "fp8-delayed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rng.seed_all(1)
        losses = []
        for _ in range(3):
            if counts:
                fields = [dict(vars(layer.state)) for layer in layers(model)]
                coverage(model, IDS)
                assert fields == [dict(vars(layer.state)) for layer in layers(model)]
            loss = model(IDS).square().mean()
            if counts:
                coverage(model, IDS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, dict(model.state_dict()), rng.generators()

    one, other = steps(True), steps(False)
    assert_same(one[:2], other[:2])
    assert_same(one[2]["torch"], other[2]["torch"])
    assert one[2]["python"] == other[2]["python"]


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ng.QLinear)]


def test_the_line_stands_under_the_table() -> None:
    model = ng.convert(Model(), "fp8-current")
    assert ng.describe(model).coverage is None
    table = ng.describe(model, batch=IDS)
    assert table.coverage == coverage(model, IDS)
    assert f"{table.coverage}." in str(table).splitlines()
    assert [row.name for row in table] == ["attention.qkv", "attention.out", "lm_head"]


def test_a_batch_that_does_not_fit_is_an_error_with_the_cause() -> None:
    with raises(ConfigError, "coverage.batch", "Model", "unexpected keyword argument 'tokens'"):
        coverage(Model(), {"tokens": IDS})


def test_experts_are_counted_by_their_tokens_and_named() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(sizes).train()
    expected = 3 * 2 * (2 * TOKENS) * 3 * 32 * 48
    before = model.config._experts_implementation
    assert shares(coverage(model, {"input_ids": IDS[None]}))["experts"] == expected
    assert model.config._experts_implementation == before
    # The same by its own kernel, computed.
    model.forward = Reading(model.forward)
    assert shares(coverage(model, {"input_ids": IDS[None]}))["experts"] == expected


class Reading:
    """A forward that no fake tensor can run."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, input_ids: Tensor) -> Any:
        assert int(input_ids.max()) > 0
        return self.forward(input_ids=input_ids)

    def __deepcopy__(self, memo: Any) -> Reading:
        return Reading(self.forward)


def test_convert_warns_of_a_model_that_it_hardly_reaches() -> None:
    """By elements of weights, and the largest part is named; not where the user chose the layers."""
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.Flatten(), nn.Linear(64, 64))
    expected = f"{100 * 64 * 64 / (64 * 64 + 32 * 64 * 9):.0f} %"
    with warns("convert.small-share", expected, "'0'"):
        ng.convert(copy.deepcopy(model), "fp8-current")
    ng.convert(model, {"2": "fp8-current"})
    ng.convert(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(64, 64)), "fp8-current")


def test_runs_that_differ_in_coverage_are_told() -> None:
    def run(share: float | None) -> dict[str, Any]:
        return {} if share is None else {"coverage": {"sentence": "", "narrow": {"8": share}}}

    assert not unequal_coverage({"bf16": run(0.0), "fp8": run(0.9), "older": run(None)})
    assert not unequal_coverage({"fp8": run(0.9), "int8": run(0.905)})
    [words] = unequal_coverage({"bf16": run(0.0), "fp8": run(0.9), "nvfp4": run(0.72)})
    assert with_code([words], "compare.coverage") and "nvfp4 72" in words and "bf16" not in words


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.13, in Dynamo
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_counted_as_it_was_written(whole: bool) -> None:
    """Compiled code would hide its products, and read the addresses of tensors without elements."""
    plain = ng.convert(
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), "fp8-current"
    )
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x, expected = torch.randn(4, 32), coverage(plain, torch.randn(4, 32))
    compiled: Any = plain
    if whole:
        compiled = torch.compile(plain, backend=backend)
    else:
        plain[0].compile(backend=backend)
    assert coverage(compiled, x) == expected
    assert not graphs
    compiled(x)
    assert graphs  # it compiles as before


def test_a_forward_that_was_put_on_a_model_as_a_function_is_counted_too() -> None:
    """As TRL does: a copy of the model keeps the function, which runs the original's layers."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    ng.convert(model, "fp8-current")
    x = torch.randn(4, 32)
    expected = coverage(model, x)
    plain = type(model).forward.__get__(model)
    model.forward = lambda *arguments: plain(*arguments)
    found = coverage(model, x)
    assert found.share == expected.share == 1.0 and found.operations == expected.operations
