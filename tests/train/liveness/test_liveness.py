"""Ranks that die, stop, hang or lose their agent are named, and none is left (exact; ranks without torch, which start at once).

tests/train/test_torchrun.py and tests/train/liveness/rank_deaths.py try the same on runs of `narrowgauge train`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from narrowgauge.errors import DataError
from narrowgauge.train import liveness
from narrowgauge.train.liveness import SIZE, Page, processes
from tests.processes import PYTHON, ROOT
from tests.train.liveness import agent as agent_module

AGENT = Path(agent_module.__file__)


class Run:
    """Ranks of one agent or two; the store is this process's, or none is served."""

    def __init__(self, fault, rank, world=2, nodes=1, timeout_s=600.0, served=True):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK_TIMEOUT_S": str(timeout_s)}
        port = str(self.store.port)
        if not served:
            self.store = None
        cuts = [0, world] if nodes == 1 else [0, world - 1, world]
        self.agents = []
        for first, end in itertools.pairwise(cuts):
            command = [
                PYTHON,
                AGENT,
                port,
                str(first),
                str(end - first),
                str(world),
                fault,
                str(rank),
            ]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            self.agents.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        self.lines: list[str] = []
        self._readers = [threading.Thread(target=self._read, args=(each,)) for each in self.agents]
        for each in self._readers:
            each.start()

    def _read(self, agent):
        for line in agent.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, pattern):
        """The match; the limit of the test ends a wait for what never comes."""
        while True:
            if found := re.search(pattern, "\n".join(self.lines), re.MULTILINE):
                return found
            time.sleep(0.02)

    @property
    def pids(self):
        """Of ranks and sentinels that have started."""
        found = re.findall(r"^started \d+ (\d+) (\d+)$", "\n".join(self.lines), re.MULTILINE)
        return [int(pid) for pair in found for pid in pair]

    def end(self):
        """What was said. Every process of the run has to end by itself: the pipe closes with the last."""
        for each in self._readers:
            each.join()
        for each in self.agents:
            each.wait()
            each.stdout.close()
        while any(
            processes.exists(pid) for pid in self.pids
        ):  # one that is ending has closed the pipe
            time.sleep(0.02)
        return self.lines

    def told(self):
        return [line for line in self.end() if line.startswith("narrowgauge: ")]


def test_a_normal_end_leaves_nothing_and_says_nothing():
    run = Run("none", 0)
    assert not [line for line in run.end() if not line.startswith("started")][:-1]
    assert run.lines[-1] == "codes 0 0"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_with_its_signal_and_last_step(rank):
    run = Run("kill", rank)
    [line] = run.told()
    assert re.match(
        rf"narrowgauge: step 3: rank {rank} of 2 \(.+, pid \d+\) was killed by SIGKILL\. All ranks end\.",
        line,
    ) or (
        f"rank {rank} of 2" in line and ": killed" in line  # reaped before it could be read
    )
    assert run.lines[-1] in ("codes 6 -9", "codes -9 6")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words", "codes"),
    [
        ("exit", r"rank 1 of 2 .* left the run by sys\.exit\(3\)", "codes 3 3"),
        ("quit", r"rank 1 of 2 .* ended (with exit code 3|without a word)", "codes 6 3"),
    ],
)
def test_a_rank_that_leaves_is_named(fault, words, codes):
    run = Run(fault, 1)
    [line] = run.told()
    assert re.search(words, line) and run.lines[-1] == codes


@pytest.mark.slow
def test_an_error_ends_the_others_with_its_code_and_its_rank_in_the_traceback():
    run = Run("raise", 1)
    assert run.told() == [] and run.lines[-1] == "codes 1 1"
    assert "ValueError: the disk is blue" in run.lines and "step 3: raised on rank 1." in run.lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "where"),
    [("loop", "in spin"), ("sleep", "in meet"), ("c", "the interpreter")],
)
def test_a_rank_that_hangs_is_named_with_its_stack_and_told_from_a_dead_one(fault, where):
    run = Run(fault, 1, world=3, timeout_s=12)
    run.wait_for(r"^WARNING: step 3: rank 1 of 3 .* makes no progress, and the others wait for it")
    assert all(agent.poll() is None for agent in run.agents)  # it is named, and the run still waits
    [line] = run.told()
    assert "rank 1 of 3" in line and "hangs: the others have waited for 12 s (timeout_s)" in line
    assert where in "\n".join(run.lines)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_may_go_on():
    run = Run("stop", 1, timeout_s=600)
    found = run.wait_for(
        r"rank 1 of 2 .* is stopped by a signal \(SIGSTOP\)\. Continue it: kill -CONT (\d+)"
    )
    os.kill(int(found[1]), signal.SIGCONT)
    while processes.exists(int(found[1])):  # it goes on, and ends in order
        time.sleep(0.05)
    assert not any(line.startswith("narrowgauge: ") for line in run.lines)
    run.agents[0].kill()  # the other waits for ever
    assert len(run.told()) == 1


