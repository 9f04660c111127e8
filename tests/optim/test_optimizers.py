"""The optimizers as torch optimizers: against torch's own (bounded), saved and loaded (exact), groups, schedulers, refusals."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.optim import (
    SGD,
    AdamW,
    Lion,
    groups,
    in_backward,
    moments,
    param_groups,
    state_bytes,
)
from narrowgauge.optim.masters import KINDS
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.optimizers import OPTIMIZERS
from narrowgauge.train.checkpoint import state as train_state
from tests.compare import assert_same
from tests.processes import ROOT
from tests.raising import coded, raises

RULES = OPTIMIZERS
# A rule without a kernel warns once, in the test that steps it first.
IN_PLAIN_TORCH = pytest.mark.filterwarnings("ignore:narrowgauge.optim steps in plain torch")


def matrix(dtype: torch.dtype = torch.float32, rows: int = 16, columns: int = 300) -> nn.Parameter:
    torch.manual_seed(2)
    return nn.Parameter((torch.randn(rows, columns) * 0.05).to(torch.bfloat16).to(dtype))


def feed(parameter: torch.Tensor, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def run(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                feed(parameter, step)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_with_float32_states_is_torchs(weight_decay):
    """A step's change differs by two units of its last place (three roundings of the denominator), a weight by one of its own."""
    ours, theirs = matrix(), matrix()
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": weight_decay}
    mine, torchs = (
        AdamW([ours], **settings),
        torch.optim.AdamW([theirs], **settings, foreach=False, fused=False),
    )
    run(mine, 0, 1)
    run(torchs, 0, 1)
    allowed = 2.0**-23 * theirs.detach().abs() + 2.0**-22 * 1e-2  # the change is about lr
    assert ((ours - theirs).abs() <= allowed).all()
    run(mine, 1, 5)
    run(torchs, 1, 5)
    assert ((ours - theirs).abs() <= 5 * allowed).all()
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            mine.state[ours][name], torchs.state[theirs][name], rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_float32_states_is_torchs(nesterov):
    ours, theirs = matrix(), matrix()
    run(SGD([ours], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov), 0, 5)
    run(torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov), 0, 5)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_lion_is_its_formula():
    ours = matrix()
    w, m = ours.detach().double().clone(), torch.zeros(16, 300, dtype=torch.float64)
    optimizer = Lion([ours], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(4):
        feed(ours, step)
        g = ours.grad.double()
        w = w * (1 - 1e-4) - 1e-3 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        optimizer.step()
    torch.testing.assert_close(ours.detach().double(), w, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_moments_of_torch_are_taken_up_whatever_their_strides(backend):
    """torch keeps them in the parameter's strides; they were read in the order of their memory, without a word (bounded)."""
    found = []
    for takes in (torch.optim.AdamW, lambda params: AdamW(params, backend=backend)):
        parameter = nn.Parameter(torch.arange(54.0).reshape(9, 6).T)
        first = torch.optim.AdamW([parameter])
        run(first, 0, 3)
        second = takes([parameter])
        second.load_state_dict(first.state_dict())
        run(second, 3, 4)
        found.append(parameter.detach())
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-6)


def test_states_of_torchs_adamw_are_taken_up():
    theirs, ours = matrix(), matrix()
    torchs = torch.optim.AdamW([theirs], lr=1e-2)
    run(torchs, 0, 3)
    optimizer = AdamW([ours], lr=1e-2)
    with torch.no_grad():
        ours.copy_(theirs)
    optimizer.load_state_dict(torchs.state_dict())
    run(torchs, 3, 4)
    run(optimizer, 3, 4)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@IN_PLAIN_TORCH
@pytest.mark.parametrize("master", KINDS, ids=str)
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("rule", RULES)
def test_saved_and_loaded_it_goes_on_with_the_same_bits(rule, states, master):
    """Through the checkpoint's own form: tensors by name and JSON."""
    dtype = torch.bfloat16 if master else torch.float32
    straight, stopped, resumed = (matrix(dtype) for _ in range(3))
    one, two, three = (
        RULES[rule]([p], states=states, master=master, seed=5) for p in (straight, stopped, resumed)
    )
    run(one, 0, 5)
    run(two, 0, 3)
    tensors, rest = train_state.flatten(two.state_dict())
    with torch.no_grad():
        resumed.copy_(stopped)
    three.load_state_dict(
        train_state.unflatten(rest, {name: tensor.clone() for name, tensor in tensors.items()})
    )
    run(three, 3, 5)
    assert_same(resumed.detach(), straight.detach())
    assert_same(three.state_dict()["state"], one.state_dict()["state"])


PROGRAM = """
import sys, torch
from safetensors.torch import load_file, save_file
from narrowgauge.optim.masters import KINDS
from narrowgauge.optim.moments import STATES
from narrowgauge.train.checkpoint.state import flatten, unflatten
import json
from tests.optim.test_optimizers import RULES, matrix, run
torch.set_num_threads(1)
stage, folder = sys.argv[1:]
for rule in RULES:
    for states in STATES:
        for master in KINDS:
            name = f"{folder}/{rule}-{states}-{master}"
            weight = matrix(torch.bfloat16 if master else torch.float32)
            optimizer = RULES[rule]([weight], states=states, master=master)
            if stage == "save":
                run(optimizer, 0, 2)
                tensors, rest = flatten({"weight": weight.detach(), "optimizer": optimizer.state_dict()})
                save_file({k: v.clone() for k, v in tensors.items()}, name)
                open(name + ".json", "w", encoding="utf-8").write(json.dumps(rest))
                run(optimizer, 2, 3)
                save_file({"weight": weight.detach()}, name + ".after")
            else:
                saved = unflatten(json.load(open(name + ".json", encoding="utf-8")), load_file(name))
                weight.data.copy_(saved["weight"])
                optimizer.load_state_dict(saved["optimizer"])
                run(optimizer, 2, 3)
                after = load_file(name + ".after")["weight"]
                assert torch.equal(weight.detach().view(torch.uint8), after.view(torch.uint8)), name
"""


@pytest.mark.slow
def test_a_new_process_goes_on_with_the_same_bits(tmp_path):
    """Every rule, state and master, through safetensors and JSON."""
    for stage in ("save", "load"):
        subprocess.run([sys.executable, "-c", PROGRAM, stage, str(tmp_path)], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("saved", "own", "words"),
    [
        (
            {"states": "8bit"},
            {"states": "fp8"},
            coded("optim.state", "states='8bit'", "states='fp8'"),
        ),
        ({"master": "fp32"}, {"master": "bf16-remainder"}, coded("optim.state", "master='fp32'")),
    ],
)
def test_a_state_of_another_format_is_refused_before_anything_changes(saved, own, words):
    dtype = torch.bfloat16 if "master" in saved else torch.float32
    giver, taker = matrix(dtype), matrix(dtype)
    source, target = AdamW([giver], **saved), AdamW([taker], **own)
    run(source, 0, 1)
    run(target, 0, 1)
    before = target.state_dict()["state"][0]["exp_avg"].clone()
    with raises(CheckpointError, words):
        target.load_state_dict(source.state_dict())
    assert_same(target.state_dict()["state"][0]["exp_avg"], before)


def test_a_4_bit_state_of_an_earlier_version_is_refused():
    """Its codes have the same type and shape, and stood for other numbers. Other states did not change."""
    for states in ("4bit", "8bit"):
        optimizer = AdamW([matrix()], states=states)
        run(optimizer, 0, 1)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0].pop("form") == moments.FORM
        taker = AdamW([matrix()], states=states)
        if states == "8bit":
            taker.load_state_dict(saved)
            continue
        with raises(CheckpointError, "optim.state", "states='4bit'"):
            taker.load_state_dict(saved)


