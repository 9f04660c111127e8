"""Steps that are left out by a flag: as if they had never been called (exact). The Triton kernel's: tests/ops/triton/stepped.py."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.optim import AdamW, skipped_steps
from narrowgauge.optim.optimizers import OPTIMIZERS
from narrowgauge.optim.skipped_steps import SkippedSteps
from tests.compare import assert_same

FLAGS = (0.0, 1.0, 0.0, math.inf, math.nan, 0.0)
BUILD = OPTIMIZERS


def gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for each in parameters:
        each.grad = torch.randn(each.shape, generator=generator).to(each.dtype) * (
            math.nan if FLAGS[step] else 1e-2
        )


def trained(options: dict[str, Any], rule: str, calls: str, absent: int | None = None) -> Any:
    """calls: "taken", where those that are left out are not called; "found_inf", "halted": the flag that leaves them out."""
    torch.manual_seed(1)
    shapes = ((17, 300), (9, 256), (40,))
    parameters = [nn.Parameter((torch.randn(shape) * 0.02).to(torch.bfloat16)) for shape in shapes]
    optimizer = BUILD[rule](parameters, lr=1e-2, **options)
    for step, flag in enumerate(FLAGS):
        gradients(parameters, step)
        if step == absent:
            parameters[1].grad = None
        optimizer.param_groups[0]["lr"] *= 0.9
        if calls == "taken" and flag:
            # The learning rate of a skipped call counts: on a GPU the host does not know of the skip.
            optimizer.param_groups[0]["previous_lr"] = optimizer.param_groups[0]["lr"]
            continue
        if calls != "taken":
            optimizer.found_inf = torch.tensor(flag)
        optimizer.step()
    return [each.detach() for each in parameters], optimizer.state_dict()["state"]


@pytest.mark.parametrize("waits", [True, False], ids=["host", "device"])
@pytest.mark.parametrize(
    ("rule", "states", "master", "backend"),
    [
        ("adamw", "8bit", "stochastic", "torch"), ("lion", "4bit", "fp16-scaled", "torch"), ("sgd", "fp8", "bf16-remainder", "torch"),
        ("adamw", "fp32", "fp32", "native"), ("adamw", "4bit", "stochastic", "native"),
    ],
)  # fmt: skip
def test_it_is_as_if_the_step_was_never_called(monkeypatch, rule, states, master, backend, waits):
    """Plain torch selects on the device what it writes; the compiled step is the CPU's, where the host looks."""
    if backend == "native" and not waits:
        pytest.skip("no device where the compiled step runs")
    options = {"states": states, "master": master, "backend": backend}
    expected = trained(options, rule, "taken", absent=4)
    if not waits:
        monkeypatch.setattr(SkippedSteps, "seen_by_host", lambda self, flag: False)
    assert_same(trained(options, rule, "found_inf", absent=4), expected)


def test_the_host_settles_where_it_must_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(SkippedSteps, "seen_by_host", lambda self, flag: False)
    monkeypatch.setattr(skipped_steps, "MOST", 3)
    monkeypatch.setattr(AdamW, "_counts_on_device", lambda self: True)
    looks = []
    monkeypatch.setattr(SkippedSteps, "count", lambda self: looks.append(self.uncertain) or 0)
    weights = [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))]
    optimizer = AdamW(weights, backend="torch")
    optimizer._kernel = lambda param_step: type(
        "Counts", (), {"name": "k", "run": lambda *call: None}
    )
    optimizer.found_inf = torch.tensor(0.0)
    for step in range(9):
        for each in weights[: 1 if step == 8 else 2]:
            each.grad = torch.ones(4, 4)
        if step == 8:
            weights[1].grad = None
        optimizer.step()
    assert looks == [3, 3, 2], "after MOST steps, twice, and where another set of parameters steps"
    copy.deepcopy(optimizer)
    assert looks == [3, 3, 2, 1]
    optimizer.state_dict()
    assert looks == [3, 3, 2, 1, 0] and optimizer._skipped.uncertain == 0


def test_a_halted_optimizer_stays_as_it_is(monkeypatch):
    """Nobody counts on: no other numbers travel with its steps, and no counter is made right."""
    monkeypatch.setattr(SkippedSteps, "seen_by_host", lambda self, flag: False)
    weight = nn.Parameter(torch.randn(4, 300))
    optimizer = AdamW([weight], states="8bit", backend="torch")
    for step in range(4):
        weight.grad = torch.randn(4, 300)
        optimizer.halted = torch.tensor(float(step > 1))
        before = (
            weight.detach().clone(),
            optimizer.state[weight].get("exp_avg", torch.zeros(0)).clone(),
        )
        optimizer.step()
        assert torch.equal(before[0], weight) == (step > 1)
        assert step < 2 or torch.equal(before[1], optimizer.state[weight]["exp_avg"])
        assert optimizer._skipped.uncertain == 0
