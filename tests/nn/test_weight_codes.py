"""Codes of weights that are kept for a step, or made again in backward: the same bits (exact), and what is kept (exact)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import Device
from tests.compare import assert_same


def trained(recipe: str, weight_codes: str, again: bool = False) -> tuple[list[Tensor], nn.Module]:
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


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("recipe", recipes.names())
def test_casting_again_changes_no_bit(recipe, again):
    kept, _ = trained(recipe, "step", again)
    recast, _ = trained(recipe, "recast", again)
    assert_same(recast, kept)


def test_nothing_is_kept_between_forward_and_backward():
    for weight_codes, keeps in (("step", True), ("recast", False)):
        _, model = trained("fp8-current", weight_codes)
        model(torch.randn(8, 64, requires_grad=True))
        layers = [module for module in model.modules() if isinstance(module, QLinear)]
        assert [any(any(True for _ in each.tensors()) for each in layer.kept_casts()) for layer in layers] == [
            keeps
        ] * 2


def test_a_cpu_keeps_them_and_a_gpu_does_not(device_is):
    """An emulated cast takes longer than a product, and memory is not what a CPU lacks."""
    layer = ng.convert(nn.Linear(64, 64), "fp8-current")
    assert not layer.recasts
    device_is(Device("cuda", (9, 0)), of="cpu")
    assert layer.recasts


def test_convert_takes_it_and_leaves_layers_that_are_not_named():
    model = ng.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8-current", weight_codes="recast")
    ng.convert(model, {"1": "fp8-row"}, weight_codes="step")
    assert [layer.weight_codes for layer in model] == ["recast", "step"]
    with pytest.raises(ConfigError, match="weight_codes = 'both'; it is one of 'auto', 'recast', 'step'"):
        ng.convert(model, "fp8-row", weight_codes="both")


def test_codes_that_are_kept_are_counted():
    """2 bytes per weight with two orientations, 4 where a CPU keeps decoded values."""
    found = []
    for weight_codes in ("recast", "step"):
        model = ng.convert(nn.Sequential(nn.Linear(256, 256, bias=False)), "fp8-row", weight_codes=weight_codes)
        ng.advance(model)
        found.append(ng.memory.saved_bytes(model, torch.randn(8, 256)).total)
    assert found[1] - found[0] >= 256 * 256
