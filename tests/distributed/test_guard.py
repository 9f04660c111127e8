"""Guarded loops on several ranks (exact): the bits of the unguarded run, and one verdict for all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from benchmarks.planted_faults import stale_codes
from narrowgauge.errors import ConfigError
from tests.compare import assert_same
from tests.distributed.models import build, micro_batch


def _trained(wrap, recipe, guard, gradients, steps=9, sick=False, stale=False):
    torch.manual_seed(0)
    model = build(recipe)
    if sick:
        model[1].down.register_forward_hook(
            lambda layer, _, output: output if layer.is_suspended else output * 0
        )
    if stale:
        stale_codes(model)
    finds = {"find_unused_parameters": recipe == "int4-hq-lss"}
    model = (
        DistributedDataParallel(model, **finds)
        if wrap == "ddp"
        else [fully_shard(each) for each in (*model, model)][-1]
    )
    ng.distribute(model, gradients=gradients)
    optimizer = ng.optim.AdamW(model, states="8bit", lr=1e-3)

    def step(batch):
        loss = (model(batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        return loss

    guarded = ng.Guard("every=3,steps=3", model, optimizer, step) if guard else step
    for number in range(steps):
        guarded(micro_batch(number, dist.get_rank())[0])
    states = [x for each in optimizer.state.values() for x in each.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    held = [getattr(each, "_local_tensor", each).detach().clone() for each in tensors]
    known = (
        "begun",
        "difference",
        "control",
        "same",
        "slopes",
        "outside",
        "weights",
        "verdict",
        "sick",
        "unlike",
        "compared",
    )
    return held, [{key: each[key] for key in known} for each in guarded.events] if guard else []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss"])
@pytest.mark.parametrize(
    ("wrap", "gradients"), [("ddp", "16bit"), ("ddp", "fp8-lm"), ("fsdp", "fp8")]
)
def test_ranks_go_on_undisturbed_and_come_to_one_verdict(ranks, wrap, gradients, recipe):
    guarded = ranks(2)(_trained, wrap, recipe, True, gradients)
    plain = ranks(2)(_trained, wrap, recipe, False, gradients)
    for (held, _), (expected, _) in zip(guarded, plain, strict=True):
        assert_same(held, expected)
    events = guarded[0][1]
    assert [each["begun"] for each in events] == [3, 6] and guarded[1][1] == events
    seen = (
        0 if recipe == "int4-hq-lss" else 4
    )  # gradients of weights that grow into learned steps are not compared
    for each in events:
        assert each["difference"] != 0 and each["same"] != 0 and each["weights"] == seen
        assert not seen or 0.5 < each["slopes"][0] <= each["slopes"][1] < 2
        assert each["unlike"] == {} and each["compared"] == 12, (
            "all products of four layers, and each is as its recipe says"
        )


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_ranks_name_a_dead_layer_alike(ranks, wrap):
    """Products of parts are summed, so one verdict goes for all."""
    told = ranks(2)(_trained, wrap, "fp8-current", True, "16bit", 9, True)
    (_, first), (_, second) = told
    assert first == second
    assert [each["outside"].get("1.down") for each in first] == [0.0, 0.0]
    assert first[-1]["verdict"] == "worse" and "1.down" in first[-1]["sick"]


@pytest.mark.slow
def test_stale_codes_of_shards_are_named_alike(ranks):
    """FSDP2 gathers the weight in 16 bits or more, and the layer casts it: what was cast is compared on each rank."""
    told = ranks(2)(_trained, "fsdp", "fp8-current", True, "16bit", 6, False, True)
    (_, first), (_, second) = told
    assert first == second and first[0]["verdict"] == "worse"
    assert {kind for kind, _ in first[0]["unlike"].values()} == {"stale"}


def _refused():
    model = DistributedDataParallel(build("int4-hq-lss"))
    with pytest.raises(ConfigError, match="find_unused_parameters=True"):
        ng.Guard("every=3,steps=3", model, torch.optim.AdamW(model.parameters()), print)


def test_learned_steps_without_a_gradient_are_refused(ranks):
    ranks(1)(_refused)
