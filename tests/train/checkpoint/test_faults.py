"""Checkpoints under attack: every damage is noticed, and no kill or refusing disk loses what was acknowledged (exact)."""

import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from narrowgauge import manifest, storage
from narrowgauge.errors import CheckpointError, StorageError
from narrowgauge.train.checkpoint import store
from tests.processes import PYTHON, ROOT, as_nobody
from tests.raising import raises
from tests.train.checkpoint.test_store import resign, saved

KILLS = 100


# Damage


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir())


@pytest.mark.slow
def test_every_one_of_1000_changed_bytes_is_noticed(tmp_path):
    path = saved(tmp_path, 1)[0]
    choice = random.Random(0)
    contents = {file: file.read_bytes() for file in files_of(path)}
    places = [(file, offset) for file, data in contents.items() for offset in range(len(data))]
    for file, offset in choice.choices(places, k=1000):
        data = bytearray(contents[file])
        data[offset] ^= choice.randrange(1, 256)
        file.write_bytes(data)
        with pytest.raises(CheckpointError):
            store.load(path)
        file.write_bytes(contents[file])
    store.load(path)


def test_every_changed_byte_of_the_manifest_is_noticed(tmp_path):
    """Exhaustive over places, with a bit flip and a space at each."""
    path = saved(tmp_path, 1)[0]
    file = path / manifest.NAME
    data = file.read_bytes()
    for offset in range(len(data)):
        for byte in {data[offset] ^ 1, ord(" ")} - {data[offset]}:
            file.write_bytes(data[:offset] + bytes([byte]) + data[offset + 1 :])
            with pytest.raises(CheckpointError):
                manifest.verify(path)


