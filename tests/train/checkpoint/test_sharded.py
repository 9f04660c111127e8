"""Checkpoints of a run on several ranks: the right one is chosen by all, and one process reads it (exact)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, NarrowgaugeError
from narrowgauge.train.checkpoint import sharded, store
from narrowgauge.train.checkpoint import state as states
from tests.raising import raises
from tests.train.checkpoint import checkpoint_kills


def state(step: int, rank: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """With generators that differ between ranks."""
    weights = {"a": torch.arange(10.0).reshape(5, 2) + step, "b": torch.full((3,), float(step))}
    return {
        "weights": weights,
        "scaling": {"h": torch.ones(2) * step},
        "rng": {"torch": torch.tensor([step, rank], dtype=torch.uint8)},
    }


def spread(step: int) -> dict[str, dict[str, torch.Tensor]]:
    found = state(step, dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found["weights"]["a"] = distribute_tensor(found["weights"]["a"], mesh, [Shard(0)])
    return found


def without_generators(
    tensors: dict[str, dict[str, torch.Tensor]],
) -> dict[str, dict[str, torch.Tensor]]:
    return {group: members for group, members in tensors.items() if group != "rng"}


def room(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return without_generators(spread(step))


def save(folder: Path, steps: list[int]) -> None:
    for step in steps:
        sharded.save(
            folder,
            step,
            spread(step),
            {"step": step, "trained_s": 1.5 + dist.get_rank(), "list": [1, 2.0, None]},
        )
    sharded.prune(folder, 2)


def resume(folder: Path, like: int = 0) -> Any:
    """Step, facts, own part of the weight, the rest, and names of what was passed over; or the error."""
    try:
        found, skipped = sharded.newest_valid(folder, lambda found: room(like))
    except NarrowgaugeError as error:
        return type(error).__name__, str(error)
    if found is None:
        return None
    weight = found.tensors["weights"].pop("a").full_tensor()  # type: ignore[attr-defined]
    rest = {
        group: {name: x.tolist() for name, x in members.items()}
        for group, members in found.tensors.items()
    }
    return found.step, found.facts, weight.tolist(), rest, [path.name for path, _ in skipped]


def answer(step: int, skipped: list[str]) -> Any:
    wanted = state(step)
    weight = wanted["weights"].pop("a").tolist()
    rest = {
        group: {name: x.tolist() for name, x in members.items()}
        for group, members in wanted.items()
    }
    return step, {"step": step, "trained_s": 1.5, "list": [1, 2.0, None]}, weight, rest, skipped


@pytest.mark.slow
def test_all_ranks_resume_from_the_newest_that_is_whole(ranks, tmp_path):
    assert ranks(2)(resume, tmp_path) == [None, None]
    ranks(2)(save, tmp_path, [1, 2, 3])
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]
    assert ranks(3)(resume, tmp_path) == [answer(3, [])] * 3
    (tmp_path / "step-00000003" / "rank-00001-0.safetensors").write_bytes(b"")
    assert ranks(2)(resume, tmp_path) == [answer(2, ["step-00000003"])] * 2
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    first, second = ranks(2)(resume, tmp_path)
    assert (
        first == second
        and first[0] == "CheckpointError"
        and "none of the 2 checkpoints is intact" in first[1]
    )


@pytest.mark.slow
def test_one_process_reads_what_ranks_wrote_and_ranks_what_one_wrote(ranks, tmp_path):
    ranks(2)(save, tmp_path / "ranks", [4])
    found = store.load(tmp_path / "ranks" / "step-00000004")
    assert found.step == 4 and found.facts["trained_s"] == 1.5
    wanted = state(4)
    assert all(
        torch.equal(found.tensors[group][name], x)
        for group in wanted
        for name, x in wanted[group].items()
    )
    store.save(tmp_path / "one", 5, state(5), {"step": 5, "trained_s": 1.5, "list": [1, 2.0, None]})
    assert ranks(2)(resume, tmp_path / "one") == [answer(5, [])] * 2
    # One process without a group.
    chosen, _ = sharded.newest_valid(tmp_path / "ranks", lambda found: without_generators(state(0)))
    assert chosen is not None and torch.equal(
        chosen.tensors["weights"]["a"], wanted["weights"]["a"]
    )


def save_poisoned(folder: Path) -> tuple[str, str]:
    given = spread(1)
    if dist.get_rank() == 1:
        given["weights"]["a"].to_local().fill_(float("nan"))  # type: ignore[attr-defined]
    try:
        sharded.save(folder, 1, given, {})
    except NarrowgaugeError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_weight_that_is_not_finite_on_one_rank_is_saved_by_none(ranks, tmp_path):
    first, second = ranks(2)(save_poisoned, tmp_path)
    assert first == second == ("NumericsError", first[1]) and first[1].startswith(
        "rank 1: refuse to save: weight 'a' holds 4 values"
    )
    assert os.listdir(tmp_path) == []


def keep_best(folder: Path) -> Any:
    best = sharded.Best(folder, "loss")
    took = [
        best.take(step, {"loss": loss}, spread(step)["weights"])
        for step, loss in [(1, 3.0), (2, 2.0), (3, 2.5)]
    ]
    best.clear()
    again = sharded.Best(folder, "loss")
    lost = again.restore(best.facts())
    weights = again.weights()
    return took, lost, {name: x.tolist() for name, x in (weights or {}).items()}


def test_the_best_weights_are_kept_and_given_to_rank_0(ranks, tmp_path):
    first, second = ranks(2)(keep_best, tmp_path)
    assert first == (
        [True, True, False],
        "",
        {name: x.tolist() for name, x in state(2)["weights"].items()},
    )
    assert second == ([True, True, False], "", {}) and os.listdir(tmp_path) == ["step-00000002"]


def test_another_model_is_refused_not_passed_over(ranks, tmp_path):
    ranks(2)(save, tmp_path, [1, 2])
    other = {"weights": {"a": torch.zeros(5, 2), "b": torch.zeros(4), "c": torch.zeros(1)}}
    with raises(CheckpointError, "checkpoint.other-state", "[3]"):
        sharded.newest_valid(tmp_path, lambda found: other)


def _assert_kills_lose_nothing(folder: Path, kills: int) -> None:
    done = list(checkpoint_kills.rounds(folder, kills, seed=1))
    found = checkpoint_kills.summary("kill -9 of random ranks", done)
    assert [found[name] for name in ("kills", "corrupt", "lost_steps", "wrong", "hung")] == [
        kills,
        0,
        0,
        0,
        0,
    ], done


@pytest.mark.slow
@pytest.mark.timeout(1200)  # processes start slowly on a busy machine
def test_eight_kills_of_random_ranks_lose_nothing(tmp_path):
    """The short version of `python -m tests.train.checkpoint.checkpoint_kills`."""
    _assert_kills_lose_nothing(tmp_path, 8)


def train(folder: Path, until: int, save_at: int | None) -> list[float]:
    """Losses of a converted model under FSDP2, resumed if there is something to resume from; as the trainer does it."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    ng.convert(model, "fp8-delayed")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ng.distribute(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found, _ = sharded.newest_valid(
        folder, lambda found: states.room(model, optimizer, found.tensors, "")
    )
    if found is not None:
        states.restore(model, optimizer, None, found.tensors, found.facts["state"], str(found.path))
    losses = []
    for step in range(found.step if found else 0, until):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ng.advance(model)
        losses.append(float(loss.detach()))
        if step + 1 == save_at:
            tensors, rest = states.collect(model, optimizer, None)
            sharded.save(folder, save_at, tensors, {"state": rest})
    return losses


def test_a_run_goes_on_to_the_bit(ranks, tmp_path):
    calm = ranks(2)(train, tmp_path / "calm", 6, None)
    first = ranks(2)(train, tmp_path / "run", 3, 3)
    assert first[0] == calm[0][:3]
    assert ranks(2)(train, tmp_path / "run", 6, None) == [calm[0][3:]] * 2
    model = ng.convert(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), "fp8-delayed"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found, _ = store.newest_valid(tmp_path / "run")  # one process takes it up as its own
    assert found is not None
    states.restore(model, optimizer, None, found.tensors, found.facts["state"], str(found.path))
    saved = found.tensors["weights"] | found.tensors["scaling"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(
        optimizer.state_dict()["state"][0]["exp_avg"], found.tensors["optimizer"]["state.0.exp_avg"]
    )
