"""Objects that outlive the interpreter's modules: nothing is written to stderr when a script ends (processes of their own)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import narrowgauge as ng

SETUP = """
import sys, decimal, torch, narrowgauge as ng
from torch import nn
model = ng.convert(nn.Sequential(nn.Linear(32, 32)), "fp8-current")
x = torch.randn(4, 32)
"""
ENDINGS = {
    "input kept by torch": "model(x); torch.kept = x",
    "input in a cycle": "model(x); x.self = [x, model]",
    "input kept by a built-in module": "model(x); sys.kept = [model, x]",
    "suspended generator": "def pause():\n    with ng.suspended(model):\n        yield\nkept = pause(); next(kept)",
    "suspended by hand": "kept = ng.suspended(model); kept.__enter__()",
    "switched": "from narrowgauge.conversion.switching import switched\nkept = switched(model); kept.__enter__()",
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_without_a_word(ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + ENDINGS[ending]], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_input_that_goes_after_torch_needs_nothing_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of the interpreter `nn.Module.__setattr__` fails, since the classes that it looks for have gone."""
    model, x = ng.convert(nn.Sequential(nn.Linear(32, 32)), "fp8-current"), torch.randn(4, 32)
    model(x)
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    monkeypatch.setattr(nn.Module, "__setattr__", lambda *given: isinstance(given, None))  # type: ignore[arg-type]
    del x
    monkeypatch.undo()
    assert not failed and model[0].state.is_last_reader
