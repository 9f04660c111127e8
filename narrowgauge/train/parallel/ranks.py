"""The ranks of a run, as torchrun starts them: what one does for all, what all decide together, and how all end when one does.

    with Ranks.join(timeout_s) as ranks:                without torchrun: one rank, and nothing below waits or sends
        ranks.refuse_differences({"torch": "2.13.0"}, "versions")
        folder = ranks.first(claim)                     rank 0 alone; the others wait as long as it takes
        found = ranks.numbers([targets])                of every rank, in the order of ranks

Two ways connect them: collectives of the process group, with its time-out, and a few keys in torchrun's store, which outlives a rank.

    first-7     the seventh thing that rank 0 did alone is done
    failed      the first rank that failed says so, with its exit code, before it ends; it alone prints its error
    alive-1     rank 1 saw a collective break and lives
    beat-1      the sentinel of rank 1 reports once a second (narrowgauge.train.liveness)

A rank whose collective breaks looks for `failed` and ends with that code, silently: the sentinel of a rank that was killed sets it. If
nobody failed, the rank waits for the others to report that they live. It names those that do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from narrowgauge.diagnose.format_text import plural
from narrowgauge.distributed.lost import is_lost
from narrowgauge.errors import ConfigError, NarrowgaugeError, PeerError
from narrowgauge.train import liveness
from narrowgauge.train.config.parallel_syntax import Layout
from narrowgauge.train.console import tell
from narrowgauge.train.device import chosen_device
from narrowgauge.train.liveness import VARIABLES
from narrowgauge.train.liveness.sentinel import AGAIN

T = TypeVar("T")
NAMED = re.compile(r"rank \d+: ")  # as errors that all ranks raise alike begin
REPORT_S = 5.0  # in which ranks that live say so
SENTINEL_S = 5.0  # in which the sentinel of a rank has reached the store
POLL_S = 0.05
# What gloo says in a plain RuntimeError when another rank is gone; of NCCL and the store it is a DistError.


class EndedElsewhere(NarrowgaugeError):
    """Another rank failed and has said why: this one ends with the same exit code, and prints nothing."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank failed, and said why")
        self.exit_code = exit_code


