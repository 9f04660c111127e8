"""Selective checkpointing (exact): no product of any kernel is computed twice, no weight is cast twice; changes in place are seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.memory import checkpoint, saved_bytes, selective
from narrowgauge.nn import plan as nn_plan
from narrowgauge.ops.mm import cublas, int4_units, triton
from narrowgauge.ops.registry import Device
from narrowgauge.plan import Step, count
from tests.memory.models import batch, llama, step
from tests.selection import quick

# FP8 in tiles is a Triton kernel there, which torch's dispatcher does not see.
ADA = Device("cuda", (8, 9), cuda=(12, 9))
INPUTS = {**batch(), "use_cache": False}
LINEARS = 7  # of a block
BLOCKS = 4
_OPERATORS = ((triton, "block_mm"), (cublas, "scaled_mm"), (int4_units, "int4_mm"))


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def test_between_full_and_everything():
    model, sizes, products = llama(), {}, {}
    for policy in ("none", "selective", "full"):
        checkpoint(model, policy, keep_last=False)
        sizes[policy] = saved_bytes(model, INPUTS).total
        with Calls() as calls:
            step(model)
        products[policy] = calls.count[torch.ops.aten.mm.default]
    assert sizes["full"] < sizes["selective"] < sizes["none"]
    # Early stop: backward asks for nothing behind the input of down_proj, so "full" repeats six of a block's seven Linears.
    assert products["full"] == products["none"] + BLOCKS * (LINEARS - 1)
    assert products["selective"] == products["none"]


@pytest.mark.parametrize("name", quick(["fp8-delayed", "nvfp4"], list(ng.recipes.names())))
def test_no_product_and_no_cast_of_a_weight_is_repeated(name, monkeypatch):
    """By whatever kernel: counted where the Linear calls it."""
    calls: Counter[str] = Counter()
    plan, quantize = nn_plan.plan, nn_plan.OperandPlan.quantize

    def counted_plan(*given, **named):
        made = plan(*given, **named)
        kernel = made.choice.kernel

        def run(*operands):
            calls["product"] += 1
            return kernel.run(*operands)

        return replace(made, choice=replace(made.choice, kernel=replace(kernel, run=run)))

    def counted_quantize(self, *given, **named):
        calls[f"cast of {self.role}"] += 1
        return quantize(self, *given, **named)

    monkeypatch.setattr(nn_plan, "plan", counted_plan)
    monkeypatch.setattr(nn_plan.OperandPlan, "quantize", counted_quantize)
    found = {}
    for policy in ("none", "selective", "full"):
        model = ng.convert(llama(num_hidden_layers=BLOCKS), name, weight_codes="recast")
        checkpoint(model, policy, keep_last=False)
        calls.clear()
        step(model)
        found[policy] = dict(calls)
    assert found["selective"]["product"] == found["none"]["product"] >= 3 * BLOCKS * LINEARS
    assert found["full"]["product"] >= found["none"]["product"] + BLOCKS * (LINEARS - 1)
    cast = ng.recipes.get(name).output.rhs
    if cast is not None and cast.rounding == "nearest":
        assert found["selective"].get("cast of w") == found["none"].get("cast of w")


@pytest.mark.slow
def test_a_kernel_that_torch_does_not_see(monkeypatch):
    calls: Counter[str] = Counter()
    launch = triton.launch

    def counted(*given):
        calls["product"] += 1
        return launch(*given)

    monkeypatch.setattr(triton, "launch", counted)
    found = {}
    for policy in ("none", "selective", "full"):

        def build(policy=policy):
            blocks = (
                nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
                for _ in range(2)
            )
            model = ng.convert(nn.Sequential(*blocks), "fp8-block")
            checkpoint(model, policy, keep_last=False)
            x = torch.zeros(512, 256)
            return Step(model, lambda: model(x).square().mean(), model.zero_grad, list, x)

        calls.clear()
        kept = count(build, ADA)
        found[policy] = calls["product"] // 2, kept.peak(kept.second)[0]
    assert found["none"][0] == found["selective"][0] < found["full"][0]
    assert found["full"][1] < found["selective"][1] < found["none"][1]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.down(self.up(x).mul_(2.0).relu())


@pytest.mark.parametrize("name", [None, "fp8-row"], ids=["torch's Linear", "ours"])
def test_what_is_kept_may_not_be_changed(name):
    model = nn.Sequential(InPlace(), InPlace())
    if name:
        ng.convert(model, name)
    checkpoint(model, "selective", keep_last=False)
    loss = model(torch.randn(4, 16)).square().sum()
    with pytest.raises(
        RuntimeError,
        match=r"'selective' .* in place",
    ):
        loss.backward()


def test_a_graph_goes_back_once():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    )
    checkpoint(model, "selective", keep_last=False)
    loss = model(torch.randn(4, 8)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def test_a_block_that_computes_something_else():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 8), 0

        def forward(self, x):
            self.calls += 1
            x = torch.bmm(x[None], x[None])[0] if self.calls > 1 else x
            return self.linear(x).tanh()

    model = nn.Sequential(Fickle(), Fickle())
    checkpoint(model, "selective", keep_last=False)
    loss = model(torch.randn(8, 8)).square().sum()
    with pytest.raises(
        RuntimeError,
        match=r"the repetition computes aten\.bmm\.default there\. A block must compute the same",
    ):
        loss.backward()


def test_graphs_keep_the_products_that_are_operators_of_ours():
    """What torch.compile's partitioner is told: each of them is defined by the module of its kernel."""
    ours = [getattr(module.torch.ops.narrowgauge, name) for module, name in _OPERATORS]
    assert all(selective._is_saved(each.default, (), {}) for each in ours)
    assert not selective._is_saved(torch.ops.aten.add.Tensor, (), {})