def test_truncation_and_appended_bytes_are_noticed(tmp_path):
    path = saved(tmp_path, 1)[0]
    for file in files_of(path):
        data = file.read_bytes()
        changed = [data[:length] for length in {0, 1, len(data) // 2, len(data) - 1}]
        changed += [data + extra for extra in (b"\0", b"\n", b" ", data)]
        changed += [data[: len(data) // 2] + bytes(len(data) - len(data) // 2)]
        for bad in changed:
            file.write_bytes(bad)
            with pytest.raises(CheckpointError):
                store.load(path)
        file.write_bytes(data)
    store.load(path)


def test_missing_foreign_swapped_and_odd_files_are_noticed(tmp_path):
    first, second = saved(tmp_path / "checkpoints", 1, 2)

    def refused(name: str, *codes: str) -> None:
        with pytest.raises(CheckpointError, match=name) as caught:
            store.load(first)
        assert caught.value.code in codes, caught.value

    for file in files_of(first):
        kept = tmp_path / "kept"
        file.rename(kept)
        refused(file.name, "checkpoint.files", "checkpoint.manifest", "file.unreadable")
        file.symlink_to(kept)
        refused(file.name, "file.link")
        file.unlink()
        file.mkdir()
        refused(file.name, "file.irregular", "file.unreadable")
        file.rmdir()
        os.mkfifo(file)
        refused(file.name, "file.irregular")
        file.unlink()
        other = second / file.name
        if other.read_bytes() != kept.read_bytes():  # facts are the same in both
            shutil.copy(other, file)
            refused(first.name, "checkpoint.changed", "checkpoint.manifest")
        kept.replace(file)
    (first / "note.txt").write_text("mine")
    refused("note.txt", "checkpoint.files")
    (first / "note.txt").unlink()
    store.load(first)


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path):
    saved(tmp_path, 1)[0].rename(tmp_path / "step-00000007")
    with raises(CheckpointError, "checkpoint.manifest"):
        store.load(tmp_path / "step-00000007")


def test_a_link_in_place_of_the_folder_is_refused(tmp_path):
    path = saved(tmp_path / "elsewhere", 1)[0]
    (tmp_path / "step-00000001").symlink_to(path)
    with raises(CheckpointError, "checkpoint.not-a-folder"):
        store.load(tmp_path / "step-00000001")


@pytest.mark.parametrize(
    "name",
    [
        "../facts.json",
        "/etc/passwd",
        "a/../b-0.safetensors",
        "C:\\x",
        "..",
        "weights-0.safetensors/x",
        "x.pkl",
    ],
)
def test_a_forged_manifest_opens_nothing_outside_the_folder(tmp_path, monkeypatch, name):
    path = saved(tmp_path, 1)[0]
    files = json.loads((path / manifest.NAME).read_bytes())["files"]
    resign(path, files={**files, name: {"bytes": 1, "sha256": ""}})
    opened = []
    real = os.open
    monkeypatch.setattr(
        manifest.os, "open", lambda file, *rest: (opened.append(Path(file)), real(file, *rest))[1]
    )
    with raises(CheckpointError, "checkpoint.manifest"):
        store.load(path)
    assert opened == [path / manifest.NAME]


@pytest.mark.parametrize(
    "changes",
    [{"step": "1"}, {"step": None}, {"groups": 3}, {"groups": ["../x"]}, {"ties": []}, {"files": {}}, {"files": None},
     {"step": -1}, {"step": True},
     {"ties": {"weights": {"a": "absent"}}}, {"ties": {"other": {}}}, {"format": 0}, {"format": "1"}, {"kind": "x"}, {"step": 2}],
    ids=repr,
)  # fmt: skip
def test_a_forged_manifest_is_a_checkpoint_error(tmp_path, changes):
    path = saved(tmp_path, 1)[0]
    resign(path, **changes)
    with pytest.raises(CheckpointError):
        store.load(path)


def test_a_newer_format_is_refused_with_words_and_not_passed_over(tmp_path):
    saved(tmp_path, 1)
    resign(saved(tmp_path, 2)[0], format=999)
    for read in (
        lambda: store.load(tmp_path / "step-00000002"),
        lambda: store.newest_valid(tmp_path),
    ):
        with pytest.raises(
            CheckpointError,
            match=r"format 999, but this narrowgauge reads formats up to 2\. Upgrade",
        ):
            read()


# The file system refuses


def test_too_little_space_is_noticed_before_writing(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: usage)
    with raises(StorageError, "storage.full", "checkpoint 2", "2 needs", "0 MiB") as caught:
        saved(tmp_path, 2)
    assert caught.value.exit_code == 8
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("code", ["ENOSPC", "EROFS", "EACCES", "EIO", "EDQUOT"])
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_refused_call_leaves_the_older_checkpoint_whole(tmp_path, monkeypatch, code, call):
    path = saved(tmp_path, 1)[0]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with raises(StorageError, "storage.refused", "save"):
            saved(tmp_path, 2)
    assert os.listdir(tmp_path) == [path.name]
    manifest.verify(path)


def test_a_refusal_at_any_of_the_syncs_leaves_the_older_checkpoint_whole(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    real = os.fsync
    left = 0  # syncs until one is refused

    def refuse(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    for syncs in range(8):  # facts and four groups, manifest, folder, parent
        left = syncs
        with raises(StorageError, "storage.refused", "Input/output error"):
            saved(tmp_path, 2)
        manifest.verify(tmp_path / "step-00000001")
        if syncs < 7:
            assert os.listdir(tmp_path) == ["step-00000001"]
    left = 8
    saved(tmp_path, 2)


def test_a_file_over_the_limit_leaves_the_older_checkpoint_whole(tmp_path):
    """RLIMIT_FSIZE, so the kernel really cuts the write short and then says EFBIG."""
    path = saved(tmp_path, 1)[0]
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, old[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            store.save(tmp_path, 2, {"weights": {"large": torch.zeros(2**20)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert os.listdir(tmp_path) == [path.name]
    manifest.verify(path)


@pytest.mark.slow
def test_a_full_disk_leaves_the_older_checkpoint_whole(tmp_path):
    """A real tmpfs of 4 MiB in a mount namespace of its own, where the kernel allows one."""
    program = (
        f"mount -t tmpfs -o size=4m none {tmp_path} && exec {PYTHON} -c '\n"
        "import os, sys, torch\nfrom pathlib import Path\n"
        "from narrowgauge import storage\nfrom narrowgauge.errors import StorageError\n"
        "from narrowgauge import manifest\n"
        "from narrowgauge.train.checkpoint import store as checkpoint\n"
        f"folder = Path({str(tmp_path)!r})\n"
        'checkpoint.save(folder, 1, {"weights": {"a": torch.zeros(1000)}}, {})\n'
        "storage.require_space = lambda *_: None\n"
        'try:\n  checkpoint.save(folder, 2, {"weights": {"a": torch.zeros(2**21)}}, {})\n'
        "except StorageError as error:\n  print(error)\n"
        'manifest.verify(folder / "step-00000001")\nprint(os.listdir(folder))\n\''
    )
    program = program.replace(f"Path({str(tmp_path)!r})", f'Path("{tmp_path}")')
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert "No space left on device" in done.stdout and "['step-00000001']" in done.stdout, (
        done.stderr
    )


def test_a_folder_without_permission_is_a_storage_error(tmp_path):
    tmp_path.chmod(0o555)
    with as_nobody(), pytest.raises(StorageError, match="Permission denied"):
        saved(tmp_path, 1)
    tmp_path.chmod(0o755)
    assert os.listdir(tmp_path) == []


def test_a_file_in_place_of_the_folder_is_a_storage_error(tmp_path):
    (tmp_path / "checkpoints").touch()
    with raises(StorageError, "storage.refused", "save"):
        saved(tmp_path / "checkpoints", 1)


def test_modes_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        path = saved(tmp_path, 1)[0]
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def test_an_interrupt_in_the_midst_of_a_save_leaves_nothing_behind(tmp_path, monkeypatch):
    real = storage.write_synced

    def interrupted(path: Path, data: bytes) -> None:
        if path.name == manifest.NAME:
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(storage, "write_synced", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_everything_is_synced_before_the_rename_and_the_parent_after(tmp_path, monkeypatch):
    tmp_path.joinpath("checkpoints").mkdir()
    order: list[str] = []
    sync, rename = os.fsync, os.rename

    def spy_sync(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def spy_rename(source: Path, target: Path) -> None:
        order.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spy_sync)
    monkeypatch.setattr(os, "rename", spy_rename)
    path = saved(tmp_path / "checkpoints", 1)[0]
    files = {file.name for file in path.iterdir()}
    assert set(order[: len(files)]) == files and order[len(files) - 1] == manifest.NAME
    assert order[len(files)].startswith(".tmp-step-00000001")
    assert order[len(files) + 1 :] == ["rename", "checkpoints"]


# Kills


# Imports torch once and forks a writer per line of input, each in one thread; the writer is then killed from outside.
WRITERS = """
import os, sys, torch
from pathlib import Path
from narrowgauge import storage
from narrowgauge import manifest
from narrowgauge.train.checkpoint import store as checkpoint

torch.set_num_threads(1)

def write(folder, say):
    storage.recover(folder, manifest.STEP.pattern)
    found, skipped = checkpoint.newest_valid(folder)
    assert not skipped, skipped
    step = found.step if found else 0
    say("START", step)
    while True:
        step += 1
        groups = ("weights", "optimizer")
        tensors = {group: {f"t{i}": torch.full((500,), float(step)) for i in range(20)} for group in groups}
        checkpoint.save(folder, step, tensors, {"step": step})
        say("ACK", step)
        manifest.prune(folder, 2)

for line in sys.stdin:
    child = os.fork()
    if not child:
        write(Path(sys.argv[1]), lambda word, step: os.write(1, f"{word} {step}\\n".encode()))
    os.write(1, f"PID {child}\\n".encode())
    os.write(1, f"END {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n".encode())
"""


def start_and_kill(writers: subprocess.Popen, delay_s: float) -> tuple[int, int]:
    """Has a writer started and kills it `delay_s` after its first acknowledgement: the steps of its start and its last ACK."""
    writers.stdin.write("next\n")
    found: dict[str, int] = {}
    while "END" not in found:
        word, number = writers.stdout.readline().split()
        if word == "ACK" and "ACK" not in found:
            threading.Timer(delay_s, os.kill, [found["PID"], signal.SIGKILL]).start()
        found[word] = int(number)
    assert found["END"] == -signal.SIGKILL
    return found["START"], found["ACK"]


@pytest.mark.slow
def test_no_kill_loses_an_acknowledged_step_or_leaves_an_unreadable_one(tmp_path):
    """Real kill -9 at random moments of a process that saves without pause; the oracle is what it printed."""
    choice = random.Random(0)
    acknowledged = landed_inside = 0
    with subprocess.Popen(
        [PYTHON, "-c", WRITERS, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as writers:  # fmt: skip
        for _ in range(KILLS):
            started_at, last = start_and_kill(writers, choice.uniform(0, 0.05))
            assert started_at >= acknowledged
            acknowledged = last
            landed_inside += any(name.startswith(".tmp-") for name in os.listdir(tmp_path))
            found, skipped = store.newest_valid(tmp_path)
            assert not skipped
            assert found is not None and found.step >= acknowledged
            tensors = [tensor for group in found.tensors.values() for tensor in group.values()]
            assert {float(value) for tensor in tensors for value in tensor.unique()} == {
                float(found.step)
            }
            assert found.facts == {"step": found.step}
        writers.stdin.close()
    assert landed_inside >= KILLS // 3, (
        "nearly all the time goes into saving, so many kills land there"
    )


def test_a_reader_beside_a_writer_never_sees_half_a_checkpoint(tmp_path):
    """A hundred reads; prune may take a checkpoint away while it is read, which the reader notices and retries."""
    stop = threading.Event()

    def write() -> None:
        for step in itertools.count(1):
            store.save(tmp_path, step, {"weights": {"a": torch.full((100,), float(step))}}, {})
            manifest.prune(tmp_path, 3)
            if stop.is_set():
                return

    store.save(tmp_path, 0, {"weights": {"a": torch.zeros(100)}}, {})
    reads = 0
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            while reads < 100 and not writer.done():  # it ends early only by an error
                try:
                    found, _ = store.newest_valid(tmp_path)
                except CheckpointError:
                    continue  # all three that were listed are gone by now
                assert found is not None and found.tensors["weights"]["a"].unique().tolist() == [
                    float(found.step)
                ]
                reads += 1
        finally:
            stop.set()
        writer.result()
