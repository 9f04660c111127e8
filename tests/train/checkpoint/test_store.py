"""Checkpoints: what goes in comes out bit for bit, what cannot is refused, the right one is chosen (exact)."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from narrowgauge import manifest, storage
from narrowgauge.errors import CheckpointError, NumericsError, StorageError
from narrowgauge.train.checkpoint import store
from tests.raising import coded, raises

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
DTYPES = sorted((getattr(torch, name) for name in manifest.DTYPES), key=str)


def some_tensors(step: int = 1) -> store.Tensors:
    """One of each group, a few hundred bytes each."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {
            "up": torch.randn(6, 5, generator=generator),
            "norm": torch.ones(7, dtype=torch.bfloat16),
        },
        "optimizer": {
            "up.exp_avg": torch.randn(6, 5, generator=generator),
            "up.step": torch.tensor(float(step)),
        },
        "scaling": {"up.x.window": torch.arange(4.0)},
        "rng": {"cpu": generator.get_state()[:64]},
    }


FACTS = {"elapsed_s": 1.5, "data": {"epoch": 0, "cursor": 17}, "words": ["é", None, True]}


def assert_same(found: store.Tensors, expected: store.Tensors) -> None:
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
    return [store.save(folder, step, some_tensors(step), FACTS) for step in steps]


def resign(path: Path, **changes: object) -> None:
    """Forges a manifest: what an attacker, but no bit rot, can do."""
    body = json.loads((path / manifest.NAME).read_bytes())
    body = {key: changes.get(key, value) for key, value in body.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    (path / manifest.NAME).write_text(json.dumps({**body, "sha256": digest}, indent=1))


# Round trip


def test_what_is_saved_comes_back(tmp_path):
    path = store.save(tmp_path / "new" / "checkpoints", 100, some_tensors(), FACTS)
    assert path.name == "step-00000100"
    found = store.load(path)
    assert (found.step, found.facts, found.path) == (100, FACTS, path)
    assert_same(found.tensors, some_tensors())
    manifest.verify(path)


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
    path = store.save(tmp_path, 1, {"optimizer": members}, {})
    assert_same(store.load(path).tensors, {"optimizer": members})


def test_the_dtypes_of_training_are_among_them():
    assert FP8 | {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.uint8,
        torch.int64,
        torch.bool,
    } <= set(DTYPES)


def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path):
    embedding = torch.nn.Parameter(torch.randn(64, 64))
    members = {
        "embed": embedding,
        "head": embedding,
        "view": embedding.view(64, 64),
        "part": embedding[:2],
    }
    path = store.save(tmp_path, 1, {"weights": members}, {})
    assert (path / "weights-0.safetensors").stat().st_size < 1.2 * embedding.numel() * 4
    found = store.load(path).tensors["weights"]
    assert found["head"] is found["embed"] and found["view"] is found["embed"]
    assert bits(found["part"]) == bits(embedding[:2])
    assert found["part"].untyped_storage().data_ptr() != found["embed"].untyped_storage().data_ptr()


def test_equal_but_separate_tensors_stay_separate(tmp_path):
    path = store.save(tmp_path, 1, {"weights": {"a": torch.ones(3), "b": torch.ones(3)}}, {})
    found = store.load(path).tensors["weights"]
    assert found["a"] is not found["b"]


def test_conjugated_and_negated_views_keep_their_values(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    members = {"conjugate": values.conj(), "negated": values.conj().imag}
    path = store.save(tmp_path, 1, {"optimizer": members}, {})
    assert_same(store.load(path).tensors, {"optimizer": members})


def test_a_large_group_is_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 1000)
    members = {f"layer {i}": torch.full((100,), float(i)) for i in range(7)} | {
        "large": torch.ones(2000)
    }
    path = store.save(tmp_path, 1, {"weights": members, "none": {}}, {})
    assert len(list(path.glob("weights-*.safetensors"))) == 5
    assert_same(store.load(path).tensors, {"weights": members, "none": {}})