class Ranks:
    """One rank's view of all of them. `Ranks()` is a run of one process."""

    def __init__(
        self, rank: int = 0, world: int = 1, local: int = 0, store: Any = None, timeout_s: float = 600.0
    ) -> None:
        """local: among the ranks of this machine; store: where they leave each other words."""
        self.rank, self.world, self.local, self.timeout_s = rank, world, local, timeout_s
        self._store, self._done = store, 0
        self.layout = Layout(dp=world)  # how they share the run
        self._live = liveness.current()
        self.place = "before the first step"

    @classmethod
    @contextmanager
    def join(cls, device: str, timeout_s: float) -> Iterator[Ranks]:
        """Those that torchrun started, as a process group with time-out `timeout_s`; else one rank. Ends the group after the body."""
        if not under_torchrun():
            yield cls()
            return
        local, limit = _number("LOCAL_RANK", "0"), timedelta(seconds=timeout_s)
        uses_cuda = device != "cpu" and torch.cuda.is_available()
        if uses_cuda:
            torch.cuda.set_device(_own_device(device, local))
        store, rank, world = _met(limit)
        backend = "cpu:gloo,cuda:nccl" if uses_cuda else "gloo"
        own = PrefixStore("group", store)
        ranks = cls(rank, world, local, PrefixStore(liveness.KEYS, store), timeout_s)
        with ranks.ending_together():
            ranks._is_watched()
            dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=limit)
            yield ranks
        dist.destroy_process_group()

    @property
    def place(self) -> str:
        """Where the run is, for messages; every assignment counts as progress."""
        return self._place

    @place.setter
    def place(self, words: str) -> None:
        self._place = words
        if self._live is not None:
            self._live.place = words

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device `name` of the settings: of the GPUs of this machine the rank's own."""
        if self._store is not None and name != "cpu" and torch.cuda.is_available():
            return torch.device("cuda", self.local)
        return chosen_device(name)

    # --- decisions

    def first(self, work: Callable[[], T]) -> T | None:
        """What `work` returns on rank 0, which alone does it; None on the others, which wait for it as long as rank 0 lives."""
        if self.world == 1:
            return work()
        self._done += 1
        key = f"first-{self._done}"
        if self.is_first:
            with self._alone():
                result = work()
            self._store.set(key, "done")
            return result
        self.wait_for_first_rank(key)
        return None

    def told_by_first(self, work: Callable[[], Any]) -> Any:
        """As `first`, but all ranks get what rank 0 got: JSON."""
        if self.world == 1:
            return work()
        key = f"told-{self._done + 1}"
        self.first(lambda: self._store.set(key, json.dumps(work())))
        return json.loads(self._store.get(key))

    def numbers(self, own: list[int]) -> list[list[int]]:
        """Whole numbers of every rank, in the order of ranks."""
        return self._of_all(own, torch.int64)

    def reals(self, own: list[float]) -> list[list[float]]:
        """As `numbers`, of float64."""
        return self._of_all(own, torch.float64)

    def _of_all(self, own: list[Any], dtype: torch.dtype) -> list[list[Any]]:
        if self.world == 1:
            return [own]
        mine = torch.tensor(own, dtype=dtype)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return [each.tolist() for each in found]

    def first_of(self, own: str, nothing: str, place: int = 0) -> str:
        """What the first rank says that does not say `nothing`, with its number. place: of what is said, which counts before the rank's."""
        if self.world == 1:
            return own
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, (place, own))
        found = [(where, rank, words) for rank, (where, words) in enumerate(told) if words != nothing]
        return "{2}, on rank {1}".format(*min(found)) if found else nothing

    def joined(self, own: Mapping[int, T]) -> list[T]:
        """What all ranks have, in the order of its numbers; of several with one number that of the first rank."""
        told: list[Any] = [own]
        if self.world > 1:
            told = [None] * self.world
            dist.all_gather_object(told, own)
        found = {number: value for each in reversed(told) for number, value in each.items()}
        return [found[number] for number in sorted(found)]

    def refuse_differences(
        self, own: Mapping[str, Any], what: str, error: type[NarrowgaugeError] = ConfigError
    ) -> None:
        """Raises on all ranks if one has another value of something; what: they are, for the message."""
        if self.world == 1:
            return
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, {key: str(value) for key, value in own.items()})
        differences = []
        for rank, each in enumerate(told[1:], 1):
            for key in own.keys() | each.keys():
                if each.get(key) != told[0].get(key):
                    differences.append(f"{key} is {told[0].get(key)!r} on rank 0 and {each.get(key)!r} on rank {rank}")
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            shown = "; ".join(sorted(differences)[:3])
            raise error(f"ranks differ in {what}: {shown}{more}. Start all of them with the same {what}.")

    # --- the end

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        try:
            yield
        except EndedElsewhere:
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and is_lost(error):
                raise self._explained(error) from error
            if isinstance(error, SystemExit):
                error = NarrowgaugeError(
                    f"{self.place}: rank {self.rank} of {self.world} left the run by sys.exit({error.code!r}). {AGAIN}"
                )
                self._fails(error.exit_code, str(error))
                raise self._told(error) from None
            if not self._fails(getattr(error, "exit_code", 1), str(error)):
                told = self._failed() or {}
                raise EndedElsewhere(told.get("code", 1)) from error
            if isinstance(error, NarrowgaugeError):
                error.told = True
                error.args = (
                    (f"rank {self.rank}: {error}",) if self.rank and not NAMED.match(str(error)) else error.args
                )
            raise

    def _fails(self, code: int, words: str) -> bool:
        """Tells the others that this rank fails; False if one has told before."""
        mine = json.dumps({"rank": self.rank, "code": code, "words": words})
        with contextlib.suppress(RuntimeError):  # the store is gone too: nobody to tell
            return bool(self._store.compare_set("failed", "", mine) == mine.encode())
        return True

    def _failed(self) -> dict[str, Any] | None:
        return json.loads(self._store.get("failed")) if self._store.check(["failed"]) else None

    def _is_watched(self) -> None:
        """Warns where no sentinel of this rank reaches the store: then a peer that dies is found by time-outs alone."""
        if self._live is None:
            return
        self._live.timeout_s = self.timeout_s
        until_s = time.monotonic() + SENTINEL_S
        while not self._store.check([f"beat-{self.rank}"]):
            if time.monotonic() > until_s:
                tell(
                    f"WARNING: rank {self.rank} of {self.world} is not watched: its sentinel has not reached the store of torchrun "
                    f"within {SENTINEL_S:g} s. A rank that dies or hangs is named after --timeout-s alone."
                )
                return
            time.sleep(POLL_S)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The others wait for this rank as long as it takes; only its end, or a stop by a signal, ends them."""
        if self._live is None:
            yield
            return
        self._live.is_alone = True
        try:
            yield
        finally:
            self._live.is_alone = False

    def wait_for_first_rank(self, key: str) -> None:
        """Until rank 0 has set the key. Raises EndedElsewhere where a rank or a sentinel reports a failure."""
        while not self._store.check([key]):
            if failed := self._failed():
                raise EndedElsewhere(failed["code"])
            time.sleep(POLL_S)

    def _where(self, rank: int) -> str:
        """Where its sentinel saw a rank last, for a sentence."""
        if not self._store.check([f"beat-{rank}"]):
            return ""
        beat = json.loads(self._store.get(f"beat-{rank}"))
        if not beat.get("where"):
            return ""
        innermost = beat["where"].splitlines()[-1].strip()
        return f" ({beat['host']}, pid {beat['pid']}, {beat['place'] or 'before the first step'}, at {innermost})"

    def _told(self, error: NarrowgaugeError) -> NarrowgaugeError:
        error.told = True
        return error

    def _explained(self, error: RuntimeError) -> NarrowgaugeError:
        """Who is to blame for a collective that broke."""
        first_line = str(error).strip().splitlines()[0][:200]
        try:
            self._store.set(f"alive-{self.rank}", "yes")
            until_s = time.monotonic() + REPORT_S
            missing = [rank for rank in range(self.world) if rank != self.rank]
            while missing and time.monotonic() < until_s:
                if failed := self._failed():
                    return EndedElsewhere(failed["code"])
                missing = [rank for rank in missing if not self._store.check([f"alive-{rank}"])]
                time.sleep(POLL_S)
        except RuntimeError:
            if self._live is not None:
                self._live.wait_for_the_end()  # the sentinel of the first rank of this machine says why
            return PeerError(
                f"{self.place}: the store of torchrun is gone, and another rank with it: {first_line} {AGAIN}"
            )
        hung = re.search("imed out|timeout", str(error)) is not None
        if missing:
            who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
            did = (
                f"did not answer within {self.timeout_s:g} s (timeout_s){self._where(missing[0])}"
                if hung
                else "ended without a word: killed, or its machine is gone"
            )
        else:
            who, did = f"one of {plural(self.world, 'rank')}", f"lost its connection though all live ({first_line})"
        words = f"{self.place}: {who} of {self.world} {did}. {AGAIN}"
        if not self._fails(PeerError.exit_code, words):
            return EndedElsewhere(PeerError.exit_code)
        return self._told(PeerError(words))


def under_torchrun() -> bool:
    """Raises ConfigError where WORLD_SIZE names several ranks and what says how they meet is missing: each would train alone."""
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing and (world := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE = {world} in the environment, without {' and '.join(missing)}: torchrun sets them all. Start the run with "
            "torchrun, or unset WORLD_SIZE to train in one process."
        )
    return not missing


def restarted() -> bool:
    """Whether torchrun started this rank again after one had failed."""
    return under_torchrun() and _number("TORCHELASTIC_RESTART_COUNT", "0") > 0


def _own_device(device: str, local: int) -> int:
    """The GPU of this rank. Raises ConfigError where all ranks would get one, or there are too few."""
    if ":" in device:
        raise ConfigError(f"device = {device!r}: each rank takes a GPU of its own. Use --device cuda, or auto.")
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local} of this machine has no GPU: PyTorch sees {plural(torch.cuda.device_count(), 'CUDA device')}. "
            "Start as many ranks as there are GPUs, or take --device cpu."
        )
    return local


def _met(limit: timedelta) -> tuple[Any, int, int]:
    """(store, rank, ranks). torchrun may keep the store from start to start, so each start has names of its own in it.

    Raises ConfigError for variables that are no numbers of ranks, PeerError where too few ranks come.
    """
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world:
        raise ConfigError(f"RANK = {rank}, WORLD_SIZE = {world}: ranks count from 0. Start the run with torchrun.")
    _number("MASTER_PORT")
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"
        raise PeerError(
            f"rank {rank} of {world} did not meet the others at {place} within {limit.total_seconds():g} s (timeout_s): "
            f"{str(error).strip().splitlines()[0][:200]} Start all ranks, with the same address."
        ) from error
    return PrefixStore(liveness.prefix_of(world), store), rank, world


def _number(name: str, default: str = "") -> int:
    """Of a variable that torchrun sets."""
    text = os.environ.get(name, default)
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(
            f"{name} = {text!r} in the environment: is no whole number. Start the run with torchrun, which sets it."
        )
    return int(text)
