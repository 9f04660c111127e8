"""`train` alone refuses what only the lab can do; nothing is left out in silence (exact)."""

from __future__ import annotations

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.lab.training import EXTENSIONS
from narrowgauge.train import loop
from narrowgauge.train.guard_state import Unguarded
from tests.raising import raises


@pytest.mark.parametrize("setting", [{"guard": "every=4,steps=2"}, {"on_spike": "warn"}])
def test_a_run_without_the_lab_refuses_guard_and_spike_watch(make, setting):
    with raises(ConfigError, "train.needs-lab"):
        loop.run(make(recipe="fp8-current", **setting), loop.ALONE)


def test_a_run_without_the_lab_refuses_a_branch(make):
    first = make("first", steps=2)
    assert loop.run(first) == 0
    with raises(ConfigError, "train.needs-lab"):
        loop.run(make("second", steps=4, parent=first.output), loop.ALONE)


def test_a_former_call_gets_the_lab_with_a_warning(make):
    first = make("first", steps=2)
    assert loop.run(first) == 0
    second = make("second", steps=4, parent=first.output)
    with pytest.warns(DeprecationWarning, match=r"lab\.training"):
        assert loop.run(second) == 0


def test_the_lab_adds_a_guard_and_a_spike_watch(make):
    assert loop.ALONE.plugins(make()) == [Unguarded]
    assert len(EXTENSIONS.plugins(make(on_spike="warn"))) == 2
