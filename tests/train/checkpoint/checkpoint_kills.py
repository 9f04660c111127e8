"""Does kill -9 of random ranks, at random moments of saving, ever leave a corrupt checkpoint or lose an acknowledged step?

    python -m tests.train.checkpoint.checkpoint_kills --kills 100

Ranks (gloo on this machine) do nothing but save steps, prune, and say what was saved. After a random time one of them, or all, are
killed. Then every checkpoint in the folder must be whole and hold the numbers of its step alone, and the newest must not be older than
what any rank said. The next ranks, two or another number, resume from it and compare every number. Survivors must end by themselves.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.harness import RESULTS, record
from narrowgauge import manifest, storage
from narrowgauge.distributed import storage as ranks
from narrowgauge.train.checkpoint import sharded, store

PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "narrowgauge.train.checkpoint.sharded",
]
ROWS, COLUMNS = 257, 512  # of the weight, 0.5 MB: no number of ranks from 2 on divides its rows
LATEST_S = 0.3  # of a kill, after the first step that was saved
PATIENCE_S = 60.0


def whole_state(step: int) -> dict[str, dict[str, Tensor]]:
    """Every number says which step it belongs to."""
    codes = torch.full((ROWS, 64), step % 256, dtype=torch.uint8)
    return {
        "weights": {
            "weight": torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
            + step
        },
        "scaling": {"history": torch.full((16,), float(step))},
        "optimizer": {"codes": codes.view(torch.float8_e4m3fn), "step": torch.tensor(step)},
    }


def _spread(state: dict[str, dict[str, Tensor]], mesh: Any) -> dict[str, dict[str, Tensor]]:
    """Weight and codes by rows, the rest as it is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for group, name in (("weights", "weight"), ("optimizer", "codes")):
        full = state[group][name]
        per_rank = -(-ROWS // world)
        local = full[rank * per_rank : (rank + 1) * per_rank].clone()
        state[group][name] = DTensor.from_local(
            local, mesh, [Shard(0)], shape=full.shape, stride=full.stride()
        )
    return state


def _bytes(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().reshape(-1).view(torch.uint8)


def _train(folder: Path, rank: int, world: int, meeting: str, say: Connection) -> None:
    """Resumes, then saves step after step until it is killed."""
    torch.set_num_threads(1)
    try:
        group = {"init_method": f"file://{meeting}", "rank": rank, "world_size": world}
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S), **group)
        mesh = init_device_mesh("cpu", (world,))
        found, skipped = sharded.newest_valid(folder, lambda found: _spread(whole_state(0), mesh))
        step = found.step if found else 0
        wanted = _spread(whole_state(step), mesh)
        is_same = found is None or all(
            torch.equal(_bytes(found.tensors[part][name]), _bytes(tensor))
            for part, members in wanted.items()
            for name, tensor in members.items()
        )
        if skipped or not is_same or (found and found.facts != {"step": step}):
            say.send(("wrong", f"step {step}: skipped {skipped}, same numbers: {is_same}"))
            return
        say.send(("resumed", step))
        for each in itertools.count(step + 1):
            sharded.save(folder, each, _spread(whole_state(each), mesh), {"step": each})
            say.send(("saved", each))
            sharded.prune(folder, 2)
    except RuntimeError as error:  # the process group's: another rank was killed
        say.send(("ended", str(error)[:200]))
    except BaseException as error:
        say.send(("wrong", f"{type(error).__name__}: {error}"[:500]))


