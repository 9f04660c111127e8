"""Paths that docs named before the lab had a room of its own (exact)."""

from __future__ import annotations

from importlib import import_module

import pytest

from narrowgauge.diagnose.moved import PLACES

FORMER = {
    "narrowgauge.diagnose.blame": ("narrowgauge.lab.blame", "blame"),
    "narrowgauge.diagnose.guard.evidence": ("narrowgauge.lab.guard.evidence", "Evidence"),
    "narrowgauge.train.blame_checkpoint": ("narrowgauge.lab.blame_checkpoint", "blame_checkpoint"),
    "narrowgauge.train.blamed": ("narrowgauge.lab.blamed", "blame_run"),
    "narrowgauge.train.probe": ("narrowgauge.lab.probe", "run_probe"),
    "narrowgauge.train.study.plan": ("narrowgauge.lab.study.plan", "Study"),
    "narrowgauge.train.study.runner": ("narrowgauge.lab.study.runner", "run"),
    "narrowgauge.train.transformers_trainer": (
        "narrowgauge.lab.transformers_trainer",
        "GuardedTrainer",
    ),
}


@pytest.mark.parametrize("former", FORMER)
def test_a_former_path_gives_the_same_object_with_a_warning(former):
    place, name = FORMER[former]
    if former.endswith("transformers_trainer"):
        pytest.importorskip("transformers")
    with pytest.warns(DeprecationWarning):
        found = getattr(import_module(former), name)
    assert found is getattr(import_module(place), name)


def test_a_name_that_never_was_is_no_attribute():
    with pytest.warns(DeprecationWarning), pytest.raises(AttributeError):
        _ = import_module("narrowgauge.train.probe").nothing


def test_the_tables_agree():
    """Every former place of the package is tried above."""
    assert {former: place for former, (place, _) in FORMER.items()} == PLACES


def test_a_former_path_is_imported_from_its_package_as_well():
    from narrowgauge.train.study import plan

    with pytest.warns(DeprecationWarning):
        assert plan.Study is import_module("narrowgauge.lab.study.plan").Study


def test_a_name_beside_a_former_path_is_no_module():
    with pytest.raises(ModuleNotFoundError):
        import_module("narrowgauge.train.study.nothing")
