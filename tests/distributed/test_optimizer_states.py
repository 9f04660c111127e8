"""States of sharded optimizers in checkpoints, norms of sharded gradients, and ZeRO: one process, to the bit (exact)."""

from __future__ import annotations

import math
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.optim import rules
from narrowgauge.optim.clipping import clip_gradients, gradient_norm
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.optimizers import OPTIMIZERS
from tests.compare import assert_same
from tests.distributed.test_optimizers import BF16, FP32, gradient, placed, whole
from tests.raising import raises
from tests.selection import quick

STEPS = 2


def build(
    rule: str, options: dict[str, Any], dtype: torch.dtype, mesh: DeviceMesh | None
) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(300, 65), nn.ReLU(), nn.Linear(65, 64, bias=False), nn.LayerNorm(64)
    ).to(dtype)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[rule](model, lr=1e-2, weight_decay=0.1, **options)


def step(model: nn.Module, optimizer: Any, first: int = 0, last: int = STEPS) -> None:
    for number in range(first, last):
        for name, parameter in model.named_parameters():
            g = gradient(name, parameter.shape, number, parameter.dtype)
            on = (
                (parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else (None, ())
            )
            parameter.grad = placed(g, *on)
        optimizer.step()


def everything(model: nn.Module, optimizer: Any) -> Any:
    return whole(dict(model.named_parameters()), optimizer)


# --- checkpoints -----------------------------------------------------------------------------------------------------------------


def save(folder: str, model: nn.Module, optimizer: Any) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "states": states}, checkpoint_id=folder)


def begin(folder: str, call: tuple[Any, ...]) -> None:
    model, optimizer = build(*call, init_device_mesh("cpu", (dist.get_world_size(),)))
    step(model, optimizer)
    save(folder, model, optimizer)


