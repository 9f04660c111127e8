"""The scripts of examples/ for several ranks, by torchrun: convert and distribute alone make them right."""

from __future__ import annotations

import sys

import pytest

from tests.processes import ROOT, run_ok


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ddp.py", "ddp.py --fsdp", "transformers_trainer.py", "accelerate_fsdp2.py"])
def test_examples_train_on_two_ranks(script):
    name, *options = script.split()
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_ok([*torchrun, ROOT / "examples" / name, *options])
    assert "loss" in done.stdout
    assert "narrowgauge.distribute" not in done.stderr  # no warning of ranks that drift
