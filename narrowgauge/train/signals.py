"""Ctrl-C and SIGTERM as a request to stop after the current step, with a checkpoint saved.

    with StopRequest() as stop:
        for step in range(...):
            train(step)
            if stop.requested:
                save(); return stop.exit_code

The first Ctrl-C asks; the second raises KeyboardInterrupt at once, for whoever does not want to wait. SIGTERM, what a
scheduler sends before it takes the machine away, asks however often it comes.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, Literal, Self

from narrowgauge.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

Request = Literal["", "interrupted", "preempted"]
REQUESTS: tuple[Request, ...] = ("", "interrupted", "preempted")  # the strongest last
EXIT_CODES = {"": 0, "interrupted": EXIT_INTERRUPTED, "preempted": EXIT_PREEMPTED}
WAIT = b"\nStopping after this step, with a checkpoint. Ctrl-C again stops at once, without.\n"


class StopRequest:
    """`requested` says what was asked for. Outside the main thread, which alone gets signals, it stays ''."""

    def __init__(self, patient: bool = False) -> None:
        """patient: one rank of several. torchrun passes each signal on to all of them, and none may stop in the midst of a step."""
        self.requested: Request = ""
        self._patient = patient
        self._interrupts = 0
        self._old: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.requested]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGINT, self._interrupt), (signal.SIGTERM, self._terminate)):
                old = signal.getsignal(number)
                if old not in (signal.SIG_IGN, None):  # neither ignored, as under nohup, nor handled outside Python
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
        # Straight to the descriptor: a buffered stream may be in the midst of a write when the signal comes.
        with contextlib.suppress(OSError):  # nobody listens
            os.write(2, WAIT)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.requested = "preempted"


class AgreedStop:
    """A StopRequest of one rank of several: `requested` is what any rank was asked for, known to all since the step began."""

    def __init__(self, own: StopRequest) -> None:
        self._own = own
        self.requested: Request = ""

    @property
    def own(self) -> int:
        """What this rank was asked for, as a number for the others."""
        return REQUESTS.index(self._own.requested)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.requested]

    def agree(self, numbers: Iterable[int]) -> None:
        """numbers: `own` of every rank."""
        self.requested = REQUESTS[max(numbers)]
