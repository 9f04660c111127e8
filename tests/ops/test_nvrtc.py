"""The cache of compiled CUDA binaries: what is left in its folder (exact). The compiler is replaced; int4 kernels test the real one."""

from __future__ import annotations

import stat
from types import SimpleNamespace

import pytest

from narrowgauge.ops import nvrtc
from narrowgauge.ops.mm import int4_units

BINARY = b"a cubin"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "_compiler", lambda: SimpleNamespace(nvrtcVersion=lambda *_: 0))
    monkeypatch.setattr(nvrtc, "compiled", lambda *_: (BINARY, ""))
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_a_binary_is_cached_for_its_user_alone(folder):
    assert int4_units.SOURCE.binary((8, 0)) == BINARY
    [kept] = folder.iterdir()
    assert kept.read_bytes() == BINARY and stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_processes_that_compile_at_once_write_to_different_files(folder, monkeypatch):
    """Both may have the binary at one address: a second process begins while the first has written half."""
    drafts = []

    def interrupted(draft, target):
        drafts.append(draft)
        raise OSError("no space left")

    monkeypatch.setattr("os.rename", interrupted)
    monkeypatch.setattr("pathlib.Path.replace", interrupted)
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            int4_units.SOURCE.binary((8, 0))
    assert drafts[0] != drafts[1] and not list(folder.iterdir())