@pytest.mark.slow
def test_a_rank_that_stays_stopped_ends_the_run():
    run = Run("stop", 0, timeout_s=8)
    [line] = run.told()
    assert (
        "rank 0 of 2" in line
        and "was stopped for 8 s (timeout_s)" in line
        and run.lines[-1] == "codes -9 6"
    )


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_whose_agent_is_killed_end(nodes):
    """The second node's agent: the store lives on, and tells the first node."""
    run = Run("wait", 9, world=3, nodes=nodes)
    run.wait_for(r"(started(.|\n)*){3}")
    time.sleep(1)
    run.agents[-1].kill()
    [line] = run.told()
    assert re.search(rf"\(pid {run.agents[-1].pid}\).* rank \d of 3 .* is gone", line)
    if nodes == 2:
        assert "codes 6 6" in run.lines


@pytest.mark.slow
def test_ranks_whose_store_is_gone_end():
    run = Run("wait", 9, served=False)
    [line] = run.told()
    assert "rank 0 of 2" in line and "lost the store at 127.0.0.1:" in line
    assert run.lines[-1] == "codes 6 6"


@pytest.mark.slow
def test_a_rank_that_is_killed_with_its_sentinel_is_named_by_its_neighbour():
    run = Run("wait", 9, world=3)
    run.wait_for(r"(started(.|\n)*){3}")
    time.sleep(2)
    found = re.search(r"^started 2 (\d+) (\d+)$", "\n".join(run.lines), re.MULTILINE)
    for pid in found.groups():
        os.kill(int(pid), signal.SIGSTOP)
    for pid in found.groups():
        os.kill(int(pid), signal.SIGKILL)
    [line] = run.told()
    assert "rank 2 of 3" in line and "killed, with" in line


# --- in this process


@pytest.fixture
def as_rank(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return dist.PrefixStore(f"{liveness.prefix_of(1)}/{liveness.KEYS}", store)


def test_a_rank_has_a_heartbeat_and_leaves_no_thread_and_no_process(as_rank):
    before = threading.active_count()
    with liveness.watched() as rank:
        rank.place = "step 7"
        as_rank.wait(["beat-0"])
        while json.loads(as_rank.get("beat-0"))["place"] != "step 7":
            time.sleep(0.02)
        assert json.loads(as_rank.get("beat-0"))["pid"] == os.getpid()
        assert liveness.current() is rank
        with liveness.watched() as again:
            assert again is rank
        sentinel = rank._sentinel.pid
    assert liveness.current() is None
    assert threading.active_count() == before and not processes.exists(sentinel)
    assert json.loads(as_rank.get("beat-0")) == {"ended": True}
    assert not as_rank.check(["failed"])


def test_an_error_that_leaves_the_body_is_told(as_rank):
    with pytest.raises(OSError, match="no such card"), liveness.watched():
        as_rank.wait(["beat-0"])
        raise OSError("no such card")
    failed = json.loads(as_rank.get("failed"))
    assert failed["code"] == 1 and "raised OSError: no such card" in failed["words"]


def test_an_error_of_ours_is_told_by_who_prints_it_and_once(as_rank, monkeypatch):
    with pytest.raises(DataError), liveness.watched():
        raise DataError("shard-7.jsonl:12: is not JSON.")
    assert not as_rank.check(["failed"])
    assert not liveness.failed_before(DataError("first"))
    monkeypatch.setenv("RANK", "1")
    assert liveness.failed_before(DataError("second"))
    assert json.loads(as_rank.get("failed"))["words"] == "first"


def test_without_torchrun_nothing_is_watched(monkeypatch):
    for name in liveness.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with liveness.watched() as rank:
        assert rank is None and liveness.current() is None


def test_progress_is_read_as_it_was_written(tmp_path):
    with open(tmp_path / "page", "w+b") as file:
        file.truncate(SIZE)
        ours, theirs = Page(file.fileno()), Page(file.fileno())
    assert theirs.read() == (0, "")
    ours.write("step 3")
    ours.write("é" * 400)
    ticks, place = theirs.read()
    assert ticks == 2 and place == "é" * 124
