"""Liveness of torchrun's ranks: names a rank that is killed, stopped or hung, and ends all others.

    with liveness.watched(timeout_s=600) as rank:       in the first second of the process: no torch
                                                        is needed
        rank.place = "step 3"                           after each step: progress, and a description
                                                        for messages
        ...

A sentinel process of 16 MB watches each rank and torchrun. It writes a heartbeat to torchrun's
store and reads the heartbeats of other ranks (see sentinel.py). A thread of the rank wakes once a
second. It sends the sentinel the main thread's stack and reports if the rank waits for others.
After a failure elsewhere, the thread ends the process after GRACE_S, with the exit code of the
failure. The delay lets a rank that notices the failure by itself end in order.

Cost: 10 µs per progress report, and 20 µs per second. `narrowgauge train` uses this by default. A
script that calls `narrowgauge.distribute` has to enter `watched` itself, since ranks end by
os._exit. Without torchrun's variables `watched` does nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import socket
import struct
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
from narrowgauge.train.liveness.processes import RUN_ID
from narrowgauge.train.liveness.store import GONE_S, STORE_S, StoreClient

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
LOOK_S = 1.0  # interval of the rank's reports to its sentinel
GRACE_S = 3.0  # time for a rank to end by itself after a peer has failed
GOODBYE_S = 10.0  # time for the sentinel to end after its rank's goodbye
KEYS = "run"  # sub-prefix for the keys of sentinels and of train.parallel.ranks
SIZE = 256  # bytes of a `Page`
FRAMES = 12  # reported frames of a stack
POLLS = "wait_for_first_rank"  # of train.parallel.ranks: it polls the store
POLL_DEPTH = 4  # frames above the innermost one in which it is looked for
IDLE = 0.3  # CPU share below which a backward pass counts as waiting for messages

_current: Watched | None = None


def current() -> Watched | None:
    """The watched rank of this process, or None."""
    return _current


def prefix_of(world: int) -> str:
    """Prefix of all store keys of one start of a run.

    torchrun may keep its store when it restarts ranks.
    """
    return f"narrowgauge-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{world}"


@contextmanager
def watched(timeout_s: float = 600.0) -> Iterator[Watched | None]:
    """Watches this rank while the body runs. Yields None without torchrun's variables.

    timeout_s   the run ends if a rank is stopped, or the others wait for it, for longer than this

    An error that leaves the body is reported to the other ranks. No thread, process or file remains
    afterwards.
    """
    global _current
    # No AF_UNIX: Windows
    if _current is not None or not _is_rank() or not hasattr(socket, "AF_UNIX"):
        yield _current
        return
    rank = _current = Watched(timeout_s)
    try:
        yield rank
    except NarrowgaugeError:
        # `failed_before`, called by the code that prints this error, reports it to the others
        rank.close()
        raise
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        rank.close(code, f"left the run by sys.exit({error.code!r})", prints=True)
        raise
    except BaseException as error:
        error.add_note(
            f"{rank.place or 'Before the first step'}: raised on rank {os.environ['RANK']}."
        )
        rank.close(
            130 if isinstance(error, KeyboardInterrupt) else 1,
            f"raised {type(error).__name__}: {error}",
        )
        raise
    else:
        rank.close()
    finally:
        _current = None


def failed_before(error: NarrowgaugeError) -> bool:
    """Returns True if another rank has failed already. Otherwise reports this error to the others.

    Returns False without a store. Uses StoreClient, not torch's client: after the store is gone,
    torch's client retries for 10 to 26 s.
    """
    if not _is_rank():
        return False
    world = int(os.environ["WORLD_SIZE"])
    mine = json.dumps(
        {"rank": int(os.environ["RANK"]), "code": error.exit_code, "words": str(error)}
    )
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
    """This rank, its reporting thread and its sentinel process.

    place       description of the current step, for messages; every assignment counts as progress
    is_alone    this rank works while the others wait for it without a limit
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.is_alone = timeout_s, False
        self._main = threading.get_ident()
        self._place = ""
        self._stop = threading.Event()
        self._processor_s, self._waits_since_s = time.process_time(), 0.0
        self._looked_s = time.monotonic()
        self._stood = ("", "")
        # SOCK_DGRAM delivers whole messages or nothing
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.setblocking(False)
        with its, tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            self._page = Page(file.fileno())
            self._talk = own
            self._sentinel = _start(its.fileno(), file.fileno())
        # The thread sends its first report after LOOK_S: the sentinel needs timeout_s before.
        self._say()
        self._thread = threading.Thread(
            target=self._report, name="narrowgauge-liveness", daemon=True
        )
        self._thread.start()

    @property
    def place(self) -> str:
        return self._place

    @place.setter
    def place(self, words: str) -> None:
        self._place = words
        self._page.write(words)

    def wait_for_the_end(self) -> None:
        """Waits until the sentinel ends this process. Returns if it does not.

        Called after the store is lost: the sentinel loses it as well and ends the rank.
        """
        self._stop.wait(GONE_S + GRACE_S + 2 * STORE_S)

    def close(self, code: int = 0, words: str = "", prints: bool = False) -> None:
        """Ends the thread and the sentinel.

        code    exit code of this rank's failure; 0: it has not failed
        words   description of the failure
        prints  the sentinel prints the description, if no other rank has failed before
        """
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
            with contextlib.suppress(OSError):  # no message from the sentinel
                self._end(json.loads(self._talk.recv(4096))["end"])
                return
            self._say()

    def _end(self, code: int) -> None:
        """Ends this process because the run has failed elsewhere."""
        if not self._stop.wait(GRACE_S):
            # Not sys.exit: the main thread may hang in a C library, and a thread cannot end it
            # otherwise.
            os._exit(code)

    def _say(self) -> None:
        stack, waits = self._stack()
        now_s = time.monotonic()
        self._waits_since_s = (self._waits_since_s or now_s) if waits else 0.0
        waits_s = now_s - self._waits_since_s if waits else 0.0
        self._send(
            {
                "timeout_s": self.timeout_s,
                "is_alone": self.is_alone,
                "waits_s": waits_s,
                "where": "\n".join(stack),
            }
        )

    def _stack(self) -> tuple[list[str], bool]:
        """Returns (frames of the main thread, innermost last; True if it waits for other ranks)."""
        now_s, processor_s = time.monotonic(), time.process_time()
        used = (processor_s - self._processor_s) / max(now_s - self._looked_s, 1e-3)
        self._processor_s, self._looked_s = processor_s, now_s
        frame = sys._current_frames().get(self._main)
        polls = _polling(frame)
        inner = polls or frame
        found: list[str] = []
        while frame is not None and len(found) < FRAMES:
            code = frame.f_code
            found.append(f"  {code.co_filename}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        stands = (self._place, POLLS if polls else found[0] if found else "")
        # A rank that moved since the last look computes, even if it is in a collective now.
        moved, self._stood = stands != self._stood, stands
        return found[::-1], not moved and inner is not None and _waits(inner, used)

    def _send(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the socket's buffer is full: the sentinel is stopped
            self._talk.send(json.dumps(what).encode())


def _polling(inner: FrameType | None) -> FrameType | None:
    """The frame of the loop that waits for rank 0, if it is among the innermost frames.

    A look may find the loop at any of its lines, or inside a function that it calls. Judged by the
    innermost line, such a rank would seem to move, and the time-out would begin again.
    """
    for _ in range(POLL_DEPTH):
        if inner is None or inner.f_code.co_name == POLLS:
            return inner
        inner = inner.f_back
    return None


def _waits(inner: FrameType, used: float) -> bool:
    """True if a stack waits for other ranks.

    used  CPU time over wall time since the last look

    DistributedDataParallel waits for its messages at the end of backward, where Python sees the
    autograd engine alone. A backward pass that computes uses more than IDLE.
    """
    where = inner.f_code.co_filename.replace(os.sep, "/")
    if "/torch/distributed/" in where or inner.f_code.co_name == POLLS:
        return True
    return where.endswith("/torch/autograd/graph.py") and used < IDLE


def _start(talk: int, page: int) -> subprocess.Popen[bytes]:
    """Starts the sentinel in a session of its own.

    Ctrl-C and signals to the ranks' process group do not reach it there.
    """
    setting = {
        "rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "pid": os.getpid(),
        "local": int(os.environ.get("LOCAL_RANK") or 0) if _is_number(os.environ.get("LOCAL_RANK", "0")) else 0,
        "host": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]),
        "prefix": f"{prefix_of(int(os.environ['WORLD_SIZE']))}/{KEYS}",
        "uses_agent_store": os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", "is_elastic": RUN_ID in os.environ,
    }  # fmt: skip
    root = str(Path(__file__).resolve().parents[3])
    program = f"import sys; sys.path.insert(0, {root!r}); from narrowgauge.train.liveness.sentinel import main; main()"
    # -I and -S skip site-packages and PYTHON* variables. A new interpreter rather than a fork: a
    # fork would inherit locks, CUDA's descriptors and the rank's memory.
    command = [sys.executable, "-I", "-S", "-c", program, str(talk), str(page), json.dumps(setting)]
    return subprocess.Popen(
        command,
        pass_fds=(talk, page),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


class Page:
    """Progress of a rank: SIZE bytes of memory, shared with its sentinel, behind a file descriptor.

        bytes 0 to 8    uint64, little-endian: number of progress reports
        bytes 8 to 256  description of the current step in UTF-8, padded with zeros: "step 3"

    A write costs 10 µs. A reader may see half of a text during a write. Its next look sees the
    whole text.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._ticks = 0

    def write(self, place: str) -> None:
        self._ticks += 1
        # Cutting bytes may split a UTF-8 character: `read` decodes with errors="replace".
        text = place.encode()[: SIZE - 8].ljust(SIZE - 8, b"\0")
        self._memory[:] = struct.pack("<Q", self._ticks) + text

    def read(self) -> tuple[int, str]:
        """Returns (number of reports, description of the current step)."""
        (ticks,) = struct.unpack("<Q", self._memory[:8])
        return ticks, self._memory[8:].rstrip(b"\0").decode(errors="replace")
