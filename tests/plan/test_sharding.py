"""A rank's share of a counted step: what is cut, and what copies hold all the time; beside what ranks really allocate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from narrowgauge.plan.forecast import Forecast
from narrowgauge.plan.moments import MemoryMoment
from narrowgauge.plan.sharding import divided, micro_batches_in_flight
from narrowgauge.train.parallel.pipeline import SCHEDULES
from tests.plan import planned_ranks

MIB = 2**20


def moment(phase, **parts):
    named = {
        tuple(name.split("/")) if "/" in name else (name, ""): size for name, size in parts.items()
    }
    total = sum(named.values())
    return MemoryMoment(
        step=2, micro_batch=1, phase=phase, alive=total, end=total, allocated=total, reserved=total, parts=named, module=""
    )  # fmt: skip


def of(*moments, **more):
    return Forecast(
        moments=moments, counted="", reserved=0, reserved_error=0.1, on_gpu=True, **more
    )


def test_copies_hold_all_gradients_from_step_to_step():
    """As views of DistributedDataParallel's buckets: also where the next forward pass is at its largest."""
    whole = of(
        moment("head", weights=10 * MIB, saved=7 * MIB),
        moment("step", weights=10 * MIB, gradients=10 * MIB),
    )
    copy = divided(whole, 4, copies=2)
    assert whole.allocated == 20 * MIB and copy.allocated == 27 * MIB and copy.top.phase == "head"
    assert copy.parts()["gradients"] == 10 * MIB and copy.allocated_error == whole.allocated_error
    assert divided(whole, 4) is whole


def test_shared_products_cut_inner_layers_and_an_own_head_but_no_sum_of_residuals():
    saved = {
        "saved/mlp.up_proj": 8 * MIB,
        "saved/input_layernorm": 3 * MIB,
        "saved/(block)": 2 * MIB,
    }
    whole = of(
        moment("head", weights=40 * MIB, **saved), block_weights=8 * MIB, head_weights=4 * MIB
    )  # 4 blocks, the head, and an embedding of the same size
    rank = divided(whole, 4, tp=2)
    assert rank.parts()["weights"] == 40 * MIB - (4 * 8 + 4) * MIB // 2
    assert rank.saved() == {"mlp.up_proj": 4 * MIB, "input_layernorm": 3 * MIB, "(block)": 2 * MIB}


def most_in_flight(schedule, ranks, micro_batches):
    """Forward passes whose backward has not ended, on the rank with the most, in torch's own order of work."""
    kind, per_rank, is_v = SCHEDULES[schedule]
    count = ranks * per_rank
    stages = [
        SimpleNamespace(
            stage_index=number,
            num_stages=count,
            group_size=ranks,
            group_rank=0,
            has_backward=True,
            is_first=number == 0,
            is_last=number == count - 1,
            group=None,
            device=torch.device("cpu"),
            submod=None,
        )
        for number in (0, count - 1 if is_v else ranks)
    ]
    most = 0
    for actions in kind(stages, micro_batches, loss_fn=lambda *_: 0).pipeline_order.values():
        alive = 0
        for action in filter(None, actions):
            does = action.computation_type.name
            # OVERLAP_F_B ends one micro-batch while it begins another, so both are alive.
            most = max(most, alive + (does in ("FORWARD", "OVERLAP_F_B")))
            alive += (does == "FORWARD") - (does in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
    return most / per_rank


@pytest.mark.parametrize("ranks, micro_batches", [(2, 4), (2, 8), (3, 12), (4, 8), (4, 16)])
@pytest.mark.parametrize("schedule", [name for name, row in SCHEDULES.items() if row[1] == 2])
def test_micro_batches_in_flight_are_those_of_torch(schedule, ranks, micro_batches):
    found = micro_batches_in_flight(schedule, ranks, micro_batches)
    assert found == most_in_flight(schedule, ranks, micro_batches)


@pytest.mark.parametrize("schedule, most", [("1F1B", 4), ("GPipe", 16)])
def test_a_stage_of_gpipe_saves_every_micro_batch(schedule, most):
    in_flight = micro_batches_in_flight(schedule, ranks=4, micro_batches=16)
    whole = of(moment("head", weights=4 * MIB, **{"saved/mlp": 3 * MIB}))
    assert in_flight == most
    rank = divided(whole, 4, stages=4, in_flight=in_flight)
    assert rank.saved() == {"mlp": most * 3 * MIB}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "within", "early"), [("dp=2", 0.005, 0), ("fsdp=2", 0.01, 0.05), ("tp=2", 0.03, 0)]
)
def test_planned_is_what_a_rank_allocates(layout, within, early, tmp_path):
    """Buffers of messages are freed when the other rank is done, so the peak of one run is not that of the next.

    early  what a rank of shards may lack at its peak, where messages arrive before they are waited for
    """
    runs = [
        planned_ranks.settings(tmp_path / name, layout, **planned_ranks.RUNS["plain"])
        for name in "abc"
    ]
    # New processes: what tests before left behind would be freed on the way. On busy cores more messages wait, which only adds.
    most = min(max(planned_ranks.on_ranks(each)) for each in runs)
    assert most * (1 - within) < planned_ranks.planned(runs[0]) < most * (1 + within + early)
