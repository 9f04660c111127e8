"""The cases of PyTorch's database of optimizers on the optimizers that narrowgauge has of the same name (bounded; states exact).

`common_optimizers.optim_db` lists arguments and errors of each optimizer. The checks (test/test_optim.py, TestOptimRenewed) are not in
PyTorch's wheel, and are written here: each is passed with torch's optimizer beside ours, or ends in a sentence. REFUSED has those.

Left out, since the two below have no such option or path: foreach and fused against the loop over tensors, capturable under CUDA
graphs, differentiable steps, sparse gradients (refused, tests/optim/test_optimizers.py), and parameters on several devices.
"""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import optim
from narrowgauge.errors import NarrowgaugeError
from tests.torch_databases import torch_databases

pytestmark = [
    pytest.mark.slow,  # the import of the database alone takes 4 s
    pytest.mark.filterwarnings("ignore:narrowgauge.optim steps in plain torch"),  # RAdam
]

NAMES = ("AdamW", "SGD", "RAdam")
STEPS = 8
# Ten steps round a weight of magnitude below 4 twice each, by at most 2**-23 of it; both add the same update to a few ulps.
ATOL, RTOL = 2 * STEPS * 4 * 2.0**-23, 1e-5
# Description in the database -> why ours refuses it: an option that the optimizer has not.
REFUSED = {
    "maximize": "an option of torch's that ours lack: the loss is negated",
    "amsgrad": "an option of torch's that ours lack: the third moment it keeps has no narrow format",
    "dampening": "an option of torch's that ours lack",
    "Tensor lr": "a learning rate is a number: it is read by the host, and would be a synchronisation",
    "tensor lr": "a learning rate is a number: it is read by the host, and would be a synchronisation",
}
# Errors of torch's that ours do not share: a beta is read as a number, whichever of the two has it.
TAKEN = {"betas must be either both floats or both Tensors"}


def info(name: str) -> Any:
    return next(each for each in torch_databases()[1].optim_db if each.name == name)


def ours(name: str) -> Any:
    return getattr(optim, name)


def of_torch(name: str) -> Any:
    """Torch's, with the weight decay of ours: torch's RAdam couples it unless it is told otherwise."""
    kind = getattr(torch.optim, name)
    return partial(kind, decoupled_weight_decay=True) if name == "RAdam" else kind


def build(name: str, params: Any, **options: Any) -> optim.base.LowPrecisionOptimizer:
    """With torch's default where ours is another."""
    if name == "SGD":
        options.setdefault("momentum", 0.0)
    if name == "RAdam":
        options.setdefault("weight_decay", 0.0)
        assert options.pop("decoupled_weight_decay", True), "the only decay that ours has"
    return ours(name)(params, **options)


def weights() -> list[nn.Parameter]:
    """A matrix, a vector, a scalar, one without elements and one that does not lie in the order of its axes."""
    draw = torch.Generator().manual_seed(1)
    turned = torch.randn(9, 6, generator=draw).T
    made = [
        torch.randn(6, 40, generator=draw),
        torch.randn(7, generator=draw),
        torch.randn((), generator=draw),
        turned,
    ]
    return [*map(nn.Parameter, made), nn.Parameter(torch.zeros(0, 3))]


def run(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range = range(STEPS)
) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(100 + step)
        for each in params:
            each.grad = torch.randn(each.shape, generator=draw)
        optimizer.step()


def assert_near(found: list[nn.Parameter], want: list[nn.Parameter]) -> None:
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), atol=ATOL, rtol=RTOL)


def refuses(call: Callable[[], Any], word: str) -> bool:
    """Whether the call ends in a sentence about the option: ours, or Python's about a keyword that a class does not have."""
    try:
        call()
    except NarrowgaugeError as error:
        assert str(error).endswith(".") and word in str(error), error
        return True
    except TypeError as error:
        assert f"unexpected keyword argument {word!r}" in str(error)
        return True
    return False


