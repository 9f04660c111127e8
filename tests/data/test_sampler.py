"""The sampler, exactly: what a stopped epoch left is what follows, in another process, with workers, in another world."""

import json

import numpy as np
import pytest
from torch.utils.data import DataLoader

from narrowgauge.data.epochs import Batching, examples_of
from narrowgauge.data.sampler import LengthBatchSampler
from narrowgauge.errors import CheckpointError, ConfigError
from tests.processes import PYTHON, run_ok
from tests.raising import raises
from tests.selection import quick

LENGTHS = np.random.default_rng(0).integers(3, 100, 300)
BUDGET = Batching(token_budget=512, seed=5)


def take(sampler, steps):
    batches = iter(sampler)
    return [next(batches) for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("packed", quick([True], [False, True]))
def test_it_resumes_in_another_process(tmp_path, packed):
    batching = Batching(token_budget=512, seed=5, row_length=128 if packed else None)
    whole = LengthBatchSampler(LENGTHS, batching)
    whole.set_epoch(2)
    expected = list(whole)
    stopped = LengthBatchSampler(LENGTHS, batching)
    stopped.set_epoch(2)
    assert take(stopped, 7) == expected[:7]
    (tmp_path / "state.json").write_text(json.dumps(stopped.state_dict()), encoding="utf-8")
    (tmp_path / "lengths.json").write_text(json.dumps(LENGTHS.tolist()), encoding="utf-8")
    program = f"""
import json
from pathlib import Path
from narrowgauge.data import Batching, LengthBatchSampler
read = lambda name: json.loads(Path({str(tmp_path)!r}, name).read_text(encoding="utf-8"))
sampler = LengthBatchSampler(read("lengths.json"), Batching(**{ {"token_budget": 512, "seed": 5, "row_length": batching.row_length} }))
sampler.load_state_dict(read("state.json"))
print(json.dumps([sampler.epoch, list(sampler), list(sampler)]))
"""
    epoch, rest, following = json.loads(run_ok([PYTHON, "-c", program]).stdout)
    assert epoch == 2
    assert rest == json.loads(json.dumps(expected[7:]))
    assert following == json.loads(json.dumps(list(whole)))


@pytest.mark.parametrize(("old", "new"), [(1, 3), (4, 2), (2, 2)])
def test_another_world_plans_the_rest_anew(old, new):
    """Steps done by the old world and those of the new one are the epoch: nothing twice, nothing lost; twice in a row."""

    def samplers(world):
        batching = Batching(token_budget=256, world=world)
        return [LengthBatchSampler(LENGTHS, batching, rank=rank) for rank in range(world)]

    before = samplers(old)
    done = [index for sampler in before for batch in take(sampler, 3) for index in batch]
    between = samplers(new)
    for sampler in between:
        sampler.load_state_dict(before[0].state_dict())
    done += [index for sampler in between for batch in take(sampler, 2) for index in batch]
    state = json.loads(json.dumps(between[-1].state_dict()))
    assert (state["epoch"], state["step"]) == (0, 5)
    after = samplers(old)
    for sampler in after:
        sampler.load_state_dict(state)
    done += [index for sampler in after for batch in sampler for index in batch]
    assert sorted(done) == list(range(300))
    assert len({len(sampler) for sampler in after}) == 1
    assert sorted(index for sampler in after for batch in sampler for index in batch) == list(
        range(300)
    )  # epoch 1


def test_each_pass_is_the_next_epoch_and_set_epoch_agrees():
    first, second = LengthBatchSampler(LENGTHS, BUDGET), LengthBatchSampler(LENGTHS, BUDGET)
    passes = [list(first) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    for epoch in range(3):
        second.set_epoch(epoch)
        assert list(second) == passes[epoch]
    second.set_epoch(1)
    assert list(second) == passes[1]
    assert len(second) == len(passes[1])


def test_a_peek_is_no_epoch():
    sampler = LengthBatchSampler(LENGTHS, BUDGET)
    first = take(sampler, 1)[0]
    assert next(iter(sampler)) == first


def test_with_workers_the_loop_says_where_it_is():
    """The workers have drawn ahead; the state of what the loop has finished resumes right behind it."""
    sampler = LengthBatchSampler(LENGTHS, BUDGET)
    loader = DataLoader(
        range(300),
        batch_sampler=sampler,
        num_workers=1,
        collate_fn=list,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    state = sampler.state_dict(step=3)
    del batches
    resumed = LengthBatchSampler(LENGTHS, BUDGET)
    resumed.load_state_dict(state)
    assert seen + list(resumed) == list(LengthBatchSampler(LENGTHS, BUDGET))


def test_the_state_at_the_end_of_an_epoch_leaves_nothing_of_it():
    sampler = LengthBatchSampler(LENGTHS, BUDGET)
    list(sampler)
    resumed = LengthBatchSampler(LENGTHS, BUDGET)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == []
    assert list(resumed) == list(sampler)
    assert resumed.epoch == 1


def test_ranks_divide_each_step():
    batching = Batching(batch_size=4, world=3)
    samplers = [LengthBatchSampler(LENGTHS, batching, rank=rank) for rank in range(3)]
    for step, parts in enumerate(zip(*samplers, strict=True)):
        assert list(parts) == samplers[0].plan.steps[step]
    assert sorted(
        i for step in samplers[0].plan.steps for batch in step for i in examples_of(batch)
    ) == list(range(300))


def test_a_state_of_other_data_or_none_is_refused():
    sampler = LengthBatchSampler(LENGTHS, BUDGET)
    state = sampler.state_dict()
    with raises(CheckpointError, "sampler.other-data"):
        LengthBatchSampler(LENGTHS[:-1], BUDGET).load_state_dict(state)
    for broken in ({}, {**state, "segments": [[{"nonsense": 1}, 0]]}, {**state, "step": 3}):
        with raises(CheckpointError, "sampler.state"):
            sampler.load_state_dict(broken)
    late = {**sampler.state_dict(), "step": 10_000}
    late["segments"] = [[late["segments"][0][0], 10_000]]
    late["epoch"] = 7
    with raises(CheckpointError, "sampler.other-epoch", "10000"):
        sampler.load_state_dict(late)
    assert sampler.state_dict() == state  # what was refused changed nothing
    with raises(ConfigError, "sampler.rank", "rank 2", "of 2"):
        LengthBatchSampler(LENGTHS, Batching(batch_size=1, world=2), rank=2)
    with raises(ConfigError, "sampler.step", "10000"):
        sampler.state_dict(step=10_000)


def test_what_the_old_settings_dropped_the_new_ones_draw():
    """Ten examples, four at a time: two would be dropped. Two at a time, from the second step on, all come."""
    sampler = LengthBatchSampler([5] * 10, Batching(batch_size=4, ragged="drop"))
    done = take(sampler, 1)[0]
    finer = LengthBatchSampler([5] * 10, Batching(batch_size=2, ragged="drop"))
    finer.load_state_dict(sampler.state_dict())
    assert len(finer) == 1 + 3
    assert sorted(done + [index for batch in finer for index in batch]) == list(range(10))


def test_a_state_from_before_there_were_strata_goes_on_and_another_is_refused():
    """The rest of its epoch is planned by strata, and nothing is drawn twice or lost."""
    strata, batching = LENGTHS % 2, Batching(batch_size=8, seed=3)
    old = LengthBatchSampler(LENGTHS, batching)
    seen = take(old, 5)
    state = old.state_dict()
    del state["strata"]
    for settings, _ in state["segments"]:
        del settings["stratify"]
    again = LengthBatchSampler(LENGTHS, batching)
    again.load_state_dict(state)
    assert seen + list(again) == list(LengthBatchSampler(LENGTHS, batching))

    new = LengthBatchSampler(LENGTHS, batching, strata=strata)
    new.load_state_dict(state)
    rest = list(new)
    assert sorted(index for batch in seen + rest for index in batch) == list(range(len(LENGTHS)))
    assert all(
        abs(strata[batch].sum() - 8 * strata.mean()) < 2 for batch in rest if len(batch) == 8
    )

    mine = LengthBatchSampler(LENGTHS, batching, strata=strata)
    take(mine, 2)
    for other in (None, LENGTHS % 3):
        with raises(CheckpointError, "sampler.other-strata"):
            LengthBatchSampler(LENGTHS, batching, strata=other).load_state_dict(mine.state_dict())
