"""Pipelines on torch's schedules compute, to the bit, what one process computes with the same micro-batches; messages of 8 bits too."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.distributed import distributed_state
from narrowgauge.distributed.pipeline import ACTIVATION_GRADIENTS
from narrowgauge.distributed.stage_messages import DecodeMessage, EncodeMessage, message_like
from narrowgauge.errors import ConfigError
from tests.distributed.models import TOKENS, WIDTH, build
from tests.distributed.pipelines import SCHEDULES, places, run_alone, run_pipeline, stages_of
from tests.raising import coded, require
from tests.selection import quick

STEPS, MICRO_BATCHES, BLOCKS = 3, 4, 4
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble")  # schedules with two halves of a backward pass
OLDEST = torch.__version__.startswith("2.11")
NO_SPLIT = "torch 2.11 cannot split the backward pass of an autograd function of one's own"
# Recipes with memory and with random numbers of each kind, and one with neither.
NEEDY = ["fp8-delayed", "int4-hq-lss", "nvfp4", "mxfp4", "fp8-row"]


class Checkpointed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.fixture(autouse=True)
def torch_can_split(request):
    if (
        OLDEST
        and hasattr(request.node, "callspec")
        and request.node.callspec.params.get("schedule") in SPLIT
    ):
        pytest.skip(NO_SPLIT)


def _model(recipe, checkpoints=False):
    model = build(recipe, BLOCKS)
    if checkpoints:
        model = nn.Sequential(
            OrderedDict((name, Checkpointed(each)) for name, each in model.named_children())
        )
    return model


def _piped(schedule, names, activations="16bit", by_module=False, **options):
    found = {}
    for name in names:
        stages = stages_of(schedule, partial(_model, name, **options))
        if by_module:
            for stage in stages:
                ng.distribute(stage.submod)
        else:
            ng.distribute(stages, activations=activations)
        found[name] = run_pipeline(stages, schedule, STEPS, range(MICRO_BATCHES), MICRO_BATCHES)
    return found


def _alone(name, between=(), **options):
    """between: the blocks before which the numbers pass through a message."""
    torch.manual_seed(0)
    model = ng.distribute(_model(name, **options))
    for number, block in enumerate(model):
        if number in between:
            block.register_forward_pre_hook(
                lambda _, args: (
                    DecodeMessage.apply(EncodeMessage.apply(args[0]), lambda sent: None),
                )
            )
    return run_alone(model, STEPS, MICRO_BATCHES)


def _assert_same(found, name, truth):
    """Losses, gradients of every step, weights, windows and all other state."""
    losses, whole, gradients = truth
    ranks = [each[name] for each in found]
    assert next(each[0] for each in ranks if each[0]) == losses, name
    pairs = [({k: v for each in ranks for k, v in each[1].items()}, whole)]
    pairs += [
        ({k: v for each in ranks for k, v in each[2][step].items()}, gradients[step])
        for step in range(STEPS)
    ]
    for there, here in pairs:
        assert there.keys() == here.keys(), name
        assert [key for key in here if not torch.equal(here[key], there[key])] == [], name


@pytest.mark.slow
@pytest.mark.parametrize("schedule", quick(["1F1B", "InterleavedZeroBubble"], SCHEDULES))
def test_two_ranks_are_one_process_to_the_bit(ranks, schedule):
    names = NEEDY if schedule == "1F1B" else NEEDY[:3]
    found = ranks(2)(_piped, schedule, names)
    for name in names:
        _assert_same(found, name, _alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_recipe_on_every_schedule(ranks, schedule):
    found = ranks(2)(_piped, schedule, ng.recipes.names(), by_module=True)
    for name in ng.recipes.names():
        _assert_same(found, name, _alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", quick(["1F1B"], ["1F1B", "ZBVZeroBubble"]))
def test_activation_checkpointing_inside_stages(ranks, schedule):
    names = ["int4-hq-lss", "mxfp4"]
    found = ranks(2)(_piped, schedule, names, checkpoints=True)
    for name in names:
        _assert_same(found, name, _alone(name, checkpoints=True))


# Schedule -> the blocks whose input comes from another rank; in a V stages 1 and 2 are on one.
BOUNDARIES = {
    "GPipe": [2],
    "1F1B": [2],
    "Interleaved1F1B": [1, 2, 3],
    "InterleavedZeroBubble": [1, 2, 3],
    "ZBVZeroBubble": [1, 3],
    "DualPipeV": [1, 3],
}


@pytest.mark.parametrize("schedule", quick(["1F1B"], SCHEDULES))
def test_messages_in_8_bits_are_roundings_and_nothing_else(ranks, schedule):
    names = ["fp8-delayed", "mxfp4"]
    found = ranks(2)(_piped, schedule, names, activations="fp8")
    for name in names:
        _assert_same(found, name, _alone(name, between=BOUNDARIES[schedule]))


class Counting(PipelineStage):
    """Counts the bytes that torch is given to send."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.sent = {"activations": 0, ACTIVATION_GRADIENTS: 0}

    def get_fwd_send_ops(self, chunk):
        return self._counted("activations", super().get_fwd_send_ops(chunk))

    def get_bwd_send_ops(self, chunk):
        return self._counted(ACTIVATION_GRADIENTS, super().get_bwd_send_ops(chunk))

    def _counted(self, what, operations):
        self.sent[what] += sum(each.tensor.nbytes for each in operations)
        return operations


