"""Rules as objects: chosen per group, saved by name, refused by kernels that do not know them (exact)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.optim import AdamW, Lion, RAdam, rules, state_bytes
from narrowgauge.optim.masters import KINDS
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.optimizers import OPTIMIZERS
from narrowgauge.optim.states import named
from narrowgauge.train.config.settings import TrainConfig
from tests.compare import assert_same
from tests.optim.building import build
from tests.processes import ROOT
from tests.raising import raises
from tests.selection import needs_compiler, quick

pytestmark = pytest.mark.filterwarnings(
    "ignore:narrowgauge.optim steps in plain torch"
)  # said once in a process


def _constants(group: Any, step: int) -> float:
    return -float(group["lr"]) * group["share"]


def _centred(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: float, holds: bool) -> rules.Updated:
    """A momentum, and a step without its mean over the whole matrix: no part of it can be computed alone."""
    decays = rules.only_decays(g, m)
    m = m * 0.9 + g
    return w + (m - m.mean()) * c, m, v, decays


CENTRED = rules.Rule(
    name="centred", moments=("momentum",), constants=_constants, update=_centred, granularity="matrix", options={"share": 0.5}
)  # fmt: skip


def matrix(rows: int = 300, columns: int = 301, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    torch.manual_seed(2)
    return nn.Parameter((torch.randn(rows, columns) * 0.05).to(dtype))


def run(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                generator = torch.Generator().manual_seed(step)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(
                    parameter.dtype
                )
        optimizer.step()


def test_groups_step_by_their_own_rules():
    """As two optimizers would (noise is of a parameter's number), with the options of each rule as its own optimizer has them."""
    one, two, three, four = matrix(), matrix(20), matrix(), matrix(20)
    both = AdamW(
        [{"params": [one], "rule": "lion", "lr": 1e-4}, {"params": [two]}],
        states="fp8",
        weight_decay=0.0,
    )
    assert both.param_groups[0]["betas"] == (0.9, 0.99) and both.param_groups[1]["betas"] == (
        0.9,
        0.999,
    )
    alone = [
        Lion([three], lr=1e-4, states="fp8"),
        AdamW([matrix(), four], states="fp8", weight_decay=0.0),
    ]
    for optimizer in (both, *alone):
        run(optimizer, 0, 3)
    assert_same([one.detach(), two.detach()], [three.detach(), four.detach()])
    assert "exp_avg_sq" in both.state[two] and "exp_avg_sq" not in both.state[one]
    assert "rule" not in alone[0].state_dict()["param_groups"][0]


def test_a_rule_of_whole_matrices_sees_them_whole():
    """Larger than a chunk of the plain torch step, with ragged tiles."""
    weight, truth = matrix(), matrix().detach()
    optimizer = AdamW([{"params": [weight], "rule": CENTRED}], lr=0.1)
    moment = torch.zeros_like(truth)
    for step in range(3):
        run(optimizer, step, step + 1)
        moment = moment * 0.9 + weight.grad
        truth = truth + (moment - moment.mean()) * -0.05
    torch.testing.assert_close(weight.detach(), truth, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("states", quick(["8bit", "4bit"], STATES))
@pytest.mark.parametrize("master", KINDS, ids=str)
def test_every_state_and_master_works_with_a_new_rule_and_resumes(states, master):
    """Steps near those of float32 states (4bit: 12 dB), and the same bits after a state was saved by name and loaded."""
    dtype = torch.bfloat16 if master else torch.float32
    weight, straight, exact = (matrix(dtype=dtype) for _ in range(3))

    def centred(parameter: nn.Parameter, states: str) -> AdamW:
        return AdamW(
            [{"params": [parameter], "rule": CENTRED}], lr=0.1, states=states, master=master
        )  # type: ignore[arg-type]

    first, uncut = centred(weight, states), centred(straight, states)
    wide = centred(exact, "fp32")
    run(first, 0, 2)
    run(uncut, 0, 4)
    run(wide, 0, 4)
    second = centred(weight, states)
    saved = first.state_dict()
    assert saved["param_groups"][0]["rule"] == "centred"
    second.load_state_dict(saved)
    run(second, 2, 4)
    assert_same(weight.detach(), straight.detach())
    step = (exact.detach() - matrix(dtype=dtype).detach()).float()
    error = (weight.detach() - exact.detach()).float()
    assert float(error.norm() / step.norm()) < 0.25


@needs_compiler
def test_kernels_refuse_rules_that_they_do_not_know():
    parameter = nn.Parameter(torch.zeros(64, 64))
    with raises(ConfigError, "optim.backend-unavailable", "'centred'"):
        AdamW([{"params": [parameter], "rule": CENTRED}], backend="native")
    impostor = replace(rules.ADAMW, update=rules.LION.update, granularity="matrix")
    optimizer = AdamW([{"params": [parameter], "rule": impostor}])
    assert optimizer.computed_by(parameter).startswith(
        "torch ("
    ) and "has no kernel for rule 'adamw', which is not" in optimizer.computed_by(parameter)
    run(optimizer, 0, 1)
    assert rules.refuse(impostor, "native") in str(state_bytes(optimizer))


@needs_compiler
def test_a_rule_may_have_one_of_the_kernels(monkeypatch):
    rule = replace(rules.SGD, backends=frozenset({"triton"}))
    for known in (rules.RULES, rules.BUILT_IN):
        monkeypatch.setitem(known, "sgd", rule)
    assert not rules.refuse(rule, "triton")
    assert rules.refuse(rule, "native") == "has no kernel for rule 'sgd'"
    with raises(ConfigError, "optim.backend-unavailable", "has no kernel for rule 'sgd'"):
        AdamW([{"params": [matrix()], "rule": "sgd"}], backend="native")


def test_a_rule_survives_a_copy():
    optimizer = copy.deepcopy(AdamW([{"params": [matrix()], "rule": CENTRED}]))
    run(optimizer, 0, 1)
    assert "momentum" in optimizer.state[optimizer.param_groups[0]["params"][0]]


def test_rules_that_are_none_and_states_of_another_are_refused():
    with raises(ConfigError, "optim.rule", "'leon'", "'lion'"):
        AdamW([{"params": [matrix()], "rule": "leon"}])
    with raises(ConfigError, "optim.unknown-option", "'shares'", "'share'"):
        AdamW([{"params": [matrix()], "rule": CENTRED, "shares": 1.0}])
    saved, other = AdamW([{"params": [matrix()], "rule": "lion"}]), AdamW([matrix()])
    run(saved, 0, 1)
    with raises(CheckpointError, "optim.state", "'lion'", "'adamw'"):
        other.load_state_dict(saved.state_dict())


def test_the_lag_falls_with_the_learning_rate():
    """The correction of a rounding error is returned by later steps, which are smaller where the learning rate falls (exact)."""
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    steady = rules.ADAMW.constants(group, 500)
    for before in (1e-3, 5e-4, 0.0):
        assert rules.ADAMW.constants({**group, "previous_lr": before}, 500) == steady
    found = [
        rules.ADAMW.constants({**group, "previous_lr": 1e-3 * (1 + fall)}, 500)
        for fall in (1e-9, 1e-3, 1e-2, 1e-1, 1.0)
    ]
    for name in ("lag", "lag_of_decay"):
        lags = [getattr(steady, name), *(getattr(each, name) for each in found)]
        assert lags == sorted(lags, reverse=True)
        assert lags[1] == pytest.approx(lags[0], rel=1e-6)
        assert lags[-1] == 0.0
    # K = sum 0.9^j max(0, 1 - 0.6 j): one term.
    assert found[3].lag == pytest.approx(0.9 * 0.4, rel=1e-6)


def _radams_rate(beta2: float, step: int) -> float | None:
    """Algorithm 2 of arXiv 1908.03265: r_t, or None where the variance is intractable; with 5 for its 4, as its authors' code."""
    most = 2 / (1 - beta2) - 1
    rho = most - 2 * step * beta2**step / (1 - beta2**step)
    if rho <= 5:
        return None
    return math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))


