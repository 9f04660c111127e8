"""`train` alone refuses what only the lab can do; nothing is left out in silence (exact)."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.lab.training import EXTENSIONS
from narrowgauge.train import loop
from narrowgauge.train.guard_state import Unguarded
from tests.raising import raises


@pytest.mark.parametrize("setting", [{"guard": "every=4,steps=2"}, {"on_spike": "warn"}])
def test_a_run_without_the_lab_refuses_guard_and_spike_watch(make, setting):
    with raises(ConfigError, "train.needs-lab"):
        loop.run(make(recipe="fp8-current", **setting))


def test_a_run_without_the_lab_refuses_a_branch(make):
    first = make("first", steps=2)
    assert loop.run(first) == 0
    with raises(ConfigError, "train.needs-lab"):
        loop.run(make("second", steps=4, parent=first.output))


def test_the_lab_adds_a_guard_and_a_spike_watch(make):
    assert loop.ALONE.plugins(make()) == [Unguarded]
    assert len(EXTENSIONS.plugins(make(on_spike="warn"))) == 2


def test_train_names_no_module_of_the_lab():
    """A string would escape the import contract; former places alone name the lab."""
    files = [*Path(loop.__file__).parent.rglob("*.py")]
    naming = {each.name for each in files if 'import_module("narrowgauge.lab' in each.read_text()}
    assert len(files) > 50 and not naming
