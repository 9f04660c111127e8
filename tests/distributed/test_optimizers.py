"""Optimizers on shards of parameters: weights and states of one process, to the bit (exact); 2 to 4 ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.optim import param_groups, rules, shards
from narrowgauge.optim.moments import STATES
from narrowgauge.optim.optimizers import OPTIMIZERS
from narrowgauge.optim.states import named
from tests.compare import assert_same

# Rows that 2, 3 and 4 ranks share unevenly; fewer rows than ranks; 3 axes; a vector whose shards begin within a block of noise; columns
# that make whole tiles of 128 and 256 in two shards, the last one short.
SHAPES = {
    "wide": (7, 1003),
    "few": (2, 4096),
    "experts": (5, 12, 96),
    "norm": (77,),
    "even": (12, 1024),
    "short": (9, 1023),
}
STEPS = 3
MASTERS = ("fp32", "bf16-remainder", "fp16-scaled", "stochastic")


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(shape, generator=generator) * 0.02).to(dtype)
        for name, shape in SHAPES.items()
    }


def gradient(name: str, shape: torch.Size, step: int, dtype: torch.dtype) -> Tensor:
    """Nine decades, a row of zeros, and columns that only decay."""
    generator = torch.Generator().manual_seed(100 * step + len(name))
    g = (
        torch.randn(shape, generator=generator)
        * torch.exp(3 * torch.randn(shape, generator=generator))
        * 1e-3
    )
    if g.ndim > 1:
        g[0], g[..., 40:60] = 0.0, g[..., 40:60] * (step == 0)
    return g.to(dtype)


def placed(x: Tensor, mesh: DeviceMesh | None, placements: list[Any]) -> Tensor:
    return x.clone() if mesh is None else distribute_tensor(x, mesh, placements)


def trained(
    rule: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    placements: Any = (),
) -> tuple[dict[str, nn.Parameter], Any]:
    """placements: of tensors of two axes or more; vectors are cut as their first axis is, or whole."""

    def fitting(shape: torch.Size) -> list[Any]:
        return [
            Replicate() if isinstance(each, Shard) and each.dim >= len(shape) else each
            for each in placements
        ]

    parameters = {
        name: nn.Parameter(placed(x, mesh, fitting(x.shape))) for name, x in weights(dtype).items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # of tiles that shards cut, where a test has them
        optimizer = OPTIMIZERS[rule](list(parameters.items()), lr=1e-2, weight_decay=0.1, **options)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = placed(
                gradient(name, parameter.shape, step, dtype), mesh, fitting(parameter.shape)
            )
        optimizer.step()
    return parameters, optimizer


def whole(parameters: dict[str, nn.Parameter], optimizer: Any) -> tuple[Any, Any]:
    """Weights and states by name and place; a step in backward makes states in the order of the gradients."""
    states = ng.optim.full_state_dict(optimizer)["state"]
    return {name: shards.gathered(each.detach()) for name, each in parameters.items()}, dict(
        sorted(states.items())
    )


def compare(
    rule: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    placements: list[Any],
) -> None:
    mesh = init_device_mesh("cpu", sizes)
    assert_same(
        whole(*trained(rule, options, dtype, mesh, placements)),
        whole(*trained(rule, options, dtype)),
    )


def compare_all(calls: list[tuple[Any, ...]]) -> None:
    for call in calls:
        try:
            compare(*call)
        except BaseException as error:
            error.add_note(f"in {call}")
            raise


ROWS, COLUMNS = [Shard(0)], [Shard(1)]
BF16, FP32 = torch.bfloat16, torch.float32
STATES_OF_RULES = [(rule, {"states": states}, FP32) for rule in OPTIMIZERS for states in STATES]
WITH_MASTERS = [
    ("adamw", {"states": states, "master": master}, BF16)
    for states in ("fp32", "8bit")
    for master in MASTERS
]
# Every rule, state and master.
QUICK = [*STATES_OF_RULES[:5], STATES_OF_RULES[6], STATES_OF_RULES[12], *WITH_MASTERS[4:]]
PAIRS = [  # one quick one of two new formats, of which the tiles of one are smaller
    ("adamw", {"states": "fp16/4bit", "master": "fp16-scaled"}, BF16),
    ("adamw", {"states": "8bit/fp32"}, FP32),
    ("adamw", {"states": "fp8/e4m3", "master": "stochastic"}, BF16),
    ("adamw", {"states": "4bit/fp16"}, FP32),
    ("lion", {"states": "fp16"}, FP32),
]
QUICK.append(PAIRS[0])
STATES_OF_RULES += PAIRS[1:]
OTHERS = [each for each in STATES_OF_RULES + WITH_MASTERS if each not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "calls", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["every one", "pairs"]
)
def test_rows_have_the_numbers_of_one_process(ranks, world, calls):
    """What FSDP2 makes: uneven and empty shards, every rule, state and master."""
    ranks(world)(compare_all, [(*each, (world,), ROWS) for each in calls])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_plain_torch_has_them_too(ranks, world):
    torch_ones = [(rule, {**options, "backend": "torch"}, dtype) for rule, options, dtype in QUICK]
    ranks(world)(compare_all, [(*each, (world,), ROWS) for each in torch_ones])


def compare_columns(calls: list[tuple[Any, ...]]) -> None:
    """Without the tensors whose states stay wide because shards cut their tiles: of those, that they do."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for rule, options, dtype in calls:
        sharded, one = trained(rule, options, dtype, mesh, COLUMNS), trained(rule, options, dtype)
        assert {name for name in SHAPES if shards.fits(sharded[0][name], 256)} == {
            "few",
            "norm",
            "even",
            "short",
        }
        found, expected = whole(*sharded), whole(*one)
        for place, name in enumerate(SHAPES):
            if shards.fits(sharded[0][name], named(options["states"]).tile):
                at = f"{name} of {rule}, {options}"
                assert_same(found[0][name], expected[0][name], at=at)
                assert_same(found[1][place], expected[1][place], at=at)
            elif rule == "adamw":
                assert (
                    options["states"] == "fp32" or found[1][place]["exp_avg"].dtype == torch.float32
                )


