"""Sentinel of a rank: a process of 16 MB that outlives the rank, reports its end, and can end it.

It imports only the standard library, since importing torch takes seconds and 200 MB. It does not
share the rank's interpreter, so its heartbeat continues while a C library holds the rank's GIL. Its
keys in the store, next to the keys of Ranks:

    beat-R   every second: host, pid, place, activity of the rank, and a counter
    failed   the first failure of the run, with its exit code. It is set once, and the process that
             sets it prints

Observations and reactions:

    its rank ended without a goodbye  sets `failed`, with the signal or exit code of the rank
    the launcher (torchrun) ended     sets `failed`, since its ranks would train on as orphans
    another process set `failed`      tells its rank to end with that code, and kills it after
                                      KILL_S
    its rank is stopped (SIGSTOP)     prints a note, and sets `failed` after timeout_s
    the others wait for its rank      prints a note with the stack, and sets `failed` after
                                      timeout_s
    the next rank's beat is silent    prints a note, and sets `failed` after LOST_S: its machine is
                                      gone
    the store is gone                 prints, and ends its rank: torchrun's agent on the store's
                                      host ended

All timers pause while the launcher is stopped, since Ctrl-Z stops torchrun together with its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import PeerError
from narrowgauge.train.liveness import Page, processes
from narrowgauge.train.liveness.store import GONE_S, STORE_S, ProtocolError, StoreClient

TICK_S = 0.5
NOTE_S = 4.0  # a rank stopped for longer is named
WAIT_S = 5.0  # a rank that others wait for longer is named
SILENT_S = 7.0  # a rank silent for longer is named
LOST_S = 30.0  # a rank silent for longer ends the run: a machine that only pauses comes back sooner
KILL_S = 6.0  # from the request to end until SIGKILL
OWN_KILL_S = 30.0  # the same for a rank that failed by itself and still cleans up
AGAIN = "All ranks end. Resume with --resume from the last checkpoint, on any number of ranks."


@dataclass
class Setting:
    """Environment of one rank, passed as JSON."""

    rank: int
    world: int
    local: int
    pid: int
    host: str
    port: int
    prefix: str
    uses_agent_store: bool
    is_elastic: bool  # started by torchrun, whose process is watched


class Sentinel:
    """State and main loop of a sentinel.

    rank_says        last report of the rank
    goodbye          last message of the rank, with its exit code; None while it runs
    ending_since_s   time since which the rank is expected to end; None: it is not
    launcher         pid of torchrun's agent; 0: none
    """

    def __init__(self, setting: Setting, talk: socket.socket, page: Page) -> None:
        self.setting, self.talk, self.page = setting, talk, page
        self.name = (
            f"rank {setting.rank} of {setting.world} ({socket.gethostname()}, pid {setting.pid})"
        )
        self.timeout_s = 600.0
        self.store: StoreClient | None = None
        self.rank_says: dict[str, Any] = {}
        self.goodbye: dict[str, Any] | None = None
        self.ending_since_s: float | None = None
        self.kill_s = KILL_S
        self.launcher, self.launcher_gone = (
            processes.launcher_of(setting.pid) if setting.is_elastic else (0, "")
        )
        self._descriptors = {
            pid: processes.pidfd(pid) for pid in (setting.pid, self.launcher) if pid > 1
        }
        self._count = 0
        self._since: dict[str, float] = {}
        self._noted: set[tuple[str, str]] = set()
        self._was_connected = False
        self._machine = (socket.gethostname(), _boot())
        self._next_beat: tuple[Any, float] = (None, time.monotonic())
        self._ticked_s = time.monotonic()
        self._paused_s = 0.0

    def run(self) -> None:
        poller = select.poll()
        for descriptor in (self.talk.fileno(), *filter(None, self._descriptors.values())):
            poller.register(descriptor, select.POLLIN)
        while True:
            poller.poll(TICK_S * 1000 if self.goodbye is None else 0)
            self._listen()
            if not self._lives(self.setting.pid) or self.goodbye is not None:
                self._rank_ended()
                return
            self._tick()

    # --- the rank

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # BlockingIOError: all messages are read
            while True:
                said = json.loads(self.talk.recv(65536))
                if "goodbye" in said:
                    self.goodbye = said
                else:
                    self.rank_says, self.timeout_s = said, said["timeout_s"]
                    self._since["said"] = time.monotonic()

    def _lives(self, pid: int) -> bool:
        """True if the rank or the launcher runs."""
        if pid == self.setting.pid:
            # The sentinel is a child of the rank: getppid changes when the rank dies, even if its
            # pid is reused.
            return os.getppid() == pid
        # A pidfd refers to one process: a new process with the same pid does not look alive.
        descriptor = self._descriptors.get(pid)
        if descriptor is None:
            return processes.exists(pid)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return not poller.poll(0)

    def _rank_ended(self) -> None:
        # Read the exit status first: the launcher may reap the zombie at any moment.
        how = processes.exit_words(self.setting.pid)
        if self.ending_since_s is not None:
            return  # the run ended this rank: nothing to report
        if self.goodbye is not None:
            if not self.goodbye["code"]:
                self._store("set", f"beat-{self.setting.rank}", json.dumps({"ended": True}))
                return
            words = f"{self._place()}{self.name} {self.goodbye['words']}. {AGAIN}"
            self._fails(words, self.goodbye["code"], prints=self.goodbye["prints"])
            return
        how = how or "ended without a word: killed, most likely, or by os._exit"
        self._fails(f"{self._place()}{self.name} {how}. {AGAIN}")

    def _end(self, code: int) -> None:
        """Tells the rank to end. `_is_ending` kills it if it does not."""
        if self.ending_since_s is None and self._lives(self.setting.pid):
            self.ending_since_s = time.monotonic()
            with contextlib.suppress(OSError):
                self.talk.send(json.dumps({"end": code}).encode())

    def _is_ending(self) -> bool:
        """True if the rank was told to end, or reports that it ends. Kills it after `kill_s`."""
        if self.ending_since_s is None:
            return False
        if time.monotonic() - self.ending_since_s > self.kill_s and self._lives(self.setting.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.setting.pid, signal.SIGKILL)
        return True

    # --- the run

    def _tick(self) -> None:
        self._pause()
        if self._is_ending():
            return
        if self.launcher > 1 and not self.launcher_gone and not self._lives(self.launcher):
            self.launcher_gone = "it was killed, most likely"
        if self.launcher_gone:
            self._fails(
                f"{self._place()}torchrun (pid {self.launcher}), which started {self.name}, is gone: "
                f"{self.launcher_gone}. {AGAIN}"
            )
            return
        self._beat()
        if self.store is None:
            self._without_store()
        elif failed := self._store("get", "failed"):
            told = json.loads(failed)
            if told["rank"] == self.setting.rank and not told.get("by_sentinel"):
                self.ending_since_s, self.kill_s = time.monotonic(), OWN_KILL_S
            else:
                self._end(told["code"])
        else:
            self._watch_own_rank()
            self._watch_next()

    def _pause(self) -> None:
        """Shifts all timers by the time for which the launcher or this process was stopped."""
        now_s = time.monotonic()
        apart_s, self._ticked_s = now_s - self._ticked_s, now_s
        is_stopped = self.launcher > 1 and processes.state(self.launcher) == "T"
        if is_stopped or apart_s > 2 * (TICK_S + STORE_S):
            self._since = {key: since_s + apart_s for key, since_s in self._since.items()}
            self._next_beat = (self._next_beat[0], self._next_beat[1] + apart_s)

    def _beat(self) -> None:
        self._count += 1
        waits_s = self.rank_says.get("waits_s", 0.0)
        ticks, place = self.page.read()
        told = {
            "count": self._count, "host": self._machine[0], "boot": self._machine[1], "pid": self.setting.pid,
            "ticks": ticks, "place": place, "waits_s": waits_s, "where": self.rank_says.get("where", ""),
        }  # fmt: skip
        self._store("set", f"beat-{self.setting.rank}", json.dumps(told))

    def _watch_own_rank(self) -> None:
        """Prints a note if the rank is stopped or others wait for it.

        Ends the run after timeout_s.
        """
        stopped = processes.state(self.setting.pid) == "T"
        if self._for_s("stopped", stopped) > NOTE_S:
            self._note(
                "stopped",
                f"is stopped by a signal (SIGSTOP). Continue it: kill -CONT {self.setting.pid}",
            )
        if self._for_s("stopped", stopped) > self.timeout_s:
            self._fails(
                f"{self._place()}{self.name} was stopped for {self.timeout_s:g} s (timeout_s). {AGAIN}"
            )
            return
        ticks, _ = self.page.read()
        # A thread of the rank cannot report while a C library holds the GIL, so silence counts as
        # standing still.
        silent_s = time.monotonic() - self._since.get("said", time.monotonic())
        stands = self.rank_says.get("waits_s", 0.0) == 0.0 or silent_s > WAIT_S
        if self._since_tick(ticks) and stands and not stopped and self.setting.world > 1:
            waiting = self._for_s("waited for", self._another_waits())
        else:
            waiting = self._for_s("waited for", False)
        if not waiting:
            return
        inside = (
            f" (a C library has held the interpreter for {silent_s:.0f} s)"
            if silent_s > WAIT_S
            else ""
        )
        stack = f"Its stack{inside}, innermost call last:\n{self.rank_says.get('where') or '  not known'}"
        if self.rank_says.get("is_alone"):
            self._note("alone", f"works alone, and the others wait for it. {stack}")
            return
        self._note("waited for", f"makes no progress, and the others wait for it. {stack}")
        if waiting > self.timeout_s:
            self._fails(
                f"{self._place()}{self.name} hangs: the others have waited for {self.timeout_s:g} s (timeout_s). "
                f"{stack}\n{AGAIN}"
            )

    def _since_tick(self, ticks: int) -> bool:
        """True if the rank has reported no progress for WAIT_S."""
        key = f"tick {ticks}"
        if key not in self._since:
            self._since = {
                name: since for name, since in self._since.items() if not name.startswith("tick ")
            }
            self._since[key] = time.monotonic()
        return time.monotonic() - self._since[key] > WAIT_S

    def _another_waits(self) -> bool:
        """True if a neighbour or rank 0 has waited for WAIT_S.

        Called only while this rank makes no progress, which saves requests to the store.
        """
        world = self.setting.world
        for other in {(self.setting.rank - 1) % world, (self.setting.rank + 1) % world, 0} - {
            self.setting.rank
        }:
            beat = self._store("get", f"beat-{other}")
            if beat and json.loads(beat).get("waits_s", 0.0) > WAIT_S:
                return True
        return False

    def _watch_next(self) -> None:
        """Watches the heartbeat of the next rank in the ring.

        Its whole machine may be gone, including its sentinel.
        """
        other = (self.setting.rank + 1) % self.setting.world
        if other == self.setting.rank or self.store is None:
            return
        text = self._store("get", f"beat-{other}")
        if text is None:  # the rank has not started, or the store does not answer
            return
        beat, now_s = json.loads(text), time.monotonic()
        if beat.get("ended") or beat["count"] != self._next_beat[0]:
            self._next_beat = (beat.get("count"), now_s)
            return
        silent_s = now_s - self._next_beat[1]
        name = f"rank {other} of {self.setting.world} ({beat['host']}, pid {beat['pid']})"
        where = f"{beat['place']}: " if beat["place"] else ""
        if silent_s > SILENT_S and (beat["host"], beat["boot"]) == self._machine:
            if not processes.exists(beat["pid"]):
                self._fails(f"{where}{name} was killed, with the process that watched it. {AGAIN}")
            return  # only its sentinel is gone or stopped
        if silent_s > SILENT_S:
            self._note(
                "silent",
                f"reports: no sign of life of {name} for {silent_s:.0f} s. Its machine or network may be gone",
            )
        if silent_s > LOST_S:
            self._fails(
                f"{where}{name} has given no sign of life for {LOST_S:g} s: its machine is gone. {AGAIN}"
            )

    # --- the store

    def _store(self, method: str, *given: str) -> Any:
        """Calls a method of the store client; reconnects if necessary.

        Returns None without a store.
        """
        try:
            if self.store is None:
                setting = self.setting
                self.store = StoreClient(setting.host, setting.port, setting.prefix, STORE_S)
                self._was_connected = True
            answer = getattr(self.store, method)(*given)
        except OSError as error:
            if self.store is not None:
                self.store.close()
            self.store = None
            refused = isinstance(error, ConnectionError) and not isinstance(error, ProtocolError)
            # Only a refused connection proves that the store ended: a stopped store is silent
            self._for_s("refused", refused)
            if isinstance(error, ProtocolError):
                self._note("protocol", f"is not watched: {error}")
            return None
        self._since.pop("refused", None)
        return answer

    def _without_store(self) -> None:
        expected = self._was_connected or self.setting.uses_agent_store
        refused_s = time.monotonic() - self._since["refused"] if "refused" in self._since else 0.0
        if not expected or refused_s < GONE_S:
            return
        host = f"{self.setting.host}:{self.setting.port}"
        whose = (
            "torchrun's agent on that machine"
            if self.setting.uses_agent_store
            else "rank 0, which served it,"
        )
        if self.setting.local == 0:
            _say(f"{self._place()}{self.name} lost the store at {host}: {whose} has ended. {AGAIN}")
        self._end(PeerError.exit_code)

    def _fails(self, words: str, code: int = PeerError.exit_code, prints: bool = True) -> None:
        """Sets `failed` and ends the rank. The first process to set it prints.

        Without a store, the first rank of each machine prints, as does a rank that reported its own
        failure.
        """
        mine = json.dumps(
            {"rank": self.setting.rank, "code": code, "words": words, "by_sentinel": True}
        )
        now = self._store("compare_set", "failed", "", mine)
        if prints and (
            now == mine or (now is None and (self.setting.local == 0 or self.goodbye is not None))
        ):
            _say(words)
        self._end(PeerError.exit_code)

    # --- messages

    def _place(self) -> str:
        place = self.page.read()[1]
        return f"{place}: " if place else ""

    def _for_s(self, what: str, holds: bool) -> float:
        """Seconds for which a condition has held."""
        if not holds:
            self._since.pop(what, None)
            return 0.0
        return time.monotonic() - self._since.setdefault(what, time.monotonic())

    def _note(self, kind: str, words: str) -> None:
        """Prints a note, once per kind and step."""
        place = self.page.read()[1]
        if (kind, place) not in self._noted:
            self._noted.add((kind, place))
            prefix = "Note" if kind == "alone" else "WARNING"
            print(f"{prefix}: {self._place()}{self.name} {words}", file=sys.stderr, flush=True)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        print(f"narrowgauge: {words}", file=sys.stderr, flush=True)


def _boot() -> str:
    """Boot id of this machine, which distinguishes machines with equal host names."""
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file,
    ):
        return file.read().strip()
    return ""


def main() -> None:
    """Entry point, started by `narrowgauge.train.liveness`.

    Arguments: two file descriptors, and a Setting as JSON.
    """
    talk, page, setting = int(sys.argv[1]), int(sys.argv[2]), Setting(**json.loads(sys.argv[3]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the sentinel ends with its rank and never before
    connection = socket.socket(fileno=talk)
    connection.setblocking(False)
    sentinel = Sentinel(setting, connection, Page(page))
    sentinel.run()
