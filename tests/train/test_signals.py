"""Ctrl-C and SIGTERM: the first asks, the second Ctrl-C ends, and old handlers come back (exact)."""

import os
import signal
import subprocess
import threading
import time

import pytest

from narrowgauge.train.signals import StopRequest
from tests.processes import PYTHON, ROOT


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_nothing_is_requested_at_first():
    with StopRequest() as stop:
        assert (stop.requested, stop.exit_code) == ("", 0)


def test_the_first_interrupt_asks_and_the_second_ends():
    with StopRequest() as stop:
        send(signal.SIGINT)
        assert (stop.requested, stop.exit_code) == ("interrupted", 130)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_sigterm_asks_however_often_it_comes():
    with StopRequest() as stop:
        for _ in range(3):
            send(signal.SIGTERM)
        assert (stop.requested, stop.exit_code) == ("preempted", 75)
        send(signal.SIGINT)  # the first Ctrl-C
        assert stop.requested == "preempted"


def test_old_handlers_come_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(RuntimeError, match="body"), StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
        raise RuntimeError("body")
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_that_is_ignored_stays_ignored():
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send(signal.SIGINT)
            assert stop.requested == ""
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)


def test_outside_the_main_thread_nothing_is_touched():
    seen = []

    def body() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [""] and signal.getsignal(signal.SIGINT) is before


PROGRAM = """
import sys, time
from narrowgauge.train.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.02)
    print("saved", flush=True)
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_process_finishes_its_step_and_exits_with_the_code(number, code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [PYTHON, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate()
    assert (out, process.returncode) == (b"saved\n", code)
    assert (b"Ctrl-C again stops at once" in err) == (number == signal.SIGINT)
