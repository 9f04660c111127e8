"""Checkpoints: exact round trip, every damage noticed, and no kill or full disk that loses what was acknowledged."""

import errno
import hashlib
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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.errors import CheckpointError, NumericsError, StorageError
from narrowgauge.train import checkpoint, manifest, storage
from tests.processes import PYTHON, ROOT, run

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
DTYPES = sorted(checkpoint.DTYPES, key=str)
KILLS = 100


def some_tensors(step: int = 1) -> checkpoint.Tensors:
    """One of each group, a few hundred bytes each."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {"up": torch.randn(6, 5, generator=generator), "norm": torch.ones(7, dtype=torch.bfloat16)},
        "optimizer": {"up.exp_avg": torch.randn(6, 5, generator=generator), "up.step": torch.tensor(float(step))},
        "scaling": {"up.x.window": torch.arange(4.0)},
        "rng": {"cpu": generator.get_state()[:64]},
    }


FACTS = {"elapsed_s": 1.5, "data": {"epoch": 0, "cursor": 17}, "words": ["é", None, True]}


def assert_same(found: checkpoint.Tensors, expected: checkpoint.Tensors) -> None:
    """Bit for bit, dtypes and shapes included."""
    assert found.keys() == expected.keys()
    for group, members in expected.items():
        assert found[group].keys() == members.keys()
        for name, tensor in members.items():
            other = found[group][name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
            assert bits(other) == bits(tensor), name


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(dense.untyped_storage())


def saved(folder: Path, *steps: int) -> list[Path]:
    return [checkpoint.save(folder, step, some_tensors(step), FACTS) for step in steps]


# Round trip


def test_what_is_saved_comes_back(tmp_path):
    path = checkpoint.save(tmp_path / "new" / "checkpoints", 100, some_tensors(), FACTS)
    assert path.name == "step-00000100"
    found = checkpoint.load(path)
    assert (found.step, found.facts, found.path) == (100, FACTS, path)
    assert_same(found.tensors, some_tensors())
    checkpoint.verify(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype):
    """Random bytes, so NaN payloads, subnormals and negative zeros too; in a group that may hold NaN."""
    size = dtype.itemsize if hasattr(dtype, "itemsize") else 1
    codes = torch.randint(0, 2 if dtype == torch.bool else 256, (24 * size,), dtype=torch.uint8)
    flat = codes.view(dtype)
    members = {
        "flat": flat,
        "matrix": flat.view(4, 6),
        "transposed": flat.view(4, 6).T,
        "every other": flat[::2],
        "zero dimensions": flat[3],
        "empty": flat[:0],
        "empty matrix": flat[:0].view(0, 5),
    }
    path = checkpoint.save(tmp_path, 1, {"optimizer": members}, {})
    assert_same(checkpoint.load(path).tensors, {"optimizer": members})


def test_the_dtypes_of_training_are_among_them():
    assert FP8 | {torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool} <= set(DTYPES)


def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path):
    embedding = torch.nn.Parameter(torch.randn(64, 64))
    members = {"embed": embedding, "head": embedding, "view": embedding.view(64, 64), "part": embedding[:2]}
    path = checkpoint.save(tmp_path, 1, {"weights": members}, {})
    assert (path / "weights-0.safetensors").stat().st_size < 1.2 * embedding.numel() * 4
    found = checkpoint.load(path).tensors["weights"]
    assert found["head"] is found["embed"] and found["view"] is found["embed"]
    assert bits(found["part"]) == bits(embedding[:2])
    assert found["part"].untyped_storage().data_ptr() != found["embed"].untyped_storage().data_ptr()


def test_equal_but_separate_tensors_stay_separate(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"weights": {"a": torch.ones(3), "b": torch.ones(3)}}, {})
    found = checkpoint.load(path).tensors["weights"]
    assert found["a"] is not found["b"]


def test_conjugated_and_negated_views_keep_their_values(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    members = {"conjugate": values.conj(), "negated": values.conj().imag}
    path = checkpoint.save(tmp_path, 1, {"optimizer": members}, {})
    assert_same(checkpoint.load(path).tensors, {"optimizer": members})


def test_a_large_group_is_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1000)
    members = {f"layer {i}": torch.full((100,), float(i)) for i in range(7)} | {"large": torch.ones(2000)}
    path = checkpoint.save(tmp_path, 1, {"weights": members, "none": {}}, {})
    assert len(list(path.glob("weights-*.safetensors"))) == 5
    assert_same(checkpoint.load(path).tensors, {"weights": members, "none": {}})


def test_other_readers_of_safetensors_read_the_weights(tmp_path):
    from safetensors.torch import load_file

    path = saved(tmp_path, 1)[0]
    assert_same({"weights": load_file(path / "weights-0.safetensors")}, {"weights": some_tensors()["weights"]})


def test_saving_does_not_change_the_tensors(tmp_path):
    tensors = some_tensors()
    saved(tmp_path, 1)
    checkpoint.save(tmp_path, 2, tensors, FACTS)
    assert_same(tensors, some_tensors())


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@settings(max_examples=25)
@given(JSON)
def test_facts_are_any_json(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("facts")
    try:
        path = checkpoint.save(folder, 1, {}, {"value": value})
    except CheckpointError as error:
        assert "not JSON" in str(error)  # a lone surrogate
    else:
        assert checkpoint.load(path).facts == {"value": value}


# What is refused


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"loss": float("nan")}, "not JSON"),
        ({"state": (1, 2)}, "come back changed"),
        ({1: "a"}, "come back changed"),
        ({"tensor": torch.ones(1)}, "not JSON"),
    ],
)
def test_facts_that_json_would_change_are_refused(tmp_path, facts, words):
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(tmp_path, 1, {}, facts)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "group", ["../weights", "/etc", "a/b", "", "Weights", "weights-0", ".hidden", "w" * 50, "manifest.json"]
)
def test_a_group_that_is_no_file_name_is_refused(tmp_path, group):
    with pytest.raises(CheckpointError, match="not a lower-case word"):
        checkpoint.save(tmp_path, 1, {group: {}}, {})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).to(torch.float8_e8m0fnu),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
        [1.0],
        "text",
    ],
    ids=["e8m0", "meta", "sparse", "complex128", "list", "text"],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path, tensor):
    with pytest.raises(CheckpointError, match="optimizer: up"):
        checkpoint.save(tmp_path, 1, {"optimizer": {"up": tensor}}, {})


@pytest.mark.parametrize("step", [-1, 10**8])
def test_a_step_that_the_name_cannot_hold_is_refused(tmp_path, step):
    with pytest.raises(CheckpointError, match="step"):
        checkpoint.save(tmp_path, step, {}, {})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=str
)
def test_weights_that_are_not_finite_are_refused(tmp_path, bad, dtype):
    saved(tmp_path, 1)
    tensors = some_tensors(2)
    tensors["weights"]["up"] = torch.tensor([[1.0, 2.0], [3.0, bad]]).to(dtype).T
    # torch's own cast saturates infinity in some versions; then there is nothing to refuse
    if tensors["weights"]["up"].float().isfinite().all():
        pytest.skip("this cast has no such value")
    with pytest.raises(NumericsError, match="refuse to save: weight 'up' holds 1 values"):
        checkpoint.save(tmp_path, 2, tensors, {})
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_an_infinite_amax_in_another_group_is_no_reason_to_lose_the_run(tmp_path):
    tensors = {"weights": {}, "scaling": {"window": torch.tensor([1.0, float("inf")])}}
    assert_same(checkpoint.load(checkpoint.save(tmp_path, 1, tensors, {})).tensors, tensors)


# Damage


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir())


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
            checkpoint.load(path)
        file.write_bytes(contents[file])
    checkpoint.load(path)


def test_every_changed_byte_of_the_manifest_is_noticed(tmp_path):
    """Exhaustive over places, with a bit flip and a space at each."""
    path = saved(tmp_path, 1)[0]
    file = path / manifest.NAME
    data = file.read_bytes()
    for offset in range(len(data)):
        for byte in {data[offset] ^ 1, ord(" ")} - {data[offset]}:
            file.write_bytes(data[:offset] + bytes([byte]) + data[offset + 1 :])
            with pytest.raises(CheckpointError):
                checkpoint.verify(path)


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
                checkpoint.load(path)
        file.write_bytes(data)
    checkpoint.load(path)


def test_missing_foreign_swapped_and_odd_files_are_noticed(tmp_path):
    first, second = saved(tmp_path / "checkpoints", 1, 2)

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(first)

    for file in files_of(first):
        kept = tmp_path / "kept"
        file.rename(kept)
        refused(file.name)
        file.symlink_to(kept)
        refused("cannot be read")
        file.unlink()
        file.mkdir()
        refused("not a regular file|cannot be read")
        file.rmdir()
        os.mkfifo(file)
        refused("not a regular file")
        file.unlink()
        other = second / file.name
        if other.read_bytes() != kept.read_bytes():  # facts are the same in both
            shutil.copy(other, file)
            refused("changed|step")
        kept.replace(file)
    (first / "note.txt").write_text("mine")
    refused("note.txt")
    (first / "note.txt").unlink()
    checkpoint.load(first)


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path):
    saved(tmp_path, 1)[0].rename(tmp_path / "step-00000007")
    with pytest.raises(CheckpointError, match="is that of step 1"):
        checkpoint.load(tmp_path / "step-00000007")


def test_a_link_in_place_of_the_folder_is_refused(tmp_path):
    path = saved(tmp_path / "elsewhere", 1)[0]
    (tmp_path / "step-00000001").symlink_to(path)
    with pytest.raises(CheckpointError, match="not a folder"):
        checkpoint.load(tmp_path / "step-00000001")


def resign(path: Path, **changes: object) -> None:
    """Forges a manifest: what an attacker, but no bit rot, can do."""
    body = json.loads((path / manifest.NAME).read_bytes())
    body = {key: changes.get(key, value) for key, value in body.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    (path / manifest.NAME).write_text(json.dumps({**body, "sha256": digest}, indent=1))


@pytest.mark.parametrize(
    "name", ["../facts.json", "/etc/passwd", "a/../b-0.safetensors", "C:\\x", "..", "weights-0.safetensors/x", "x.pkl"]
)
def test_a_forged_manifest_opens_nothing_outside_the_folder(tmp_path, monkeypatch, name):
    path = saved(tmp_path, 1)[0]
    files = json.loads((path / manifest.NAME).read_bytes())["files"]
    resign(path, files={**files, name: {"bytes": 1, "sha256": ""}})
    opened = []
    real = os.open
    monkeypatch.setattr(manifest.os, "open", lambda file, *rest: (opened.append(Path(file)), real(file, *rest))[1])
    with pytest.raises(CheckpointError, match="lists a file"):
        checkpoint.load(path)
    assert opened == [path / manifest.NAME]


@pytest.mark.parametrize(
    "changes",
    [{"step": "1"}, {"step": None}, {"groups": 3}, {"groups": ["../x"]}, {"ties": []}, {"files": {}}, {"files": None},
     {"ties": {"weights": {"a": "absent"}}}, {"ties": {"other": {}}}, {"format": 0}, {"format": "1"}, {"kind": "x"}, {"step": 2}],
    ids=repr,
)  # fmt: skip
def test_a_forged_manifest_is_a_checkpoint_error(tmp_path, changes):
    path = saved(tmp_path, 1)[0]
    resign(path, **changes)
    with pytest.raises(CheckpointError):
        checkpoint.load(path)


def test_a_newer_format_is_refused_with_words_and_not_passed_over(tmp_path):
    saved(tmp_path, 1)
    resign(saved(tmp_path, 2)[0], format=999)
    for read in (lambda: checkpoint.load(tmp_path / "step-00000002"), lambda: checkpoint.newest_valid(tmp_path)):
        with pytest.raises(CheckpointError, match=r"format 999, but this narrowgauge reads formats up to 1\. Upgrade"):
            read()


# Choosing


def test_the_newest_intact_checkpoint_is_chosen_and_damage_is_named(tmp_path):
    paths = saved(tmp_path, 1, 2, 30)
    (paths[2] / "facts.json").write_text("{}")
    os.utime(paths[0], (2e9, 2e9))  # the clock does not decide
    found, skipped = checkpoint.newest_valid(tmp_path)
    assert found is not None and found.step == 2
    assert [path for path, _ in skipped] == [paths[2]] and "facts.json: was changed" in skipped[0][1]


def test_without_any_checkpoint_there_is_nothing_to_choose(tmp_path):
    assert checkpoint.newest_valid(tmp_path) == (None, [])
    assert checkpoint.newest_valid(tmp_path / "absent") == (None, [])
    for name in ("step-1", "step-00000001.bak", "my-step-00000001", ".tmp-step-00000001-7"):
        (tmp_path / name).mkdir()
    assert checkpoint.newest_valid(tmp_path) == (None, [])


def test_when_none_is_intact_the_run_does_not_start_anew(tmp_path):
    for path in saved(tmp_path, 1, 2):
        (path / manifest.NAME).unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is intact") as caught:
        checkpoint.newest_valid(tmp_path)
    assert caught.value.exit_code == 4


# Keeping house


def test_prune_keeps_the_newest_by_step_and_touches_nothing_else(tmp_path):
    paths = saved(tmp_path, 1, 2, 3, 100)
    for index, path in enumerate(paths):
        os.utime(path, (2e9 - index, 2e9 - index))
    foreign = [tmp_path / name for name in ("my-step-5-best", "step-20.bak", "step-00000000", "notes_step-7.txt")]
    for folder in foreign:
        folder.mkdir()
        (folder / "mine").touch()
    outside = saved(tmp_path / "outside", 4)[0]
    (tmp_path / "step-00000004").symlink_to(outside)
    assert checkpoint.prune(tmp_path, 2) == [paths[1], paths[0]]
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert all((folder / "mine").exists() for folder in foreign) and outside.exists()
    assert checkpoint.prune(tmp_path, 2) == []
    with pytest.raises(CheckpointError, match="keep = 0"):
        checkpoint.prune(tmp_path, 0)


def test_a_damaged_checkpoint_does_not_displace_a_whole_one(tmp_path):
    paths = saved(tmp_path, 1, 2, 3)
    (paths[2] / "weights-0.safetensors").write_bytes(b"")
    checkpoint.prune(tmp_path, 1)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    path = saved(tmp_path, 1)[0]
    (path / "facts.json").write_text("damaged")
    assert saved(tmp_path, 1) == [path]
    checkpoint.verify(path)
    path.joinpath("facts.json").unlink()
    shutil.rmtree(path)
    path.write_text("a file of that name")
    saved(tmp_path, 1)
    checkpoint.verify(path)
    assert os.listdir(tmp_path) == [path.name]


def test_recover_clears_our_leftovers_and_only_those(tmp_path):
    kept = saved(tmp_path, 1)[0]
    for name in (".tmp-step-00000002-123", ".tmp-step-00000001", ".tmp-mine", ".old-stuff", "tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    recovered = {path.name for path in checkpoint.recover(tmp_path)}
    assert recovered == {".tmp-step-00000002-123", ".tmp-step-00000001"}
    assert sorted(os.listdir(tmp_path)) == [".old-stuff", ".tmp-mine", kept.name, "tmp"]
    assert checkpoint.recover(tmp_path / "absent") == []


CRASH = """
import os, sys, torch
from pathlib import Path
from narrowgauge.train import checkpoint
rename = os.rename
os.rename = lambda source, target: os._exit(9) if Path(source).name.startswith(".tmp-") else rename(source, target)
checkpoint.save(Path(sys.argv[1]), 1, {"weights": {"up": torch.zeros(3)}}, {})
"""


def test_a_crash_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    path = saved(tmp_path, 1)[0]
    assert run([PYTHON, "-c", CRASH, tmp_path]).returncode == 9
    assert not path.exists()
    checkpoint.recover(tmp_path)
    assert_same(checkpoint.load(path).tensors, some_tensors(1))
    assert os.listdir(tmp_path) == [path.name]


# The file system refuses


def test_too_little_space_is_noticed_before_writing(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(StorageError, match=r"checkpoint 2 needs .* MiB, but .* has 0.0 MiB free") as caught:
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
        with pytest.raises(StorageError, match="cannot save a checkpoint in"):
            saved(tmp_path, 2)
    assert os.listdir(tmp_path) == [path.name]
    checkpoint.verify(path)


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
        with pytest.raises(StorageError, match="Input/output error"):
            saved(tmp_path, 2)
        checkpoint.verify(tmp_path / "step-00000001")
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
            checkpoint.save(tmp_path, 2, {"weights": {"large": torch.zeros(2**20)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert os.listdir(tmp_path) == [path.name]
    checkpoint.verify(path)


def test_a_full_disk_leaves_the_older_checkpoint_whole(tmp_path):
    """A real tmpfs of 4 MiB in a mount namespace of its own, where the kernel allows one."""
    program = (
        f"mount -t tmpfs -o size=4m none {tmp_path} && exec {PYTHON} -c '\n"
        "import os, sys, torch\nfrom pathlib import Path\n"
        "from narrowgauge.errors import StorageError\nfrom narrowgauge.train import checkpoint, storage\n"
        f"folder = Path({str(tmp_path)!r})\n"
        'checkpoint.save(folder, 1, {"weights": {"a": torch.zeros(1000)}}, {})\n'
        "storage.require_space = lambda *_: None\n"
        'try:\n  checkpoint.save(folder, 2, {"weights": {"a": torch.zeros(2**21)}}, {})\n'
        "except StorageError as error:\n  print(error)\n"
        'checkpoint.verify(folder / "step-00000001")\nprint(os.listdir(folder))\n\''
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
    assert "No space left on device" in done.stdout and "['step-00000001']" in done.stdout, done.stderr


def test_a_folder_without_permission_is_a_storage_error(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StorageError, match="Permission denied"):
            saved(tmp_path, 1)
    finally:
        tmp_path.chmod(0o755)


def test_a_file_in_place_of_the_folder_is_a_storage_error(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(StorageError, match="cannot save a checkpoint in"):
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
from narrowgauge.train import checkpoint

torch.set_num_threads(1)

def write(folder, say):
    checkpoint.recover(folder)
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
        checkpoint.prune(folder, 2)

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
            found, skipped = checkpoint.newest_valid(tmp_path)
            assert not skipped
            assert found is not None and found.step >= acknowledged
            tensors = [tensor for group in found.tensors.values() for tensor in group.values()]
            assert {float(value) for tensor in tensors for value in tensor.unique()} == {float(found.step)}
            assert found.facts == {"step": found.step}
        writers.stdin.close()
    assert landed_inside >= KILLS // 3, "nearly all the time goes into saving, so many kills land there"


def test_a_reader_beside_a_writer_never_sees_half_a_checkpoint(tmp_path):
    """For half a second; prune may take a checkpoint away while it is read, which the reader notices and retries."""
    stop = threading.Event()

    def write() -> None:
        for step in itertools.count(1):
            checkpoint.save(tmp_path, step, {"weights": {"a": torch.full((100,), float(step))}}, {})
            checkpoint.prune(tmp_path, 3)
            if stop.is_set():
                return

    checkpoint.save(tmp_path, 0, {"weights": {"a": torch.zeros(100)}}, {})
    ends_at_s = time.monotonic() + 0.5
    reads = 0
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while time.monotonic() < ends_at_s:
            try:
                found, _ = checkpoint.newest_valid(tmp_path)
            except CheckpointError:
                continue  # all three that were listed are gone by now
            assert found is not None and found.tensors["weights"]["a"].unique().tolist() == [float(found.step)]
            reads += 1
        stop.set()
        writer.result()
    assert reads
