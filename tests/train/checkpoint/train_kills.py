"""Does kill -9 of random ranks, at random moments of `narrowgauge train`, lose a step that it told, or change a bit of what comes after?

    python -m tests.train.checkpoint.train_kills --kills 100

A tiny Llama trains on two ranks (--parallel fsdp) or in one process (two micro-batches), which compute the same to the bit, and saves
after each step. A rank or both are killed when it has told of a few checkpoints, or at any moment of its start. Then each checkpoint
must be whole, and the newest not older than the last that metrics.jsonl names. The next start resumes from it. At the end one process
trains as many steps without a kill: the loss of every step, and every tensor of the last checkpoint, must be the same.

Ranks have what torchrun gives them (its variables, a store outside of them), but are forked with their imports made: torchrun's own
starts cost seconds of CPU each. As its agent does, the benchmark ends those that still wait for a rank that died as it started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge import cli, manifest, storage
from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.distributed import storage as ranks
from narrowgauge.errors import CheckpointError
from narrowgauge.train.checkpoint import store
from tests.train.checkpoint import checkpoint_kills
from tests.train.checkpoint.checkpoint_kills import PRELOADED
from tests.train.tiny import WORDS

WORLDS = (2, 2, 2, 1)
AT_ANY_MOMENT = 0.25  # of the kills; the others come when a start has told of some checkpoints
START_S = 5.0  # in which the former come; the latter within the time that a step and its save took
MOST_SAVES = 5
BEGIN_S = 300.0
PATIENCE_S = 60.0
AGENT_S = 8.0
SIZES = (
    "--model.hidden-size=32 --model.layers=2 --model.heads=2 --model.intermediate-size=48 --model.sequence-length=16 "
    "--data.vocab-size=300 --batch.size=4"
)
RUN = (
    "--training.steps=1000000 --optimizer.warmup-steps=2 --evaluation.every=0 --evaluation.tokens=256 --log.tensor-every=0 "
    "--evaluation.sample-tokens=0"
)
SETTINGS = f"{SIZES} {RUN} --device.threads=1 --device=cpu --recipe=fp8-delayed".split()


def _rank(arguments: list[str], variables: dict[str, str], said: str) -> None:
    os.environ.update(variables)
    with (
        open(said, "a", encoding="utf-8") as file,
        contextlib.redirect_stderr(file),
        contextlib.redirect_stdout(file),
    ):
        code = cli.main(arguments)
    os._exit(code)


class Start:
    """One start of the run on `world` ranks."""

    def __init__(self, place: Path, world: int, more: tuple[str, ...] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [*PRELOADED, "narrowgauge.train.loop", "transformers.models.llama.modeling_llama"]
        )
        arguments = [
            "train",
            *SETTINGS,
            f"--data={place / 'text'}",
            f"--data.cache={place / 'cache'}",
            *more,
        ]
        arguments += ["--parallel=fsdp", f"--batch.micro-batches={2 // world}"]
        self.said = place / "said.txt"
        self.said.write_text("", encoding="utf-8")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "WORLD_SIZE": str(world),
        }
        shared |= {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.processes = []
        for rank in range(world):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
            process = context.Process(
                target=_rank, args=(arguments, own, str(self.said)), daemon=True
            )
            process.start()
            self.processes.append(process)

    def kill(self, victims: list[int], by: int = signal.SIGKILL) -> None:
        for rank in victims:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, by)  # type: ignore[arg-type]

    def ended(self, patience_s: float = PATIENCE_S) -> tuple[list[int | None], float]:
        """Exit codes, of None one that did not end, and the seconds that it took."""
        started_at_s = time.monotonic()
        for process in self.processes:
            process.join(max(0.0, started_at_s + patience_s - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes, time.monotonic() - started_at_s


def told(output: Path) -> list[int]:
    """The steps whose checkpoints the run has told of, in the order of its log."""
    with contextlib.suppress(FileNotFoundError):
        return [
            event["step"]
            for event in read_metrics(output / "metrics.jsonl")
            if event["event"] == "checkpoint"
        ]
    return []


def rounds(place: Path, kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """What each kill did."""
    rng, output = random.Random(seed), place / "run"
    write_text(place / "text")
    for _ in range(kills):
        world = rng.choice(WORLDS)
        before, size = told(output), _bytes(output)
        start = Start(
            place,
            world,
            (f"--output={output}", "--resume", "--checkpoint.every=1", "--checkpoint.keep=2"),
        )
        until_s = time.monotonic() + BEGIN_S
        saves, any_moment = rng.randrange(2, MOST_SAVES + 1), rng.random() < AT_ANY_MOMENT
        seen_s: list[float] = []  # when each save was seen
        while not any_moment and time.monotonic() < until_s and len(seen_s) < saves:
            if not any(process.is_alive() for process in start.processes):
                break
            seen_s += [time.monotonic()] * (_saves(output, size) - len(seen_s))
            time.sleep(0.005)
        ready = any_moment or len(seen_s) >= saves
        between_s = (
            START_S
            if any_moment
            else (seen_s[-1] - seen_s[0]) / (len(seen_s) - 1)
            if ready
            else 0.0
        )
        time.sleep(rng.uniform(0, between_s))
        victims = list(range(world)) if rng.random() < 0.2 else [rng.randrange(world)]
        start.kill(victims)
        begun = (
            _bytes(output) > size
        )  # before that, ranks wait for each other to start, and torchrun's agent ends them
        codes, ended_s = start.ended(PATIENCE_S if begun else AGENT_S)
        drafts = list((output / "checkpoints").glob(".tmp-step-*")) if output.exists() else []
        storage.recover(output / "checkpoints", manifest.STEP.pattern)  # as the next start does
        after = told(output)
        newest = manifest.newest_first(output / "checkpoints")
        yield {
            "world": world,
            "victims": victims,
            "told": max(after, default=0),
            "saves": max(after, default=0) - max(before, default=0),
            "in_a_save": bool(drafts),
            "corrupt": _corrupt(output / "checkpoints"),
            "lost": max(0, max(after, default=0) - (int(newest[0].name[5:]) if newest else 0)),
            "wrong": _wrong(start, codes, victims, ready),
            "hung": codes.count(None) if begun else 0,
            "ended_by_agent": 0 if begun else codes.count(None),
            "ended_s": ended_s,
        }


def _bytes(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def _saves(output: Path, size: int) -> int:
    """Checkpoints that the log tells of after its first `size` bytes."""
    path = output / "metrics.jsonl"
    return path.read_bytes()[size:].count(b'"event": "checkpoint"') if path.exists() else 0


def _wrong(start: Start, codes: list[int | None], victims: list[int], ready: bool) -> list[str]:
    """Survivors end with 6, which names the dead; warnings and other errors are wrong."""
    said = start.said.read_text("utf-8")
    survivors = {
        code for rank, code in enumerate(codes) if rank not in victims and code is not None
    }
    found = [f"exit codes {codes}"] if survivors - {6, -signal.SIGKILL} else []
    found += [] if ready else ["it did not begin"]
    return found + ([said[-800:]] if found or "passed over" in said or "Traceback" in said else [])


def _corrupt(folder: Path) -> list[str]:
    found = []
    for path in manifest.newest_first(folder):
        try:
            ranks.verify(path)
            store.load(path)
        except CheckpointError as error:
            found.append(str(error))
    return found


def write_text(folder: Path) -> None:
    folder.mkdir(parents=True)
    for seed in range(40):
        draw = random.Random(seed)
        lines = [" ".join(draw.choices(WORDS, k=8)).capitalize() + ".\n" for _ in range(20 + seed)]
        (folder / f"{seed:02}.txt").write_text("".join(lines), encoding="utf-8")


def differences(place: Path) -> list[str]:
    """Of the run that was killed from one that was not, in one process."""
    killed, calm = place / "run", place / "calm"
    last = store.newest_valid(killed / "checkpoints")[0]
    assert last is not None
    saved = calm / "checkpoints" / last.path.name
    start = Start(place, 1, (f"--output={calm}", f"--checkpoint.every={last.step}"))
    while not saved.exists():
        time.sleep(0.2)
        if not start.processes[0].is_alive():
            return [f"the run without kills ended: {start.said.read_text('utf-8')[-800:]}"]
    start.kill([0])
    start.ended()
    ours, theirs = _losses(killed), _losses(calm)
    found = [
        f"step {step}: {ours[step]} and {theirs[step]}"
        for step in range(1, last.step + 1)
        if ours[step] != theirs[step]
    ]
    for group, members in store.load(saved).tensors.items():
        for name, tensor in members.items():
            found += [] if torch.equal(tensor, last.tensors[group][name]) else [f"{group}: {name}"]
    return found


def _losses(output: Path) -> dict[int, float]:
    return {
        event["step"]: event["loss"]
        for event in read_metrics(output / "metrics.jsonl")
        if event["event"] == "step"
    }


def last(place: Path, done: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the whole run."""
    differing = differences(place)
    print(*differing[:3], sep="\n")
    return {
        "ended_by_agent": sum(row["ended_by_agent"] for row in done),
        "steps": done[-1]["told"],
        "other_losses_or_tensors": len(differing),
    }


if __name__ == "__main__":
    checkpoint_kills.run("kill -9 of random ranks of narrowgauge train", __doc__, rounds, last)
