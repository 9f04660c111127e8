"""What was compiled is kept where only this user can put something (exact)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from narrowgauge import storage
from narrowgauge.errors import ConfigError
from narrowgauge.ops.cpp import build
from narrowgauge.train import device, loop, one_run
from tests.processes import PYTHON, ROOT, run
from tests.raising import raises, require, with_code

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache folder, and no variable that names another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that what the run sets is undone
    return tmp_path


def caches_of_a_run(make, monkeypatch, **changes) -> dict[str, Path]:
    """The variables as they are when a run that compiles begins to build its model."""
    found: dict[str, Path] = {}

    class Enough(Exception):
        pass

    def start(*_: object) -> None:
        found.update({variable: Path(os.environ[variable]) for variable in VARIABLES})
        raise Enough

    monkeypatch.setattr(one_run, "Trainer", start)
    monkeypatch.setattr(loop, "refuse_without_compiler", lambda device: None)
    with pytest.raises(Enough):
        loop.run(make(compile=True, **changes))
    return found


def test_a_run_that_compiles_keeps_its_code_in_the_users_cache(home, make, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    found = caches_of_a_run(make, monkeypatch)
    assert found == {
        variable: home / "cache" / "narrowgauge" / name
        for variable, name in zip(VARIABLES, ("inductor-no-avx", "triton"), strict=True)
    }
    for folder in (*found.values(), home / "cache" / "narrowgauge"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()


def test_each_capability_of_the_cpu_has_its_own_folder_of_kernels(home, monkeypatch):
    """Inductor does not tell them apart: a kernel made for AVX512 and met under AVX2 leaves elements unwritten."""
    names = []
    for capability in ("DEFAULT", "AVX2", "AVX512"):
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        environment: dict[str, str] = {}
        assert list(device.use_own_caches(environment)) == []
        names.append(Path(environment["TORCHINDUCTOR_CACHE_DIR"]).name)
    assert names == ["inductor-default", "inductor-avx2", "inductor-avx512"]


def test_a_folder_that_the_user_named_is_kept_and_told(home, make, monkeypatch, told):
    named = home / "scratch"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(named))
    assert caches_of_a_run(make, monkeypatch)["TRITON_CACHE_DIR"] == named
    [note] = with_code(told, "compile.named-folder")
    require(note, "compile.named-folder", named, "TRITON_CACHE_DIR")


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_a_named_folder_that_others_may_write_to_is_refused(
    home, make, monkeypatch, variable, mode
):
    planted = home / "planted"
    planted.mkdir()
    planted.chmod(mode)
    monkeypatch.setenv(variable, str(planted))
    with raises(ConfigError, "compile.unsafe-folder", variable, f"{mode:o}"):
        caches_of_a_run(make, monkeypatch)


def test_a_named_folder_of_another_user_is_refused(home, make, monkeypatch):
    (home / "planted").mkdir(mode=0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "planted"))
    me = os.getuid()
    owner = (home / "planted").stat().st_uid
    (home / "cache").mkdir(mode=0o700)
    real = storage.refuse_shared
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    reason = real(home / "planted")
    assert str(owner) in reason and str(me + 1) in reason


def test_a_folder_below_one_that_all_may_rename_is_refused(home, make, monkeypatch):
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "open" / "mine"))
    with raises(ConfigError, "compile.unsafe-folder"):
        caches_of_a_run(make, monkeypatch)
    (home / "open").chmod(0o1777)  # sticky, as /tmp is
    assert caches_of_a_run(make, monkeypatch)["TRITON_CACHE_DIR"] == home / "open" / "mine"


def test_where_the_users_cache_is_open_the_code_is_kept_for_one_run(home, make, monkeypatch, told):
    """The C++ kernels of narrowgauge too: a library that somebody planted there would be loaded."""
    (home / "cache" / "narrowgauge").mkdir(parents=True)
    (home / "cache" / "narrowgauge").chmod(0o777)
    found = caches_of_a_run(make, monkeypatch)
    assert all(
        home not in folder.parents and folder.parent == build.cache_folder()
        for folder in found.values()
    )
    assert len(with_code(told, "compile.own-folder")) == len(found)


PROGRAM = """
import os, sys, torch
if sys.argv[1] == "own":
    from narrowgauge.train.device import use_own_caches
    list(use_own_caches(os.environ))
print(torch.compile(lambda x: x.sin() + 1)(torch.ones(8))[0].item())
"""


@pytest.mark.slow
def test_a_planted_cache_runs_nothing(home, monkeypatch):
    """Every pickle in the shared folder is replaced by one that leaves a trace; without a folder of one's own it does."""
    shared, trace = home / "tmp", home / "trace"
    shared.mkdir()
    monkeypatch.setenv("TMPDIR", str(shared))
    for variable in VARIABLES:
        monkeypatch.delenv(variable)
    words = [PYTHON, "-c", PROGRAM]
    assert run([*words, "default"], cwd=ROOT).returncode == 0
    payload = b"cposix\nmkdir\n(V%b\ntR." % os.fsencode(trace)
    planted = [
        path
        for path in shared.rglob("*")
        if path.is_file() and path.suffix == "" and "graph" in str(path)
    ]
    planted += [path for path in shared.rglob("*aot*/**/*") if path.is_file()]
    assert planted
    for path in planted:
        path.write_bytes(payload)
    assert run([*words, "own"], cwd=ROOT).returncode == 0
    assert not trace.exists()
    run([*words, "default"], cwd=ROOT)
    assert trace.exists(), "the trap itself must work"
