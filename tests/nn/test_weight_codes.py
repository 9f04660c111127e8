"""Codes of weights that are kept for a step, or made again in backward: the same bits (exact), and what is kept (exact)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.nn.keep_policy import resolved
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Gemm, Recipe
from tests.compare import assert_same
from tests.raising import raises
from tests.selection import quick


def trained(
    recipe: str | Recipe, weight_codes: str, again: bool = False
) -> tuple[list[Tensor], nn.Module]:
    """Outputs and gradients of three steps of two micro-batches, then all state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    model = ng.convert(model, recipe)
    for layer in model.modules():
        if isinstance(layer, QLinear):
            layer.weight_codes = weight_codes
    ng.advance(model)
    found = []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(48, 64, requires_grad=True)
            y = checkpoint(model, x, use_reentrant=False) if again else model(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        with torch.no_grad():
            for parameter in model.parameters():
                found.append(parameter.grad.clone())
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        ng.advance(model)
    return [*found, *model.state_dict().values()], model


@pytest.mark.parametrize("again", quick([True], [False, True]), ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "recipe",
    quick(
        ["fp8-delayed", "fp8-current", "fp8-block", "int4-hq-lss", "int4-lsq-luq", "nvfp4"],
        recipes.names(),
    ),
)
def test_casting_again_changes_no_bit(recipe, again):
    kept, _ = trained(recipe, "step", again)
    recast, _ = trained(recipe, "recast", again)
    assert_same(recast, kept)


def drawing(rounding: str = "stochastic") -> Recipe:
    """Weights rounded by chance: no recipe of ours has them."""
    cast = recipes.FP8_ROW.output.lhs
    drawn = Gemm(lhs=cast, rhs=replace(cast, rounding=rounding))
    return replace(recipes.FP8_ROW, name="drawing", output=drawn, grad_input=drawn)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_the_key_of_the_noise_is_kept_instead_of_codes(again):
    kept, _ = trained(drawing(), "step", again)
    recast, model = trained(drawing(), "recast", again)
    assert_same(recast, kept)
    model(torch.randn(8, 64, requires_grad=True))
    (casts,) = model[0].cached_casts()
    assert casts.is_empty and not list(casts.tensors()) and list(casts.noise_keys) == ["rows"]
    assert not all(map(torch.equal, recast, trained(drawing("nearest"), "recast", again)[0]))


def saved_of(y: Tensor) -> list[UntypedStorage]:
    """What the graph of y keeps, without hooks, each memory once."""
    found, seen, nodes = {}, set(), [y.grad_fn]
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        named = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for each in (*named, *getattr(node, "saved_tensors", ())):
            if isinstance(each, Tensor):
                found[each.untyped_storage().data_ptr()] = each.untyped_storage()
        nodes += [each for each, _ in node.next_functions]
    return list(found.values())


class Attention(nn.Module):
    """One head, whose output is read as it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each[None, None] for each in self.qkv(x).chunk(3, dim=-1))
        return self.o(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).view(len(x), 64)
        )


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_nothing_is_kept_beside_the_output_of_attention(recipe):
    """The same bits; and one copy less, 4 bytes per element on a CPU, and a scale, of the recipes that keep codes."""
    found, kept = [], []
    for weight_codes in ("step", "recast"):
        torch.manual_seed(0)
        model = ng.convert(Attention(), recipe, weight_codes=weight_codes)
        ng.advance(model)
        x = torch.randn(48, 64, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(each.grad for each in model.parameters())])
        y = model(x)
        kept.append(sum(each.nbytes() for each in saved_of(y)))
    assert_same(*found)
    assert kept[0] - kept[1] == 48 * 64 * 4 + 4


def test_nothing_is_kept_between_forward_and_backward():
    for weight_codes, keeps in (("step", True), ("recast", False)):
        _, model = trained("fp8-current", weight_codes)
        model(torch.randn(8, 64, requires_grad=True))
        layers = [module for module in model.modules() if isinstance(module, QLinear)]
        assert [
            any(any(True for _ in each.tensors()) for each in layer.cached_casts())
            for layer in layers
        ] == [keeps] * 2


def test_a_cpu_keeps_them_and_a_gpu_does_not(device_is):
    """An emulated cast takes longer than a product, and memory is not what a CPU lacks."""
    layer = ng.convert(nn.Linear(64, 64), "fp8-current")
    assert not layer.recasts
    device_is(Device("cuda", (9, 0)), of="cpu")
    assert layer.recasts


def test_auto_caches_on_a_cpu_and_in_compiled_code():
    assert [resolved("auto", kind) for kind in ("cpu", "cuda")] == ["step", "recast"]
    assert resolved("auto", "cuda", compiled=True) == "step"
    assert resolved("step", "cuda") == "step" and resolved("recast", "cpu") == "recast"


def test_convert_takes_it_and_leaves_layers_that_are_not_named():
    model = ng.convert(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8-current", weight_codes="recast"
    )
    ng.convert(model, {"1": "fp8-row"}, weight_codes="step")
    assert [layer.weight_codes for layer in model] == ["recast", "step"]
    with raises(
        ConfigError, "convert.weight-codes", "weight_codes = 'both'", "'auto', 'recast', 'step'"
    ):
        ng.convert(model, "fp8-row", weight_codes="both")


def test_codes_that_are_kept_are_counted():
    """2 bytes per weight with two orientations, 4 where a CPU keeps decoded values."""
    found = []
    for weight_codes in ("recast", "step"):
        model = ng.convert(
            nn.Sequential(nn.Linear(256, 256, bias=False)), "fp8-row", weight_codes=weight_codes
        )
        ng.advance(model)
        found.append(ng.memory.saved_bytes(model, torch.randn(8, 256)).total)
    assert found[1] - found[0] >= 256 * 256
