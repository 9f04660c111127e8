"""The ranks of a run under torchrun: agreement, work of rank 0, and a common end after a failure.

    with Ranks.join(timeout_s) as ranks:                without torchrun: one rank, no communication
        ranks.refuse_differences({"torch": "2.13.0"}, "versions")
        folder = ranks.first(claim)                     rank 0 alone; others wait without limit
        found = ranks.numbers([targets])                from every rank, in rank order

Ranks communicate through collectives of the process group, which have its timeout, and through keys
of torchrun's store, which outlives a rank:

    first-7     the seventh task of rank 0 alone is done
    failed      JSON of the first rank that failed, with its exit code; only it prints its error
    alive-1     rank 1 saw a collective break and is alive
    beat-1      heartbeat of rank 1's sentinel, once a second (narrowgauge.train.liveness)

A rank whose collective breaks reads `failed` and exits silently with that code. If a rank was
killed, its sentinel sets the key. If the key is unset, the rank waits for the others to set `alive`
and names those that do not.
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
from narrowgauge.distributed.all_ranks import is_lost
from narrowgauge.errors import ConfigError, NarrowgaugeError, PeerError
from narrowgauge.train import liveness
from narrowgauge.train.config.parallel_syntax import Layout
from narrowgauge.train.console import tell
from narrowgauge.train.device import chosen_device
from narrowgauge.train.liveness import VARIABLES
from narrowgauge.train.liveness.sentinel import AGAIN

T = TypeVar("T")
NAMED = re.compile(r"rank \d+: ")  # beginning of errors that name a rank already
REPORT_S = 5.0  # time for live ranks to set `alive-N`
SENTINEL_S = 5.0  # time for a rank's sentinel to reach the store
POLL_S = 0.05
# A lost peer is a plain RuntimeError from gloo, recognized by its words (`is_lost`); NCCL and the
# store raise DistError.


class EndedElsewhere(NarrowgaugeError):
    """Another rank failed and printed its error: exit with the same code, silently."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank failed, and said why")
        self.exit_code = exit_code