@pytest.mark.slow
def test_columns_have_the_numbers_of_one_process(ranks):
    """What row-wise tensor parallelism makes: shards of whole tiles, of which the last may be short."""
    ranks(2)(compare_columns, STATES_OF_RULES + WITH_MASTERS[4:])


@pytest.mark.parametrize(
    "placements",
    [
        pytest.param([Replicate(), Shard(0)], marks=pytest.mark.slow),
        pytest.param([Shard(0), Shard(0)], marks=pytest.mark.slow),
        [Shard(0), Shard(1)],
        [Replicate(), Replicate()],
    ],
    ids=["HSDP", "rows twice", "rows, columns", "whole"],
)
def test_two_axes_of_a_mesh_have_them(ranks, placements):
    calls = [
        ("adamw", {"states": "8bit"}, FP32),
        ("sgd", {"states": "fp8-lm", "master": "stochastic"}, BF16),
    ]
    if placements[1] == Shard(1):
        ranks(4)(compare_even, calls, (2, 2), placements)
    else:
        ranks(4)(compare_all, [(*each, (2, 2), placements) for each in calls])


def compare_even(
    calls: list[tuple[Any, ...]], sizes: tuple[int, ...], placements: list[Any]
) -> None:
    mesh = init_device_mesh("cpu", sizes)
    for rule, options, dtype in calls:
        sharded, one = (
            whole(*trained(rule, options, dtype, mesh, placements)),
            whole(*trained(rule, options, dtype)),
        )
        place = list(SHAPES).index("even")
        assert_same(sharded[0]["even"], one[0]["even"])
        assert_same(sharded[1][place], one[1][place])


def strided(world: int) -> None:
    """FSDP2 over tensor parallelism: rows cut by the latter first."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for is_sharded in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(24, 512, bias=False), nn.ReLU(), nn.Linear(512, 40))
        model.append(nn.Linear(40, 512))
        if is_sharded:
            plan = {
                "0": ColwiseParallel(),
                "2": RowwiseParallel(),
                "3": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(model, mesh["tp"], plan)
            fully_shard(model, mesh=mesh["dp"])
        optimizer = ng.optim.AdamW(model, lr=1e-2, states="fp8", seed=4)
        for step in range(STEPS):
            for name, parameter in model.named_parameters():
                g = gradient(name, parameter.shape, step, FP32)
                parameter.grad = placed(
                    g,
                    *((parameter.device_mesh, parameter.placements) if is_sharded else (None, ())),
                )
            optimizer.step()
        models.append((dict(model.named_parameters()), optimizer))
    assert any("_Strided" in str(each.placements) for each in models[0][0].values())
    assert_same(whole(*models[0]), whole(*models[1]))


def test_fsdp_over_tensor_parallelism_has_them(ranks):
    ranks(4)(strided, 4)


def fsdp(options: dict[str, Any], in_backward: bool) -> None:
    """A training loop on two ranks that see the same batch: the mean of two equal gradients is exact."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for is_sharded in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(64, 129), nn.ReLU(), nn.Linear(129, 65), nn.LayerNorm(65)
        ).to(BF16)
        if is_sharded:
            for layer in model:
                if list(layer.parameters()):
                    fully_shard(layer)
            fully_shard(model)
        optimizer = ng.optim.AdamW(model, lr=1e-2, **options)
        if in_backward:
            ng.optim.in_backward(optimizer)
        for step in range(STEPS):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(BF16)
            model(x).float().square().sum().backward()
            if in_backward:
                assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(dict(model.named_parameters()), optimizer))
    assert_same(*found)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_loop_under_fsdp_has_them(ranks, in_backward):
    """Also where the step is inside the backward pass: after each reduce-scatter."""
    for master in ("stochastic", "fp16-scaled"):
        ranks(2)(fsdp, {"states": "4bit", "master": master}, in_backward)