def test_a_shard_may_be_as_large_as_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 1200)
    members = {f"layer {i}": torch.full((100,), float(i)) for i in range(6)}
    path = store.save(tmp_path, 1, {"weights": members}, {})
    files = sorted(path.glob("weights-*.safetensors"))
    assert [list(load_file(file)) for file in files] == [list(members)[:3], list(members)[3:]]


def test_the_space_that_a_checkpoint_needs_counts_its_facts(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_100_000))
    with raises(StorageError, "storage.full", "checkpoint 1", "1.1", "1 needs"):
        store.save(tmp_path, 1, {"weights": {"a": torch.zeros(9)}}, {"log": "x" * 1_000_000})


def test_other_readers_of_safetensors_read_the_weights(tmp_path):
    path = saved(tmp_path, 1)[0]
    assert_same(
        {"weights": load_file(path / "weights-0.safetensors")},
        {"weights": some_tensors()["weights"]},
    )


def test_saving_does_not_change_the_tensors(tmp_path):
    tensors = some_tensors()
    saved(tmp_path, 1)
    store.save(tmp_path, 2, tensors, FACTS)
    assert_same(tensors, some_tensors())


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=25)
@given(JSON)
def test_facts_are_any_json(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("facts")
    try:
        path = store.save(folder, 1, {}, {"value": value})
    except CheckpointError as error:
        assert "not JSON" in str(error)  # a lone surrogate
    else:
        assert store.load(path).facts == {"value": value}


# What is refused


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"loss": float("nan")}, coded("checkpoint.facts")),
        ({"state": (1, 2)}, coded("checkpoint.facts-changed")),
        ({1: "a"}, coded("checkpoint.facts-changed")),
        ({"tensor": torch.ones(1)}, coded("checkpoint.facts")),
    ],
)
def test_facts_that_json_would_change_are_refused(tmp_path, facts, words):
    with raises(CheckpointError, words):
        store.save(tmp_path, 1, {}, facts)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "group",
    ["../weights", "/etc", "a/b", "", "Weights", "weights-0", ".hidden", "w" * 50, "manifest.json"],
)
def test_a_group_that_is_no_file_name_is_refused(tmp_path, group):
    with raises(CheckpointError, "checkpoint.group"):
        store.save(tmp_path, 1, {group: {}}, {})


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
    with raises(CheckpointError, "checkpoint.tensor-kind"):
        store.save(tmp_path, 1, {"optimizer": {"up": tensor}}, {})


@pytest.mark.parametrize("step", [-1, 10**8])
def test_a_step_that_the_name_cannot_hold_is_refused(tmp_path, step):
    with raises(CheckpointError, "checkpoint.step"):
        store.save(tmp_path, step, {}, {})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_weights_that_are_not_finite_are_refused(tmp_path, bad, dtype):
    saved(tmp_path, 1)
    tensors = some_tensors(2)
    tensors["weights"]["up"] = torch.tensor([[1.0, 2.0], [3.0, bad]]).to(dtype).T
    # torch's own cast saturates infinity in some versions; then there is nothing to refuse
    if tensors["weights"]["up"].float().isfinite().all():
        pytest.skip("this cast has no such value")
    with raises(NumericsError, "weights.not-finite", "'up'", "holds 1", "1 values"):
        store.save(tmp_path, 2, tensors, {})
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_an_infinite_amax_in_another_group_is_no_reason_to_lose_the_run(tmp_path):
    tensors = {"weights": {}, "scaling": {"window": torch.tensor([1.0, float("inf")])}}
    assert_same(store.load(store.save(tmp_path, 1, tensors, {})).tensors, tensors)


# Choosing