class Ranks:
    """One rank's view of the run. `Ranks()` is a run of one process.

    rank, world  number of this rank, count of ranks
    local        number of this rank on its machine
    timeout_s    timeout of collectives
    layout       sizes of dp, fsdp, tp and pp
    place        position in the run, for messages
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        local: int = 0,
        store: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Use `join` for a run under torchrun. store: key-value store shared by the ranks."""
        self.rank, self.world, self.local, self.timeout_s = rank, world, local, timeout_s
        self._store, self._done = store, 0
        self.layout = Layout(dp=world)  # replaced once the setting `parallel` is parsed
        self._live = liveness.current()
        self.place = "before the first step"

    @classmethod
    @contextmanager
    def join(cls, device: str, timeout_s: float) -> Iterator[Ranks]:
        """Connects the ranks of torchrun in a process group with timeout `timeout_s`.

        Without torchrun's variables it yields one rank. The process group is destroyed after the
        body, but not after an error.
        """
        if not under_torchrun():
            yield cls()
            return
        local, limit = _number("LOCAL_RANK", "0"), timedelta(seconds=timeout_s)
        uses_cuda = device != "cpu" and torch.cuda.is_available()
        if uses_cuda:
            torch.cuda.set_device(_own_device(device, local))
        store, rank, world = _met(limit)
        # Both backends on GPUs: the host's agreements (counts, losses, requests to stop) use CPU
        # tensors, which NCCL cannot send.
        backend = "cpu:gloo,cuda:nccl" if uses_cuda else "gloo"
        own = PrefixStore("group", store)
        ranks = cls(rank, world, local, PrefixStore(liveness.KEYS, store), timeout_s)
        # init_process_group inside: a rank that fails to connect must end the others too.
        with ranks.ending_together():
            ranks._is_watched()
            dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=limit)
            yield ranks
        # Not in a finally: with a dead peer this call can block.
        dist.destroy_process_group()

    @property
    def place(self) -> str:
        """Position in the run, for messages; each assignment counts as progress."""
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
        """Device for the setting `name`; with several GPUs in a machine, this rank's GPU."""
        if self._store is not None and name != "cpu" and torch.cuda.is_available():
            return torch.device("cuda", self.local)
        return chosen_device(name)

    # --- decisions

    def first(self, work: Callable[[], T]) -> T | None:
        """Runs `work` on rank 0 alone and returns its result there, None elsewhere.

        Other ranks wait without a timeout, as long as rank 0 is alive.
        """
        if self.world == 1:
            return work()
        # Counted on every rank, so that all agree on the key's name.
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
        """Runs `work` on rank 0 and returns its JSON result on all ranks."""
        if self.world == 1:
            return work()
        key = f"told-{self._done + 1}"
        self.first(lambda: self._store.set(key, json.dumps(work())))
        return json.loads(self._store.get(key))

    def numbers(self, own: list[int]) -> list[list[int]]:
        """All-gathers int64 numbers; one list for each rank, in rank order."""
        return self._of_all(own, torch.int64)

    def reals(self, own: list[float]) -> list[list[float]]:
        """All-gathers float64 numbers; one list for each rank, in rank order."""
        return self._of_all(own, torch.float64)

    def _of_all(self, own: list[Any], dtype: torch.dtype) -> list[list[Any]]:
        if self.world == 1:
            return [own]
        mine = torch.tensor(own, dtype=dtype)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return [each.tolist() for each in found]

    def first_of(self, own: str, nothing: str, place: int = 0) -> str:
        """Returns the text of the first rank whose text is not `nothing`, followed by its rank.

        place  sorts the texts before the rank does
        """
        if self.world == 1:
            return own
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, (place, own))
        found = [
            (where, rank, words) for rank, (where, words) in enumerate(told) if words != nothing
        ]
        return "{2}, on rank {1}".format(*min(found)) if found else nothing

    def joined(self, own: Mapping[int, T]) -> list[T]:
        """Merges the dicts of all ranks and returns the values in key order; lower ranks win."""
        told: list[Any] = [own]
        if self.world > 1:
            told = [None] * self.world
            dist.all_gather_object(told, own)
        # reversed: later entries overwrite earlier ones, so the lowest rank's value remains.
        found = {number: value for each in reversed(told) for number, value in each.items()}
        return [found[number] for number in sorted(found)]

    def refuse_differences(
        self, own: Mapping[str, Any], what: str, error: type[NarrowgaugeError] = ConfigError
    ) -> None:
        """Raises `error` on all ranks if a value differs between ranks.

        own   this rank's values by name
        what  what the values are, for the message
        """
        if self.world == 1:
            return
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, {key: str(value) for key, value in own.items()})
        differences = []
        for rank, each in enumerate(told[1:], 1):
            for key in own.keys() | each.keys():
                if each.get(key) != told[0].get(key):
                    differences.append(
                        f"{key} is {told[0].get(key)!r} on rank 0 and {each.get(key)!r} on rank {rank}"
                    )
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            shown = "; ".join(sorted(differences)[:3])
            raise error(
                f"ranks differ in {what}: {shown}{more}. Start all of them with the same {what}."
            )

    # --- the end

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Ends all ranks after an error on any rank, and prints the error once."""
        try:
            yield
        except EndedElsewhere:
            raise
        except BaseException as error:
            # A broken collective is a symptom: find the rank that caused it.
            if isinstance(error, RuntimeError) and is_lost(error):
                raise self._explained(error) from error
            if isinstance(error, SystemExit):
                error = NarrowgaugeError(
                    f"{self.place}: rank {self.rank} of {self.world} left the run by sys.exit({error.code!r}). {AGAIN}",
                    code="ranks.exit",
                )
                # sys.exit on one rank would leave the others waiting in a collective.
                self._fails(error.exit_code, str(error))
                raise self._told(error) from None
            # Another rank failed first, and its error is the one that is printed.
            if not self._fails(getattr(error, "exit_code", 1), str(error)):
                told = self._failed() or {}
                raise EndedElsewhere(told.get("code", 1)) from error
            if isinstance(error, NarrowgaugeError):
                error.told = True
                error.args = (
                    (f"rank {self.rank}: {error}",)
                    if self.rank and not NAMED.match(str(error))
                    else error.args
                )
            raise

    def _fails(self, code: int, words: str) -> bool:
        """Sets `failed` for the other ranks; returns False if another rank has set it before."""
        mine = json.dumps({"rank": self.rank, "code": code, "words": words})
        # compare_set is atomic: of ranks that fail at once, exactly one prints its error.
        # RuntimeError: the store is gone, and there is no rank left to inform.
        with contextlib.suppress(RuntimeError):
            return bool(self._store.compare_set("failed", "", mine) == mine.encode())
        return True

    def _failed(self) -> dict[str, Any] | None:
        """Contents of `failed`, or None. Does not block."""
        # check() first: get() blocks until the key exists.
        return json.loads(self._store.get("failed")) if self._store.check(["failed"]) else None

    def _is_watched(self) -> None:
        """Warns if this rank's sentinel does not reach the store.

        Without a sentinel, only timeouts detect a dead rank.
        """
        if self._live is None:
            return
        self._live.timeout_s = self.timeout_s
        until_s = time.monotonic() + SENTINEL_S
        while not self._store.check([f"beat-{self.rank}"]):
            if time.monotonic() > until_s:
                tell(
                    f"WARNING: rank {self.rank} of {self.world} is not watched: its sentinel has not reached the store of torchrun "
                    f"within {SENTINEL_S:g} s. A rank that dies or hangs is named after --parallel.timeout-s alone."
                )
                return
            time.sleep(POLL_S)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Marks this rank as working alone, so that the others wait for it without a timeout.

        Its exit, or a stop by a signal, still ends them.
        """
        if self._live is None:
            yield
            return
        self._live.is_alone = True
        try:
            yield
        finally:
            self._live.is_alone = False

    def wait_for_first_rank(self, key: str) -> None:
        """Waits until rank 0 sets `key`.

        Raises EndedElsewhere if a rank or a sentinel reports a failure.
        """
        # Polling instead of store.wait(): a wait has a timeout, and would not notice `failed`.
        while not self._store.check([key]):
            if failed := self._failed():
                raise EndedElsewhere(failed["code"])
            time.sleep(POLL_S)

    def _where(self, rank: int) -> str:
        """Last position and innermost stack frame of a rank, from its heartbeat; '' if unknown."""
        if not self._store.check([f"beat-{rank}"]):
            return ""
        beat = json.loads(self._store.get(f"beat-{rank}"))
        if not beat.get("where"):
            return ""
        innermost = beat["where"].splitlines()[-1].strip()
        return f" ({beat['host']}, pid {beat['pid']}, {beat['place'] or 'before the first step'}, at {innermost})"

    def _told(self, error: NarrowgaugeError) -> NarrowgaugeError:
        """Marks an error as published in `failed`."""
        error.told = True
        return error

    def _explained(self, error: RuntimeError) -> NarrowgaugeError:
        """Error that names the rank responsible for a broken collective."""
        first_line = str(error).strip().splitlines()[0][:200]
        try:
            # Set before waiting: ranks whose collective broke at the same time look for each
            # other's key.
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
                # The sentinel of this machine's first rank reports the failure.
                self._live.wait_for_the_end()
            return PeerError(
                f"{self.place}: the store of torchrun is gone, and another rank with it: {first_line} {AGAIN}",
                code="ranks.store-gone",
            )
        # A timeout means a rank that did not answer; a closed connection means a process that
        # ended.
        hung = re.search("imed out|timeout", str(error)) is not None
        if missing:
            who = (
                f"rank {missing[0]}"
                if len(missing) == 1
                else f"ranks {', '.join(map(str, missing))}"
            )
            did = (
                f"did not answer within {self.timeout_s:g} s (timeout_s){self._where(missing[0])}"
                if hung
                else "ended without a word: killed, or its machine is gone"
            )
        else:
            who, did = (
                f"one of {plural(self.world, 'rank')}",
                f"lost its connection though all live ({first_line})",
            )
        words = f"{self.place}: {who} of {self.world} {did}. {AGAIN}"
        if not self._fails(PeerError.exit_code, words):
            return EndedElsewhere(PeerError.exit_code)
        return self._told(PeerError(words, code="ranks.lost"))