def fsdp_in_fp8(clips: str) -> None:
    """Two micro-batches whose sums are held, or step in the second one, on shards and on one process.

    Not with clip="previous", where the order counts in which gradients come: FSDP2 calls hooks in another one than autograd.
    """
    from torch.distributed.fsdp import fully_shard

    found = []
    for is_sharded in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(64, 129), nn.ReLU(), nn.Linear(129, 65), nn.LayerNorm(65)
        ).to(BF16)
        if is_sharded:
            fully_shard(model)
        optimizer = ng.optim.AdamW(model, lr=1e-2, states="8bit/fp16", master="stochastic")
        if clips == "held":
            handle = ng.optim.hold_gradients(optimizer, clip_norm=0.1)
        else:
            handle = ng.optim.in_backward(optimizer, clip_norm=0.1, clip=clips, accumulation=2)

        for step in range(STEPS):

            def closure(step: int = step) -> None:
                for turn in range(2):
                    x = torch.randn(
                        16, 64, generator=torch.Generator().manual_seed(2 * step + turn)
                    ).to(BF16)
                    model(x).float().square().sum().backward()  # noqa: B023

            if clips != "two-pass":
                closure()
            optimizer.step(closure if clips == "two-pass" else None)
            optimizer.zero_grad()
        found.append((*whole(dict(model.named_parameters()), optimizer), handle.norm))
    assert_same(*found)


def test_gradients_in_fp8_and_their_norms_are_those_of_one_process(ranks):
    for clips in ("held", "two-pass"):
        ranks(2)(fsdp_in_fp8, clips)


