"""Runs commands against this checkout in a process of their own: no shared imports, no shared torch state.

None has a limit of its own: the limit of the test ends them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable


def run(
    command: Sequence[str | Path], *, cwd: Path = ROOT, import_from: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The finished process with its output as text, whatever its exit code. Modules in `import_from` come first."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(import_from)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )


def run_ok(
    command: Sequence[str | Path], *, cwd: Path = ROOT, import_from: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """As `run`; anything but exit code 0 fails the test with what the process printed."""
    __tracebackhide__ = True
    done = run(command, cwd=cwd, import_from=import_from)
    words = " ".join(map(str, command))
    assert done.returncode == 0, (
        f"exit code {done.returncode} from: {words}\n{done.stdout}{done.stderr}"
    )
    return done


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere, so as root the body runs with the rights of nobody."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def interpreted(modules: Sequence[str], part: str) -> dict[str, str]:
    """Name of a case -> what differs, of the cases that these modules run for `part` (see tests/ops/triton/cases.py).

    A process of its own, for Triton's interpreter is chosen when a kernel is defined.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        command = [PYTHON, "-W", "ignore", "-m", "tests.ops.triton.cases", part, *modules]
        lines = run_ok(command).stdout.splitlines()
    return {each["case"]: each["words"] for each in map(json.loads, lines)}
