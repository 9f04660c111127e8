"""Processes of a study: what becomes of each way to end. The runs are scripts of a few lines (exact; no clock is judged)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from narrowgauge.errors import ConfigError, StorageError
from narrowgauge.lab.study.plan import Job
from narrowgauge.lab.study.pool import KILLS, Pool
from narrowgauge.train.signals import StopRequest

# Ends as the first line of its file says, and strikes that line out.
SCRIPT = """
import os, signal, sys, time
path = sys.argv[-1]
ways = open(path).read().split()
open(path, "w").write(" ".join(ways[1:]))
open(path + ".count", "a").write("x")
way = ways[0] if ways else "0"
if way == "wait":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    open(path + ".ready", "w")
    time.sleep(60)
if way == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "parent":
    open(path + ".ready", "w")
    while os.read(0, 1):
        pass
    way = "75"
print("narrowgauge: why it ended", file=sys.stderr)
sys.exit(int(way))
"""


@pytest.fixture
def pool(tmp_path):
    """pool({"a": "9 0"}): runs these jobs; (the pool, name of a run -> how it ended)."""

    def make(ways, most=2, peak=None, devices=(), stop=None):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        jobs, ends, seen = [], {}, []
        for name, way in ways.items():
            folder = tmp_path / name
            folder.mkdir()
            (folder / "way").write_text(way)
            jobs.append(Job(name, 0, folder))

        def ask(job, device):
            seen.append((job.recipe, device))
            return job.folder / "way"

        made = Pool(
            most, list(devices), ask, peak, lambda running: None, lambda job, why: ends.update({job.recipe: why}),
            command=(sys.executable, "-S", str(script)), poll_s=0.01,
        )  # fmt: skip
        made.seen = seen
        made.run(jobs, stop or StopRequest())
        return made, ends

    return make


def starts(tmp_path, name):
    return len((tmp_path / name / "way.count").read_text())


def test_one_that_diverged_or_crashed_loses_no_other(pool):
    _, ends = pool({"a": "0", "b": "5", "c": "1", "d": "0"})
    assert ends == {"a": "", "b": "not finite", "c": "exit code 1: why it ended", "d": ""}


def test_a_killed_run_goes_on_and_at_last_counts_as_failed(pool, tmp_path):
    _, ends = pool({"a": "kill kill 0", "b": "75 0", "c": "kill " * 9})
    assert ends == {"a": "", "b": "", "c": f"killed {KILLS + 1} times"}
    assert [starts(tmp_path, name) for name in "abc"] == [3, 2, KILLS + 1]


def test_out_of_memory_is_tried_again_alone(pool, tmp_path):
    """Unless it was alone the first time."""
    made, ends = pool({"a": "9 0", "b": "0", "c": "0"}, most=3)
    assert (
        ends == {"a": "", "b": "", "c": ""}
        and starts(tmp_path, "a") == 2
        and made.seen[-1][0] == "a"
    )
    _, ends = pool({"alone": "9 0"}, most=1)
    assert ends["alone"].endswith("memory")


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (8, StorageError)])
def test_what_would_end_every_run_ends_the_study_and_stops_the_others(pool, code, error):
    with pytest.raises(error, match="a, seed 0: why it ended"):
        pool({"a": str(code), "b": "wait"})


def test_a_request_to_stop_reaches_all_and_none_is_started_after_it(pool, tmp_path):
    stop = StopRequest()

    def ask():
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s and not all(
            (tmp_path / each / "way.ready").exists() for each in "ab"
        ):
            time.sleep(0.01)
        stop.requested = "interrupted"

    asker = threading.Thread(target=ask)
    asker.start()
    made, ends = pool({"a": "wait", "b": "wait", "c": "0"}, stop=stop)
    asker.join()
    assert ends == {} and not made.running and not (tmp_path / "c" / "way.count").exists()


def test_on_the_cpu_the_first_run_says_what_fits(pool):
    """Nothing is known until one has ended here; then all fit."""
    asked = []

    def peak():
        asked.append(1)
        return None if len(asked) < 3 else 1

    _, ends = pool({"a": "0", "b": "0", "c": "0"}, most=3, peak=peak)
    assert len(ends) == 3 and asked


def test_gpus_get_one_run_each(pool):
    made, ends = pool({name: "0" for name in "abcd"}, most=2, devices=("cuda:0", "cuda:1"))
    assert len(ends) == 4 and {device for _, device in made.seen[:2]} == {"cuda:0", "cuda:1"}


@pytest.mark.slow
def test_a_run_sees_that_its_study_has_ended(tmp_path):
    """Standard input is a pipe that the system closes with the study, by kill -9 too."""
    script, way = tmp_path / "script.py", tmp_path / "way"
    script.write_text(SCRIPT)
    way.write_text("parent")
    program = (
        "import sys\nfrom pathlib import Path\nfrom narrowgauge.train.signals import StopRequest\n"
        "from narrowgauge.lab.study.plan import Job\nfrom narrowgauge.lab.study.pool import Pool\n"
        f"pool = Pool(1, [], lambda job, device: Path({str(way)!r}), None, lambda running: print(pool.running[0].process.pid, flush=True)"
        f", lambda job, why: None, command=({sys.executable!r}, {str(script)!r}))\n"
        f"pool.run([Job('a', 0, Path({str(tmp_path)!r}))], StopRequest())\n"
    )
    study = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(study.stdout.readline())
    study.kill()
    study.wait()
    study.stdout.close()
    until_s = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until_s and not ended(pid):
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}") or ended(pid)


def ended(pid):
    """A process that nobody has waited for yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_a_run_says_is_kept(pool, tmp_path):
    pool({"a": "1"})
    assert "why it ended" in (tmp_path / "a" / "console.txt").read_text()