def test_a_state_of_another_shape_or_kind_is_refused():
    small = AdamW([matrix(columns=400)], states="8bit")
    run(small, 0, 1)
    with raises(CheckpointError, "optim.state", "exp_avg", "[16, 400]", "[16, 300]"):
        AdamW([matrix()], states="8bit").load_state_dict(small.state_dict())
    lion = Lion([matrix(columns=400)], states="8bit")
    with raises(CheckpointError, "optim.state", "exp_avg_sq"):
        lion.load_state_dict(small.state_dict())
    with raises(CheckpointError, "optim.state", "[1]", "[2]"):
        AdamW([matrix(), matrix()]).load_state_dict(small.state_dict())


def test_float32_masters_and_remainders_are_the_same_training():
    """bf16-remainder: 16 bits beside the weight tell the float32 master exactly, and the weights are the same too (exact)."""
    one, two, wide = matrix(torch.bfloat16), matrix(torch.bfloat16), matrix()
    first, second, third = (
        AdamW([one], master="fp32"),
        AdamW([two], master="bf16-remainder"),
        AdamW([wide]),
    )
    for step in range(20):
        for parameter in (one, two, wide):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = (
                torch.randn(parameter.shape, generator=generator)
                .to(torch.bfloat16)
                .to(parameter.dtype)
            )
        for optimizer in (first, second, third):
            optimizer.step()
    assert_same(first.state[one]["master"], wide.detach())
    assert_same(two.detach(), one.detach())
    bits = two.detach().float().view(torch.int32) + second.state[two]["remainder"].to(torch.int32)
    assert_same(bits.view(torch.float32), wide.detach())
    assert second.state[two]["remainder"].element_size() + two.element_size() == 4