@pytest.mark.parametrize("beta2", [0.6, 0.95, 0.999])
def test_radam_is_its_formula_and_torchs(beta2):
    """Steps before and after the first that divides by sqrt(v), of which 0.6 has none; weight decay is decoupled (bounded)."""
    ours, theirs = matrix(16), matrix(16)
    w, m, v = ours.detach().double(), *(torch.zeros(2, 16, 301, dtype=torch.float64))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, beta2), "weight_decay": 0.1}
    mine = RAdam([ours], **settings, backend="torch")
    torchs = torch.optim.RAdam([theirs], **settings, decoupled_weight_decay=True, foreach=False)
    kinds = set()
    for step in range(1, 11):
        run(mine, step, step + 1)
        run(torchs, step, step + 1)
        g = ours.grad.double()
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
        change, rate = m / (1 - 0.9**step), _radams_rate(beta2, step)
        if rate is not None:
            change = change * rate * math.sqrt(1 - beta2**step) / (v.sqrt() + 1e-8)
        w = w * (1 - 1e-3) - 1e-2 * change
        kinds.add(rate is None)
    assert kinds == ({True} if beta2 == 0.6 else {True, False})
    torch.testing.assert_close(ours.detach().double(), w, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for name, truth in (("exp_avg", m), ("exp_avg_sq", v)):
        torch.testing.assert_close(mine.state[ours][name].double(), truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("beta2", [0.6, 0.95, 0.999])
@pytest.mark.parametrize("step", [1, 4, 5, 6, 40])
def test_the_lag_of_radam_is_what_later_steps_return(step, beta2, stops):
    """The sum over 1,000 later steps of their rates times 0.9^j, at a constant v or one that decays (bounded)."""
    group = {"lr": 1e-2, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.0}
    # A gradient of 0 beside a moment: it only decays.
    g, m = (0.0, 1e-3) if stops else (0.02, 0.0)
    v = 4e-4 * (1 - beta2**step)
    before = (v - (1 - beta2) * g * g) / beta2
    tensors = [torch.tensor([x]) for x in (0.0, g, m, before)]
    *_, lag = rules.RADAM.update(*tensors, rules.RADAM.constants(group, step), True)
    truth = 0.0
    # If b1^2 >= b2 the sum over a decaying v has no limit, and v is taken as constant.
    decays = stops and beta2 > 0.9**2
    for j in range(1, 1001):
        rate = _radams_rate(beta2, step + j)
        later = v * beta2**j if decays else v * (1 - beta2 ** (step + j)) / (1 - beta2**step)
        divisor = 1.0
        if rate is not None:
            divisor = math.sqrt(later / (1 - beta2 ** (step + j))) / rate
        truth -= 1e-2 / (1 - 0.9 ** (step + j)) * 0.9**j / divisor
    assert float(lag) == pytest.approx(truth, rel=1e-3)


def test_the_previous_learning_rate_is_saved_and_a_damaged_one_is_refused():
    """A run on a falling schedule resumes bit for bit (exact); states of earlier versions have no previous rate."""
    rates = [1e-2 * 0.8**step for step in range(8)]

    def steps(optimizer: AdamW, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.param_groups[0]["lr"] = rates[step]
            run(optimizer, step, step + 1)

    whole, resumed = matrix(), matrix()
    one, two = AdamW([whole], states="8bit"), AdamW([resumed], states="8bit")
    steps(one, 0, 8)
    steps(two, 0, 4)
    saved = copy.deepcopy(two.state_dict())
    assert saved["param_groups"][0]["previous_lr"] == rates[3]
    three = AdamW([resumed], states="8bit")
    three.load_state_dict(copy.deepcopy(saved))
    steps(three, 4, 8)
    assert_same(resumed.detach(), whole.detach())
    del saved["param_groups"][0]["previous_lr"]
    three.load_state_dict(copy.deepcopy(saved))
    assert three.param_groups[0]["previous_lr"] == 0.0
    for damaged in (-1.0, float("nan"), "1e-3"):
        saved["param_groups"][0]["previous_lr"] = damaged
        with raises(CheckpointError, "optim.state", "previous_lr"):
            three.load_state_dict(saved)


@pytest.mark.parametrize("states", quick(["8bit", "4bit"], STATES))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quantized_states_step_near_float32_states(name, states):
    """Medians over elements after six steps: an error is below a fifth of the distance (4-bit states: a half)."""
    found = []
    for each in ("fp32", states):
        weight = matrix()
        run(build(name, [weight], states=each, backend="torch"), 0, 6)
        found.append(weight.detach())
    distance = (found[0] - matrix().detach()).abs().median()
    error = (found[1] - found[0]).abs().median()
    assert error < distance * (0.5 if states == "4bit" else 0.2)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_stays_visible(name, states, poison):
    """In the element's weight or in its states, from the step that brings it to all later ones (exact)."""
    for at in (0, 2):
        weight = matrix(8, 1024)
        optimizer = build(name, [weight], states=states, backend="torch")
        tile = named(states).tile
        for step in range(at + 3):
            weight.grad = torch.full_like(weight, 0.1)
            if step == at:
                weight.grad[2, 300] = poison
            optimizer.step()
            if step < at:
                continue
            state = optimizer.state[weight]
            scales = [x[2, 300 // tile] for key, x in state.items() if key.endswith("_scale")]
            wide = [state[key][2, 300] for key in optimizer.rule.moments if not scales]
            seen = torch.stack([x.float() for x in (weight.detach()[2, 300], *scales, *wide)])
            assert not seen.isfinite().all(), f"step {step} after one with {poison} at {at}"


@pytest.mark.parametrize("rule", rules.RULES.values(), ids=list(rules.RULES))
def test_a_rule_says_if_it_lags(rule):
    """Kernels read `lags`, plain torch reads what the update returns (exact)."""
    zeros = torch.zeros(2, 256)
    constants = rule.constants({**rule.numbers, "previous_lr": 0.0}, 1)
    found = rule.update(zeros, zeros, zeros, zeros, constants, len(rule.moments) == 2)
    assert rule.lags == (len(found) == 5)


def test_every_rule_has_an_optimizer_and_a_setting():
    """A new rule is one object in RULES; these lists are derived from it, or compared with it here (exact)."""
    assert list(OPTIMIZERS) == list(rules.RULES)
    page = (ROOT / "docs/optimizers.md").read_text(encoding="utf-8")
    for name, kind in OPTIMIZERS.items():
        assert getattr(ng.optim, kind.__name__) is kind and kind.__name__ in ng.optim.__all__
        assert f"`{kind.__name__}`" in page or f".{kind.__name__}`" in page
        defaults = kind([matrix()], backend="torch").defaults
        assert {key: defaults[key] for key in rules.RULES[name].numbers} == kind.rule.numbers
    for name in rules.RULES:
        assert TrainConfig(optimizer=name).optimizer == name
    with raises(ConfigError, "config.optimizer", *rules.RULES):
        TrainConfig(optimizer="leon")
    numbers = [rule.kernel for rule in rules.BUILT_IN.values()]
    assert numbers == sorted(set(numbers)), "two rules would share a kernel's branch"
