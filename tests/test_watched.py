"""The watch of .ci/run ends a suite that stands still, with stacks, and leaves one that does not alone (exact)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads /proc, which Linux alone has"
)
WATCHED = ROOT / "scripts" / "watched.py"


def watched(folder, *command, silent_s=2.0, limit_s=60.0, **given):
    """(exit code, log)."""
    limits = ["--log", str(folder / "log"), "--silent-s", str(silent_s), "--limit-s", str(limit_s)]
    done = subprocess.run(
        [PYTHON, str(WATCHED), *limits, "--", *command], capture_output=True, text=True, **given
    )
    log = (folder / "log").read_text("utf-8")
    assert done.stdout == log
    return done.returncode, log


def program(folder, text):
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    return [PYTHON, str(file)]


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_ends_is_shown_and_its_code_returned(tmp_path, code):
    found = watched(
        tmp_path, *program(tmp_path, f"print('all passed'); raise SystemExit({code})"), silent_s=60
    )
    assert found == (code, "all passed\n")


STANDING = """
import os, signal, subprocess, sys, threading
def captured():
    command = [sys.executable, "-c", "import time\\ndef deep():\\n    time.sleep(600)\\ndeep()"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
child = captured()
print("began", flush=True)
def stands():
    os.kill(os.getpid(), signal.SIGSTOP)
stands()
"""


@pytest.mark.slow
def test_stacks_of_a_stopped_process_and_of_one_whose_errors_are_captured(tmp_path):
    code, log = watched(tmp_path, *program(tmp_path, STANDING))
    assert code == 124 and log.startswith("began\n\nci: nothing was printed for 2 s.")
    assert ", state T, waits in " in log and ", state S, waits in " in log
    assert "in stands" in log and "in deep" in log
    assert not [each for each in _processes() if str(tmp_path / "program.py") in each]


@pytest.mark.slow
def test_a_command_that_prints_for_ever_meets_the_limit(tmp_path):
    text = "import time\nwhile True:\n    print('.', end='', flush=True); time.sleep(0.1)"
    code, log = watched(tmp_path, *program(tmp_path, text), limit_s=3)
    assert code == 124 and "ci: the limit of 3 s has passed" in log


STOPPED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, signal\\ndef one(): os.kill(os.getpid(), signal.SIGSTOP)\\none()"])
while True:
    print(".", end="", flush=True); time.sleep(0.1)
"""


@pytest.mark.slow
def test_one_process_that_is_stopped_ends_what_the_others_still_print(tmp_path):
    code, log = watched(tmp_path, *program(tmp_path, STOPPED), silent_s=3)
    assert code == 124 and "was stopped for 3 s. Every process of" in log and "in one" in log


@pytest.mark.slow
def test_a_reader_that_stops_reading_stops_nothing(tmp_path):
    """The command ends, with all that it printed in the log."""
    command = program(tmp_path, "print('x' * 1_000_000); print('all passed')")
    limits = ["--log", str(tmp_path / "log"), "--silent-s", "20"]
    with subprocess.Popen(
        [PYTHON, str(WATCHED), *limits, "--", *command], stdout=subprocess.PIPE
    ) as process:
        while not (tmp_path / "log").exists() or not (tmp_path / "log").read_bytes().endswith(
            b"all passed\n"
        ):
            time.sleep(0.05)
        assert process.wait() == 0  # nothing was read
        process.stdout.close()


@pytest.mark.slow
def test_who_ends_the_watch_ends_the_command(tmp_path):
    command = program(tmp_path, "import time; print('began', flush=True); time.sleep(600)")
    with subprocess.Popen(
        [PYTHON, str(WATCHED), "--log", str(tmp_path / "log"), "--", *command]
    ) as process:
        while not (tmp_path / "log").exists() or not (tmp_path / "log").read_bytes():
            time.sleep(0.05)
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    while [each for each in _processes() if str(tmp_path / "program.py") in each]:
        time.sleep(0.05)


def _processes():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode("utf-8", "replace"))
        except OSError:
            continue
    return found


# --- .ci/run

SUITE = """
import os, signal, time
import pytest
from tests.distributed.ranks import Ranks

def stop_rank_1():
    import torch.distributed as dist
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

def test_first():
    pass

def test_stands():
    time.sleep(2)
    {fault}

def test_last():
    time.sleep(0.1)
"""
FAULTS = {
    "worker": "os.kill(os.getpid(), signal.SIGSTOP)",
    "controller": "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(600)",
    "rank": "Ranks(2)(stop_rank_1)",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", FAULTS)
def test_the_suite_ends_where_one_of_its_processes_is_stopped(tmp_path, who):
    """.ci/run itself, with a Makefile that runs a suite of three tests in two workers."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    shutil.copy(WATCHED, tmp_path / "scripts")
    (tmp_path / "test_suite.py").write_text(SUITE.format(fault=FAULTS[who]), encoding="utf-8")
    config = f"-c {ROOT / 'pyproject.toml'} --rootdir . -p no:cacheprovider -p tests.conftest"
    lines = [f"\t{sys.executable} -m pytest -n 2 --dist worksteal {config} test_suite.py"]
    (tmp_path / "Makefile").write_text(
        "\n".join(["check:", "\t@true", "test:", *lines, "test-slow:", "\t@true", ""])
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CI_SILENT_S": "90",
        "CI_STEPS": "check test test-slow",  # whatever the suite around was asked for
        "PYTHON": sys.executable,
    }
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 124, done.stdout + done.stderr
    assert (
        "ci: failed: " in done.stdout and "for 90 s" in done.stdout and ", state T, " in done.stdout
    )
    assert ("in stop_rank_1" if who == "rank" else "in test_stands") in done.stdout
    assert "execnet" in done.stdout  # the stack of the controller or a worker
    assert not [each for each in _processes() if str(tmp_path) in each]
