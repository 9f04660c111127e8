"""How gradients travel in DDP, FSDP2, HSDP and over several nodes: ranks equal to the bit, and the sums those of `messages` (exact).

What FP8 itself costs is bounded where a test says so; the expected error of one rounding to E4M3 is about 2.6 % of a tensor (32 dB).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import messages
from narrowgauge.distributed.gradients import Gradients, install
from narrowgauge.distributed.shared_scale import DOUBLING_STEPS, LARGEST_MU, Controller
from narrowgauge.errors import CheckpointError, ConfigError
from tests.raising import raises
from tests.selection import quick
from tests.small_model import IDS, Model

ONE_ROUNDING = 0.035  # of a gradient, relative; see above
TWO_ROUNDINGS = 0.05


def model(dtype: torch.dtype = torch.float32) -> Model:
    made = Model().to(dtype)
    made.lm_head.weight = nn.Parameter(
        made.embed.weight.detach().clone()
    )  # FSDP2's blocks are not tied
    return made


def loss_of(parallel: nn.Module, batch: int) -> Tensor:
    """Of the batch of one rank and step; batches differ."""
    ids = (IDS + 7 * batch) % 48
    return nn.functional.cross_entropy(parallel(ids).float().flatten(0, 1), ids.roll(1).flatten())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole ones."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = (
                parameter.grad.full_tensor()
                if isinstance(parameter.grad, DTensor)
                else parameter.grad
            )
            found[name.removeprefix("module.")] = whole.detach().clone()
    return found


def shard(made: Model, mesh: Any = None, **options: Any) -> Model:
    for layer in made.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(made, mesh=mesh, **options)


def parallelised(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """(the model, the mesh for `install`). "nodes" have half of the ranks each."""
    world = dist.get_world_size()
    if kind in ("ddp", "ddp views"):
        return DistributedDataParallel(
            model(dtype), gradient_as_bucket_view=kind == "ddp views"
        ), None
    if kind == "fsdp":
        return shard(model(dtype), init_device_mesh("cpu", (world,))), None
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("nodes", "ranks"))
    if kind == "hsdp":
        return shard(model(dtype), mesh), None
    if kind == "ddp nodes":
        return DistributedDataParallel(model(dtype)), mesh
    return shard(model(dtype), mesh["ranks"]), mesh


@contextmanager
def without_sync(parallel: nn.Module) -> Iterator[None]:
    if isinstance(parallel, DistributedDataParallel):
        with parallel.no_sync():
            yield
    else:
        parallel.set_requires_gradient_sync(False)
        yield
        parallel.set_requires_gradient_sync(True)


def _reduced(
    kind: str, numbers: str, reduce: str, dtype: torch.dtype = torch.float32, micro_batches: int = 1
) -> dict[str, Any]:
    """Gradients of one step on this rank, what was sent, and the state."""
    parallel, mesh = parallelised(kind, dtype)
    made = install(parallel, gradients=numbers, reduce=reduce, mesh=mesh)
    first = dist.get_rank() * micro_batches
    for batch in range(first, first + micro_batches - 1):
        with without_sync(parallel):
            loss_of(parallel, batch).backward()
    loss_of(parallel, first + micro_batches - 1).backward()
    return {
        "gradients": gradients_of(parallel),
        "sent": made.bytes_sent,
        "state": made.state_dict(),
        "words": made.descriptions,
    }


def alone(
    batches: int, divisor: float = 1.0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The sum over batches, divided, of one process; bfloat16 gradients summed in float32."""
    total: dict[str, Tensor] = {}
    for batch in range(batches):
        made = model(dtype)
        loss_of(made, batch).backward()
        for name, gradient in gradients_of(made).items():
            total[name] = total.get(name, 0) + gradient.float()
    return {name: gradient / divisor for name, gradient in total.items()}


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Relative, of all gradients as one vector."""
    assert found.keys() == truth.keys()
    missed = sum(
        float((found[name].double() - truth[name].double()).square().sum()) for name in truth
    )
    return math.sqrt(missed / sum(float(x.double().square().sum()) for x in truth.values()))


def assert_ranks_equal(results: list[dict[str, Any]]) -> None:
    for result in results[1:]:
        assert result["state"] == results[0]["state"]
        for name, gradient in results[0]["gradients"].items():
            assert torch.equal(result["gradients"][name], gradient), name


# --- every way of data parallelism ------------------------------------------------------------------------------------------------

WAYS = [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("ddp nodes", 4), ("fsdp nodes", 4), ("fsdp nodes", 2)]  # fmt: skip


@pytest.mark.parametrize("numbers", ("fp8", "fp8-lm"))
@pytest.mark.parametrize(("kind", "world"), WAYS)
@pytest.mark.parametrize("reduce", quick(["mean"], ["mean", "sum"]))
def test_every_way_sums_within_the_rounding_of_its_messages_and_ranks_stay_equal(
    ranks, kind, world, numbers, reduce
):
    results = ranks(world)(_reduced, kind, numbers, reduce)
    assert_ranks_equal(results)
    truth = alone(world, world if reduce == "mean" else 1)
    allowed = ONE_ROUNDING if kind in ("fsdp", "hsdp") else TWO_ROUNDINGS
    assert 0 < error(results[0]["gradients"], truth) < allowed


@pytest.mark.parametrize(("kind", "world"), WAYS)
def test_sixteen_bits_are_torch_s_sums_and_means(ranks, kind, world):
    for reduce, divisor in (("mean", world), ("sum", 1)):
        results = ranks(world)(_reduced, kind, "16bit", reduce)
        assert_ranks_equal(results)
        # A sum of `world` float32 numbers in another order.
        assert error(results[0]["gradients"], alone(world, divisor)) < 1e-6


def test_ddp_s_gradients_are_those_of_the_messages(ranks):
    """Exact: all parameters are in one bucket, in their order; a mean is divided before it is sent back."""
    results = ranks(2)(_reduced, "ddp", "fp8", "mean")
    each = [alone_batch(rank) for rank in range(2)]
    names = list(each[0])
    flat = [torch.cat([gradients[name].reshape(-1) for name in names]) for gradients in each]
    rows = [messages.as_rows(x, 2) for x in flat]
    columns = rows[0].shape[1]
    total = torch.zeros(2, columns)
    for row in rows:
        total += messages.decode(messages.encode(row), columns)
    mean = messages.decode(messages.encode(total / 2), columns).reshape(-1)
    found = torch.cat([results[0]["gradients"][name].reshape(-1) for name in names])
    assert torch.equal(found, mean[: len(found)])


def alone_batch(batch: int) -> dict[str, Tensor]:
    made = model()
    loss_of(made, batch).backward()
    return gradients_of(made)


@pytest.mark.parametrize("kind", ("ddp", "ddp views", "fsdp"))
@pytest.mark.parametrize("numbers", ("fp8", "fp8-lm"))
def test_micro_batches_without_sync_travel_once(ranks, kind, numbers):
    once = ranks(2)(_reduced, kind, numbers, "sum")
    results = ranks(2)(_reduced, kind, numbers, "sum", torch.float32, 3)
    assert_ranks_equal(results)
    assert results[0]["sent"] == once[0]["sent"]
    assert error(results[0]["gradients"], alone(6)) < TWO_ROUNDINGS


@pytest.mark.parametrize("kind", ("ddp", "fsdp"))
@pytest.mark.parametrize("numbers", ("fp8", "fp8-lm"))
def test_bfloat16_gradients(ranks, kind, numbers):
    results = ranks(2)(_reduced, kind, numbers, "mean", torch.bfloat16)
    assert_ranks_equal(results)
    assert all(x.dtype == torch.bfloat16 for x in results[0]["gradients"].values())
    assert error(results[0]["gradients"], alone(2, 2, torch.bfloat16)) < TWO_ROUNDINGS


def _partly_frozen(kind: str, numbers: str) -> dict[str, Any]:
    """A block without trainable parameters, and one that the step does not use."""
    made = model()
    made.layers[0].requires_grad_(False)
    skipped = made.layers.pop(2)
    made.add_module("skipped", skipped)
    if kind == "ddp":
        parallel: nn.Module = DistributedDataParallel(made, find_unused_parameters=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(made.skipped, mesh=mesh)
        parallel = shard(made, mesh)
    state = install(parallel, gradients=numbers)
    loss_of(parallel, dist.get_rank()).backward()
    return {"gradients": gradients_of(parallel), "state": state.state_dict()}


@pytest.mark.parametrize("kind", ("ddp", "fsdp"))
@pytest.mark.parametrize("numbers", ("fp8", "fp8-lm"))
def test_parameters_without_gradient(ranks, kind, numbers):
    results = ranks(2)(_partly_frozen, kind, numbers)
    assert_ranks_equal(results)
    found = results[0]["gradients"]
    assert not any(name.startswith("layers.0.") for name in found)
    assert not any(name.startswith("skipped.") and x.count_nonzero() for name, x in found.items())
    assert found["layers.1.up_proj.weight"].count_nonzero() > 0


def _half_used() -> dict[str, Any]:
    """FSDP2 sends those parameters of a block that have a gradient: here not those of the gate."""
    made = shard(model(), init_device_mesh("cpu", (dist.get_world_size(),)))
    state = install(made, gradients="fp8-lm")
    layer = made.layers[1]
    layer.forward = lambda x: x + layer.down_proj(torch.relu(layer.up_proj(layer.norm(x))))
    loss_of(made, dist.get_rank()).backward()
    return {"gradients": gradients_of(made), "state": state.state_dict()}


def test_a_block_of_which_a_part_has_gradients_takes_one_scale(ranks):
    results = ranks(2)(_half_used)
    assert_ranks_equal(results)
    assert (
        "layers.1.*" in results[0]["state"]["mu"]
        and "layers.0.gate.weight" in results[0]["state"]["mu"]
    )
    assert "layers.1.gate.weight" not in results[0]["gradients"]


def _mixed_precision() -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = shard(model(), init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    state = install(made, gradients="fp8")
    loss_of(made, dist.get_rank()).backward()
    return {"gradients": gradients_of(made), "state": state.state_dict()}


def test_fsdp2_with_a_policy_of_dtypes(ranks):
    results = ranks(2)(_mixed_precision)
    assert_ranks_equal(results)
    assert all(x.dtype == torch.float32 for x in results[0]["gradients"].values())


def _with_tensor_parallelism(numbers: str) -> dict[str, Any]:
    """FSDP2 over TP, 2 x 2: ranks of one TP group have the same batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = model()
    for layer in made.layers:
        parallelize_module(
            layer, mesh["tp"], {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        )
    shard(made, mesh["dp"])
    state = install(made, gradients=numbers)
    loss_of(made, mesh.get_local_rank("dp")).backward()
    return {"gradients": gradients_of(made), "state": state.state_dict()}


@pytest.mark.parametrize("numbers", quick(["fp8-lm"], ["fp8", "fp8-lm"]))
def test_fsdp2_over_tensor_parallelism(ranks, numbers):
    results = ranks(4)(_with_tensor_parallelism, numbers)
    assert_ranks_equal(results)
    assert 0 < error(results[0]["gradients"], alone(2, 2)) < ONE_ROUNDING
    if numbers == "fp8-lm":  # a scale for each tensor, split or not
        assert list(results[0]["state"]["mu"]) == sorted(
            name for name, _ in model().named_parameters()
        )


def _poisoned(kind: str, numbers: str) -> dict[str, Tensor]:
    parallel, mesh = parallelised(kind)
    install(parallel, gradients=numbers, mesh=mesh)
    loss = loss_of(parallel, dist.get_rank())
    (loss * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
    return gradients_of(parallel)


@pytest.mark.parametrize("kind", ("ddp", "fsdp"))
@pytest.mark.parametrize("numbers", ("fp8", "fp8-lm"))
def test_one_rank_s_infinity_is_seen_on_all(ranks, kind, numbers):
    for found in ranks(2)(_poisoned, kind, numbers):
        assert all(not x.isfinite().all() for x in found.values())


# --- training ---------------------------------------------------------------------------------------------------------------------


def _trained(kind: str, numbers: str, steps: int) -> tuple[list[str], float]:
    """A digest of the weights after each step, and the last loss."""
    parallel, mesh = parallelised(kind)
    install(parallel, gradients=numbers, mesh=mesh)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, foreach=False)
    digests = []
    for step in range(steps):
        loss = loss_of(parallel, 2 * step + dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in parallel.parameters()]
        digests.append(str([float(weight.detach().double().sum()) for weight in weights]))
    return digests, float(loss.detach())


@pytest.mark.parametrize("kind", ("ddp", "fsdp"))
@pytest.mark.parametrize("numbers", quick(["fp8"], ["fp8", "fp8-lm"]))
def test_weights_of_all_ranks_are_equal_after_each_step(ranks, kind, numbers):
    (first, loss), (second, _) = ranks(2)(_trained, kind, numbers, 6)
    assert first == second and len(set(first)) == 6 and math.isfinite(loss)


# --- bytes ------------------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Enough numbers that the ends of rows do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _bytes_per_parameter(kind: str, numbers: str) -> tuple[float, float]:
    """(what was given to collectives, what `install` says)."""
    made: nn.Module = Wide()
    count = sum(p.numel() for p in made.parameters())
    made = (
        DistributedDataParallel(made)
        if kind == "ddp"
        else shard(made, init_device_mesh("cpu", (2,)))
    )
    state = install(made, gradients=numbers)
    made(torch.randn(8, 256)).square().sum().backward()
    return sum(state.bytes_sent.values()) / count, state.bytes_per_element


@pytest.mark.parametrize("numbers", ("fp8", "fp8-lm"))
@pytest.mark.parametrize(("kind", "most"), (("ddp", 2.05), ("fsdp", 1.02)))
def test_bytes_per_parameter(ranks, kind, most, numbers):
    for sent, said in ranks(2)(_bytes_per_parameter, kind, numbers):
        assert 1 < sent <= most
        assert sent == pytest.approx(
            said, rel=1e-3
        )  # the ends of rows, and what "fp8-lm" says of its scales


# --- the factor of fp8-lm ---------------------------------------------------------------------------------------------------------


def one(value: float) -> Tensor:
    return torch.tensor([value])


def test_mu_doubles_in_a_thousand_steps_and_is_halved_by_overflow():
    controller, is_valid = Controller(), torch.tensor([True])
    numbers = one(1e6)
    controller.update(["w"], one(11.0), numbers, is_valid)  # 0.0011 %
    assert controller.state_dict() == {"w": 0.5}
    for _ in range(DOUBLING_STEPS):
        controller.update(["w"], one(10.0), numbers, is_valid)  # 0.001 %, not above
    assert controller.state_dict()["w"] == pytest.approx(
        1.0, rel=1e-4
    )  # 1,000 roundings to float32
    for _ in range(2 * DOUBLING_STEPS):
        controller.update(["w"], one(0.0), numbers, is_valid)
    assert controller.state_dict() == {"w": LARGEST_MU}
    controller.update(["w"], one(1e6), numbers, ~is_valid)
    assert controller.state_dict() == {"w": LARGEST_MU}


def _continued(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    parallel, mesh = parallelised(kind)
    made = install(parallel, gradients="fp8-lm", mesh=mesh)
    made.load_state_dict(state)
    loss_of(parallel, dist.get_rank()).backward()
    return made.state_dict()


@pytest.mark.parametrize(
    ("kind", "world"), (("ddp", 2), ("fsdp", 3), ("hsdp", 4), ("fsdp nodes", 4), ("ddp nodes", 4))
)
def test_mu_is_of_the_tensor_s_name_and_goes_on_from_a_checkpoint_of_any_kind(ranks, kind, world):
    names = [name for name, _ in model().named_parameters()]
    saved = {"mu": {name: 0.25 for name in names}}
    for state in ranks(world)(_continued, kind, saved):
        assert list(state["mu"]) == sorted(names)
        assert set(state["mu"].values()) == {float(torch.tensor(0.25) * 2 ** (1 / DOUBLING_STEPS))}
    # The largest numbers overflow: more than 0.001 % of tensors so small.
    too_large = {"mu": {name: 2.0 for name in names}}
    for state in ranks(world)(_continued, kind, too_large):
        assert set(state["mu"].values()) == {1.0}


def test_a_state_of_something_else_is_refused():
    made = Gradients("fp8-lm", "mean", names=("layers.0.weight",))
    with raises(CheckpointError, "gradient-messages.unknown-name"):
        made.load_state_dict({"mu": {"layers.0.weigth": 1.0}})
    for bad in (math.nan, 0.0, -1.0, "1"):
        with raises(CheckpointError, "gradient-messages.mu"):
            made.load_state_dict({"mu": {"layers.0.weight": bad}})
    with raises(CheckpointError, "gradient-messages.state", "['nu']"):
        made.load_state_dict({"nu": {}})
    made.load_state_dict({})
    assert made.state_dict() == {"mu": {}} and Gradients("fp8", "mean").state_dict() == {}


# --- bad input --------------------------------------------------------------------------------------------------------------------


def _refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def _beside_another_hook() -> None:
    parallel = DistributedDataParallel(model())
    parallel.register_comm_hook(None, allreduce_hook)
    install(parallel, gradients="fp8")


def _sharded_over_all() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("nodes", "ranks"))
    install(shard(model(), mesh), gradients="fp8", mesh=mesh)


def _foreign_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    group = dist.new_subgroups(2)[0]
    install(DistributedDataParallel(model(), process_group=group), gradients="fp8", mesh=mesh)


def test_what_cannot_be_is_refused_in_sentences_on_every_rank(ranks):
    assert all("communication hook" in words for words in ranks(2)(_refused, _beside_another_hook))
    assert all(
        "layers.0" in words or "embed" in words for words in ranks(4)(_refused, _sharded_over_all)
    )
    assert all(
        "has the ranks [0, 1, 2, 3], but the model's group has" in w
        for w in ranks(4)(_refused, _foreign_mesh)
    )
    with raises(ConfigError, "distribute.no-gradients", "Model"):
        install(model(), gradients="fp8")


def _asked(kind: str, arguments: list[dict[str, Any]]) -> str:
    return _refused(lambda: install(parallelised(kind)[0], **arguments[dist.get_rank()]))


@pytest.mark.parametrize("kind", ("ddp", "fsdp"))
def test_wrong_and_differing_arguments_end_every_rank(ranks, kind):
    unknown = r"distribute: gradients is 'fp4'; choose one of 16bit, fp8, fp8-lm."
    assert ranks(2)(_asked, kind, [{"gradients": "fp4"}] * 2) == [unknown] * 2
    unknown = r"distribute: reduce is 'max'; choose one of mean, sum."
    assert ranks(2)(_asked, kind, [{"reduce": "max"}] * 2) == [unknown] * 2
    differ = "distribute: ranks differ in gradients: '16bit' on rank 0; 'fp8' on rank 1. Give all ranks the same."
    assert ranks(2)(_asked, kind, [{}, {"gradients": "fp8"}]) == [differ] * 2