@pytest.mark.parametrize("master", ["stochastic", "fp16-scaled"])
def test_small_updates_are_kept_on_average(master):
    """lr 1e-4 on weights of 1, 200 steps: rounding to nearest would keep bfloat16 at 1. Mean within 4 of its standard errors."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=1e-4, weight_decay=0.0, master=master)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # A random walk of 200 draws with units of at most 2^-8 (fp16-scaled: then rounded once, by at most 2^-9 at 0.98).
    allowed = (
        4 * (200 * 1e-4 * 2**-8) ** 0.5 / 64 + 1e-4 + (2**-9 if master == "fp16-scaled" else 0)
    )
    assert abs(float(weight.detach().float().mean()) - 0.98) < allowed


@pytest.mark.parametrize("master", ["fp32", "fp16-scaled"])
def test_a_weight_written_since_is_taken_over(master):
    weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
    optimizer = SGD([weight], lr=2.0**-10, momentum=0.0, master=master)
    weight.data.fill_(1.0)
    for expected in (1 - 2.0**-10, 1 - 2.0**-9):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        master_now = optimizer.state[weight]["master"].float()
        if master == "fp16-scaled":
            master_now = master_now * 2.0**-15 * optimizer.state[weight]["master_scale"].float()
        assert_same(master_now, torch.full((4, 8), expected))


def test_rules_say_which_states_stay_wide():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(100, 64)
            self.inner = nn.Linear(64, 128)
            self.small = nn.Linear(64, 4, bias=False)
            self.thin = nn.Linear(4, 2048, bias=False)
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.tokens.weight

    model = Model()
    model.small.weight.requires_grad_(False)
    optimizer = AdamW(model, states="8bit")
    predicted = state_bytes(optimizer)
    rules = {row.rule: row.states for row in predicted.rows}
    assert rules == {
        "asked for": "8bit",
        "one axis": "fp32",
        param_groups.SHORT: "fp32",
        "embedding": "fp32",
    }
    assert predicted.parameters == 6400 + 64 * 128 + 128 + 4 * 2048
    model.small.weight.grad = torch.ones(4, 64)
    run(optimizer, 0, 1)
    assert state_bytes(optimizer) == predicted
    assert "embedding" in str(predicted) and optimizer.state.get(model.small.weight) is None
    narrow = state_bytes(AdamW(groups(model, embeddings="same"), states="8bit"))
    # One scale of 2 bytes per moment and row.
    assert narrow.total == predicted.total - 6400 * 8 + 6400 * 2 + 100 * 2 * 2
    assert state_bytes(AdamW(model, states="8bit", embeddings="same")).total == narrow.total
    named = AdamW(nn.ModuleDict({"wte": nn.Embedding(100, 64)}).named_parameters(), states="8bit")
    assert [row.rule for row in state_bytes(named).rows] == ["embedding"]


@pytest.mark.parametrize(
    ("states", "expected"),
    [("fp32", 8), ("8bit", 2.016), ("fp8", 2.047), ("fp8-lm", 3.016), ("4bit", 1.032)],
)
def test_bytes_per_parameter(states, expected):
    found = state_bytes(AdamW([nn.Parameter(torch.zeros(256, 1024))], states=states))
    assert found.per_parameter == pytest.approx(expected, abs=0.001)


def test_groups_schedulers_hooks_and_missing_gradients():
    first, second, third = matrix(), matrix(), matrix()
    optimizer = AdamW([first, second], lr=1.0, states="8bit", weight_decay=0.0)
    optimizer.add_param_group({"params": [third], "lr": 0.5, "states": "4bit"})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    still = second.detach().clone()
    start = first.detach().clone()
    first.grad, third.grad = torch.ones_like(first), torch.ones_like(third)
    assert optimizer.step(lambda: 3.5) == 3.5
    scheduler.step()
    assert_same(second.detach(), still)
    assert calls == [1] and [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    # The step is 1.0, and what the rounding of the first moment will take from the next ones.
    torch.testing.assert_close(first.detach(), start - 1.0, rtol=0, atol=0.2)
    assert optimizer.state[third]["exp_avg"].dtype == torch.uint8 and not optimizer.state[second]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_parameters_that_are_not_contiguous(backend):
    if backend == "native":
        from narrowgauge.optim.cpp import binding

        if binding.refuse():
            pytest.skip(binding.refuse())
    plain = matrix()
    strided = nn.Parameter(plain.detach().t().contiguous().t())
    for parameter in (plain, strided):
        run(AdamW([parameter], states="8bit", backend=backend), 0, 3)
    assert_same(strided.detach().contiguous(), plain.detach())


def test_an_empty_parameter_and_a_scalar():
    empty, scalar = nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.tensor(1.0))
    optimizer = AdamW([empty, scalar], lr=0.1, weight_decay=0.0, states="8bit")
    empty.grad, scalar.grad = torch.zeros(0, 5), torch.tensor(2.0)
    optimizer.step()
    assert float(scalar.detach()) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: AdamW([matrix(torch.bfloat16)]), coded("optim.parameter-kind", "512")),
        (
            lambda: AdamW([matrix(torch.float16)], master="bf16-remainder"),
            coded("optim.parameter-kind", "master='bf16-remainder'"),
        ),
        (lambda: AdamW([matrix(torch.float64)]), coded("optim.parameter-kind")),
        (lambda: AdamW([matrix()], states="8bits"), coded("optim.states", "'8bits'", "'8bit'")),
        (lambda: AdamW([matrix()], master="fp23"), coded("optim.master", "'fp23'", "'fp32'")),
        (
            lambda: AdamW([matrix()], master="stochastic"),
            coded("optim.master-float32", "master = 'stochastic'"),
        ),
        (
            lambda: SGD([{"params": [matrix()], "master": "fp32"}]),
            coded("optim.master-float32", "master = 'fp32'"),
        ),
        (lambda: AdamW([matrix()], backend="cuda"), coded("optim.backend", "backend = 'cuda'")),
        (lambda: AdamW([matrix()], lr=-1.0), coded("optim.not-negative", "lr = -1")),
        (lambda: AdamW([matrix()], lr="fast"), coded("optim.not-negative", "lr = 'fast'")),
        (lambda: AdamW([matrix()], betas=0.9), coded("optim.betas")),
        (lambda: Lion([matrix()], betas=(0.9, 1.0)), coded("optim.betas")),
        (
            lambda: SGD([matrix()], embeddings="8bit"),
            coded("optim.embeddings", "embeddings = '8bit'"),
        ),
        (
            lambda: SGD(nn.Linear(2, 2), embeddings="8bit"),
            coded("optim.embeddings", "embeddings = '8bit'"),
        ),
        (lambda: AdamW(None), coded("optim.no-parameters", "AdamW", "None")),
        (lambda: state_bytes(3), coded("state-bytes.optimizer", "state_bytes: 3")),
    ],
)
def test_what_cannot_work_is_refused(build, words):
    with raises(ConfigError, words):
        build()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("master", "dtype", "words"),
    [
        (None, torch.bfloat16, coded("optim.parameter-changed")),
        ("fp32", torch.float64, coded("optim.parameter-changed")),
        ("fp32", torch.bfloat16, coded("optim.parameter-form")),
        ("bf16-remainder", torch.bfloat16, coded("optim.parameter-form")),
    ],
)
def test_a_model_that_is_converted_later_is_refused(backend, steps_before, master, dtype, words):
    """Its state has no master: the compiled step would read one from nowhere."""
    layer = nn.Linear(300, 16)
    beside = [matrix(torch.bfloat16)] if master else []  # a master needs a weight that it is for
    optimizer = AdamW([*layer.parameters(), *beside], master=master, backend=backend)
    run(optimizer, 0, steps_before)
    layer.to(dtype)
    before = layer.weight.detach().clone()
    if not steps_before and dtype == torch.bfloat16 and master:
        return run(optimizer, 0, 1)  # nothing was made yet: it starts as a bfloat16 model would
    with raises(ConfigError, words):
        run(optimizer, 1, 2)
    assert_same(layer.weight.detach(), before)
    return None


def test_the_state_of_torchs_optimizer_goes_on_in_the_same_groups():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(9, 16), nn.Linear(16, 16)

    model = Embedded()
    theirs = torch.optim.AdamW(model.parameters())
    run(theirs, 0, 2)
    with raises(CheckpointError, "optim.state", "[3]", "[2, 1]"):
        AdamW(model).load_state_dict(theirs.state_dict())
    ours = AdamW(model.parameters())
    ours.load_state_dict(theirs.state_dict())
    for parameter, state in theirs.state.items():
        assert_same(ours.state[parameter]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda saved: {"state": saved["state"]}, coded("optim.state", "'state'")),
        (lambda saved: saved | {"state": {"0": saved["state"][0]}}, coded("optim.state", "'0'")),
        (
            lambda saved: saved | {"param_groups": [saved["param_groups"][0] | {"maximize": True}]},
            coded("optim.state", "maximize=True"),
        ),
    ],
)
def test_a_state_that_is_no_state_is_refused(damage, words):
    optimizer = AdamW([matrix()])
    run(optimizer, 0, 1)
    with raises(CheckpointError, words):
        optimizer.load_state_dict(damage(optimizer.state_dict()))


@pytest.mark.parametrize(
    ("states", "name", "value", "words"),
    [
        (
            "fp32",
            "exp_avg",
            float("nan"),
            coded("optim.state", "exp_avg", "4,800"),
        ),
        (
            "8bit",
            "exp_avg_sq_scale",
            float("inf"),
            coded("optim.state", "exp_avg_sq_scale", "32"),
        ),
        ("fp8", "exp_avg", float("nan"), coded("optim.state", "exp_avg", "4,800")),
        ("8bit", "step", -3.0, coded("optim.state", "-3")),
        ("8bit", "step", float("nan"), coded("optim.state", "1 places")),
    ],
)
def test_a_state_with_numbers_that_are_none_is_refused_and_nothing_changes(
    states, name, value, words
):
    optimizer, taker = AdamW([matrix()], states=states), AdamW([matrix()], states=states)
    for each in (optimizer, taker):
        run(each, 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][name].view(-1)[:2] = value
    before = copy.deepcopy(taker.state_dict())
    with raises(CheckpointError, words):
        taker.load_state_dict(saved)
    assert_same(taker.state_dict(), before)


def test_a_sparse_gradient_is_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with raises(ConfigError, "optim.sparse-gradient", "sparse=False"):
        AdamW(embedding.parameters()).step()


@IN_PLAIN_TORCH
@pytest.mark.parametrize("kind", RULES.values(), ids=RULES)
def test_no_parameters_are_refused_in_words(kind):
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with raises(ConfigError, "optim.empty-list", kind.__name__):
        kind([])
    with raises(ConfigError, "optim.empty-list", "requires_grad"):
        kind(p for p in frozen.parameters() if p.requires_grad)
    with raises(ConfigError, "optim.nothing-trains", "Linear"):
        kind(frozen)
    with raises(ConfigError, "optim.nothing-trains", "Tanh"):
        kind(nn.Tanh())
    with pytest.raises(TypeError, match="params argument"):
        kind(next(frozen.parameters()))


def test_stepping_in_backward_is_stepping_after_it():
    def train(inside: bool) -> tuple[nn.Module, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        model[2].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
        optimizer = AdamW(model.named_parameters(), lr=1e-2, states="8bit")
        if inside:
            in_backward(optimizer)
        kept = 0
        for step in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            (model(x) - x).square().mean().backward()
            kept += sum(p.grad is not None for p in model.parameters())
            if not inside:
                optimizer.step()
                optimizer.zero_grad()
        return model, kept

    (inside, kept), (after, _) = train(True), train(False)
    assert kept == 0
    assert_same(inside.state_dict(), after.state_dict())


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_stepping_in_backward_lets_go_of_each_gradient(states):
    """A view that the optimizer kept would hold the memory, though parameter.grad is None."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    seen: list[weakref.ref[torch.Tensor]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    optimizer = AdamW(model.named_parameters(), states=states)  # held, see test_in_backward.py
    in_backward(optimizer)
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        assert len(seen) == 4 and not any(gradient() is not None for gradient in seen)
        seen.clear()


