"""Where a non-finite number appeared first (exact, in words)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from narrowgauge import convert
from narrowgauge.diagnose.nonfinite import NOTHING, first_nonfinite


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, ids):
        return self.down(torch.relu(self.up(self.norm(self.embed(ids)))))


@pytest.fixture(params=["fp8-delayed", "fp8-current", "mxfp8", "bf16"])
def net(request):
    return convert(Net(), request.param)


def blamed(net, loss=lambda y: y.square().mean()):
    ids = torch.arange(16).reshape(2, 8)
    return first_nonfinite(net, lambda: loss(net(ids)).backward())


def spoil(bad):
    """A hook that puts `bad` into one element of what passes by."""

    def spoiled(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = bad
        return tensor

    return spoiled


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_operand_of_a_product(net, bad):
    net.up.register_forward_pre_hook(lambda module, inputs: (spoil(bad)(inputs[0]),))
    assert blamed(net) == "module 'up', product output: the input x was not finite"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_output_of_an_ordinary_module(net, bad):
    net.norm.register_forward_hook(lambda module, inputs, output: spoil(bad)(output))
    assert blamed(net) == "module 'norm' (LayerNorm), the output was not finite"


def test_output_of_a_linear(net):
    net.up.register_forward_hook(lambda module, inputs, output: spoil(math.inf)(output))
    assert blamed(net) == "module 'up' (QLinear), product output: the result was not finite"


def test_gradient_that_enters_a_linear(net):
    net.down.register_forward_hook(
        lambda module, inputs, output: output.register_hook(spoil(math.nan)) and None
    )
    assert (
        blamed(net)
        == "module 'down', product grad_input: the gradient gy of its output was not finite"
    )


def test_gradient_that_leaves_an_ordinary_module(net):
    """NaN in backward alone: the forward pass is finite."""

    class Sqrt(nn.Module):
        def forward(self, x):
            return (x - x).clamp(
                min=0
            ).sqrt() + x  # d sqrt / dx is infinite at 0, and inf * 0 is NaN

    net.norm = nn.Sequential(net.norm, Sqrt())
    assert blamed(net) == "module 'norm.1' (Sqrt), the gradient of the input was not finite"


def test_gradient_of_a_weight_alone(net):
    net.up.weight.register_hook(spoil(math.inf))
    assert blamed(net) == "module 'up' (QLinear), product grad_weight: the result was not finite"


def test_gradient_of_another_parameter(net):
    net.embed.weight.register_hook(spoil(math.nan))
    assert blamed(net) == "module 'embed' (Embedding), the gradient of its weight was not finite"


def test_a_parameter_that_was_bad_before(net):
    with torch.no_grad():
        net.down.bias[0] = math.nan
    assert blamed(net) == "the parameter 'down.bias' itself was not finite before the step"


def test_the_loss_itself(net):
    words = blamed(net, lambda y: y.square().mean() * 0 + torch.tensor(math.nan))
    assert words == NOTHING


def test_finite_micro_batches_before_the_bad_one_are_passed_over(net):
    ids = torch.arange(16).reshape(2, 8)
    calls = []

    def watch(module, inputs, output):
        calls.append(1)
        return spoil(math.nan)(output) if len(calls) == 2 else output

    net.norm.register_forward_hook(watch)
    found = first_nonfinite(net, lambda: [net(ids).sum().backward() for _ in range(2)])
    assert found == "module 'norm' (LayerNorm), the output was not finite" and len(calls) == 2


def test_frozen_and_unused_parameters_do_no_harm(net):
    net.norm.requires_grad_(False)
    net.unused = nn.Linear(4, 4)
    assert blamed(net) == NOTHING


def test_nothing_stays_on_the_model(net):
    blamed(net)
    hooks = [module for module in net.modules() if module._forward_hooks or module._backward_hooks]
    assert not hooks and net.up.observer is None and not net.up.weight._backward_hooks


def test_nothing_stays_on_the_model_after_an_error(net):
    with pytest.raises(ZeroDivisionError):
        first_nonfinite(net, lambda: 1 / 0)
    assert net.up.observer is None and not net.norm._forward_hooks


def test_a_norm_beyond_float32_names_the_largest_gradient(net):
    """Each gradient is finite, and so is the loss."""
    net.up.bias.register_hook(
        lambda grad: torch.full_like(grad, 3e38).index_fill_(0, torch.tensor([0]), -3.2e38)
    )
    ids = torch.arange(16).reshape(2, 8)
    words = first_nonfinite(net, lambda: net(ids).square().mean().backward(), loss=1.0)
    assert words == (
        "the norm of the gradients, which is beyond float32 though each of them is finite: the largest, 3.2e+38, is of the parameter "
        "'up.bias'"
    )


def test_a_norm_that_is_finite_when_it_is_repeated_is_said_to_be_so(net):
    ids = torch.arange(16).reshape(2, 8)
    words = first_nonfinite(net, lambda: net(ids).square().mean().backward(), loss=1.0)
    assert words.startswith(
        "the norm of the gradients, and when the step was repeated it was finite: the largest, "
    )