def load(folder: str, call: tuple[Any, ...]) -> tuple[nn.Module, Any]:
    world = dist.get_world_size()
    model, optimizer = build(*call, init_device_mesh("cpu", (world,)) if world > 1 else None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "states": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return model, optimizer


def go_on(folder: str, then: str, call: tuple[Any, ...], done: int) -> None:
    """Loads, compares with one process that was not interrupted, makes one step more, compares, and saves."""
    resumed, unbroken = load(folder, call), build(*call, None)
    step(*unbroken, 0, done)
    assert_same(everything(*resumed), everything(*unbroken))
    for each in (resumed, unbroken):
        step(*each, done, done + 1)
    assert_same(everything(*resumed), everything(*unbroken))
    save(then, *resumed)


CALLS = [("adamw", {"states": states}, FP32) for states in STATES]
CALLS += [
    ("sgd", {"states": "8bit", "master": "bf16-remainder"}, BF16),
    ("lion", {"states": "4bit", "master": "fp16-scaled"}, BF16),
]


@pytest.mark.parametrize(
    "call",
    [each if each is CALLS[-1] else pytest.param(each, marks=pytest.mark.slow) for each in CALLS],
    ids=str,
)
def test_torchs_checkpoints_reshard_states(ranks, call, tmp_path):
    """2 ranks -> 1 -> 3 (uneven) -> 2: the numbers of a run that was not interrupted."""
    ranks(2)(begin, str(tmp_path / "0"), call)
    for place, world in enumerate((1, 3, 2)):
        ranks(world)(
            go_on, str(tmp_path / str(place)), str(tmp_path / str(place + 1)), call, STEPS + place
        )


def one_process(rank_zero_folder: str, call: tuple[Any, ...]) -> None:
    """What one process saved as whole tensors is taken up by shards, and the other way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    single = build(*call, None)
    step(*single)
    model, optimizer = build(*call, mesh)
    with torch.no_grad():
        for own, other in zip(model.parameters(), single[0].parameters(), strict=True):
            own.copy_(distribute_tensor(other.detach(), mesh, own.placements))
    optimizer.load_state_dict(single[1].state_dict())
    for each in (single, (model, optimizer)):
        step(*each, STEPS, STEPS + 1)
    assert_same(everything(model, optimizer), everything(*single))
    again = build(*call, None)[1]
    again.load_state_dict(ng.optim.full_state_dict(optimizer))
    assert_same(again.state_dict()["state"], single[1].state_dict()["state"])
    sharded = optimizer.state_dict()
    with raises(CheckpointError, "optim.state-placement"):
        again.load_state_dict(sharded)
    optimizer.load_state_dict(sharded)
    kept = ng.optim.full_state_dict(optimizer, rank=1)["state"]
    assert bool(kept) == (dist.get_rank() == 1)


@pytest.mark.parametrize("call", CALLS[1:3] + CALLS[5:], ids=str)
def test_whole_states_go_into_shards_and_back(ranks, call, tmp_path):
    ranks(2)(one_process, str(tmp_path), call)


def poisoned() -> str:
    """A NaN in the shard of one rank: all refuse."""
    model, optimizer = build("adamw", {"states": "8bit"}, FP32, init_device_mesh("cpu", (2,)))
    step(model, optimizer)
    saved = optimizer.state_dict()
    if dist.get_rank() == 1:
        saved["state"][0]["exp_avg_scale"].to_local()[-1] = math.nan
    with pytest.raises(CheckpointError) as refused:
        optimizer.load_state_dict(saved)
    return str(refused.value)


def test_all_ranks_refuse_what_one_of_them_finds(ranks):
    first, second = ranks(2)(poisoned)
    assert first == "AdamW: another rank refused its part of the saved state, and says why."
    assert second.startswith("AdamW: parameter 0: exp_avg_scale is not finite in 2 of ")


def test_a_scaled_master_of_one_axis_that_was_saved_before_goes_on_in_float32():
    """Its tiles could not be sharded; the number that it stood for is kept."""
    from narrowgauge.optim import masters

    x = torch.linspace(-1, 1, 300)
    codes, scale = masters.encode_scaled(
        torch.nn.functional.pad(x, (0, 212)).view(1, 2, 256), torch.full((1, 2, 256), 0.5)
    )
    expected = masters.decode_scaled(codes, scale).flatten()[:300]
    optimizer = ng.optim.SGD([nn.Parameter(masters.rounded(expected, BF16))], master="fp16-scaled")
    state = {
        "step": torch.tensor(3.0),
        "momentum_buffer": torch.zeros(300),
        "master": codes.flatten()[:300],
        "master_scale": scale,
    }
    saved = {"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"][0]["master"], expected)
    assert saved["state"][0]["master"].dtype == torch.float16


# --- clipping --------------------------------------------------------------------------------------------------------------------


def clipped(world: int, scale: float) -> list[float]:
    """Gradients on a mesh, on an axis of it, in partial sums, and plain: one norm, of float64, and no gather without need."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    full = {name: gradient(name, torch.Size(shape), 0, FP32) * scale for name, shape in
            {"both": (9, 50), "one": (7, 30), "same": (6, 6), "sum": (4, 5), "plain": (3, 8)}.items()}  # fmt: skip
    placements = {
        "both": (mesh, [Shard(0), Shard(1)]), "one": (mesh["a"], [Shard(0)]), "same": (mesh, [Replicate(), Replicate()]),
    }  # fmt: skip
    made = []
    for name, g in full.items():
        on = placements.get(name, (None, ()))
        parameter = nn.Parameter(placed(torch.zeros_like(g), *on))
        parameter.grad = placed(g.clone(), *on)
        if name == "sum":
            parameter = nn.Parameter(
                distribute_tensor(torch.zeros_like(g), mesh, [Replicate(), Replicate()])
            )
            parameter.grad = DTensor.from_local(g / 2, mesh, [Partial(), Replicate()])
        made.append(parameter)
    norm = clip_gradients(made, 1.0)
    truth = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in full.values()]))
    torch.testing.assert_close(norm.double(), truth, rtol=2.0**-24, atol=0)
    plain = [nn.Parameter(torch.zeros_like(g)) for g in full.values()]
    for parameter, g in zip(plain, full.values(), strict=True):
        parameter.grad = g.clone()
    assert_same(clip_gradients(plain, None, wide=True), norm)
    factor = min(1.0, 1.0 / float(truth))
    for parameter, (name, g) in zip(made, full.items(), strict=True):
        found = (
            parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        )
        torch.testing.assert_close(
            found.double(), g.double() * factor, rtol=2.0**-21, atol=0, msg=name
        )
    return [float(norm)]


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_the_norm_is_of_all_ranks_and_the_same_on_all(ranks, scale):
    found = ranks(4)(clipped, 4, scale)
    assert len({tuple(each) for each in found}) == 1


