"""Who steps a tensor, and what is said of it (exact); the check of the GPU's kernel, with plain torch in its place (exact)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.ops import selfcheck, triton
from narrowgauge.ops.registry import Device
from narrowgauge.optim import SGD, AdamW, backends, rules, state_bytes
from narrowgauge.optim import selfcheck as proof
from narrowgauge.optim.cpp import binding
from narrowgauge.optim.masters import KINDS
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.step import step_in_torch
from tests.raising import raises

CPU = torch.device("cpu")


def kind(states: str = "8bit", **changes) -> proof.StepKind:
    pair = STATES[states]
    whole = proof.StepKind(
        rules.ADAMW,
        False,
        pair.first,
        pair.second,
        torch.float32,
        torch.float32,
        None,
        pair.tile,
        aligned=True,
    )
    return replace(whole, **changes)


def failure(run, given: proof.StepKind) -> str | None:
    """Why a step fails the check of the GPU's kernel, or None."""
    return selfcheck.examine(
        "optim", lambda param_steps, kept: run(param_steps), backends.CHECK, (given,), CPU
    ).reason


# --- choice --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name", "words"),
    [
        (Device("cuda", (9, 0)), "triton", ""),
        (Device("cuda", (8, 0)), "triton", ""),
        (Device("cuda", (7, 5)), "torch", "compute capability 7.5, needs 8.0"),
        (Device("mps"), "torch", ""),
    ],
)
def test_a_device_gets_its_kernel(triton_installed, device, name, words):
    choice = backends.KERNELS.choose(backends.BackendSpec(device, rules.ADAMW))
    assert choice.kernel.name == name and backends.words(choice) == words


def test_without_triton_a_gpu_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(
        triton,
        "unavailable",
        lambda: "a reason of triton",
    )
    choice = backends.KERNELS.choose(backends.BackendSpec(Device("cuda", (9, 0)), rules.ADAMW))
    assert choice.kernel.name == "torch" and backends.words(choice) == "a reason of triton"


def test_a_cpu_is_stepped_by_the_compiled_kernel_or_says_why():
    parameter = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW([parameter], states="8bit")
    expected = f"torch ({binding.refuse()})" if binding.refuse() else "native"
    assert optimizer.computed_by(parameter) == expected
    assert [row.backend for row in state_bytes(optimizer).rows] == [expected]
    assert expected.splitlines()[0] in str(state_bytes(optimizer))


def test_what_was_asked_for_is_told_without_a_reason():
    parameter = nn.Parameter(torch.randn(64, 128))
    optimizer = SGD([parameter], backend="torch")
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        assert optimizer.computed_by(parameter) == "torch"
        optimizer.step()


def test_a_kernel_for_another_device_is_refused_at_once():
    with raises(ConfigError, "optim.backend-unavailable", "AdamW", "triton"):
        AdamW([nn.Parameter(torch.zeros(4))], backend="triton")
    with raises(
        ConfigError, "optim.backend", "backend = 'cuda'", "'auto', 'triton', 'native', 'torch'"
    ):
        AdamW([nn.Parameter(torch.zeros(4))], backend="cuda")


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_step_is_seen_by_who_looks_at_versions(backend):
    parameter = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW([parameter], states="8bit", backend=backend)
    parameter.grad = torch.ones_like(parameter)
    before = parameter._version
    optimizer.step()
    assert parameter._version > before


