"""Liveness of the ranks of torchrun: a rank that is killed, stopped or hung is named, and none trains on alone.

    with liveness.watched(timeout_s=600) as rank:       in the first second of the process: no torch is needed
        rank.place = "step 3"                           after each step: progress, and where the run is for messages
        ...

A process of 16 MB, the sentinel, watches each rank and torchrun, keeps a heartbeat in torchrun's store and
reads the others' (sentinel.py says what it does). A thread of the rank, which wakes once a second, tells
the sentinel whether the rank waits for others and where it stands, and ends the process where the run has
failed elsewhere: with the exit code of the failure, GRACE_S after it, so that a rank which notices by
itself can end in order.

Costs 10 µs for each report of progress and 20 µs a second. `narrowgauge train` does this by itself. A
script of your own that calls `narrowgauge.distribute` has to ask for it, since ranks end by os._exit.
Without torchrun's variables `watched` does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.train.liveness.page import SIZE, Page
from narrowgauge.train.liveness.processes import RUN_ID
from narrowgauge.train.liveness.store import GONE_S, STORE_S, StoreClient

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
LOOK_S = 1.0  # between reports of the rank to its sentinel
GRACE_S = 3.0  # in which a rank whose peers failed may end by itself
GOODBYE_S = 10.0  # for the sentinel to end after its rank has said goodbye
KEYS = "run"  # under the prefix, those of sentinels and of train.parallel.ranks
FRAMES = 12  # of a stack that is reported
IDLE = 0.3  # of a processor, below which a backward pass waits for messages

_current: Watched | None = None


def current() -> Watched | None:
    """The rank that is being watched in this process."""
    return _current


def prefix_of(world: int) -> str:
    """Of the keys of one start of a run: torchrun may keep its store when it starts ranks again."""
    return f"narrowgauge-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{world}"


@contextmanager
def watched(timeout_s: float = 600.0) -> Iterator[Watched | None]:
    """Watches this rank while the body runs; None without torchrun's variables.

    timeout_s   after which a rank that is stopped, or for which the others wait, ends the run

    An error that leaves the body is reported to the other ranks. Nothing is left afterwards: no thread,
    no process, no file.
    """
    global _current
    if _current is not None or not _is_rank() or not hasattr(socket, "AF_UNIX"):  # Windows
        yield _current
        return
    rank = _current = Watched(timeout_s)
    try:
        yield rank
    except NarrowgaugeError:
        rank.close()  # whoever prints it tells the others
        raise
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        rank.close(code, f"left the run by sys.exit({error.code!r})", prints=True)
        raise
    except BaseException as error:
        error.add_note(f"{rank.place or 'Before the first step'}: raised on rank {os.environ['RANK']}.")
        rank.close(130 if isinstance(error, KeyboardInterrupt) else 1, f"raised {type(error).__name__}: {error}")
        raise
    else:
        rank.close()
    finally:
        _current = None


def failed_before(error: NarrowgaugeError) -> bool:
    """Whether another rank has failed already; reports this error to the others where none has. False without a store."""
    if not _is_rank():
        return False
    world = int(os.environ["WORLD_SIZE"])
    mine = json.dumps({"rank": int(os.environ["RANK"]), "code": error.exit_code, "words": str(error)})
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = StoreClient(*address, f"{prefix_of(world)}/{KEYS}", STORE_S)
    except OSError:
        return False
    try:
        return store.compare_set("failed", "", mine) != mine
    except OSError:
        return False
    finally:
        store.close()


def _is_rank() -> bool:
    numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    return bool(sys.executable) and all(map(_is_number, numbers)) and "MASTER_ADDR" in os.environ


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text) is not None


class Watched:
    """This rank, its thread and its sentinel.

    place       where the run is, for messages; every assignment counts as progress
    is_alone    the other ranks know that this one works while they wait, however long that takes
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.is_alone = timeout_s, False
        self._main = threading.get_ident()
        self._place = ""
        self._stop = threading.Event()
        self._processor_s, self._waits_since_s = time.process_time(), 0.0
        self._looked_s = time.monotonic()
        self._stood = ("", "")
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # whole messages, or none
        own.setblocking(False)
        with its, tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            self._page = Page(file.fileno())
            self._talk = own
            self._sentinel = _start(its.fileno(), file.fileno())
        self._say()
        self._thread = threading.Thread(target=self._report, name="narrowgauge-liveness", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        return self._place

    @place.setter
    def place(self, words: str) -> None:
        self._place = words
        self._page.write(words)

    def wait_for_the_end(self) -> None:
        """Until the sentinel, which has lost the store too, ends this process; returns where it does not."""
        self._stop.wait(GONE_S + GRACE_S + 2 * STORE_S)

    def close(self, code: int = 0, words: str = "", prints: bool = False) -> None:
        """Says goodbye; with a code, that this rank failed, which the sentinel prints unless it is said elsewhere."""
        self._stop.set()
        self._send({"goodbye": True, "code": code, "words": words, "prints": prints})
        self._thread.join()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._sentinel.wait(GOODBYE_S)
        if self._sentinel.poll() is None:
            self._sentinel.kill()
            self._sentinel.wait()
        self._talk.close()

    # --- the thread

    def _report(self) -> None:
        while not self._stop.wait(LOOK_S):
            with contextlib.suppress(OSError):  # nothing was said
                self._end(json.loads(self._talk.recv(4096))["end"])
                return
            self._say()

    def _end(self, code: int) -> None:
        """The run has failed elsewhere: this process ends."""
        if not self._stop.wait(GRACE_S):
            os._exit(code)

    def _say(self) -> None:
        stack, waits = self._stack()
        now_s = time.monotonic()
        self._waits_since_s = (self._waits_since_s or now_s) if waits else 0.0
        waits_s = now_s - self._waits_since_s if waits else 0.0
        self._send(
            {"timeout_s": self.timeout_s, "is_alone": self.is_alone, "waits_s": waits_s, "where": "\n".join(stack)}
        )

    def _stack(self) -> tuple[list[str], bool]:
        """(lines of the main thread's stack, innermost last; whether it waits for other ranks)."""
        now_s, processor_s = time.monotonic(), time.process_time()
        used = (processor_s - self._processor_s) / max(now_s - self._looked_s, 1e-3)
        self._processor_s, self._looked_s = processor_s, now_s
        frame = sys._current_frames().get(self._main)
        inner = frame
        found: list[str] = []
        while frame is not None and len(found) < FRAMES:
            code = frame.f_code
            found.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        stands = (self._place, found[0] if found else "")
        moved, self._stood = stands != self._stood, stands
        return found[::-1], not moved and inner is not None and _waits(inner, used)

    def _send(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a sentinel that is stopped reads nothing
            self._talk.send(json.dumps(what).encode())


def _waits(inner: FrameType, used: float) -> bool:
    """Whether a stack waits for other ranks.

    used: of a processor. DistributedDataParallel waits for its messages at the end of a backward pass,
    where Python sees the engine alone; a backward pass that computes uses more than IDLE.
    """
    where = inner.f_code.co_filename.replace(os.sep, "/")
    if "/torch/distributed/" in where or inner.f_code.co_name == "wait_for_first_rank":
        return True
    return where.endswith("/torch/autograd/graph.py") and used < IDLE


def _start(talk: int, page: int) -> subprocess.Popen[bytes]:
    """The sentinel, in a session of its own: Ctrl-C and signals to the ranks' group leave it alone."""
    setting = {
        "rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "pid": os.getpid(),
        "local": int(os.environ.get("LOCAL_RANK") or 0) if _is_number(os.environ.get("LOCAL_RANK", "0")) else 0,
        "host": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]),
        "prefix": f"{prefix_of(int(os.environ['WORLD_SIZE']))}/{KEYS}",
        "uses_agent_store": os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", "is_elastic": RUN_ID in os.environ,
    }  # fmt: skip
    root = str(Path(__file__).resolve().parents[3])
    program = f"import sys; sys.path.insert(0, {root!r}); from narrowgauge.train.liveness.sentinel import main; main()"
    command = [sys.executable, "-I", "-S", "-c", program, str(talk), str(page), json.dumps(setting)]
    return subprocess.Popen(
        command, pass_fds=(talk, page), start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
