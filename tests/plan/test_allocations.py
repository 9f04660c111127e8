"""Measuring what a step allocates, in a process of its own: what it says besides (exact)."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, torch
from torch import nn
from narrowgauge.plan import Step
from narrowgauge.plan.allocations import most_allocated
model, x = nn.Linear(64, 64), torch.zeros(8, 64)
print(most_allocated(Step(model, lambda: model(x).sum(), model.zero_grad, lambda: [], x), torch.device("cpu")))
assert "KINETO_LOG_LEVEL" not in os.environ
"""


@pytest.mark.slow
def test_measuring_writes_nothing_of_torchs_profiler():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, encoding="utf-8", check=True
    )
    assert int(done.stdout) > 2 * 64 * 65 * 4 and done.stderr == ""
