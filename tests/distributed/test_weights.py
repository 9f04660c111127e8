"""Weights of fully_shard as codes: to the bit what gathers of the original give, at a byte per weight, and nothing is kept (exact)."""

from __future__ import annotations

import gc
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.distributed import distributed_state
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from tests.distributed.llama import Llama, loss_of, parallelize
from tests.distributed.models import build, micro_batch, state, train
from tests.selection import quick

STEPS = 3
NEED_THE_ORIGINAL = (
    "bf16", "int4-hq-lss", "int4-lsq-luq", "mxfp4", "nvfp4-46", "quartet2", "quartet2-46", "tetrajet2",
    "int4-eden",
)  # fmt: skip
# One of each kind: a window, one set of codes, two sets, tiles, 4 bits in tiles and straight-through.
KINDS = ("fp8-delayed", "fp8-block", "mxfp8", "int8", "nvfp4", "int4-hq-bs")


def _shard(model, weights, parts=None, **options):
    for module in [*(model if parts is None else parts), model]:
        fully_shard(module, **options)
    return ng.distribute(model, weights=weights)


def _both(compute, *given):
    """What a function of (weights, ...) gives with gathers of the original and with codes."""
    found = []
    for weights in ("16bit", "codes"):
        torch.manual_seed(0)
        found.append(compute(weights, *given))
    return found


def differing(here, there):
    assert here.keys() == there.keys()
    return [name for name, tensor in here.items() if not torch.equal(tensor, there[name])]


class Watch:
    """Sees the weight of each layer in its forward pass: whether all of it reads as NaN."""

    def __init__(self, model):
        self.poisoned = set()
        for layer in model.modules():
            if isinstance(layer, QLinear):
                layer.register_forward_hook(self.look)

    def look(self, layer, *_):
        self.poisoned.add(bool(layer.weight.isnan().all()))


def _trained(weights, recipe):
    model = _shard(build(recipe), weights)
    watch = Watch(model)
    losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
    return losses, state(model), watch.poisoned


