"""A rank without torch: waits for the others as a collective does, and meets a fault. python rank.py FAULT RANK

FAULT: none, kill, stop, loop, sleep, exit, raise, quit (os._exit), c (a C function that holds the GIL)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from narrowgauge.train import liveness


def wait_for_first_rank() -> None:
    """Named as in train.parallel.ranks, by which a stack that waits is known.

    As there it runs at two lines and inside a function that it calls. A look of the liveness thread, once a second, finds one or another.
    """
    while True:
        time.sleep(0.35)
        look()
        time.sleep(0.35)


def look() -> None:
    time.sleep(0.35)


def spin() -> None:
    while True:
        pass


def meet(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "loop":
        spin()
    elif fault == "sleep":
        time.sleep(600)
    elif fault == "c":
        ctypes.PyDLL(None).sleep(600)
    elif fault == "exit":
        sys.exit(3)
    elif fault == "quit":
        os._exit(3)
    elif fault == "raise":
        raise ValueError("the disk is blue")


if __name__ == "__main__":
    with liveness.watched(timeout_s=float(os.environ.get("RANK_TIMEOUT_S", "600"))) as rank:
        assert rank is not None
        os.write(
            1, f"started {os.environ['RANK']} {os.getpid()} {rank._sentinel.pid}\n".encode()
        )  # in one piece
        rank.place = "step 3"
        time.sleep(1.5)
        if sys.argv[1] != "none" and os.environ["RANK"] == sys.argv[2]:
            meet(sys.argv[1])
        elif sys.argv[1] != "none":
            wait_for_first_rank()
