"""What a training step launches, moves, copies and waits for is not more than is committed (exact); and how that is compared.

Slow, and skipped with the reason where the versions are not those of the committed counts: `make dry-run` installs these, and runs all.
"""

from __future__ import annotations

import json

import pytest

from narrowgauge.train.attention import WHOLE_ROWS
from tests.gpu_dry_run import __main__ as command
from tests.gpu_dry_run import counts, layer

OLD = {
    "versions": {},
    "linear": {"fp8": {"launches": 9, "read_gb": 0.5}},
    "kernels": {
        "linear: fp8: cast": {"registers": 40, "programs": 5},
        "linear: fp8: settle": {"registers": 9},
        "trainer: a: b": {},
    },
}
NEW = {
    "linear": {"fp8": {"launches": 9, "read_gb": 0.5}},
    "kernels": {"linear: fp8: cast": {"registers": 40, "programs": 5}},
}


def test_what_is_better_fell_and_a_kernel_that_is_gone_did():
    """Of the cases that were counted: another part's kernels are not gone."""
    new = {
        "linear": {"fp8": {"launches": 8, "read_gb": 0.5}},
        "kernels": {"linear: fp8: cast": {"registers": 40, "programs": 6}},
    }
    fell = [
        "linear: fp8: launches 9 -> 8",
        "kernels: linear: fp8: cast: programs 5 -> 6",
        "kernels: linear: fp8: settle: gone",
    ]
    assert counts.differences(OLD, new) == {"rose": [], "new": [], "fell": fell}


def test_what_rose_is_named():
    new = {
        "linear": {"fp8": {"launches": 10, "read_gb": 0.501, "waits": 1}, "fp4": {"launches": 1}},
        "kernels": {"linear: fp8: cast": {"registers": 41, "programs": 4}, "linear: fp4: x": {}},
    }
    found = counts.differences(OLD, new)
    assert found["rose"] == [
        "linear: fp8: launches 9 -> 10", "linear: fp8: read_gb 0.5 -> 0.501", "linear: fp8: waits 0 -> 1",
        "kernels: linear: fp8: cast: registers 40 -> 41", "kernels: linear: fp8: cast: programs 5 -> 4",
    ]  # fmt: skip
    assert found["new"] == ["linear: fp4", "kernels: linear: fp4: x"]


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The command, as if this machine could count, and had counted what the test says."""
    path = tmp_path / "counts" / "torch-0.0.json"
    path.parent.mkdir()
    path.write_text(json.dumps(OLD))
    monkeypatch.setattr(counts, "path", lambda: path)
    monkeypatch.setattr(counts, "versions", lambda: {"torch": "0.0"})
    monkeypatch.setattr(counts, "refusal", lambda: "")
    monkeypatch.setattr(command.runtime, "refusal", lambda: "")

    def run(new, *arguments):
        monkeypatch.setattr(counts, "measured", lambda part, log, cases: new)
        return command.main(["--only", "linear", "--log", str(tmp_path), *arguments])

    return run


def test_the_command_fails_when_a_number_rose(counted, capsys):
    assert counted(NEW) == 0 and "nothing rose" in capsys.readouterr().out
    assert counted(NEW | {"linear": {"fp8": {"launches": 10, "read_gb": 0.5}}}) == 1
    assert "rose: linear: fp8: launches 9 -> 10" in capsys.readouterr().out


def test_an_update_writes_what_was_counted_and_keeps_the_rest(counted):
    new = {
        "linear": {"fp8": {"launches": 8}, "int8": {"launches": 3}},
        "kernels": {"linear: int8: cast": {"registers": 8}},
    }
    assert counted(new, "--update") == 0
    found = counts.committed()
    assert found["linear"] == {"fp8": {"launches": 8}, "int8": {"launches": 3}} and found[
        "versions"
    ] == {"torch": "0.0"}
    assert found["kernels"] == {"linear: int8: cast": {"registers": 8}, "trainer: a: b": {}}
    assert counted(new) == 0


def test_the_layer_that_is_counted_has_no_mask():
    """Its batch names what the trainer's has: a batch without ids counts as another task's, whose mask is kept."""
    assert layer.llama("meta").config._attn_implementation == WHOLE_ROWS


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compiled layers, where no cache holds them
@pytest.mark.skipif(counts.refusal() != "", reason=counts.refusal() or "can be counted here")
@pytest.mark.parametrize("part", counts.PARTS)
def test_nothing_rose(part, tmp_path):
    found = counts.differences(counts.committed(), counts.measured(part, tmp_path))
    assert not found["rose"] + found["new"], "\n".join(
        [*found["rose"], *found["new"], f"Where it was meant: {counts.UPDATE}"]
    )
