"""Ranks of one process group (gloo on the CPU) that run functions of the tests: `ranks(2)(function, argument)` gives [result, result].

Starting a process costs seconds of imports, so the processes stay for the tests that follow. They are forked from a server that has
imported torch and what a run needs, and done nothing else. A call that raises on one rank, or that is interrupted, leaves the others
in a collective: they are ended, and the next call begins with new ones. So it does after MOST_CALLS: groups that tests have made keep
three threads each, which wake up ten times a second (440 of them took a seventh of two cores).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

PRELOADED = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "narrowgauge", "narrowgauge.train.loop",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip
STACKS_S = 1.0  # for all ranks to write their stacks
PATIENCE_S = 2.0  # for the other ranks, once one has failed
MOST_CALLS = 40
GROUP_TIMEOUT_S = 600.0  # of a collective: longer than any test may take


class RankError(AssertionError):
    """What went wrong on a rank, with its traceback."""


class Ranks:
    """`world` processes, started at the first call."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._members: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = (
            None  # of the store by which they find each other
        )
        self._calls = 0

    def __call__(self, function: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        """What `function(*given, **named)` returns on each rank; a function of a module, and arguments that pickle takes."""
        __tracebackhide__ = True
        if self._calls >= MOST_CALLS:
            self.close()
        if not self._members:
            self._start()
        self._calls += 1
        try:
            for _, pipe in self._members:
                pipe.send_bytes(pickle.dumps((function, given, named)))
            return self._results()
        except RankError:
            self.close(kill=True)
            raise
        except BaseException:  # the limit of the test, most often: a rank stands still
            self._print_stacks()
            self.close(kill=True)
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self.world, str(store)), daemon=True
            )
            process.start()
            there.close()
            self._members.append((process, here))

    def _results(self) -> list[Any]:
        __tracebackhide__ = True
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._members)}
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=PATIENCE_S if failed else None)
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    worked, result = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    worked, result = False, "the process ended"
                (found if worked else failed)[rank] = result
        if failed:
            raise RankError(
                "\n".join(
                    f"rank {rank} of {self.world}: {words}"
                    for rank, words in sorted(failed.items())
                )
            )
        return [found[rank] for rank in range(self.world)]

    def _print_stacks(self) -> None:
        """Of every thread of every rank, also of one that holds the GIL or was stopped: its handler is C, and runs first."""
        if self._folder is None:
            return
        for process, _ in self._members:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
                os.kill(process.pid, signal.SIGCONT)
        time.sleep(STACKS_S)
        for rank in range(len(self._members)):
            file = Path(self._folder.name) / f"stacks-{rank}"
            words = file.read_text("utf-8", "replace") if file.exists() else "none"
            print(f"stacks of rank {rank} of {self.world}:\n{words}", file=sys.stderr)

    def close(self, kill: bool = False) -> None:
        members, self._members, self._calls = self._members, [], 0
        for process, pipe in members:
            pipe.close()  # which ends the loop of a rank that waits
            if kill:
                process.kill()
        for process, _ in members:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(pipe: Connection, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    with open(Path(store).with_name(f"stacks-{rank}"), "wb") as file:
        _serve_calls(pipe, rank, world, store, file)


def _serve_calls(pipe: Connection, rank: int, world: int, store: str, stacks: IO[bytes]) -> None:
    faulthandler.register(signal.SIGUSR2, file=stacks)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            function, given, named = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        torch.manual_seed(0)
        try:
            answer = pickle.dumps((True, function(*given, **named)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
