"""Ranks that read other data compute, to the bit, what one process computes with the same micro-batches."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.recipe import LearnedStep
from narrowgauge.structure import plain_name
from tests.distributed.models import build, state, train

STEPS = 3


def _sum_gradients(state, bucket):
    return (
        dist.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda future: future.value()[0])
    )


def _ddp(recipe):
    model = DistributedDataParallel(build(recipe))
    model.register_comm_hook(None, _sum_gradients)
    return model


def _fsdp(recipe, mesh=None):
    model = build(recipe)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _hsdp(recipe):
    return _fsdp(
        recipe,
        init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        ),
    )


WRAPPED = {"ddp": _ddp, "fsdp": _fsdp, "hsdp": _hsdp}


def _trained(wrap, recipe, per_rank=1, **options):
    """(losses of its own micro-batches, all tensors) of a rank."""
    model = ng.distribute(WRAPPED[wrap](recipe, **options))
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = [rank + world * turn for turn in range(per_rank)]
    losses = train(model, numbers, STEPS, world * per_rank)
    return losses, state(model)


def _each(wrap, names, **options):
    return {name: _trained(wrap, name, **options) for name in names}


def alone(recipe, count, **options):
    torch.manual_seed(0)
    model = ng.distribute(build(recipe, **options))
    return train(model, range(count), STEPS, count), state(model)


def differing(here, there):
    assert here.keys() == there.keys()
    return [name for name, tensor in here.items() if not torch.equal(tensor, there[name])]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_two_ranks_are_one_process_to_the_bit(ranks, wrap):
    found = ranks(2)(_each, wrap, ng.recipes.names())
    for name in ng.recipes.names():
        losses, whole = alone(name, 2)
        for rank, each in enumerate(found):
            assert each[name][0] == losses[rank::2], name
            assert differing(each[name][1], whole) == [], name


# Recipes with memory and with random numbers, of which each kind needs the ranks to agree.
NEEDY = ["fp8-delayed", "int4-hq-lss", "int4-hq-bs", "mxfp4"]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_micro_batches_of_a_rank_are_those_of_one_process(ranks, wrap):
    """Two of each rank, in turn; the sums of gradients are in another order."""
    found = ranks(2)(_each, wrap, NEEDY, per_rank=2)
    for name in NEEDY:
        losses, _ = alone(name, 4)
        for rank, each in enumerate(found):
            assert each[name][0][:2] == losses[rank:4:2], name


def _without(recipe):
    model = _ddp(recipe)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = train(model, [dist.get_rank()], STEPS, 2)
    return (
        losses,
        state(model),
        [str(each.message) for each in told if "ranks train" in str(each.message)],
    )


@pytest.mark.slow
def test_without_distribute_ranks_drift_and_say_so(ranks):
    (_, first, told), (_, second, _) = ranks(2)(_without, "fp8-delayed")
    windows = differing(first, second)
    assert len(windows) > 8 and all(".scaling." in name for name in windows)
    assert len(told) == 1 and "narrowgauge.distribute(model)" in told[0]
    losses, whole = alone("int4-hq-bs", 2)
    (other, tensors, _), _ = ranks(2)(_without, "int4-hq-bs")
    assert other != losses[0::2] and "0.up.weight" in differing(tensors, whole)


class Dropping(nn.Module):
    """A model that draws random numbers itself, and is checkpointed."""

    def __init__(self, inner, dropout):
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(dropout)

    def forward(self, x):
        for block in self.inner:
            x = self.dropout(checkpoint(block, x, use_reentrant=False))
        return x


def _dropping(world, rank, recipe):
    model = Dropping(build(recipe), 0.1)
    if world > 1:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, _sum_gradients)
    model = ng.distribute(model)
    before = torch.get_rng_state()
    losses = train(model, [rank] if world > 1 else range(2), STEPS, 2)
    assert torch.equal(
        torch.get_rng_state(), before
    )  # the user's own random numbers are as they were
    return losses, {name.removeprefix("inner."): tensor for name, tensor in state(model).items()}


def _dropping_of_rank(recipe):
    return _dropping(2, dist.get_rank(), recipe)


@pytest.mark.parametrize("recipe", ["int4-hq-bs", "mxfp4"])
def test_dropout_and_checkpointing_are_those_of_one_process(ranks, recipe):
    torch.manual_seed(0)
    losses, whole = _dropping(1, 0, recipe)
    for rank, (own, tensors) in enumerate(ranks(2)(_dropping_of_rank, recipe)):
        assert own == losses[rank::2] and differing(tensors, whole) == []


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "hsdp"])
def test_four_ranks_are_equal_and_near_one_process(ranks, wrap):
    """The sum of four gradients depends on its order: the first losses are equal, the first gradients to 1e-7."""
    found = ranks(4)(_first_gradients, wrap, ng.recipes.names())
    for name in ng.recipes.names():
        torch.manual_seed(0)
        model = ng.distribute(build(name))
        losses = train(model, range(4), 1, 4, optimizer=_Still)
        truth = {plain: p.grad for plain, p in model.named_parameters()}
        for rank, each in enumerate(found):
            own, gradients = each[name]
            assert own == [losses[rank]], name
            for key, gradient in gradients.items():
                error = (gradient - truth[key]).norm()
                assert error <= 1e-7 * truth[key].norm(), (name, key, error.item())
                assert torch.equal(gradient, found[0][name][1][key]), (name, key)


class _Still(torch.optim.SGD):
    """Keeps the gradients, so that they can be looked at."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)

    def zero_grad(self, set_to_none=True):
        pass


def _first_gradients(wrap, names):
    found = {}
    for name in names:
        model = ng.distribute(WRAPPED[wrap](name))
        losses = train(model, [dist.get_rank()], 1, dist.get_world_size(), optimizer=_Still)
        gradients = {
            plain_name(key): p.grad for key, p in model.named_parameters() if p.grad is not None
        }
        found[name] = (
            losses,
            {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in gradients.items()},
        )
    return found


@pytest.mark.slow
def test_learned_steps_leave_their_cold_start_together(ranks):
    recipe = _warming(1)
    losses, whole = alone(recipe, 2)
    for wrap in ("ddp", "fsdp"):
        for rank, (own, tensors) in enumerate(ranks(2)(_trained, wrap, recipe)):
            assert own == losses[rank::2] and differing(tensors, whole) == []
    assert whole["0.up.steps.cold_left"] == 0 and whole["0.up.steps.x"] != 0


def _warming(steps):
    """int4-hq-lss with a cold start of so many steps."""
    recipe = ng.recipes.get("int4-hq-lss")

    def cast(own):
        return (
            replace(own, calibrate=replace(own.calibrate, cold_steps=steps))
            if own and isinstance(own.calibrate, LearnedStep)
            else own
        )

    gemms = {
        name: replace(gemm, lhs=cast(gemm.lhs), rhs=cast(gemm.rhs))
        for name, gemm in recipe.gemms().items()
    }
    return replace(recipe, **gemms)


def _copied():
    model = ng.distribute(_fsdp("fp8-delayed"))
    copied = copy.deepcopy(build("fp8-delayed"))
    again = copy.deepcopy(ng.distribute(build("fp8-delayed")))
    train(again, [dist.get_rank()], 1, 2)
    return ng.distributed.distributed_state(again).layers, len(state(copied)), len(state(model))


def test_a_copy_stands_alone(ranks):
    for layers, copied, model in ranks(2)(_copied):
        assert layers == {} and copied == model
