"""The fixtures of every test do what they promise (exact): a pytest of its own runs tests that break each rule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests import conftest
from tests.processes import PYTHON, ROOT, run

TESTS = """
import pytest, torch, hypothesis, hypothesis.strategies as st

def test_leaves_dtype():
    torch.set_default_dtype(torch.float64)

def test_leaves_threads():
    torch.set_num_threads(2)

def test_leaves_deterministic():
    torch.use_deterministic_algorithms(True)

def test_leaves_environment(monkeypatch):
    import os

    monkeypatch.setenv("LEFT_BY_MONKEYPATCH", "1")
    os.environ["LEFT_BY_A_LIBRARY"] = "1"
    os.environ["HOME"] = "changed"

def test_all_is_back():
    import os

    assert not {"LEFT_BY_A_LIBRARY", "LEFT_BY_MONKEYPATCH"} & os.environ.keys()
    assert os.environ["HOME"] != "changed"
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == 1 and torch.get_num_interop_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()

@pytest.mark.parametrize("again", range(2))
def test_seeded(again):
    assert torch.initial_seed() == 0
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))

def test_poisoned(poisoned_memory):
    assert torch.empty(3, 5).isnan().all()
    assert (torch.empty(7, dtype=torch.uint8) == 255).all()

@hypothesis.given(st.integers())
def test_derandomized(x):
    assert hypothesis.settings().derandomize and hypothesis.settings().deadline is None

@pytest.mark.gpu
def test_gpu():
    torch.zeros(1, device="cuda")

def test_warning_is_an_error():
    with pytest.raises(UserWarning):
        import warnings
        warnings.warn("anything")
"""


# Holds the GIL in C, where no handler of a signal can run.
HANGING = """
import ctypes, signal, pytest

@pytest.mark.timeout(4)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    ctypes.PyDLL(None).sleep(600)

def test_next():
    pass
"""


COLLECTING = """
import gc, pathlib

def pytest_sessionfinish(session):
    who = "worker" if hasattr(session.config, "workerinput") else "controller"
    pathlib.Path(who).write_text(f"{gc.isenabled()}")
"""


def reported(folder: Path, tests: str, *arguments: str) -> str:
    file = folder / "test_rules.py"
    file.write_text(tests, encoding="utf-8")
    config = [
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        folder,
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conftest",
    ]
    ended = run([PYTHON, "-m", "pytest", *config, "-rA", *arguments, file.name], cwd=folder)
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return reported(tmp_path_factory.mktemp("rules"), TESTS)


@pytest.mark.slow
def test_a_test_that_hangs_in_c_is_told_and_the_others_go_on(tmp_path):
    report = reported(tmp_path, HANGING, "-n", "1")
    assert "Timeout (0:00:05)!" in report and "in test_hangs" in report
    assert (
        "FAILED test_rules.py::test_hangs" in report and "PASSED test_rules.py::test_next" in report
    ), report


@pytest.mark.slow
def test_garbage_is_collected_in_the_controller_and_in_workers(tmp_path):
    (tmp_path / "conftest.py").write_text(COLLECTING, encoding="utf-8")
    reported(tmp_path, "def test(): pass", "-n", "1")
    assert {who: (tmp_path / who).read_text("utf-8") for who in ("controller", "worker")} == {
        "controller": "True",
        "worker": "True",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "change"),
    [
        ("test_leaves_dtype", "default dtype: torch.float32 -> torch.float64"),
        ("test_leaves_threads", "threads: 1 -> 2"),
        ("test_leaves_deterministic", "deterministic debug mode: 0 -> 2"),
    ],
)
def test_a_changed_global_fails_the_test_that_left_it(report, test, change):
    assert f"ERROR test_rules.py::{test}" in report
    assert f"the test left torch's globals changed: {change}" in report


@pytest.mark.slow
def test_the_others_pass(report):
    for test in (
        "leaves_environment",
        "all_is_back",
        "seeded[0]",
        "seeded[1]",
        "poisoned",
        "derandomized",
        "warning_is_an_error",
    ):
        assert f"PASSED test_rules.py::test_{test}" in report, report


@pytest.mark.slow
def test_a_gpu_test_runs_or_is_skipped_with_a_reason(report):
    assert (
        "PASSED test_rules.py::test_gpu" in report
        or "needs a CUDA device; torch.cuda.is_available()" in report
    )


def test_kernels_of_torch_compile_are_kept_apart_by_configuration(monkeypatch):
    """A worker, which inherits the variable, keeps it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/cache")
    found = []
    for capability in ("AVX2", "AVX2", "AVX512"):
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        conftest._one_cache_per_configuration()
        found.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert found[0] == found[1] and found[2].startswith(found[1]) and found[2] != found[1]