class Wrapped(torch.Tensor):
    """Its memory is elsewhere, as that of a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def test_the_memory_of_a_subclass_is_left_alone():
    parameter = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW([parameter], states="8bit", backend="torch")
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    param_step = optimizer._param_steps[parameter]
    assert backends._spec(param_step).device.wrapper == ""
    param_step.source = torch.Tensor._make_wrapper_subclass(Wrapped, (64, 128))
    choice = backends.KERNELS.choose(backends._spec(param_step))
    assert choice.kernel.name == "torch" and "a Wrapped hides the memory" in backends.words(choice)


# --- check ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", STATES)
def test_the_definition_passes(states):
    for changes in (
        {},
        {
            "weight": torch.bfloat16,
            "gradient": torch.bfloat16,
            "master": "stochastic",
            "aligned": False,
        },
    ):
        assert failure(step_in_torch, kind(states, **changes)) is None


@pytest.mark.parametrize("master", [name for name in KINDS if name])
def test_the_definition_passes_with_every_master(master):
    given = kind(weight=torch.bfloat16, gradient=torch.float32, master=master)
    assert failure(step_in_torch, given) is None
    assert (
        failure(step_in_torch, replace(given, rule=rules.LION, second=STATES["8bit"].first)) is None
    )


def with_other_noise(param_steps):
    for param_step in param_steps:
        param_step.number += 1
    step_in_torch(param_steps)
    for param_step in param_steps:
        param_step.number -= 1


def with_one_tensor_twice(param_steps):
    step_in_torch([param_steps[0], param_steps[0]])


def with_the_scale_of_the_next_tile(param_steps):
    step_in_torch(param_steps)
    param_steps[0].first.scale.copy_(param_steps[0].first.scale.roll(1, 1))


def with_one_bit_off(param_steps):
    step_in_torch(param_steps)
    param_steps[1].weight[2, -1] *= 1 + 2.0**-23


def with_another_root(param_steps):
    """A correction that is off by a unit in the last place."""
    for param_step in param_steps:
        c = param_step.constants
        param_step.constants = replace(
            c, correction=float(torch.nextafter(torch.tensor(c.correction), torch.tensor(9.0)))
        )
    step_in_torch(param_steps)


def without_nan(param_steps):
    for param_step in param_steps:
        param_step.gradient = param_step.gradient.nan_to_num(0.0)
    step_in_torch(param_steps)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            with_other_noise,
            r"its (weight|exp_avg_sq) of tensor 0 after step \d is wrong on cpu in ",
        ),
        (with_one_tensor_twice, r"its weight of tensor 0 after step \d is wrong on cpu in "),
        (
            with_the_scale_of_the_next_tile,
            r"its exp_avg_scale of tensor 0 after step \d is wrong on cpu in ",
        ),
        (with_one_bit_off, r"its weight of tensor 1 after step \d is wrong on cpu in "),
        (with_another_root, r"its weight of tensor 0 after step \d is wrong on cpu in "),
        (without_nan, r"its weight of tensor 0 after step \d is wrong on cpu in "),
    ],
    ids=["noise", "table", "scale", "bit", "root", "nan"],
)
def test_wrong_kernels_are_found(run, words):
    reason = failure(run, kind())
    assert reason is not None and re.match(words, reason), reason


def test_a_kernel_that_fails_its_check_is_refused_and_named(monkeypatch):
    """On the device that it was tried on, once; the others go on."""
    monkeypatch.setattr(selfcheck, "RESULTS", {})
    monkeypatch.setattr(triton, "refuse", lambda *device: None)
    monkeypatch.setattr(backends, "refuse_triton", lambda *device: None)
    runs = []

    def broken(param_steps, kept):
        runs.append(param_steps)
        with_one_bit_off(param_steps)

    monkeypatch.setattr(backends, "_step_by_triton", broken)
    spec = backends.BackendSpec(Device("cpu", index=0), rules.ADAMW, kind=kind())
    with pytest.warns(
        RuntimeWarning,
        match="optim: the triton kernel is not used, .* because its weight of tensor 1 after step 1 is wrong",
    ):
        backends.KERNELS.choose(spec)
    for _ in range(2):
        choice = backends.KERNELS.choose(spec)
        assert (
            choice.kernel.name != "triton"
            and "is wrong on cpu" in dict(choice.refusals)["triton"].text
        )
    assert len(runs) == 1  # the first step shows it
    monkeypatch.setattr(
        backends, "_step_by_triton", lambda param_steps, kept: step_in_torch(param_steps)
    )
    assert backends.KERNELS.choose(replace(spec, kind=kind("4bit"))).kernel.name == "triton"
