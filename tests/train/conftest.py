"""One corpus, one tokenizer and one cache for all runs of these tests."""

from __future__ import annotations

import shutil

import pytest

from tests.train import tiny


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return tiny.write_text(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture
def own_text(text, tmp_path):
    """A copy of the corpus that a test may change."""
    return shutil.copytree(text, tmp_path / "own" / "text")


@pytest.fixture
def make(text, tmp_path):
    """make("name", steps=3): the configuration of a tiny run in a folder of that name."""
    return lambda name="run", **changes: tiny.settings(text, tmp_path / name, **changes)


@pytest.fixture
def with_report():
    """Asked for by a quick test whose runs write their report."""


@pytest.fixture(autouse=True)
def reports(request, monkeypatch):
    """The folders whose report was due. A third of a tiny run is its page: a quick test has none written, unless it asks `with_report`."""
    from narrowgauge.train import loop

    due, write = [], loop._write_report
    is_written = "with_report" in request.fixturenames or request.node.get_closest_marker("slow")

    def noted(folder):
        due.append(folder.path)
        if is_written:
            write(folder)

    monkeypatch.setattr(loop, "_write_report", noted)
    return due


@pytest.fixture
def before_step(monkeypatch):
    """before_step(3, do): calls do(trainer) once, just before optimizer step 3 is computed."""
    from narrowgauge.train.trainer import Trainer

    def install(number, do):
        real = Trainer._optimizer_step
        done = []

        def step(trainer):
            if trainer.step + 1 == number and not done:
                done.append(number)
                do(trainer)
            return real(trainer)

        monkeypatch.setattr(Trainer, "_optimizer_step", step)

    return install
