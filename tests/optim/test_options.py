"""Options of groups are looked at when the group comes; and a compiled caller gets the eager step (exact)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.optim import SGD, AdamW, Lion, param_groups
from tests.compare import assert_same
from tests.raising import raises

SHAPES = [(64, 64), (64,), (96, 64), (96, 128)]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


@pytest.mark.parametrize(
    ("rule", "group", "words"),
    [
        (AdamW, {"betas": (0.9, 1.5)}, "betas or momentum = .* below 1"),
        (AdamW, {"betas": (0.9,)}, "betas = "),
        (AdamW, {"lr": float("nan")}, "lr = nan: must be a number of at least 0"),
        (AdamW, {"lr": float("inf")}, "lr = inf: must be a number of at least 0, and finite"),
        (AdamW, {"lr": torch.tensor(float("inf"))}, "and finite"),
        (AdamW, {"lr": True}, "lr = True: must be a number"),
        (Lion, {"weight_decay": float("inf")}, "weight_decay = inf"),
        (SGD, {"seed": "a"}, "seed = 'a': must be a whole number"),
        (SGD, {"seed": 1.0}, "seed = 1.0: must be a whole number"),
        (AdamW, {"eps": "small"}, "eps = 'small'"),
        (AdamW, {"state": "8bit"}, "a group has 'state', which is no option. Closest: 'states'"),
        (Lion, {"weight_decays": 0.1}, "Closest: 'weight_decay'"),
        (SGD, {"nesterov": True, "momentum": 0.0}, "nesterov = True .*momentum = 0"),
        (SGD, {"embeddings": "8bit"}, "embeddings = '8bit'"),
        (AdamW, {"nesterov": True}, "a group has 'nesterov', which its rule does not know"),
        (AdamW, {"rule": 5}, "no rule 5. Closest: 'adamw', 'lion', 'sgd'"),
        (AdamW, {"rule": ["lion"]}, "no rule .'lion'.. Closest: 'lion'"),
        (AdamW, {"states": ["8bit"]}, "no states .'8bit'.. Closest: '8bit'"),
    ],
)
def test_a_group_is_refused_as_arguments_are(rule: Any, group: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rule([{"params": parameters(), **group}])
    optimizer = rule(parameters())
    with pytest.raises(ConfigError, match=words):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 2))], **group})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_whose_elements_share_memory_is_refused() -> None:
    whole = torch.zeros(6, 8, 4)
    for shared in (
        torch.ones(1, 64).expand(64, 64),
        whole.as_strided((3, 4), (1, 1)),
        whole[:1, ::3].expand(2, -1, 4),
    ):
        with raises(ConfigError, "optim.parameter-kind"):
            AdamW([torch.nn.Parameter(shared)])
    for own in (
        whole.mT,
        whole[::2, 1:7:3],
        whole.diagonal(),
        whole.permute(2, 0, 1),
        whole[:0].expand(0, 8, 4),
    ):
        AdamW([torch.nn.Parameter(own)])


def test_a_group_whose_check_fails_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the check."""
    optimizer = AdamW(parameters())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(param_groups, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 2))]})
    assert len(optimizer.param_groups) == 1


def test_what_others_write_into_a_group_is_left_alone() -> None:
    optimizer = AdamW([{"params": parameters(), "name": "all", "layer": 3}], lr=1e-3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    optimizer.add_param_group(
        {**optimizer.param_groups[0], "params": [torch.nn.Parameter(torch.zeros(2, 2))]}
    )


@pytest.mark.parametrize(
    ("option", "value"), [("states", "8bit"), ("master", "fp32"), ("embeddings", "same")]
)
def test_a_form_that_is_changed_under_a_state_is_refused(option: str, value: str) -> None:
    mine = parameters()
    optimizer = AdamW(mine)
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[0][option] = value
    before = [parameter.detach().clone() for parameter in mine]
    with raises(ConfigError, "optim.group-changed"):
        optimizer.step()
    assert_same([parameter.detach() for parameter in mine], before)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_caller_gets_the_eager_step(states: str) -> None:
    mine, others = parameters(), parameters()
    compiled, eager = AdamW(mine, lr=0.1, states=states), AdamW(others, lr=0.1, states=states)
    step = torch.compile(compiled.step, backend="eager")
    for _ in range(4):
        for one, other in zip(mine, others, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        step()
        eager.step()
    assert_same([each.detach() for each in mine], [each.detach() for each in others])
    assert {float(state["step"]) for state in compiled.state.values()} == {4.0}