def test_stepping_in_backward_follows_the_learning_rate_after_a_state_was_loaded():
    weight = matrix()
    optimizer = AdamW([weight], lr=1e-2)
    in_backward(optimizer)
    weight.sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())  # brings new groups
    optimizer.param_groups[0]["lr"] = 0.0
    before = weight.detach().clone()
    weight.sum().backward()
    assert_same(weight.detach(), before)


def test_a_group_that_comes_later_steps_in_backward_too():
    """Exact: as if it had been there from the start, with the numbers that its rounding draws."""

    def train(late: bool) -> tuple[list[nn.Parameter], Any]:
        weights = [matrix(torch.bfloat16), matrix(torch.bfloat16)]
        optimizer = AdamW(weights[:1], lr=1e-2, master="stochastic")
        if late:
            handle = in_backward(optimizer)
        optimizer.add_param_group({"params": weights[1:], "lr": 1e-3})
        if not late:
            handle = in_backward(optimizer)
        for _ in range(2):
            sum(weight.square().sum() for weight in weights).backward()
            assert all(weight.grad is None for weight in weights)
        return weights, handle

    (early, _), (late, handle) = train(False), train(True)
    for one, other in zip(early, late, strict=True):
        assert_same(one.detach(), other.detach())
    handle.remove()
    late[1].sum().backward()
    assert late[1].grad is not None


