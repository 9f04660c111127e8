"""`distribute`: what it says, what it refuses, what it saves."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed import arrange
from narrowgauge.errors import CheckpointError, ConfigError
from tests.distributed.models import build, micro_batch, state, train
from tests.distributed.ranks import RankError
from tests.raising import raises, require


def _said(gradients):
    model = DistributedDataParallel(build("fp8-delayed"))
    ng.distribute(model, gradients=gradients)
    sharded = build("fp8-current")
    for module in [*sharded, sharded]:
        fully_shard(module)
    ng.distribute(sharded, gradients=gradients)
    return (
        [row.sends for row in ng.describe(model)],
        [row.sends for row in ng.describe(sharded)],
        str(ng.describe(model)),
    )


def test_describe_says_what_travels(ranks):
    """64 x 128 weights: 8,192 numbers."""
    for copied, sharded, whole in ranks(2)(_said, "fp8"):
        assert all("E4M3, tiles of 1 x 128" in each and "16,512 bytes" in each for each in copied)
        assert all(
            "8,256 bytes a reduction" in each
            and "float32" in each
            and "32,768 bytes a gather" in each
            for each in sharded
        )
        assert "sends        gradient as E4M3" in whole
    for copied, _, _ in ranks(2)(_said, "16bit"):
        assert all("65,536 bytes" in each and 'gradients="16bit"' in each for each in copied)
    assert [row.sends for row in ng.describe(build("fp8-current"))] == [""] * 4
    assert ranks(1)(_said, "fp8")[0][:2] == ([""] * 4, [""] * 4)  # one rank sends nothing


def _gradients(model):
    (model(micro_batch(0, dist.get_rank())[0]) ** 2).sum().backward()
    return [
        getattr(each.grad, "full_tensor", lambda grad=each.grad: grad)()
        for each in model.parameters()
    ]


def _anew(wrap, *options):
    """Gradients of a model that was distributed with each of the options, one after the other, and trained in between."""
    model = build("fp8-current")
    model = (
        DistributedDataParallel(model)
        if wrap == "ddp"
        else [fully_shard(each) for each in (*model, model)][-1]
    )
    for each in options:
        model.zero_grad()
        found = _gradients(ng.distribute(model, **each))
    return found


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_model_that_is_distributed_anew_has_nothing_of_before(ranks, wrap):
    narrow, plain = {"gradients": "fp8", "reduce": "sum"}, {}
    for first, then in ((narrow, plain), (plain, narrow), ({"reduce": "sum"}, plain)):
        again, once = ranks(2)(_anew, wrap, first, then), ranks(2)(_anew, wrap, then)
        assert all(map(torch.equal, again[1], once[1]))


def _codes_no_more(trains):
    model = build("fp8-current")
    for each in (*model, model):
        fully_shard(each)
    ng.distribute(model, weights="codes")
    if trains:
        _gradients(model)
    try:
        ng.distribute(model)
    except ConfigError as error:
        return str(error)
    model.zero_grad()
    return all(map(torch.equal, _gradients(model), _anew("fsdp", {})))


def test_weights_go_back_from_codes_before_any_travelled(ranks):
    assert ranks(2)(_codes_no_more, False) == [True, True]
    for said in ranks(2)(_codes_no_more, True):
        assert "weight of '0.up' has travelled as codes" in said and 'weights="codes"' in said


def _compiled():
    try:
        ng.distribute(torch.compile(DistributedDataParallel(build("fp8-current"))))
    except ConfigError as error:
        return str(error)
    return ""


def test_what_is_around_a_ddp_is_told_to_pass_it(ranks):
    for said in ranks(2)(_compiled):
        assert (
            "this OptimizedModule has a DistributedDataParallel inside. Pass that one to distribute"
            in said
        )


def _refusal(options):
    try:
        ng.distribute(
            DistributedDataParallel(build(options.pop("recipe", "fp8-current"))), **options
        )
    except ConfigError as error:
        return str(error)
    return ""


def _refusals(per_rank):
    return _refusal(dict(per_rank[dist.get_rank()]))


@pytest.mark.parametrize(
    ("per_rank", "words"),
    [
        ([{"recipe": "int8"}, {}], "ranks differ in layers and their recipes: '0.up: int8 ("),
        ([{"seed": 1}, {"seed": 2}], "ranks have seeds [1, 2]"),
        (
            [{"weights": "8bit"}, {}],
            "rank 0: distribute: weights is '8bit'; choose one of 16bit, codes.",
        ),
        ([{}, {"replicas": 3}], "rank 1: distribute: replicas"),
        ([{"weights": "8bit"}] * 2, "weights is '8bit'; choose one of 16bit, codes."),
        (
            [{"gradients": "fp8"}, {}],
            "ranks differ in gradients: 'fp8' on rank 0; '16bit' on rank 1",
        ),
        ([{"activations": "fp8"}] * 2, "distribute: activations='fp8'"),
    ],
)
def test_refusals_are_those_of_every_rank(ranks, per_rank, words):
    told = ranks(2)(_refusals, per_rank)
    assert told[0] == told[1] and words in told[0] and len(told[0]) < 700


def test_without_ranks():
    with raises(ConfigError, "distribute.model", "nn.Module"):
        ng.distribute([])
    with raises(ConfigError, "distribute.not-distributed"):
        ng.distributed.distributed_state(build("bf16"))


def test_its_state_goes_on(seed=5):
    def losses(model, first, steps):
        distributed = ng.distributed.distributed_state(model)
        distributed.step = first
        return train(
            model,
            range(2),
            steps,
            2,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        )

    model = ng.distribute(build("int4-hq-bs"), seed=seed)
    straight = losses(model, 0, 2)
    state = ng.distributed.distributed_state(model).state_dict()
    assert state == {"seed": seed, "step": 2, "gradients": {}}
    other = ng.distribute(build("int4-hq-bs"), seed=0)
    ng.distributed.distributed_state(other).load_state_dict({**state, "step": 0})
    assert losses(other, 0, 2) == straight  # the same noise, from the seed alone
    for wrong in ({}, {"seed": 1}, {"seed": 1, "step": -1}, {"seed": True, "step": 0}):
        with raises(CheckpointError, "distribute.state"):
            ng.distributed.distributed_state(other).load_state_dict(wrong)


def _unsummed(kind):
    model = build("int4-hq-lss" if kind == "ignored" else "bf16")
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        steps = {each for name, each in model.named_parameters() if "steps" in name}
        fully_shard(model, ignored_params=steps if kind == "ignored" else None)
    if kind != "ignored":
        ng.convert(model, "int4-hq-lss")
    try:
        ng.distribute(model)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [("ddp", "DistributedDataParallel"), ("fsdp", "fully_shard"), ("ignored", "fully_shard")],
)
def test_learned_steps_that_no_wrapper_sums_are_refused(ranks, kind, wrapper):
    for told in ranks(2)(_unsummed, kind):
        require(told, "distribute.learned-steps", f"distribute: {wrapper}", "'0.up'")


def _accumulated(numbers, is_silent):
    """The gradient of two micro-batches of a rank, summed over ranks; what was said where it could not be had."""
    model = ng.distribute(
        DistributedDataParallel(build("fp8-current")), reduce="sum", gradients=numbers
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for set_to_none in (False, True):
            for turn in range(2):
                model.require_backward_grad_sync = not is_silent or turn == 1
                (model(micro_batch(0, 2 * dist.get_rank() + turn)[0]) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("numbers", ["16bit", "fp8"])
def test_sums_that_would_be_summed_again_are_refused(ranks, numbers):
    """DDP reduces all that a gradient has become: with a mean that is right, with a sum the first micro-batches would count twice."""
    for said in ranks(2)(_accumulated, numbers, False):
        require(said, "gradient-messages.second-backward", 'reduce="sum"')
    assert ranks(2)(_accumulated, numbers, True) == [None, None]


def _in_order(early, recipe):
    model = build(recipe)
    if early:
        ng.distribute(model, seed=3)
    wrapped = DistributedDataParallel(model)
    if not early:
        ng.distribute(wrapped, seed=3)
    found = train(wrapped, [dist.get_rank()], 3, 2)
    return found, state(wrapped)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-bs"])
def test_a_model_that_is_wrapped_after_it_was_distributed_is_found_in_its_wrapper(ranks, recipe):
    """To the bit what the right order has, and the ranks agree."""
    early, late = ranks(2)(_in_order, True, recipe), ranks(2)(_in_order, False, recipe)
    for ours, theirs in zip(early, late, strict=True):
        assert ours[0] == theirs[0] and all(map(torch.equal, ours[1].values(), theirs[1].values()))
    assert all(map(torch.equal, early[0][1].values(), early[1][1].values()))


def _alone(is_told):
    model = ng.distribute(build("fp8-delayed"), replicas=dist.group.WORLD if is_told else None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, [0], 2, 1)
    return [each.message for each in said]


def test_ranks_that_nothing_joins_are_told_once(ranks):
    for said in ranks(2)(_alone, False):
        [warning] = said
        require(warning, "distribute.one-replica", "2 ranks")
    assert ranks(2)(_alone, True) == [[], []]


def _codes_before_shards():
    try:
        ng.distribute(build("fp8-current"), weights="codes")
    except ConfigError as error:
        return error
    return None


def test_codes_of_weights_that_nothing_gathers_are_refused(ranks):
    for said in ranks(2)(_codes_before_shards):
        require(said, "distribute.codes-without-fsdp", "fully_shard")
    assert ranks(1)(_codes_before_shards) == [None]


def test_one_process_takes_the_settings_of_several():
    """So that one script is the run and what it is compared with."""
    model = ng.distribute(build("fp8-current"), reduce="sum", gradients="fp8")
    assert (
        train(model, [0], 1, 1)
        and ng.distributed.distributed_state(model).gradients.bytes_sent == {}
    )
    with raises(ConfigError, "distribute.choice", "gradients", "'fp4'"):
        ng.distribute(build("fp8-current"), gradients="fp4")


@pytest.mark.parametrize("seed", [-5, 1.5, True, "x"])
def test_seeds_are_whole_numbers(seed):
    with raises(ConfigError, "distribute.seed", "0 on"):
        ng.distribute(build("fp8-current"), seed=seed)


def _without_a_batch(missing):
    """Rank 1 has none in that step, and the loop sums gradients by itself."""
    model = ng.distribute(build("int4-hq-bs"), replicas=dist.group.WORLD, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if dist.get_rank() == 0 or step != missing:
            model(micro_batch(step, dist.get_rank())[0]).square().mean().backward()
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            dist.all_reduce(each.grad)
        optimizer.step()
        optimizer.zero_grad()
    return ng.distributed.distributed_state(model).step


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_without_a_batch_counts_its_steps(ranks, missing):
    """In the first step too, where the forward pass of the other rank used to wait for its own."""
    assert ranks(2)(_without_a_batch, missing) == [3, 3]


def _wrapped_without_a_batch(wrap):
    model = build("fp8-delayed")
    model = (
        DistributedDataParallel(model) if wrap == "DistributedDataParallel" else fully_shard(model)
    )
    ng.distribute(model)
    if dist.get_rank() == 0:
        model(micro_batch(0, 0)[0]).square().mean().backward()
    ng.advance(model)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_a_wrapper_that_waits_for_a_rank_without_a_batch_is_named(ranks, wrap):
    words = rf"advance: rank 1 has run no forward pass with gradients since distribute, and {wrap} on the"
    with pytest.raises(RankError, match=words):
        ranks(2)(_wrapped_without_a_batch, wrap)


def _wrapped_late_without_a_batch():
    arrange.FIRST_FORWARD_S = 0.5
    model = ng.distribute(build("fp8-delayed"), replicas=dist.group.WORLD)
    ng.convert(model, "fp8-row")
    if dist.get_rank() == 0:
        model(micro_batch(0, 0)[0])
    else:
        time.sleep(30)


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_comparison_is_an_error_and_not_a_hang(ranks):
    with pytest.raises(
        RankError,
        match=r"rank 0 is in its first forward pass .* within 0\.5 s: .* Give every rank a batch",
    ):
        ranks(2)(_wrapped_late_without_a_batch)