# --- names -----------------------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_noise_goes_by_names_without_those_of_wrappers():
    """Order and wrappers change nothing; another name does. Without names the place decides, as before."""

    def stepped(named: list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        optimizer = ng.optim.AdamW(named, states="8bit", master="stochastic")
        for name, parameter in named:
            parameter.grad = gradient(name[-3:], parameter.shape, 1, BF16)
        optimizer.step()
        return {name: parameter.detach() for name, parameter in named}

    def parameters(names: list[str]) -> list[tuple[str, nn.Parameter]]:
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(16, 256, generator=generator).to(BF16)
        return [(name, nn.Parameter(start.clone())) for name in names]

    found = stepped(parameters(["a.one", "a.two"]))
    again = stepped(parameters(["a.two", "a.one"]))
    wrapped = stepped(
        parameters(
            ["module.a._orig_mod.one", "a._fsdp_wrapped_module._checkpoint_wrapped_module.two"]
        )
    )
    assert_same(again["a.one"], found["a.one"])
    assert_same(list(wrapped.values()), list(found.values()))
    assert not torch.equal(found["a.one"], stepped(parameters(["b.one"]))["b.one"])
    unnamed = [nn.Parameter(parameter.detach().clone()) for _, parameter in parameters(["x", "y"])]
    assert [number for *_, number in ng.optim.AdamW(unnamed, master="stochastic")._indexed()] == [
        0,
        1,
    ]


# --- what is refused and told ------------------------------------------------------------------------------------------------------


def refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(
        ConfigError,
        match=r"placements \(P\(?sum\)?\) hold sums that are not added up yet, .* Redistribute it",
    ):
        ng.optim.AdamW([partial])
    rule = rules.Rule(
        name="whole", moments=("m",), constants=lambda group, step: (), granularity="matrix",
        update=lambda w, g, m, v, c, holds: (w - g, m, v, g == 0),
    )  # fmt: skip
    rows = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    with pytest.raises(ConfigError, match=r"works on whole matrices.* narrowgauge\.optim\.zero"):
        ng.optim.AdamW([{"params": [rows], "rule": rule}])
    same = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    optimizer = ng.optim.AdamW([{"params": [same], "rule": rule}])
    same.grad = torch.ones_like(same)
    optimizer.step()
    assert_same(same.to_local().detach(), torch.zeros(4, 4))


def test_what_cannot_be_stepped_is_refused_with_the_next_step(ranks):
    ranks(2)(refused)


def told() -> str:
    mesh = init_device_mesh("cpu", (2,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cut = nn.Parameter(distribute_tensor(torch.ones(16, 384), mesh, [Shard(1)]))
        kept = nn.Parameter(distribute_tensor(torch.ones(16, 512), mesh, [Shard(1)]))
        optimizer = ng.optim.AdamW([cut, kept], states="8bit")
    table = ng.optim.state_bytes(optimizer)
    assert table.of(cut) == 16 * 192 * 8 + 4 and table.of(kept) == 16 * 256 * 2 + 16 * 4 + 4
    for parameter in (cut, kept):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    again = ng.optim.state_bytes(optimizer)
    assert again.total == table.total and again.parameters == 16 * (192 + 256)
    assert param_groups.CUT in str(again)
    return "; ".join(str(each.message) for each in caught)


def test_states_that_stay_wide_are_told_once(ranks):
    first, second = ranks(2)(told)
    assert second == "" and first.startswith(
        "AdamW: 1 of 2 parameters keep float32 states: shards of their columns cut tiles of 256, for example of [16, 384] in [16, 192]."
    )


def gradients_elsewhere() -> None:
    """Partial gradients, and those of other placements, are brought to the parameter's."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for placement in (Partial(), Shard(1), Shard(0)):
        parameter = nn.Parameter(distribute_tensor(torch.ones(8, 512), mesh, [Shard(0)]))
        g = torch.arange(8 * 512.0).view(8, 512)
        parameter.grad = (
            DTensor.from_local(g / 2, mesh, [placement])
            if placement == Partial()
            else distribute_tensor(g, mesh, [placement])
        )
        optimizer = ng.optim.AdamW([parameter], states="8bit")
        optimizer.step()
        found.append(whole({"w": parameter}, optimizer))
    assert_same(found[0], found[2])
    assert_same(found[1], found[2])


def test_gradients_of_other_placements_are_brought_to_the_weights(ranks):
    ranks(2)(gradients_elsewhere)


def counted() -> tuple[int, int, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parameters, optimizer = trained(
        "adamw", {"states": "8bit"}, FP32, mesh, [Replicate(), Shard(0)]
    )
    for name, parameter in parameters.items():
        parameter.grad = distribute_tensor(
            gradient(name, parameter.shape, 9, FP32), mesh, parameter.placements
        )
    calls = []
    for work in (
        optimizer.step,
        lambda: ng.optim.clip_gradients(parameters.values(), 1.0),
        lambda: ng.optim.state_bytes(optimizer),
    ):
        with CommDebugMode() as mode:
            work()
        calls.append(mode.get_total_counts())
    return tuple(calls)


def test_a_step_asks_nothing_of_other_ranks_and_clipping_once(ranks):
    assert ranks(4)(counted) == [(0, 1, 0)] * 4


def offloaded() -> None:
    """Of parameters whose part lies elsewhere than the mesh (FSDP2's CPU offload; here on meta) states do, too."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = distribute_tensor(torch.zeros(8, 300), mesh, [Shard(0)])
    state = shards.wrapped(torch.zeros(4, 2, device="meta"), parameter, torch.Size((8, 2)))
    assert isinstance(state, DTensor) and state.shape == (8, 2) and state.placements == (Shard(0),)
    assert state.device_mesh == mesh and state.to_local().is_meta


def test_states_stay_where_parameters_are_offloaded(ranks):
    ranks(2)(offloaded)


def sequence_parallel() -> list[float]:
    """FSDP2 over tensor and sequence parallelism, whose norms have gradients of other placements than their weights."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses = []
    for is_sharded in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.LayerNorm(64)
        )
        if is_sharded:
            plan = {
                "0": SequenceParallel(), "4": SequenceParallel(use_local_output=True),
                "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }  # fmt: skip
            parallelize_module(
                model,
                mesh["tp"],
                {
                    "": PrepareModuleInput(
                        input_layouts=Replicate(), desired_input_layouts=Shard(1)
                    ),
                    **plan,
                },
            )
            fully_shard(model, mesh=mesh["dp"])
        optimizer = ng.optim.AdamW(model, lr=3e-3, states="8bit")
        for step in range(4):
            x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(step))
            y = model(x)
            if is_sharded:
                y = DTensor.from_local(y, mesh["tp"], [Shard(1)]).full_tensor()
            loss = (y - x.roll(1, -1)).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            losses.append(float(ng.optim.clip_gradients(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_a_loop_of_fsdp_tensor_and_sequence_parallelism_trains(ranks):
    """Bounded: sums over four ranks are of another order, 1e-4 of the loss and of the norm of its gradient after four steps."""
    found = ranks(4)(sequence_parallel)
    assert all(each == found[0] for each in found)
    torch.testing.assert_close(
        torch.tensor(found[0][:8]), torch.tensor(found[0][8:]), rtol=1e-4, atol=0
    )
