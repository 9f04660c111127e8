"""Compiled libraries: damaged, unloadable, after a fork, interrupted. What they compute is tested with each of them (exact)."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from narrowgauge.errors import BackendError
from narrowgauge.ops.cpp import build
from tests.processes import PYTHON, run_ok
from tests.raising import raises
from tests.selection import needs_compiler

PACKAGE, SOURCES = "narrowgauge.optim", ("tiny.cpp",)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder, and one source of one function, for `load`."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text('extern "C" int seven() { return 7; }\n', encoding="utf-8")
    monkeypatch.setattr(build.resources, "files", lambda package: sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "narrowgauge"


def load() -> ctypes.CDLL:
    return build.library(PACKAGE, SOURCES, "a test", "do without")


@needs_compiler
@pytest.mark.parametrize("left", [0, 9000, -1], ids=["empty", "cut", "one byte lost"])
def test_a_damaged_library_is_built_anew(cache, left):
    """Cut in the middle it would end the process when it is loaded; so it is replaced before."""
    assert load().seven() == 7
    [library] = cache.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # the one that is loaded stays as it is
    library.write_bytes(whole[:left])
    assert load().seven() == 7
    assert [path.read_bytes() for path in cache.glob("*.so")] == [whole]


@needs_compiler
def test_a_library_is_built_once(cache, monkeypatch):
    """Also of several sources: the next process finds it by a name that comes from all of them."""
    (cache.parent / "sources" / "eight.h").write_text(
        "// what tiny.cpp may include\n", encoding="utf-8"
    )
    sources = (*SOURCES, "eight.h")
    assert build.library(PACKAGE, sources, "a test", "do without").seven() == 7
    monkeypatch.setattr(build, "_build", lambda *arguments: pytest.fail("built again"))
    assert build.library(PACKAGE, sources, "a test", "do without").seven() == 7


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_told_in_words(cache, monkeypatch):
    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    with raises(BackendError, "compiler.unloadable", "do without", "XDG_CACHE_HOME"):
        load()


@needs_compiler
def test_a_full_disk_is_told_in_words(cache, monkeypatch):
    def full(**options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", full)
    with raises(BackendError, "compiler.failed", "a test", "XDG_CACHE_HOME"):
        load()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    """With the pool of its parent, which has no threads there, it would wait for ever."""
    program = (
        "import os, signal\n"
        "from narrowgauge.ops.cpp.build import in_shares\n"
        "done = []\n"
        "in_shares(2, done.append)\n"
        "if (child := os.fork()) == 0:\n"
        "    signal.alarm(20)\n"
        "    in_shares(2, done.append)\n"
        "    os._exit(len(done))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert run_ok([PYTHON, "-c", program]).stdout.strip() == "4"


def test_a_share_that_began_is_waited_for_where_the_next_cannot_begin(monkeypatch):
    pool, ended = ThreadPoolExecutor(1), []

    class Exhausted:
        def submit(self, run, share: int):
            if share == 2:
                raise RuntimeError("can't start new thread")
            return pool.submit(run, share)

    def run(share: int) -> None:
        time.sleep(0.05)
        ended.append(share)

    monkeypatch.setattr(build, "_pool", lambda workers: Exhausted())
    with pytest.raises(RuntimeError, match="new thread"):
        build.in_shares(3, run)
    assert ended == [1]
    pool.shutdown()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_thread_is_at_work_when_an_error_comes_through(error):
    release, ended = threading.Event(), []

    def run(share: int) -> None:
        if share == 0:
            release.set()
            raise error
        release.wait()
        time.sleep(0.05)
        ended.append(share)

    with pytest.raises(error):
        build.in_shares(2, run)
    assert ended == [1]
