"""The compiled step against its definition in torch: the same bits, for every format, rule, master and dtype (exact)."""

from __future__ import annotations

import copy
import functools
import platform
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from narrowgauge.errors import BackendError, ConfigError
from narrowgauge.ops.cpp import build
from narrowgauge.optim import SGD, AdamW, Lion, backends, rules
from narrowgauge.optim.cpp import binding
from narrowgauge.optim.masters import KINDS
from narrowgauge.optim.moments import STATES
from tests.compare import assert_same
from tests.optim.building import NATIVE
from tests.raising import raises
from tests.selection import needs_compiler


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """A matrix with whole and ragged tiles of odd length, and a vector."""
    torch.manual_seed(4)
    return [
        nn.Parameter((torch.randn(8, 557) * 0.02).to(dtype)),
        nn.Parameter(torch.randn(77).to(dtype)),
    ]


def gradients(parameters: list[nn.Parameter], step: int, dtype: torch.dtype) -> None:
    """Nine decades, a zero row, a zero column, subnormals; columns that stay, stop and fade: first moments are held and only decay."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        shape = parameter.shape
        g = (
            torch.randn(shape, generator=generator)
            * torch.exp(3 * torch.randn(shape, generator=generator))
            * 1e-3
        )
        if g.ndim == 2:
            g[2], g[:, 7], g[3, :5] = 0.0, 0.0, 1e-39
            g[:, 40:80] = 1e-3
            g[:, 80:120] *= 1.0 if step == 0 else 0.0
            g[:, 120:140] *= 1e-6**step
        parameter.grad = g.to(dtype).to(parameter.dtype)


@needs_compiler
@pytest.mark.parametrize("rule", NATIVE)
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(
    ("master", "dtype"),
    [(None, torch.float32)]
    + [(master, torch.bfloat16) for master in KINDS if master]
    + [(master, torch.float16) for master in ("fp32", "fp16-scaled", "stochastic")],
    ids=str,
)
def test_both_backends_compute_the_same_bits(rule, states, master, dtype):
    found = []
    for backend in ("native", "torch"):
        parameters = weights(dtype)
        optimizer = NATIVE[rule](parameters, states=states, master=master, backend=backend)
        for step in range(3):
            gradients(parameters, step, dtype)
            optimizer.step()
        found.append(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
    assert_same(found[0], found[1])


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="has vectors of one width")
@pytest.mark.parametrize(
    "without",
    [
        pytest.param(["-mno-avx512f"], id="avx2"),
        pytest.param(["-mno-avx512f", "-mno-avx"], id="sse2", marks=pytest.mark.slow),
    ],
)
def test_every_width_of_vectors_computes_the_same_bits(without, monkeypatch):
    """8 and 4 elements at a time, where the test above has what this processor has.

    The vectors are those of the source, so -O1 has the same width and builds in half the time.
    """
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1", *without))
    monkeypatch.setattr(binding, "_library", functools.cache(binding._library.__wrapped__))
    for rule in NATIVE:
        for states in STATES:
            test_both_backends_compute_the_same_bits(rule, states, None, torch.float32)


@needs_compiler
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"kernel": 77}, "no branch for rule 'lion' with kernel = 77"),
        ({"draws_first": False}, "DRAWS and LAGS of rule 'lion'"),
        ({"lags": True}, "DRAWS and LAGS of rule 'lion'"),
    ],
    ids=str,
)
def test_a_rule_without_its_branch_in_the_kernel_is_an_error(other, words, monkeypatch):
    """A number without a branch computed the last one."""
    rule = replace(rules.LION, **other)
    for known in (rules.RULES, rules.BUILT_IN):
        monkeypatch.setitem(known, "lion", rule)
    monkeypatch.setattr(Lion, "rule", rule)
    parameters = weights(torch.float32)
    optimizer = Lion(parameters, states="8bit", backend="native")
    gradients(parameters, 0, torch.float32)
    before = [p.detach().clone() for p in parameters]
    with raises(BackendError, "optim.kernel-rule", words):
        optimizer.step()
    assert_same([p.detach() for p in parameters], before)


@needs_compiler
@pytest.mark.parametrize("states", STATES)
def test_threads_change_nothing(states, monkeypatch):
    found = []
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 100)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        parameters = weights(torch.float32)
        optimizer = AdamW(parameters, states=states, backend="native")
        gradients(parameters, 0, torch.float32)
        optimizer.step()
        found.append([p.detach() for p in parameters])
    assert_same(found[0], found[1])


@needs_compiler
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("states", STATES)
def test_a_poisoned_gradient_stays_visible_and_its_tile_alone_is_lost(backend, states):
    parameter = nn.Parameter(torch.randn(8, 1024))
    optimizer = AdamW([parameter], states=states, backend=backend)
    for step in range(2):
        parameter.grad = torch.ones_like(parameter)
        if step == 0:
            parameter.grad[2, 300] = float("nan")
        optimizer.step()
    assert parameter[2, 300].isnan()
    tile = STATES[states].tile
    rest = parameter.detach().clone()
    rest[2, 300 // tile * tile : (300 // tile + 1) * tile] = 0.0
    assert rest.isfinite().all()
    if states != "fp32":
        assert parameter[2, 301].isnan()  # the moments of the tile are gone, and say so


@needs_compiler
@pytest.mark.parametrize("states", STATES)
def test_what_fills_a_short_tile_poisons_nothing(states):
    """With eps = 0 its step is 0 / 0."""
    found = []
    for backend in ("native", "torch"):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(32, 129).bfloat16())
        optimizer = AdamW(
            [parameter], eps=0.0, states=states, master="fp16-scaled", backend=backend
        )
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        found.append((parameter.detach(), optimizer.state_dict()["state"]))
    assert found[0][0].isfinite().all()
    assert_same(found[0], found[1])


@needs_compiler
@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), 1e38])
def test_a_scaled_master_of_a_poisoned_tile_is_codes_of_zeros_and_a_scale_of_nan(poison):
    found = []
    for backend in ("native", "torch"):
        parameter = nn.Parameter(torch.full((3, 300), -1.0).bfloat16())
        optimizer = SGD([parameter], lr=1.0, master="fp16-scaled", backend=backend)
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[1, 7] = poison
        optimizer.step()
        state = optimizer.state[parameter]
        assert parameter[1, :256].isnan().all() and state["master_scale"][1, 0].isnan()
        assert parameter.isnan().sum() == 256
        found.append(state["master"])
    assert_same(found[0], found[1])
    assert not found[0][1, :256].view(torch.int16).any()


def test_without_a_compiler_it_says_so_once_and_steps_in_torch(monkeypatch):
    def none() -> None:
        raise BackendError("optim: no C++ compiler 'none' is here.")

    monkeypatch.setattr(binding, "_library", none)
    monkeypatch.setattr(binding, "refuse", functools.cache(binding.refuse.__wrapped__))
    backends.tell_once.cache_clear()
    parameters = weights(torch.float32)
    optimizer = AdamW(parameters, states="8bit")
    before = parameters[0].detach().clone()
    gradients(parameters, 0, torch.float32)
    with pytest.warns(RuntimeWarning, match="plain torch, several times slower: optim: no C"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert not torch.equal(before, parameters[0])
    with raises(ConfigError, "optim.backend-unavailable", "native"):
        AdamW(weights(torch.float32), backend="native")
    backends.tell_once.cache_clear()


def test_a_build_that_fails_is_tried_once(monkeypatch):
    attempts = []

    def failing() -> None:
        attempts.append(1)
        raise BackendError("optim: it does not compile.")

    monkeypatch.setattr(binding, "_library", failing)
    monkeypatch.setattr(binding, "refuse", functools.cache(binding.refuse.__wrapped__))
    parameters = weights(torch.float32)
    optimizer = AdamW(parameters, states="8bit")
    gradients(parameters, 0, torch.float32)
    backends.tell_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="it does not compile"):
        optimizer.step()
    assert len(parameters) > 1 and attempts == [1]
    backends.tell_once.cache_clear()


@needs_compiler
def test_a_failing_compiler_is_named(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho nothing works >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(binding, "_library", binding._library.__wrapped__)
    monkeypatch.setattr(binding, "refuse", binding.refuse.__wrapped__)
    assert "could not build the fused step: nothing works" in binding.refuse()
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert str(tmp_path / "absent") in binding.refuse()


def test_a_deep_copy_goes_its_own_way():
    parameters = weights(torch.float32)
    optimizer = AdamW(parameters, states="8bit")
    gradients(parameters, 0, torch.float32)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    theirs = twin.param_groups[0]["params"]
    assert theirs[0] is not parameters[0] and twin.backend == optimizer.backend
    gradients(parameters, 1, torch.float32)
    gradients(theirs, 1, torch.float32)
    before = theirs[0].detach().clone()
    optimizer.step()
    assert_same(theirs[0].detach(), before)
    twin.step()
    assert_same([p.detach() for p in theirs], [p.detach() for p in parameters])
