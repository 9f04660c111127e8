"""Ctrl-C and SIGTERM as a request to stop after the current step, with a checkpoint saved.

    with StopRequest() as stop:
        for step in range(...):
            train(step)
            if stop.requested:
                save(); return stop.exit_code

The first Ctrl-C requests a stop. The second raises KeyboardInterrupt at once. Schedulers send
SIGTERM before they take a machine away: every SIGTERM only requests a stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, Literal, Self

from narrowgauge.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

Request = Literal["", "interrupted", "preempted"]
# Weakest first: `AgreedStop.agree` takes the maximum over ranks
REQUESTS: tuple[Request, ...] = ("", "interrupted", "preempted")
EXIT_CODES = {"": 0, "interrupted": EXIT_INTERRUPTED, "preempted": EXIT_PREEMPTED}
WAIT = b"\nStopping after this step, with a checkpoint. Ctrl-C again stops at once, without.\n"


class StopRequest:
    """`requested` is '', "interrupted" or "preempted".

    It stays '' outside the main thread, the only thread that receives signals.
    """

    def __init__(self, patient: bool = False) -> None:
        """Creates a request. Handlers are installed on entering the context.

        patient  one rank of several, which ignores a second Ctrl-C. torchrun forwards each signal
                 to all ranks, and a rank that stopped inside a step would leave the others in a
                 collective.
        """
        self.requested: Request = ""
        self._patient = patient
        self._interrupts = 0
        self._old: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.requested]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, handler in (
                (signal.SIGINT, self._interrupt),
                (signal.SIGTERM, self._terminate),
            ):
                old = signal.getsignal(number)
                # Leave alone a signal that is ignored, as under nohup, or that has a handler
                # outside Python
                if old not in (signal.SIG_IGN, None):
                    self._old[number] = old
                    signal.signal(number, handler)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1 and not self._patient:
            raise KeyboardInterrupt
        self.requested = self.requested or "interrupted"
        if self._patient:
            return
        # Write to the descriptor: the signal may interrupt a write to the buffered sys.stderr, and
        # a nested write to it raises RuntimeError.
        with contextlib.suppress(OSError):  # stderr is closed
            os.write(2, WAIT)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.requested = "preempted"


class AgreedStop:
    """StopRequest of one rank of several: `requested` is the strongest request of any rank.

    All ranks exchange requests at the start of each step, so they stop after the same step.
    """

    def __init__(self, own: StopRequest) -> None:
        self._own = own
        self.requested: Request = ""

    @property
    def own(self) -> int:
        """The request of this rank, as its index in REQUESTS."""
        return REQUESTS.index(self._own.requested)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.requested]

    def agree(self, numbers: Iterable[int]) -> None:
        """Sets the common request from the numbers (`own`) of all ranks."""
        self.requested = REQUESTS[max(numbers)]