def under_torchrun() -> bool:
    """Returns True if torchrun's variables are set.

    Raises ConfigError if WORLD_SIZE names several ranks but the other variables are missing: each
    rank would train alone.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing and (world := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE = {world} in the environment, without {' and '.join(missing)}: torchrun sets them all. Start the run with "
            "torchrun, or unset WORLD_SIZE to train in one process.",
            code="torchrun.variables",
        )
    return not missing


def restarted() -> bool:
    """True if torchrun restarted this rank after a failure."""
    return under_torchrun() and _number("TORCHELASTIC_RESTART_COUNT", "0") > 0


def _own_device(device: str, local: int) -> int:
    """Index of this rank's GPU; ConfigError if ranks would share one, or there are too few."""
    if ":" in device:
        raise ConfigError(
            f"device = {device!r}: each rank takes a GPU of its own. Use --device cuda, or auto.",
            code="ranks.device",
        )
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local} of this machine has no GPU: PyTorch sees {plural(torch.cuda.device_count(), 'CUDA device')}. "
            "Start as many ranks as there are GPUs, or take --device cpu.",
            code="ranks.no-gpu",
        )
    return local


def _met(limit: timedelta) -> tuple[Any, int, int]:
    """Connects to torchrun's store; returns (store, rank, ranks).

    Raises ConfigError for invalid variables, and PeerError if ranks are missing after `limit`.
    """
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world:
        raise ConfigError(
            f"RANK = {rank}, WORLD_SIZE = {world}: ranks count from 0. Start the run with torchrun.",
            code="torchrun.rank",
        )
    _number("MASTER_PORT")
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))
    except (RuntimeError, ValueError, OSError) as error:
        place = (
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"
        )
        raise PeerError(
            f"rank {rank} of {world} did not meet the others at {place} within {limit.total_seconds():g} s (timeout_s): "
            f"{str(error).strip().splitlines()[0][:200]} Start all ranks, with the same address.",
            code="ranks.timeout",
        ) from error
    # torchrun may keep its store across restarts; a prefix for each start hides stale keys.
    return PrefixStore(liveness.prefix_of(world), store), rank, world


def _number(name: str, default: str = "") -> int:
    """Integer value of an environment variable that torchrun sets."""
    text = os.environ.get(name, default)
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(
            f"{name} = {text!r} in the environment: is no whole number. Start the run with torchrun, which sets it.",
            code="torchrun.number",
        )
    return int(text)