def test_the_newest_intact_checkpoint_is_chosen_and_damage_is_named(tmp_path):
    paths = saved(tmp_path, 1, 2, 30)
    (paths[2] / "facts.json").write_text("{}")
    os.utime(paths[0], (2e9, 2e9))  # the clock does not decide
    found, skipped = store.newest_valid(tmp_path)
    assert found is not None and found.step == 2
    assert [path for path, _ in skipped] == [paths[2]] and "facts.json: was changed" in skipped[0][
        1
    ]


def test_without_any_checkpoint_there_is_nothing_to_choose(tmp_path):
    assert store.newest_valid(tmp_path) == (None, [])
    assert store.newest_valid(tmp_path / "absent") == (None, [])
    for name in ("step-1", "step-00000001.bak", "my-step-00000001", ".tmp-step-00000001-7"):
        (tmp_path / name).mkdir()
    assert store.newest_valid(tmp_path) == (None, [])


def test_when_none_is_intact_the_run_does_not_start_anew(tmp_path):
    for path in saved(tmp_path, 1, 2):
        (path / manifest.NAME).unlink()
    with raises(CheckpointError, "checkpoint.none-intact", "the 2", "2 checkpoints") as caught:
        store.newest_valid(tmp_path)
    assert caught.value.exit_code == 4


# Keeping house


def test_prune_keeps_the_newest_by_step_and_touches_nothing_else(tmp_path):
    paths = saved(tmp_path, 1, 2, 3, 100)
    for index, path in enumerate(paths):
        os.utime(path, (2e9 - index, 2e9 - index))
    foreign = [
        tmp_path / name
        for name in ("my-step-5-best", "step-20.bak", "step-00000000", "notes_step-7.txt")
    ]
    for folder in foreign:
        folder.mkdir()
        (folder / "mine").touch()
    outside = saved(tmp_path / "outside", 4)[0]
    (tmp_path / "step-00000004").symlink_to(outside)
    for _ in range(2):
        manifest.prune(tmp_path, 2)
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert all((folder / "mine").exists() for folder in foreign) and outside.exists()
    with raises(CheckpointError, "checkpoint.prune", "= 0"):
        manifest.prune(tmp_path, 0)


def test_a_damaged_checkpoint_does_not_displace_a_whole_one(tmp_path):
    paths = saved(tmp_path, 1, 2, 3)
    (paths[2] / "weights-0.safetensors").write_bytes(b"")
    manifest.prune(tmp_path, 1)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    path = saved(tmp_path, 1)[0]
    (path / "facts.json").write_text("damaged")
    assert saved(tmp_path, 1) == [path]
    manifest.verify(path)
    path.joinpath("facts.json").unlink()
    shutil.rmtree(path)
    path.write_text("a file of that name")
    saved(tmp_path, 1)
    manifest.verify(path)
    assert os.listdir(tmp_path) == [path.name]


def test_recover_clears_our_leftovers_and_only_those(tmp_path):
    kept = saved(tmp_path, 1)[0]
    for name in (".tmp-step-00000002-123", ".tmp-step-00000001", ".tmp-mine", ".old-stuff", "tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    storage.recover(tmp_path, manifest.STEP.pattern)
    assert sorted(os.listdir(tmp_path)) == [".old-stuff", ".tmp-mine", kept.name, "tmp"]
    storage.recover(tmp_path / "absent", manifest.STEP.pattern)
    assert not (tmp_path / "absent").exists()


def test_a_crash_between_the_renames_of_a_replacement_loses_nothing(tmp_path):
    path = saved(tmp_path, 1)[0]
    rename = os.rename
    child = os.fork()  # a process of its own would import torch first
    if not child:
        os.rename = lambda source, target: (
            os._exit(9) if Path(source).name.startswith(".tmp-") else rename(source, target)
        )
        try:
            store.save(tmp_path, 1, {"weights": {"up": torch.zeros(3)}}, {})
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not path.exists()
    storage.recover(tmp_path, manifest.STEP.pattern)
    assert_same(store.load(path).tensors, some_tensors(1))
    assert os.listdir(tmp_path) == [path.name]