def _each(names):
    return {name: _both(_trained, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("world", quick([2], [2, 3]))
def test_codes_are_to_the_bit_gathers_of_the_original(ranks, world):
    """Three ranks share 64 and 128 rows unevenly. A layer whose codes travel has no weight to read."""
    for found in ranks(world)(_each, ng.recipes.names()):
        for name, ((losses, tensors, wide), (own_losses, own, narrow)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name
            assert wide == {False} and narrow == {name not in NEED_THE_ORIGINAL}, name


def _replicated(weights, recipe):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _shard(build(recipe), weights, mesh=mesh)
    return train(model, [dist.get_rank()], STEPS, 4), state(model)


def _each_replicated(names):
    return {name: _both(_replicated, name) for name in names}


@pytest.mark.slow
def test_shards_that_are_replicated(ranks):
    for found in ranks(4)(_each_replicated, KINDS):
        for name, ((losses, tensors), (own_losses, own)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


def _beside_tensor_parallelism(weights, recipe, sequence):
    """Column-wise and row-wise layers, whose parts fully_shard shards again, by rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(ng.convert(Llama(layers=2), {"layers.*": recipe}), mesh["tp"], sequence)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh["dp"])
    model = ng.distribute(model, weights=weights)
    watch, losses = Watch(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(STEPS):
        torch.manual_seed(step)  # of recipes whose casts of x or of gradients draw random numbers
        loss = loss_of(model, step, mesh["dp"].get_local_rank(), 2)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return losses, state(model), watch.poisoned


def _each_beside_tensor_parallelism(names, sequence):
    return {name: _both(_beside_tensor_parallelism, name, sequence) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
def test_shards_of_tensor_parallelism(ranks, sequence):
    """2 x 2 ranks, every recipe: each rank of fully_shard has rows of the rows, or of the columns, that its rank of the other axis has."""
    for found in ranks(4)(_each_beside_tensor_parallelism, ng.recipes.names(), sequence):
        for name, ((losses, tensors, wide), (own_losses, own, narrow)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name
            assert wide == {False} and narrow == {name not in NEED_THE_ORIGINAL}, name


class Ragged(nn.Sequential):
    """Layers with fewer rows than three ranks have shares, and with rows and columns that no tile divides."""

    def __init__(self):
        torch.manual_seed(7)
        super().__init__(
            nn.Linear(64, 2), nn.GELU(), nn.Linear(2, 75), nn.GELU(), nn.Linear(75, 64)
        )


def _ragged(weights, recipe):
    model = ng.convert(Ragged(), recipe)
    _shard(model, weights, parts=[each for each in model if isinstance(each, nn.Linear)])
    losses = train(model, [dist.get_rank()], STEPS, dist.get_world_size())
    return losses, state(model)


def _each_ragged(names):
    return {name: _both(_ragged, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("world", quick([2], [2, 3]))
def test_ragged_and_empty_shards(ranks, world):
    names = [name for name in ng.recipes.names() if name not in NEED_THE_ORIGINAL]
    for found in ranks(world)(_each_ragged, names):
        for name, ((losses, tensors), (own_losses, own)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        for block in self.inner:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _checkpointed(weights, recipe, reentrant):
    model = Checkpointed(build(recipe), reentrant)
    _shard(model, weights, parts=model.inner)
    model.inner.requires_grad_(True)
    losses = train(
        _InputWithGradient(model) if reentrant else model,
        [dist.get_rank()],
        STEPS,
        dist.get_world_size(),
    )
    return losses, state(model), dict(distributed_state(model).bytes_sent)


class _InputWithGradient(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.requires_grad_())


def _each_checkpointed(names):
    return {(name, way): _both(_checkpointed, name, way) for name in names for way in (False, True)}


@pytest.mark.slow
def test_activation_checkpointing(ranks):
    for found in ranks(2)(_each_checkpointed, KINDS):
        for name, ((losses, tensors, _), (own_losses, own, _)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


def _accumulated(weights, recipe, kept):
    """Two micro-batches of each rank; gradients are reduced after the second. kept: weights stay gathered until the step."""
    model = _shard(build(recipe), weights, reshard_after_forward=not kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        for turn in range(2):
            model.set_requires_gradient_sync(turn == 1)
            model.set_reshard_after_backward(turn == 1 or not kept)
            losses.append(_backward(model, step, dist.get_rank() + 2 * turn))
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return losses, state(model)


def _backward(model, step, number):
    x, y = micro_batch(step, number)
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.item()


def _each_accumulated(names):
    return {
        (name, kept): _both(_accumulated, name, kept) for name in names for kept in (False, True)
    }


@pytest.mark.slow
def test_gradient_accumulation_and_weights_that_stay(ranks):
    for found in ranks(2)(_each_accumulated, KINDS):
        for name, ((losses, tensors), (own_losses, own)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


def _disturbed(weights, recipe):
    """Steps end while the root is gathered, modes change, weights and states are loaded and written by hand."""
    model = _shard(build(recipe), weights, parts=[], reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, x = [], micro_batch(9, 9)[0]

    def look():
        with torch.no_grad():
            losses.append(model(x).square().mean().item())

    look()
    for step in range(STEPS):
        losses.append(_backward(model, step, dist.get_rank()))
        ng.advance(model)
        look()
        model.eval()
        look()
        model.train()
        losses.append(_backward(model, step, dist.get_rank() + 2))
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses.append(_backward(model, 7, dist.get_rank()))
    optimizer.step()
    model.load_state_dict(kept)
    losses.append(_backward(model, 7, dist.get_rank()))
    optimizer.zero_grad()
    ng.advance(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, QLinear):
                layer.weight.mul_(1.5)
    losses.append(_backward(model, 8, dist.get_rank()))
    return losses, state(model)


def _each_disturbed(names):
    return {name: _both(_disturbed, name) for name in names}


@pytest.mark.slow
def test_changes_between_passes_are_followed(ranks):
    for found in ranks(2)(_each_disturbed, KINDS):
        for name, ((losses, tensors), (own_losses, own)) in found.items():
            assert own_losses == losses and differing(own, tensors) == [], name


def _written_between_micro_batches(through_data):
    found = []
    for reshards in (True, False):
        model = _shard(build("fp8-current"), "codes", reshard_after_forward=reshards)
        _backward(model, 0, 0)
        weight = model[0].up.weight
        with torch.no_grad():
            (weight.to_local().data if through_data else weight).mul_(2)
        try:
            _backward(model, 0, 1)
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_written_between_micro_batches_are_refused(ranks, through_data):
    """Also where codes that are at hand are read again, and where the write leaves the version of the shard."""
    for found in ranks(2)(_written_between_micro_batches, through_data):
        assert len(found) == 2
        for words in found:
            assert "0.up: the weight was written" in words and "narrowgauge.advance(model)" in words


def _merged_through_data(weights):
    """As PEFT merges, into the shards: outputs of evaluations with gradients and of a new step."""
    model, found = _shard(build("fp8-current"), weights), []
    _backward(model, 0, 0)
    ng.advance(model)
    x, _ = micro_batch(0, 0)
    for training in (False, False, True):
        model.train(training)
        found.append(model(x).detach())
        for parameter in model.parameters():
            parameter.to_local().data.mul_(1.5)
        if training:
            ng.advance(model)
            found.append(model(x).detach())
    return found


def test_a_merge_into_shards_is_read_by_the_next_forward_pass(ranks):
    for there, here in ranks(2)(_both, _merged_through_data):
        assert all(map(torch.equal, here, there)) and not torch.equal(here[0], here[1])


def _sent(recipe, width):
    model = _shard(build(recipe, blocks=1, width=width), "codes")
    x = torch.randn(4, width)
    model(x).sum().backward()
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, QLinear))
    sent = distributed_state(model).bytes_sent
    return sent["weights"] / weights, sent["weight scales"] / weights


def test_bytes_sent_per_weight(ranks):
    """Two gathers of each. Scales are exchanged once: of 1x32 tiles an exponent for 32 weights, twice."""
    for recipe, codes in (
        ("fp8-current", 2.0),
        ("fp8-row", 2.0),
        ("mxfp8", 2.0),
        ("int4-hq-bs", 1.25),
        ("nvfp4", 1.0),
    ):
        for sent, scales in ranks(2)(_sent, recipe, 256):
            assert sent == codes, recipe
            assert scales <= 0.0625, recipe
            assert sent + scales <= 2 * 1.03125, recipe


def _large(least):
    """Elements of floating or integer tensors that hold as much memory."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:
            storage = each.untyped_storage()
            try:
                place = storage.data_ptr()
            except (
                RuntimeError
            ):  # a tensor without memory, which a test before has left to the collector
                continue
            if storage.size() >= least:
                found[place] = storage.size()
    return found


def _kept(recipe, reshards):
    """Bytes of tensors as large as a weight's codes, or larger, that a forward pass, and a backward pass, leave behind."""
    width, found = 128, []
    model = _shard(build(recipe, width=width), "codes", reshard_after_forward=reshards)
    model(torch.randn(4, width)).sum().backward()
    model.zero_grad()
    ng.advance(model)
    before = _large(2 * width * width)
    loss = model(torch.randn(4, width)).sum()
    found.append(
        sum(size for place, size in _large(2 * width * width).items() if place not in before)
    )
    loss.backward()
    gradients = {
        each.grad._local_tensor.untyped_storage().data_ptr() for each in model.parameters()
    }
    after = _large(2 * width * width)
    found.append(
        sum(size for place, size in after.items() if place not in before and place not in gradients)
    )
    return found


def _each_kept(names, reshards):
    return {name: _kept(name, reshards) for name in names}


@pytest.mark.slow
def test_nothing_is_kept_after_resharding(ranks):
    """Of one kind each; the control keeps its codes until backward: those of four weights."""
    names = ("fp8-current", "mxfp8", "int4-hq-bs")
    for found in ranks(2)(_each_kept, names, True):
        assert found == {name: [0, 0] for name in names}
    for found in ranks(2)(_each_kept, names[:1], False):
        assert found["fp8-current"] == [4 * 2 * 128 * 128, 0]


def _suspended(weights):
    """Layers that read the original after all: without a recipe for a while, or with another than they were distributed with."""
    model = _shard(build("fp8-row"), weights)
    with ng.suspended(model):
        losses = [_backward(model, 0, dist.get_rank())]
    model[0].up.recipe = "fp8-current"
    model[1].down.recipe = None
    losses += train(model, [dist.get_rank()], STEPS, 2)
    return losses, state(model)


@pytest.mark.slow
def test_layers_that_read_the_original(ranks):
    for (losses, tensors), (own_losses, own) in ranks(2)(_both, _suspended):
        assert own_losses == losses and differing(own, tensors) == []


def _observed(recipe):
    model = _shard(build(recipe), "codes")
    seen = []
    for layer in model.modules():
        if isinstance(layer, QLinear):
            layer.observer = lambda gemm, role, original, made: seen.append(
                (role, bool(original.isfinite().all()))
            )
    _backward(model, 0, 0)
    return seen


@pytest.mark.parametrize("recipe", ["mxfp8", "int4-hq-bs"])
def test_observers_see_what_codes_mean(ranks, recipe):
    for seen in ranks(2)(_observed, recipe):
        assert {role for role, _ in seen} == {"x", "w", "gy"} and all(finite for _, finite in seen)


def _mixed(recipe):
    """Under a policy of bfloat16 the codes are those of the float32 master: the first loss is that of one process that keeps it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _shard(build(recipe), "codes", mp_policy=policy)
    found = []
    handle = model[0].up.register_forward_hook(
        lambda layer, given, out: found.append((given[0].detach(), out.detach()))
    )
    losses = train(model, [dist.get_rank()], STEPS, 2)
    handle.remove()
    single = ng.distribute(build(recipe))
    given, out = found[0]
    single[0].up.bias.data = single[0].up.bias.data.to(torch.bfloat16)
    return losses, torch.equal(single[0].up(given), out)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", "int4-hq-bs"])
def test_codes_are_of_the_master_whatever_the_policy_says(ranks, recipe):
    for losses, equal in ranks(2)(_mixed, recipe):
        assert equal and all(map(math.isfinite, losses))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(nn.functional.gelu(self.one(x)))


def _tied(weights):
    model = _shard(ng.convert(Tied(), "fp8-current"), weights, parts=[])
    losses = train(model, [dist.get_rank()], STEPS, 2)
    gathers = distributed_state(model).weights
    return losses, state(model), None if gathers is None else gathers.traffic(model.one)


def test_tied_weights_travel_as_torch_sends_them(ranks):
    for (losses, tensors, _), (own_losses, own, traffic) in ranks(2)(_both, _tied):
        assert own_losses == losses and differing(own, tensors) == []
        assert (
            traffic.format == "float32, or as mp_policy says"
            and traffic.reason_16bit == "its weight is also 'two.weight'"
        )


def _travels():
    found = {}
    for name in ng.recipes.names():
        model = _shard(build(name), "codes")
        found[name] = tuple(distributed_state(model).weights.traffic(model[0].up))
    return found


def test_what_travels_is_told(ranks):
    found = ranks(2)(_travels)[0]
    weights = 64 * 128
    assert found["fp8-current"] == ("e4m3 codes", weights, "")
    assert found["fp8-row"] == ("e4m3 two sets of codes", weights, "")
    assert found["nvfp4"] == ("e2m1 codes", weights / 2, "")
    assert found["int4-hq-bs"] == ("int4 codes", 0.625 * weights, "")
    assert found["mxfp4"] == (
        "float32, or as mp_policy says",
        4 * weights,
        "grad_input rounds the original stochastically",
    )
    for name in NEED_THE_ORIGINAL:
        assert found[name][2]


def _compiled(weights, recipe):
    model = build(recipe)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model:
            block.compile(backend="aot_eager")
            fully_shard(block)
        fully_shard(model)
        model = ng.distribute(model, weights=weights)
        losses = train(model, [dist.get_rank()], 2, 2)
    return losses, state(model)


def _each_compiled(names):
    return {name: _both(_compiled, name) for name in names}


@pytest.mark.slow
def test_compiled_blocks_never_read_the_carrier(ranks):
    """Layers compute between two graphs, as in eager mode; what is around them rounds as the compiler has it."""
    for found in ranks(2)(_each_compiled, ["mxfp8", "int4-hq-bs"]):
        for name, ((losses, _), (own_losses, own)) in found.items():
            assert own_losses[0] == pytest.approx(losses[0], rel=0.05), (
                name
            )  # a carrier that is read gives NaN
            assert all(tensor.isfinite().all() for tensor in own.values()), name
