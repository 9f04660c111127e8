"""When a sentinel kills its rank: after it was told to end, and not before `kill_s` have passed."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from narrowgauge.train.liveness import sentinel


@pytest.mark.parametrize(("waited_s", "kills"), [(1.0, False), (9.0, False), (11.0, True)])
def test_a_rank_that_was_told_to_end_has_its_time(monkeypatch, waited_s, kills):
    sent = []
    # The names of the module alone: the process and its plugins go on by the real clock.
    kill = SimpleNamespace(kill=lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(sentinel, "os", kill)
    monkeypatch.setattr(sentinel, "time", SimpleNamespace(monotonic=lambda: 1000.0 + waited_s))
    told = SimpleNamespace(
        ending_since_s=1000.0, kill_s=10.0, setting=SimpleNamespace(pid=77), _lives=lambda pid: True
    )
    assert sentinel.Sentinel._is_ending(told)
    assert sent == ([(77, signal.SIGKILL)] if kills else [])