def test_the_optimizers_of_both_are_those_that_are_tried() -> None:
    both = {each.name for each in torch_databases()[1].optim_db} & set(dir(optim))
    assert both == set(NAMES)


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_the_database_are_followed_or_refused(name: str, in_group: bool) -> None:
    """As keywords and in a group. Refused are those of the list alone, by an error that has the option's name."""
    entries = info(name).optim_inputs_func(device="cpu")
    assert len(entries) >= 5
    for entry in entries:
        first, second = weights(), weights()
        options = dict(entry.kwargs)
        theirs = of_torch(name)(first, **options)
        given = [{"params": second, **options}] if in_group else second

        def trained(given: Any = given, options: Any = options, second: Any = second) -> None:
            run(build(name, given, **({} if in_group else options)), second)

        if entry.desc in REFUSED:
            word = next(
                (each for each in ("maximize", "amsgrad", "dampening") if each in options), "lr"
            )
            if refuses(trained, word):
                continue
        else:
            trained()
        run(theirs, first)
        assert_near(second, first)


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_the_database_are_errors_here(name: str) -> None:
    """A NarrowgaugeError, or torch's own error and words where its base class says them."""
    for entry in info(name).optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = entry.optimizer_error_input
        params = [nn.Parameter(torch.randn(1, 1))] if given.params is None else given.params
        options = given.kwargs
        if "foreach" in options:
            assert refuses(
                lambda params=params, options=options: build(name, params, **options), "foreach"
            )
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                build(name, params, **options)
            except NarrowgaugeError as error:
                assert str(error).endswith("."), (given.desc, error)
            except entry.error_type as error:
                assert re.search(entry.error_regex, str(error)), (given.desc, error)
            else:
                assert given.desc in TAKEN, f"{name}: {given.desc} is taken"


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable"])
@pytest.mark.parametrize("name", NAMES)
def test_options_of_paths_that_ours_lack_are_refused_as_keywords(name: str, option: str) -> None:
    assert refuses(lambda: build(name, weights(), **{option: True}), option)


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_their_own_numbers(name: str) -> None:
    """lr and weight_decay of a group go before those of the optimizer."""
    found = []
    for kind in (
        of_torch(name),
        lambda params, **options: build(name, params, **options),
    ):
        params = weights()
        groups = [{"params": params[:2], "lr": 0.05}, {"params": params[2:], "weight_decay": 0.3}]
        run(kind(groups, lr=0.01), params)
        found.append(params)
    assert_near(found[1], found[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on(name: str) -> None:
    """Through load_state_dict, deepcopy and pickle: the weights are those of an optimizer that was never left (exact)."""
    options = {"lr": 0.02, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    whole = weights()
    run(build(name, whole, **options), whole)
    for way in ("load", "deepcopy", "pickle"):
        params = weights()
        optimizer = build(name, params, **options)
        run(optimizer, params, range(STEPS // 2))
        if way == "load":
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build(name, params, **options)
            optimizer.load_state_dict(state)
        else:
            taken = (
                copy.deepcopy(optimizer)
                if way == "deepcopy"
                else pickle.loads(pickle.dumps(optimizer))
            )
            params = [each for group in taken.param_groups for each in group["params"]]
            optimizer = taken
        run(optimizer, params, range(STEPS // 2, STEPS))
        for one, other in zip(params, whole, strict=True):
            assert torch.equal(one, other), way


@pytest.mark.parametrize("name", NAMES)
def test_hooks_closures_and_zero_grad_are_those_of_torch(name: str) -> None:
    params, seen = weights(), []
    optimizer = build(name, params)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saves"))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append("saved") or state)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("loads"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(each.square().sum() for each in params)
        loss.backward()
        seen.append("closure")
        return loss.detach()

    first = optimizer.step(closure)
    assert float(optimizer.step(closure)) < float(first)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [*("before", "closure", "after") * 2, "saves", "saved", "loads", "loaded"]
    optimizer.zero_grad(set_to_none=False)
    assert all(not each.grad.any() for each in params)
    optimizer.zero_grad()
    assert all(each.grad is None for each in params)


@pytest.mark.parametrize("name", NAMES)
def test_complex_parameters_are_refused(name: str) -> None:
    with pytest.raises(NarrowgaugeError, match=r"complex64.*\.$"):
        build(name, [nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))])


@pytest.mark.parametrize("name", NAMES)
def test_schedulers_of_the_database_move_the_learning_rate(name: str) -> None:
    """A loss of one Rosenbrock-like valley falls, with every scheduler of the database; the rates are those of torch's optimizer."""
    for makers in info(name).scheduler_inputs:
        found = []
        for kind in (
            of_torch(name),
            lambda params, **options: build(name, params, **options),
        ):
            params = weights()
            optimizer = kind(params, lr=0.01)
            schedulers = [make(optimizer) for make in makers]
            rates = []
            for step in range(STEPS):
                run(optimizer, params, range(step, step + 1))
                for each in schedulers:
                    plateau = isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    each.step(*([1.0] if plateau else []))
                rates.append([group["lr"] for group in optimizer.param_groups])
            found.append((rates, params))
        assert found[0][0] == found[1][0]
        assert_near(found[1][1], found[0][1])


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("AdamW", "torch's in ours"),
        ("SGD", "torch's in ours"),
        ("RAdam", "torch's in ours"),
        ("AdamW", "ours in torch's"),
        ("SGD", "ours in torch's"),
        # Not RAdam's: torch takes a group that does not say "decoupled" for coupled (docs/optimizers.md).
    ],
)
def test_states_pass_between_torch_and_ours(name: str, direction: str) -> None:
    """They go on with the other's numbers, or the state is refused in a sentence."""
    options = {"lr": 0.02, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    whole, params = weights(), weights()
    theirs = of_torch(name)
    run(theirs(whole, **options), whole)
    kinds: list[Any] = [theirs, lambda params, **options: build(name, params, **options)]
    first, second = kinds if direction == "torch's in ours" else reversed(kinds)
    before = first(params, **options)
    run(before, params, range(STEPS // 2))
    after = second(params, **options)
    try:
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    except NarrowgaugeError as error:
        assert str(error).endswith("."), error
        return
    run(after, params, range(STEPS // 2, STEPS))
    assert_near(params, whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_as_a_python_number_is_taken(name: str) -> None:
    """States of PyTorch before 1.12 have it so."""
    params = weights()
    options = {"lr": 0.02} | ({"momentum": 0.9} if name == "SGD" else {})
    optimizer = build(name, params, **options)
    run(optimizer, params, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        if "step" in each:
            each["step"] = float(each["step"])
    other = build(name, params, **options)
    try:
        other.load_state_dict(state)
    except NarrowgaugeError as error:
        assert "step" in str(error) and "missing" not in str(error)
        return
    run(other, params, range(2, 4))


def test_a_decay_that_is_not_ours_is_refused() -> None:
    """As a word of a group and in a saved state: RAdam's and Adam's decay enters the moments in torch, unless it is decoupled."""
    for name, theirs in (("RAdam", torch.optim.RAdam), ("AdamW", torch.optim.Adam)):
        params = weights()
        before = theirs(params, weight_decay=0.1)
        run(before, params)
        with pytest.raises(NarrowgaugeError, match="decoupled_weight_decay"):
            build(name, params, weight_decay=0.1).load_state_dict(before.state_dict())
        group = {"params": weights(), "weight_decay": 0.1, "decoupled_weight_decay": False}
        with pytest.raises(NarrowgaugeError, match="decoupled_weight_decay"):
            build(name, [group])
        build(name, [group | {"params": weights(), "weight_decay": 0.0}])
