"""Each moment in a format of its own: names, bits on every backend, saved states, sizes (exact), and what is refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.optim import SGD, AdamW, Lion, masters, moments, noise, state_bytes, states
from narrowgauge.optim.masters import KINDS
from narrowgauge.train.config.settings import TrainConfig
from tests.compare import assert_same, z_limit, z_score
from tests.optim.test_cpp import test_both_backends_compute_the_same_bits as compare
from tests.raising import coded, raises
from tests.selection import needs_compiler

PAIRS = [f"{first}/{second}" for first, second in product(states.FIRST, states.SECOND)]
BYTES = {
    "fp32": 4.0,
    "fp16": 2 + 2 / 256,
    "8bit": 1 + 2 / 256,
    "fp8": 1 + 3 / 128,
    "e4m3": 1 + 2 / 256,
    "4bit": 0.5 + 2 / 128,
}


def matrix(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    torch.manual_seed(1)
    return nn.Parameter((torch.randn(64, 512) * 0.02).to(dtype))


def run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * 1e-3).to(
            parameter.dtype
        )
        optimizer.step()


@needs_compiler
@pytest.mark.parametrize(
    ("pair", "master"),
    [
        ("fp16/e4m3", None),
        ("fp32/8bit", None),
        ("4bit/fp32", None),
        ("8bit/fp16", "fp16-scaled"),
        ("fp8/4bit", "stochastic"),
    ],
)
def test_a_pair_has_the_same_bits_in_both_backends(pair, master):
    compare("adamw", pair, master, torch.bfloat16 if master else torch.float32)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_with_every_master_has_them(pair):
    compare("adamw", pair, None, torch.float32)
    for master in filter(None, KINDS):
        compare("adamw", pair, master, torch.bfloat16)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("rule", "name"), list(product(("lion", "sgd"), states.FIRST)))
def test_rules_of_one_moment_take_every_format(rule, name):
    compare(rule, name, None, torch.float32)


def test_names_of_one_form_are_one_form():
    found = []
    for name in ("fp8-lm", "e4m3/fp16"):
        parameter = matrix()
        optimizer = AdamW([parameter], states=name)
        run(optimizer, parameter, 0, 2)
        found.append((parameter.detach(), optimizer.state_dict()["state"]))
    assert_same(*found)
    for name in moments.STATES:
        assert states.same(name, name)
    assert (
        states.same("8bit", "8bit/8bit")
        and not states.same("8bit", "8bit/fp16")
        and not states.same("8bit", None)
    )


@pytest.mark.parametrize("pair", ["8bit/fp16", "fp16/8bit", "fp32/4bit", "e4m3/fp8"])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(pair):
    straight, resumed = matrix(), matrix()
    one, two = (AdamW([each], states=pair, seed=3) for each in (straight, resumed))
    run(one, straight, 0, 4)
    run(two, resumed, 0, 2)
    three = AdamW([resumed], states=pair, seed=3)
    three.load_state_dict(two.state_dict())
    run(three, resumed, 2, 4)
    assert_same(resumed.detach(), straight.detach())
    assert_same(three.state_dict()["state"], one.state_dict()["state"])
    with raises(CheckpointError, "optim.state", pair):
        AdamW([resumed], states="8bit").load_state_dict(three.state_dict())


@pytest.mark.parametrize("pair", PAIRS)
def test_sizes_are_those_of_the_formats(pair):
    """Bytes per parameter: those of each moment; beside smaller tiles, a scale more for 256 elements."""
    parameter = matrix()
    optimizer = AdamW([parameter], states=pair)
    first, second = pair.split("/")
    tile = states.named(pair).tile
    expected = sum(
        BYTES[name] + (2 / tile - 2 / format.tile if format.has_scale else 0)
        for name, format in ((first, states.FIRST[first]), (second, states.SECOND[second]))
    )
    told = state_bytes(optimizer).total
    run(optimizer, parameter, 0, 1)
    assert (
        told == state_bytes(optimizer).total == round(expected * parameter.numel()) + 4
    )  # and a step count


def test_the_first_moment_is_held_where_either_is_narrow():
    """Codes of m alone can be off as much as codes of both: see `rules.bound`."""
    for pair in ("8bit/fp32", "fp32/8bit", "8bit"):
        parameter = matrix()
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[0, 0] = 1.0
        optimizer = AdamW([parameter], states=pair, backend="torch")
        optimizer.step()
        assert optimizer._param_steps[parameter].clamps_first, pair
    optimizer = AdamW([matrix()], states="fp32/fp32", backend="torch")
    run(optimizer, optimizer.param_groups[0]["params"][0], 0, 1)
    assert not next(iter(optimizer._param_steps.values())).clamps_first


@pytest.mark.parametrize(
    ("build", "name", "words"),
    [
        (AdamW, "8bits", coded("optim.states", "'8bits'", "'8bit'")),
        (AdamW, "8bit/f16", coded("optim.states", "'8bit/f16'", "'fp16'", "'first/second'")),
        (AdamW, "8bit/", coded("optim.states", "'8bit/'")),
        (AdamW, "8bit/8bit/8bit", coded("optim.states", "'8bit/8bit/8bit'")),
        (AdamW, "fp8-lm/fp16", coded("optim.states", "'fp8-lm/fp16'")),
        (AdamW, ("fp8", "fp16"), coded("optim.states", "'fp8'", "'fp16'")),
        (
            Lion,
            "8bit/fp16",
            coded("optim.two-moments", "states = '8bit/fp16'", "keeps 1", "states = '8bit'"),
        ),
        (SGD, "fp8/fp8", coded("optim.two-moments")),
    ],
)
def test_what_names_no_states_is_refused(build, name, words):
    with raises(ConfigError, words):
        build([matrix()], states=name)


def test_a_run_takes_the_same_names():
    rule = TrainConfig.__dataclass_fields__["states"].metadata["rule"]
    assert rule.names == tuple(moments.STATES) and rule.parts == tuple(states.FIRST) == tuple(
        states.SECOND
    )
    for name in (*moments.STATES, *states.FIRST, *PAIRS):
        assert TrainConfig(states=name).states == name
    with pytest.raises(
        ConfigError, match=r"optimizer.states = '8bit/fp4': must be one of .*Closest"
    ):
        TrainConfig(states="8bit/fp4")
    with pytest.raises(
        ConfigError,
        match=r"names two moments, and lion keeps one. Give one, as optimizer.states = '8bit'",
    ):
        TrainConfig(states="8bit/fp16", optimizer="lion")


def test_float16_weights_round_stochastically_without_bias():
    """Between two neighbours in proportion, normal and subnormal (z-scores over 20,000 draws, false alarm 1e-5); exact ones stay."""
    values = torch.tensor([1.0 + 2.0**-12, -0.3, 3e-5, -7.3e-7, 2.0**-26, 65000.0])
    bits = noise.bits(3, torch.arange(20_000 * 6)).view(20_000, 6)
    found = masters.round_to_float16(values.expand(20_000, 6), bits)
    for place, value in enumerate(values.tolist()):
        seen = found[:, place].double()
        assert len(seen.unique()) == 2 and abs(z_score(seen, value, float(seen.std()))) < z_limit(
            1e-5, 6
        )
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for fill in (0, 0xFFFF):
        assert_same(
            masters.round_to_float16(
                every.float(), torch.full(every.shape, fill, dtype=torch.int32)
            ),
            every.clone(),
            any_nan=True,
        )
    beyond = torch.tensor([65536.0, -1e30, float("inf")])
    assert_same(masters.round_to_float16(beyond, torch.zeros(3, dtype=torch.int32)), beyond.half())