def norms_of_stages() -> tuple[float, float]:
    """Other parameters on each rank, on the last none."""
    rank = dist.get_rank()
    own = [torch.full((3,), 2.0**60 * (rank + 1))] if rank < 2 else []
    return float(gradient_norm(own, stages=dist.group.WORLD)), float(gradient_norm(own))


def test_the_norm_of_a_pipeline_is_of_all_stages(ranks):
    found = ranks(3)(norms_of_stages)
    assert {norm for norm, _ in found} == {float(torch.tensor(2.0**60 * math.sqrt(15), dtype=FP32))}
    assert found[2][1] == 0


# --- ZeRO ------------------------------------------------------------------------------------------------------------------------

MATRIX = rules.Rule(
    name="matrix", moments=("m",), constants=lambda group, step: group["lr"], granularity="matrix",
    update=lambda w, g, m, v, c, holds: (w - c * (m * 0.5 + g) / (g.norm() + 1e-6), m * 0.5 + g, v, g == 0),
)  # fmt: skip


def zero_steps(calls: list[tuple[Any, ...]]) -> None:
    for rule, options, dtype in calls:
        single = build(rule, options, dtype, None)
        model = build(rule, options, dtype, None)[0]
        optimizer = ng.optim.zero(model, OPTIMIZERS[rule], lr=1e-2, weight_decay=0.1, **options)
        for each in ((model, optimizer), single):
            step(*each)
        optimizer.consolidate_state_dict(to=0)
        for own, other in zip(model.parameters(), single[0].parameters(), strict=True):
            assert_same(own.detach(), other.detach(), at=f"{rule}, {options}")
        if dist.get_rank() == 0:
            assert_same(
                optimizer.state_dict()["state"],
                single[1].state_dict()["state"],
                at=f"{rule}, {options}",
            )
        assert ng.optim.state_bytes(optimizer).total < ng.optim.state_bytes(single[1]).total


@pytest.mark.parametrize("world", quick([2], [2, 3]))
def test_zero_has_the_numbers_of_one_process(ranks, world):
    calls = [(rule, {"states": states}, FP32) for rule in OPTIMIZERS for states in STATES]
    calls += [
        ("adamw", {"states": "8bit", "master": master}, BF16)
        for master in ("fp32", "fp16-scaled", "stochastic")
    ]
    ranks(world)(zero_steps, calls)


def zero_of_matrices() -> None:
    found = []
    for is_zero in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(256, 64, bias=False), nn.Linear(64, 64, bias=False))
        groups = ng.optim.groups(model)
        groups[0]["rule"] = MATRIX
        make = ng.optim.zero if is_zero else ng.optim.AdamW
        optimizer = make(groups, states="8bit", lr=1e-2)
        step(model, optimizer)
        found.append([parameter.detach() for parameter in model.parameters()])
    assert_same(*found)


def test_zero_steps_rules_of_whole_matrices(ranks):
    ranks(2)(zero_of_matrices)