def rounds(folder: Path, kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """What each kill did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    rng, acknowledged = random.Random(seed), 0
    for _ in range(kills):
        storage.recover(folder, manifest.STEP.pattern)
        world = rng.choice((2, 2, 2, 3, 1))
        row = _round(context, folder, world, rng)
        row["lost"] = _lost(folder, row["acknowledged"], acknowledged)
        acknowledged = max(acknowledged, row["acknowledged"])
        yield row


def _lost(folder: Path, *acknowledged: int) -> int:
    """Acknowledged steps that the newest checkpoint does not reach."""
    newest = manifest.newest_first(folder)
    return max(0, max(acknowledged) - (int(newest[0].name[5:]) if newest else 0))


def _round(context: Any, folder: Path, world: int, rng: random.Random) -> dict[str, Any]:
    victims = list(range(world)) if rng.random() < 0.2 else [rng.randrange(world)]
    with tempfile.TemporaryDirectory() as place:
        members = []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_train, args=(folder, rank, world, f"{place}/store", there), daemon=True
            )
            process.start()
            there.close()
            members.append((process, here))
        try:
            heard = [_first_saved(pipe) for _, pipe in members]
            time.sleep(rng.uniform(0, LATEST_S))
            for rank in victims:
                os.kill(members[rank][0].pid, signal.SIGKILL)
            killed_at_s = time.monotonic()
            for process, _ in members:
                process.join(PATIENCE_S)
            ended_s = time.monotonic() - killed_at_s
            hung = sum(process.is_alive() for process, _ in members)
        finally:
            for process, _ in members:
                process.kill()
        for said, (_, pipe) in zip(heard, members, strict=True):
            said += _rest(pipe)
    drafts = [
        path
        for path in folder.iterdir()
        if path.name.startswith(".tmp-step-") and path.name.count("-") == 3
    ]
    said = [each for of_rank in heard for each in of_rank]
    return {
        "world": world,
        "victims": victims,
        "acknowledged": max((step for kind, step in said if kind == "saved"), default=0),
        "saves": max(sum(kind == "saved" for kind, _ in of_rank) for of_rank in heard),
        "in_a_save": bool(drafts),
        "corrupt": _corrupt(folder),
        "wrong": [words for kind, words in said if kind == "wrong"],
        "hung": hung,
        "ended_s": ended_s,
    }


def _first_saved(pipe: Connection) -> list[tuple[str, Any]]:
    """What a rank says until it has saved a step, or failed."""
    said = []
    while pipe.poll(PATIENCE_S):
        try:
            said.append(pipe.recv())
        except EOFError:
            break
        if said[-1][0] != "resumed":
            return said
    return [*said, ("wrong", "it printed no line")]


def _rest(pipe: Connection) -> list[tuple[str, Any]]:
    said = []
    try:
        while pipe.poll(0):
            said.append(pipe.recv())
    except (EOFError, OSError):
        pass
    return said


def _corrupt(folder: Path) -> list[str]:
    """Checkpoints that are not whole, or hold numbers of another step."""
    found = []
    for path in manifest.newest_first(folder):
        try:
            ranks.verify(path)
            checkpoint = store.load(path)
            wanted = whole_state(int(path.name[5:]))
            is_same = all(
                torch.equal(_bytes(checkpoint.tensors[part][name]), _bytes(tensor))
                for part, members in wanted.items()
                for name, tensor in members.items()
            )
        except Exception as error:
            found.append(f"{path.name}: {error}")
        else:
            found += [] if is_same else [f"{path.name}: holds other numbers"]
    return found


def summary(case: str, done: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "case": case,
        "kills": len(done),
        "ranks_killed": sum(len(row["victims"]) for row in done),
        "worlds": dict(sorted(Counter(str(row["world"]) for row in done).items())),
        "in_a_save": sum(row["in_a_save"] for row in done),
        "saves": sum(row["saves"] for row in done),
        "corrupt": sum(len(row["corrupt"]) for row in done),
        "lost_steps": sum(row["lost"] for row in done),
        "wrong": sum(len(row["wrong"]) for row in done),
        "hung": sum(row["hung"] for row in done),
        "longest_end_s": max(row["ended_s"] for row in done),
    }


def run(
    what: str,
    description: str | None,
    rounds: Callable[[Path, int, int], Iterator[dict[str, Any]]],
    last: Callable[[Path, list[dict[str, Any]]], dict[str, Any]] = lambda place, done: {},
) -> None:
    """The command of a script: kills, a row in checkpoint_kills.jsonl, exit code 1 if something was lost.

    rounds  kills in a folder, as many as asked, with a seed
    last    further counts of the whole, from the folder and the rows
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    done = []
    with tempfile.TemporaryDirectory() as place:
        for row in rounds(Path(place), given.kills, given.seed):
            done.append(row)
            print(len(done), row, flush=True)
        found = summary(what, done) | last(Path(place), done)
    print(found)
    record("checkpoint-kills", [found], RESULTS / "checkpoint_kills.jsonl")
    losses = ("corrupt", "lost_steps", "wrong", "hung", "other_losses_or_tensors")
    sys.exit(any(found.get(key) for key in losses))


if __name__ == "__main__":
    run("kill -9 of random ranks", __doc__, rounds)