def _bytes(activations):
    rank = dist.get_rank()
    blocks = list(build("fp8-row", 2).bfloat16())
    stage = Counting(blocks[rank], rank, 2, torch.device("cpu"))
    ng.distribute(stage, activations=activations)
    engine = Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).float().square().mean())
    x = torch.randn(4 * TOKENS, WIDTH).bfloat16()
    for _ in range(2):
        engine.step(*([x] if rank == 0 else []), target=x if rank else None)
    return stage.sent, distributed_state(stage.submod).bytes_sent


def test_bytes_on_the_wire_are_half_of_sixteen_bits(ranks):
    wide, narrow = (ranks(2)(_bytes, form) for form in ("16bit", "fp8"))
    for rank, what in enumerate(["activations", ACTIVATION_GRADIENTS]):
        assert wide[rank][0][what] == 2 * 4 * TOKENS * WIDTH * 2
        assert narrow[rank][0][what] <= 0.52 * wide[rank][0][what]
        assert narrow[rank][1][what] == narrow[rank][0][what]  # what `distributed_state` counts


class Several(nn.Module):
    """Sends a tensor, a number per row that is not a multiple of 32 wide, whole numbers and a mask."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, narrow=None, numbers=None, mask=None):
        y = self.linear(x)
        if narrow is None:
            return y, y[:, None, :45].half(), torch.arange(len(y))[:, None], y > 0
        kept = torch.where(mask, y, x) + numbers
        return kept + torch.nn.functional.pad(narrow[:, 0].float(), (0, y.shape[1] - 45))


def _several(activations):
    rank = dist.get_rank()
    torch.manual_seed(3)
    modules = [Several(96), Several(96)]
    stage = ng.distribute(
        PipelineStage(modules[rank], rank, 2, torch.device("cpu")), activations=activations
    )
    engine = Schedule1F1B(stage, 2, loss_fn=lambda y, target: (y - target).square().sum())
    x, losses = torch.randn(8, 96), []
    engine.step(
        *([x] if rank == 0 else []),
        target=torch.zeros(8, 96) if rank else None,
        losses=losses if rank else None,
    )
    return [each.item() for each in losses], [p.grad for p in modules[rank].parameters()]


@pytest.mark.skipif(
    OLDEST, reason="torch 2.11 wants gradients of whole numbers that a stage receives"
)
def test_several_tensors_of_any_kind(ranks):
    (_, first), (losses, second) = ranks(2)(_several, "fp8")
    (_, exact), (truth, _) = ranks(2)(_several, "16bit")
    assert losses == pytest.approx(truth, rel=0.02)  # E4M3 rounds by 2**-4 at most, to either side
    assert all(each.isfinite().all() for each in [*first, *second])
    assert (first[0] - exact[0]).norm() < 2.0**-4 * exact[0].norm()


def _products(schedule):
    """How many products of the layers of this rank are computed in a step."""
    counts = {"output": 0, "grad_input": 0, "grad_weight": 0}
    stages = ng.distribute(stages_of(schedule, partial(_model, "fp8-row")))

    def seen(product, *_):
        counts[product] += 1  # the rehearsal's too, which is the same for both

    for stage in stages:
        for layer in stage.submod.modules():
            if isinstance(layer, ng.QLinear):
                layer.observer = seen
    run_pipeline(stages, schedule, 1, range(MICRO_BATCHES), MICRO_BATCHES)
    return counts


@pytest.mark.skipif(OLDEST, reason=NO_SPLIT)
def test_a_backward_pass_in_two_halves_computes_each_product_once(ranks):
    for whole, split in zip(
        *(ranks(2)(_products, each) for each in ("Interleaved1F1B", "InterleavedZeroBubble")),
        strict=True,
    ):
        assert split == whole and min(split.values()) > 0


def _with_data_parallelism(recipe, activations):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    group, replicas = mesh["stages"].get_group(), mesh["replicas"]

    def wrap(module):
        for block in module:
            fully_shard(block, mesh=replicas, reshard_after_forward=False)
        fully_shard(module, mesh=replicas)
        for each in module.modules():
            if hasattr(each, "set_gradient_divide_factor"):
                each.set_gradient_divide_factor(1.0)
                each.set_force_sum_reduction_for_comms(True)
        return module

    stages = stages_of("Interleaved1F1B", partial(_model, recipe), group, wrap)
    ng.distribute(stages, activations=activations)
    number = dist.get_rank(replicas.get_group())
    numbers = range(number, MICRO_BATCHES, 2)
    return number, run_pipeline(stages, "Interleaved1F1B", STEPS, numbers, MICRO_BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NEEDY)
@pytest.mark.parametrize("activations", ["16bit", "fp8"])
def test_pipelines_of_two_replicas(ranks, recipe, activations):
    """The sums of gradients are in another order: the losses of the first step are equal, its gradients to 1e-7 of the model's."""
    found = ranks(4)(_with_data_parallelism, recipe, activations)
    losses, _, gradients = _alone(
        recipe, between=BOUNDARIES["Interleaved1F1B"] if activations == "fp8" else ()
    )
    per_rank = MICRO_BATCHES // 2
    for number, (own, _, sharded) in found:
        assert not own or own[:per_rank] == losses[number:MICRO_BATCHES:2]
        assert sharded[0].keys() <= gradients[0].keys()
    states = [
        {k: v for at, each in found if at == number for k, v in each[1].items()}
        for number in range(2)
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def _with_ddp(recipe):
    """torch 2.13 cannot find shapes with DistributedDataParallel in a stage (an assertion of its reducer): it is told them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    replicas = mesh["replicas"].get_group()

    def total(_, bucket):
        return (
            dist.all_reduce(bucket.buffer(), group=replicas, async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    def wrap(module):
        module = DistributedDataParallel(module, process_group=replicas)
        module.register_comm_hook(None, total)
        return module

    stages = stages_of(
        "1F1B", partial(_model, recipe), mesh["stages"].get_group(), wrap, message_like
    )
    ng.distribute(stages, activations="fp8")
    number = dist.get_rank(replicas)
    return number, run_pipeline(
        stages, "1F1B", STEPS, range(number, MICRO_BATCHES, 2), MICRO_BATCHES
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp4"])
def test_shapes_that_torch_is_told_and_ddp(ranks, recipe):
    found = ranks(4)(_with_ddp, recipe)
    losses, _, _ = _alone(recipe, between=[2])
    assert sum(bool(own) for _, (own, _, _) in found) == 2
    for number, (own, _, _) in found:
        assert not own or own[:2] == losses[number:MICRO_BATCHES:2]


class Tied(nn.Module):
    def __init__(self, rank, is_tied):
        super().__init__()
        table = torch.randn(16, 8, generator=torch.Generator().manual_seed(0 if is_tied else rank))
        if rank == 0:
            self.embed = nn.Embedding(16, 8, _weight=table)
        else:
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = nn.Parameter(table)


def _refused(case):
    rank = dist.get_rank()
    module = Tied(rank, case == "tied") if case in ("tied", "untied") else nn.Linear(4, 4)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    try:
        if case == "module":
            ng.distribute(module, activations="fp8")
        elif case == "name":
            ng.distribute(stage, activations="fp4")
        elif case == "nothing":
            ng.distribute([])
        else:
            ng.distribute(stage, activations="fp8" if case != "mixed" or rank else "16bit")
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "tied",
            coded("pipeline.tied-weights", "'embed.weight' of stage 0", "'head.weight' of stage 1"),
        ),
        ("mixed", coded("pipeline.activations-differ", "'16bit' of stage 0", "'fp8' of stage 1")),
        ("module", coded("tensor-parallel.no-module", "PipelineStage")),
        ("name", coded("distribute.choice", "'fp4'", "16bit, fp8")),
        ("nothing", coded("distribute.model", "PipelineStage")),
    ],
)
def test_refusals_are_sentences_on_every_rank(ranks, case, expected):
    for found in ranks(2)(_refused, case):
        require(found, expected.code, *expected.values)
    assert ranks(2)(_refused, "untied") == [None, None]


def _copied():
    stage = ng.distribute(stages_of("1F1B", partial(_model, "fp8-delayed")), activations="fp8")[0]
    run_pipeline([stage], "1F1B", 1, range(2), 2)
    x, copied = torch.randn(2, WIDTH), copy.deepcopy(stage.submod)
    with torch.no_grad():
        return copied(x).shape, pickle.loads(pickle.dumps(copied))(x).shape


def _warned_of(reshards):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(module[0], mesh=mesh["shards"], reshard_after_forward=reshards)
    fully_shard(module, mesh=mesh["shards"])
    stage = PipelineStage(
        module, dist.get_rank(), 2, torch.device("cpu"), group=mesh["stages"].get_group()
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ng.distribute(stage)
    return [str(each.message) for each in found if "zero-bubble" in str(each.message)]


def test_stages_that_reshard_are_named(ranks):
    for rank, words in enumerate(ranks(2)(_warned_of, True)):
        assert (
            len(words) == 1
            and f"stage {rank} reshards the weights of '0' after forward" in words[0]
        )
    assert ranks(2)(_warned_of, False) == [[], []]


def test_a_copy_of_a_stage_takes_and_gives_plain_tensors(ranks):
    assert ranks(2)(_copied) == [((2, WIDTH), (2, WIDTH))] * 2


def test_places_of_stages():
    assert [places("ZBVZeroBubble", rank, 2) for rank in range(2)] == [[0, 3], [1, 2]]
    assert [places("Interleaved1F1B", rank, 2) for rank in range(2)] == [[0, 2], [1, 3]]