def zero_resumed(options: dict[str, Any]) -> None:
    """Consolidated, sent to all, and loaded: the steps after it are those of one process. More ranks than tensors of a group."""
    single = build("adamw", options, BF16, None)
    model = build("adamw", options, BF16, None)[0]
    optimizer = ng.optim.zero(model, ng.optim.AdamW, lr=1e-2, weight_decay=0.1, **options)
    for each in ((model, optimizer), single):
        step(*each)
    optimizer.consolidate_state_dict(to=0)
    sent = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    path = [tempfile.mkdtemp() + "/zero.pt" if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    if dist.get_rank() == 0:
        torch.save(sent[0], path[0])
    dist.barrier()
    saved = torch.load(path[0])
    fresh = ng.optim.zero(model, ng.optim.AdamW, lr=5.0, **options)
    fresh.load_state_dict(saved)
    assert not fresh.state and saved["state"][0] is not None and fresh.param_groups[0]["lr"] == 1e-2
    for each in ((model, fresh), single):
        step(*each, STEPS, STEPS + 2)
    for own, other in zip(model.parameters(), single[0].parameters(), strict=True):
        assert_same(own.detach(), other.detach())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].float().fill_(math.nan)
    with pytest.raises(
        CheckpointError,
        match=r"the saved state has another form|rank \d refused its part of the saved state",
    ):
        fresh.load_state_dict(saved)


@pytest.mark.parametrize("world", [2, 3])
def test_zero_goes_on_from_a_consolidated_state(ranks, world):
    ranks(world)(zero_resumed, {"states": "fp8", "master": "bf16-remainder"})


def zero_converted(recipe: str) -> None:
    """A model whose layers keep casts of weights: those that come from other ranks are cast anew, and windows move once a step."""
    found = []
    for is_zero in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        ng.convert(model, recipe)
        optimizer = (ng.optim.zero if is_zero else ng.optim.AdamW)(model, states="8bit", lr=1e-2)
        for number in range(3):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(dict(model.state_dict()))
    assert_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_zero_ends_the_steps_of_a_converted_model_once(ranks, recipe):
    ranks(2)(zero_converted, recipe)


def test_the_balance_of_zero_is_told_before_the_run():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    even = ng.optim.zero_balance(model, 4, states="8bit")
    assert even.ratio == 1 and set(even.parameters) == {65536}
    assert (
        str(even)
        == "4 ranks: the fullest, rank 0, keeps 132,100 bytes of states for 65,536 parameters, 1.00 of the mean"
    )
    uneven = ng.optim.zero_balance(model, 8, states="fp32", optimizer=ng.optim.Lion)
    assert uneven.ratio == 2 and str(uneven).endswith("2.00 of the mean; 4 ranks keep nothing")
    with raises(ConfigError, "zero.world", "= 0"):
        ng.optim.zero_balance(model, 0)


def zero_balanced() -> bool:
    model = build("adamw", {}, FP32, None)[0]
    optimizer = ng.optim.zero(model, states="8bit")
    step(model, optimizer)
    told = ng.optim.zero_balance(model, 3, states="8bit")
    found = ng.optim.state_bytes(optimizer)
    rank = dist.get_rank()
    return found.total == told.state_bytes[rank] and found.parameters == told.parameters[rank]


def test_the_balance_is_that_of_the_run(ranks):
    assert ranks(3)(zero_balanced) == [True] * 3


def zero_refused() -> None:
    model = build("adamw", {}, FP32, None)[0]
    with pytest.raises(
        ConfigError, match=r"zero: parameters have no names.*model\.named_parameters"
    ):
        ng.optim.zero([{"params": list(model.parameters())}])
    with raises(ConfigError, "zero.optimizer", "AdamW"):
        ng.optim.zero(model, torch.optim.AdamW)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(
        ConfigError, match=r"zero: 0\.weight is a DTensor, whose states are sharded already"
    ):
        ng.optim.zero(model)


def test_zero_refuses_what_it_cannot_keep(ranks):
    ranks(2)(zero_refused)


def test_zero_needs_ranks():
    with raises(ConfigError, "zero.no-group", "Lion"):
        ng.optim.zero(nn.Linear(4, 4), ng.optim.Lion)


def casts_refused() -> list[str]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ng.convert(model, "fp8-current")
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ng.optim.AdamW(model, states="8bit")
        return optimizer.cast_weights(model).summary()


def test_weights_on_shards_are_not_cast_by_the_step(ranks):
    assert ranks(2)(casts_refused)[0] == ["a DTensor hides the memory of its weight: 2 layers"]
