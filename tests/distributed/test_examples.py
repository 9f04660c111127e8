"""The scripts of examples/ for several ranks: convert and distribute alone give the losses of one process (exact).

Without a GPU, which they would take; Accelerate, and with it the Trainer, is told to shard on the CPU (accelerate_on_cpu.py).
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.processes import ROOT, run_ok

EXAMPLES = ROOT / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    EXAMPLES / "fsdp2.yaml",
]
SHARDING = ROOT / "tests" / "distributed" / "accelerate_on_cpu.py"
CASES = {
    "a loop, DDP": ([*TORCHRUN], "ddp.py", [], "copies"),
    "a loop, FSDP2": ([*TORCHRUN], "ddp.py", ["--fsdp"], "shards"),
    "Trainer, DDP": ([*TORCHRUN], "transformers_trainer.py", [], "copies"),
    "Trainer, its own FSDP2": (
        [*TORCHRUN, SHARDING],
        "transformers_trainer.py",
        ["--fsdp"],
        "shards",
    ),
    "Trainer, FSDP2 of Accelerate": ([*LAUNCH, SHARDING], "transformers_trainer.py", [], "shards"),
    "Accelerate": ([*TORCHRUN, SHARDING], "accelerate_fsdp2.py", [], "shards"),
    "Accelerate, launched": ([*LAUNCH, SHARDING], "accelerate_fsdp2.py", [], "shards"),
    "Lightning": ([*TORCHRUN], "lightning_fsdp2.py", [], "shards"),
}
NEEDS = {
    "transformers_trainer.py": "accelerate",
    "accelerate_fsdp2.py": "accelerate",
    "lightning_fsdp2.py": "lightning",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_losses_of_one_process(monkeypatch, case):
    launcher, script, options, kind = CASES[case]
    if script in NEEDS:
        pytest.importorskip(NEEDS[script])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run_ok([*launcher, EXAMPLES / script, *options])
    assert f"2 ranks, {kind} " in done.stdout
    assert "narrowgauge.distribute" not in done.stderr  # no warning of ranks that drift
    found, alone = losses(done.stdout), of_one_process(script)
    assert found.keys() == alone.keys() and len(found) >= 10
    if (
        script == "transformers_trainer.py"
    ):  # which adds up ranks' losses in an order of its own: one unit in the last place
        assert [float(each) for each in found.values()] == pytest.approx(
            [float(each) for each in alone.values()], rel=1.2e-7
        )
    else:
        assert found == alone


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-bs", "int4-hq-lss"])
def test_a_run_of_lightning_is_resumed_to_the_bit(monkeypatch, tmp_path, recipe):
    pytest.importorskip("lightning")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [*TORCHRUN, Path(__file__).with_name("lightning_resumed.py"), "--recipe", recipe]
    whole = losses(run_ok([*command, "--steps", "6"]).stdout)
    run_ok([*command, "--steps", "3", "--save", tmp_path / "saved"])
    resumed = losses(run_ok([*command, "--steps", "6", "--resume", tmp_path / "saved"]).stdout)
    assert list(resumed) == ["4", "5", "6"] and resumed.items() <= whole.items()


def losses(text: str) -> dict[str, str]:
    """Step -> the loss, every digit."""
    return dict(re.findall(r"^step (\d+): loss (\S+)$", text, re.MULTILINE))


@cache
def of_one_process(script: str) -> dict[str, str]:
    return losses(run_ok([sys.executable, EXAMPLES / script, "--micro-batches", "2"]).stdout)