def test_stepping_in_backward_begins_once():
    weight = matrix()
    optimizer = AdamW([weight])
    handle = in_backward(optimizer)
    with raises(ConfigError, "in-backward.twice"):
        in_backward(optimizer)
    handle.remove()
    in_backward(optimizer)
    weight.sum().backward()
    assert weight.grad is None


def test_stepping_in_backward_refuses_what_needs_all_gradients():
    weight = matrix()
    optimizer = AdamW([weight])
    with raises(ConfigError, "in-backward.accumulation", "= 0"):
        in_backward(optimizer, accumulation=0)
    with raises(ConfigError, "in-backward.whole-norm", "clip_norm"):
        in_backward(optimizer, clip_norm=1.0)
    with raises(ConfigError, "in-backward.optimizer", "AdamW"):
        in_backward(torch.optim.AdamW([weight]))  # type: ignore[arg-type]
    handle = in_backward(optimizer, clip_parameter_norm=1e-3)
    before = weight.detach().clone()
    (weight * 100).sum().backward()
    assert weight.grad is None and not torch.equal(before, weight)
    assert float(optimizer.state[weight]["exp_avg"].norm()) == pytest.approx(1e-4, rel=1e-3)
    handle.remove()
    weight.sum().backward()
    assert weight.grad is not None
