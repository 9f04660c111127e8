"""Checkpoints of several ranks: exact on any number of them, refused when damaged, and one error for all ranks (exact)."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge import manifest
from narrowgauge import storage as files
from narrowgauge.distributed import distributed_state, shards, storage
from narrowgauge.errors import CheckpointError, StorageError
from narrowgauge.train.checkpoint import store
from tests.raising import coded, raises, require
from tests.selection import quick

NARROW = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64,
]  # fmt: skip


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern may occur, NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    return (
        torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .reshape(shape)
    )


def expected(seed: int = 0) -> dict[str, Any]:
    """A state as one process has it: sharded by rows (also fewer rows than ranks), by columns, replicated, and values."""
    rows = {str(dtype): _random((7, 4), dtype, seed + place) for place, dtype in enumerate(NARROW)}
    return {
        "rows": rows,
        "few": {"weight": _random((3, 2), torch.float32, seed + 50), "none": torch.empty(0, 5)},
        "columns": {"weight": _random((4, 6), torch.bfloat16, seed + 51)},
        "plain": {"window": _random((5, 3), torch.float32, seed + 52), "step": torch.tensor(seed), "bias": [torch.ones(3), 2]},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "on": True, "name": "é", "none": None}],
        "step": seed, "mu": 0.5 + seed, "empty": {}, "by number": {0: {"exp_avg": torch.full((2,), 3.0)}, 7: -0.0},
    }  # fmt: skip


def _spread(full: torch.Tensor, mesh: Any, placement: Any) -> torch.Tensor:
    """As a DTensor; bytes are distributed, since gloo refuses 8-bit floats."""
    octets = full.view(torch.uint8) if full.dtype.itemsize == 1 else full
    spread = distribute_tensor(octets, mesh, placement)
    local = spread.to_local().view(full.dtype)
    return DTensor.from_local(local, mesh, placement, shape=full.shape, stride=full.stride())


def spread_state(state: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": [Shard(0)], "few": [Shard(0)], "columns": [Shard(1)]}
    for part, placement in placements.items():
        state[part] = {name: _spread(full, mesh, placement) for name, full in state[part].items()}
    state["plain"]["replicated"] = _spread(torch.arange(6.0), mesh, [Replicate()])
    return state


def whole(tree: Any) -> Any:
    """The same with plain tensors: each rank gathers them."""
    if isinstance(tree, DTensor):
        octets = tree.to_local().view(torch.uint8) if tree.dtype.itemsize == 1 else tree.to_local()
        spread = DTensor.from_local(
            octets, tree.device_mesh, tree.placements, shape=tree.shape, stride=tree.stride()
        )
        return spread.full_tensor().view(tree.dtype)
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value) for value in tree)
    return tree


def assert_equal(one: Any, other: Any, place: str = "") -> None:
    """Bit for bit, type for type."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape, place
        assert torch.equal(_octets(one), _octets(other)), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_equal(mine, theirs, f"{place}.{number}")
    else:
        assert repr(one) == repr(other), place


def save_on_ranks(folder: Path, seed: int) -> None:
    storage.save(spread_state(expected(seed)), folder)


def blank(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        with torch.no_grad():
            _octets_in_place(tree)
        return tree
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(
            blank(value) if isinstance(value, torch.Tensor) else value for value in tree
        )
    return "other"


def _octets_in_place(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel():
        local.copy_(_random(tuple(local.shape), local.dtype, 999))


def load_on_ranks(folder: Path, again: Path | None, seed: int) -> None:
    state = blank(spread_state(expected(0)))
    storage.load(state, folder)
    if again is not None:
        storage.save(state, again)
    assert_equal(whole(state), with_replicated(seed))


def with_replicated(seed: int) -> dict[str, Any]:
    state = expected(seed)
    state["plain"]["replicated"] = torch.arange(6.0)
    return state


def test_two_ranks_one_four_and_two_again_hold_the_same_bits(ranks, tmp_path):
    places = [tmp_path / f"step-0000000{step}" for step in range(1, 4)]
    ranks(2)(save_on_ranks, places[0], 3)
    one = storage.read(places[0])
    assert_equal({key: one[key] for key in with_replicated(3)}, with_replicated(3))
    template = blank(with_replicated(0))
    storage.load(template, places[0])
    assert_equal(template, with_replicated(3))
    storage.save(template, places[1])
    ranks(4)(load_on_ranks, places[1], places[2], 3)
    ranks(2)(load_on_ranks, places[2], None, 3)
    for place in places:
        storage.verify(place)
        manifest.verify(place)
    assert sorted(os.listdir(tmp_path)) == [place.name for place in places]


def save_replicas(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = {name: torch.ones(4, 4) for name in "abc"}
    storage.save(
        whole | {name: _spread(torch.ones(4, 4), mesh, [Replicate()]) for name in "def"}, folder
    )


def test_what_all_ranks_hold_is_stored_once_and_shared_out(ranks, tmp_path):
    ranks(2)(save_replicas, tmp_path / "a")
    index = json.loads((tmp_path / "a" / "index.json").read_bytes())["tensors"]
    assert [len(entry["chunks"]) for entry in index.values()] == [1] * 6
    files = sorted(entry["chunks"][0][2] for entry in index.values())
    assert files == ["rank-00000-0.safetensors"] * 3 + ["rank-00001-0.safetensors"] * 3


# A model and its optimizer


def _trained(shape: tuple[int, ...]) -> dict[str, Any]:
    """FSDP2, or FSDP2 over tensor parallelism, after two steps of AdamW: the same numbers on any mesh that starts from a load."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    names = ("dp", "tp")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(3, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 2,
    }


def save_trained(folder: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    state = _trained(shape)
    storage.save(state, folder)
    return whole(dict(state))


def load_trained(folder: Path, shape: tuple[int, ...], again: Path) -> dict[str, Any]:
    state = _trained(shape)
    for tensor in [
        *state["model"].values(),
        *(each for part in state["optimizer"]["state"].values() for each in part.values()),
    ]:
        _octets_in_place(tensor)
    state["step"] = 0
    storage.load(state, folder)
    storage.save(state, again)
    return whole(dict(state))


@pytest.mark.slow
def test_fsdp_and_tensor_parallel_states_reshard_to_the_bit(ranks, tmp_path):
    """FSDP2 on 2 -> FSDP2 x TP on 4 -> FSDP2 on 3, whose shards are uneven -> FSDP2 on 2."""
    places = [tmp_path / str(number) for number in range(4)]
    saved = ranks(2)(save_trained, places[0], (2,))[0]
    for number, (world, shape) in enumerate([(4, (2, 2)), (3, (3,)), (2, (2,))]):
        for found in ranks(world)(load_trained, places[number], shape, places[number + 1]):
            assert_equal(found, saved)
    assert_equal(storage.read(places[3], only="model")["model"], dict(saved["model"]))


# Damage


@pytest.fixture(scope="module")
def kept(ranks, tmp_path_factory):
    """Two checkpoints of two ranks; copy them."""
    folder = tmp_path_factory.mktemp("kept")
    for step in (1, 2):
        ranks(2)(save_on_ranks, folder / f"step-0000000{step}", step)
    return folder


@pytest.fixture
def folder(kept, tmp_path):
    shutil.copytree(kept, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("flips", quick([100], [100, 1000]))
def test_each_changed_byte_is_noticed(folder, flips):
    path, rng = folder / "step-00000001", random.Random(0)
    sizes = {each: each.stat().st_size for each in sorted(path.iterdir())}
    offsets = rng.choices(list(sizes), weights=list(sizes.values()), k=flips)
    unnoticed = []
    for file in offsets:
        data = bytearray(file.read_bytes())
        place = rng.randrange(len(data))
        data[place] ^= rng.randrange(1, 256)
        whole_file = file.read_bytes()
        file.write_bytes(data)
        try:
            storage.verify(path)
            unnoticed.append((file.name, place))
        except CheckpointError:
            pass
        file.write_bytes(whole_file)
    assert unnoticed == []
    storage.verify(path)


def test_each_of_two_hundred_truncations_and_extensions_is_noticed(folder):
    path, rng = folder / "step-00000001", random.Random(1)
    for _ in range(200):
        file = rng.choice(sorted(path.iterdir()))
        data = file.read_bytes()
        file.write_bytes(
            data[: rng.randrange(len(data))]
            if rng.random() < 0.8
            else data + bytes(rng.randrange(1, 9))
        )
        with pytest.raises(CheckpointError) as caught:
            storage.read(path)
        assert caught.value.code in ("checkpoint.changed", "checkpoint.manifest"), caught.value
        file.write_bytes(data)


def _damage(path: Path, how: str) -> None:
    shard, other = path / "rank-00001-0.safetensors", path.with_name("step-00000002")
    if how == "missing":
        shard.unlink()
    elif how == "extra":
        shutil.copy(shard, path / "rank-00002-0.safetensors")
    elif how == "of another step":
        shutil.copy(other / shard.name, shard)
    elif how == "of the other rank":
        shutil.copy(path / "rank-00000-0.safetensors", shard)
    elif how == "link":
        shard.rename(path.parent / "elsewhere")
        shard.symlink_to(path.parent / "elsewhere")
    elif how == "renamed folder":
        shutil.rmtree(path)
        shutil.copytree(other, path)
    elif how == "manifest of another step":
        shutil.copy(other / "manifest.json", path / "manifest.json")


DAMAGES = {
    "missing": coded("checkpoint.files", "rank-00001-0.safetensors"),
    "extra": coded("checkpoint.files", "rank-00002-0.safetensors"),
    "of another step": coded("checkpoint.foreign", "step 2"),
    "of the other rank": coded("checkpoint.changed", "rank-00001-0.safetensors"),
    "link": coded("file.link", "rank-00001-0.safetensors"),
    "renamed folder": coded("checkpoint.manifest", "step 2"),
    "manifest of another step": coded("checkpoint.manifest", "step 2"),
}


def _load_error(path: Path) -> CheckpointError | None:
    """The error on this rank, once it is sure that nothing was changed."""
    state = spread_state(expected(0))
    before = whole(state)
    try:
        storage.load(state, path)
    except CheckpointError as error:
        assert_equal(whole(state), before)
        return error
    return None


@pytest.mark.parametrize("how", DAMAGES)
def test_a_foreign_or_missing_shard_is_refused_on_all_ranks_alike(ranks, folder, how):
    path = folder / "step-00000001"
    _damage(path, how)
    with raises(CheckpointError, DAMAGES[how]):
        storage.verify(path)
    first, second = ranks(2)(_load_error, path)
    assert str(first) == str(second)
    for error in (first, second):
        assert type(error) is CheckpointError
        require(error, DAMAGES[how].code, *DAMAGES[how].values)


def _resigned(path: Path, change: Any) -> None:
    """The index changed by somebody who also makes the hashes right."""
    index = json.loads((path / "index.json").read_bytes())
    change(index)
    data = json.dumps(index).encode()
    (path / "index.json").write_bytes(data)
    body = json.loads((path / "manifest.json").read_bytes())
    listed = {**body["files"], "index.json": manifest.listed(data)}
    (path / "manifest.json").write_bytes(
        manifest.Manifest(1, [], {}, listed, body["save"]).signed()
    )


CHANGES = {
    "leaves the folder": lambda index: index["tensors"]["rows.torch.int8"]["chunks"][0].__setitem__(2, "../x.safetensors"),
    "out of bounds": lambda index: index["tensors"]["rows.torch.int8"]["chunks"][0].__setitem__(0, [9, 0]),
    "a hole": lambda index: index["tensors"]["rows.torch.int8"]["chunks"].pop(),
    "twice the same": lambda index: index["tensors"]["rows.torch.int8"]["chunks"].append(
        index["tensors"]["rows.torch.int8"]["chunks"].pop(0)
    ) or index["tensors"]["rows.torch.int8"]["chunks"].__setitem__(0, index["tensors"]["rows.torch.int8"]["chunks"][1]),
    "another type": lambda index: index["tensors"]["rows.torch.int8"].__setitem__("dtype", "float8_e5m2"),
    "no type": lambda index: index["tensors"]["rows.torch.int8"].__setitem__("dtype", "__class__"),
    "no path": lambda index: index["tensors"]["rows.torch.int8"].__setitem__("path", []),
    "a path below a tensor": lambda index: index["tensors"]["rows.torch.int8"].__setitem__("path", ["step", "x"]),
    "a negative shape": lambda index: index["tensors"]["rows.torch.int8"].__setitem__("shape", [-7, 4]),
    "no value": lambda index: index["values"]["step"].__setitem__("value", {"call": ["x"]}),
    "no table": lambda index: index.__setitem__("tensors", []),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_an_index_that_lies_is_refused(folder, how):
    path = folder / "step-00000001"
    _resigned(path, CHANGES[how])
    with pytest.raises(CheckpointError) as caught:
        storage.read(path)
    codes = "checkpoint.index", "checkpoint.chunk-form", "checkpoint.contents"
    assert caught.value.code in codes, caught.value


@pytest.mark.parametrize(
    "name",
    ["../rank-00001-0.safetensors", "/etc/passwd", "rank-00001-0.bin", "rank-1-0.safetensors"],
)
def test_a_manifest_that_leaves_the_folder_is_refused(folder, name):
    path = folder / "step-00000001"
    body = json.loads((path / "manifest.json").read_bytes())
    listed = body["files"] | {name: {"bytes": 1, "sha256": "0" * 64}}
    (path / "manifest.json").write_bytes(
        manifest.Manifest(1, [], {}, listed, body["save"]).signed()
    )
    with raises(CheckpointError, "checkpoint.manifest"):
        storage.verify(path)


def test_reading_runs_no_pickle(folder, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    for place in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(place, refuse)
    storage.verify(folder / "step-00000001")
    storage.load(blank(with_replicated(0)), folder / "step-00000001")
    written = b"".join(each.read_bytes()[:2] for each in (folder / "step-00000001").iterdir())
    assert b"\x80\x04" not in written and b"PK" not in written


# What is refused


def _refusal(state: dict[str, Any], rank: int | None, folder: Path) -> tuple[str, str]:
    """The error of a save in which one rank (None: all) has `state`, the others what is expected."""
    own = spread_state(expected(0)) | (state if rank in (None, dist.get_rank()) else {})
    try:
        storage.save(own, folder)
    except (CheckpointError, StorageError) as error:
        return type(error).__name__, str(error)
    return "", ""


REFUSED = {
    "'plain.window' differs between rank 0 and rank 1": ({"plain": expected(1)["plain"]}, 1),
    "'mu' is 0.5 on rank 0 and 0.25 on rank 1, and is one value of all ranks": ({"mu": 0.25}, 1),
    "'step' is 0 on rank 0 and 0.0 on rank 1": ({"step": 0.0}, 1),
    "rank 1: 'x' is a tests.distributed.test_storage.Odd, which JSON cannot hold": (None, 1),
    "'x' is nan, which JSON cannot hold": ({"x": float("nan")}, None),
    "'x' is inf, which JSON cannot hold": ({"x": [1, (2, float("inf"))]}, None),
    "two entries of the state are called 'x.y'": ({"x": {"y": 1}, "x.y": 2}, None),
    "'x' has the key 1.5, which is no text or whole number": ({"x": {1.5: 2}}, None),
    "'x' is a torch.sparse_coo tensor": ({"x": torch.eye(3).to_sparse()}, None),
    "'x' is a torch.strided tensor of torch.complex128": (
        {"x": torch.zeros(2, dtype=torch.complex128)},
        None,
    ),
    "'x' is a torch.strided tensor of torch.float32 on meta": (
        {"x": torch.zeros(2, device="meta")},
        None,
    ),
}


class Odd:
    """Something that is neither tensor nor JSON."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_stored_or_differs_is_refused_on_all_ranks_alike(ranks, tmp_path, words):
    state, rank = REFUSED[words]
    first, second = ranks(2)(_refusal, state or {"x": Odd()}, rank, tmp_path / "new")
    assert first == second and first[0] == "CheckpointError" and words in first[1]
    assert os.listdir(tmp_path) == []


def _misfit(folder: Path, how: str) -> tuple[str, str]:
    rank = dist.get_rank()
    spread = _spread(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    odd: Any = {
        "kind": torch.ones(4) if rank else spread,
        "shape": torch.ones(4 + rank),
        "type": torch.ones(4).to(torch.bfloat16 if rank else torch.float32),
        "value": None if rank else torch.ones(4),
        "table": {"y": 1} if rank else 1,
    }.get(how)
    state = (
        {"x.y": 1} if how == "path" and rank else {"x": {"y": 1}} if how == "path" else {"x": odd}
    )
    try:
        storage.save(state, folder)
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""


MISFITS = {
    "kind": r"'x' is a DTensor float32 \[4\] on rank 0 and a tensor float32 \[4\] on rank 1",
    "shape": r"'x' is a tensor float32 \[4\] on rank 0 and a tensor float32 \[5\] on rank 1",
    "type": r"'x' is a tensor float32 \[4\] on rank 0 and a tensor bfloat16 \[4\] on rank 1",
    "value": r"'x' is a tensor float32 \[4\] on rank 0 and a value on rank 1",
    "table": "are not parts of one state: 'x.y' is below something that is no table",
    "path": "'x.y' is a value on rank 0 and a value, at another place on rank 1",
}


@pytest.mark.parametrize("how", MISFITS)
def test_states_that_are_not_parts_of_one_are_refused_on_all_ranks_alike(ranks, tmp_path, how):
    first, second = ranks(2)(_misfit, tmp_path / "a", how)
    assert first == second and first[0] == "CheckpointError"
    with pytest.raises(CheckpointError, match=MISFITS[how]):
        raise CheckpointError(first[1])
    assert os.listdir(tmp_path) == []


def test_another_state_is_refused_before_anything_is_loaded(folder):
    state = with_replicated(0)
    state["rows"]["torch.int8"] = torch.zeros(7, 4)
    state["few"]["weight"] = torch.zeros(3, 3)
    state["more"] = 1
    before = whole(state)
    with raises(CheckpointError, "checkpoint.other-state", "[7, 4]"):
        storage.load(state, folder / "step-00000001")
    assert_equal(state, before)
    part = {"columns": {"weight": torch.zeros(4, 6, dtype=torch.bfloat16)}}
    with raises(CheckpointError, "checkpoint.other-state"):
        storage.load(part, folder / "step-00000001")
    storage.load(part, folder / "step-00000001", partial=True)
    assert_equal(part["columns"], expected(1)["columns"])


def test_a_folder_of_other_things_is_never_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").write_text("mine")
    with raises(CheckpointError, "checkpoint.other-files"):
        storage.save({"x": 1}, tmp_path / "notes")
    assert (tmp_path / "notes" / "a").read_text() == "mine"


# A disk that refuses


@contextmanager
def _file_limit(size: int) -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _save_refused(folder: Path, where: str, rank: int) -> tuple[str, str]:
    """A save while the file system of `rank` refuses: files beyond 64 bytes, or one function."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == dist.get_rank() and where != "limit":

            def refuse(*_: Any) -> None:
                raise OSError(28, "No space left on device", str(folder))

            patch.setattr(
                *{
                    "manifest": (shards, "Manifest"),
                    "sync": (files, "flush"),
                    "rename": (files, "replace_folder"),
                }[where],
                refuse,
            )
        try:
            with _file_limit(
                64 if where == "limit" and rank == dist.get_rank() else resource.RLIM_INFINITY
            ):
                storage.save(spread_state(expected(9)), folder)
        except StorageError as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("where", "rank"),
    [("limit", 0), ("limit", 1), ("sync", 0), ("sync", 1), ("manifest", 0), ("rename", 0)],
)
def test_a_full_disk_of_one_rank_is_one_message_on_all_and_loses_nothing(
    ranks, folder, where, rank
):
    before = {each.name: each.read_bytes() for each in (folder / "step-00000002").iterdir()}
    first, second = ranks(2)(_save_refused, folder / "step-00000002", where, rank)
    assert first == second and first[0] == "StorageError"
    assert first[1].startswith(
        f"rank {rank}: cannot save a checkpoint in {folder / 'step-00000002'}: "
    )
    assert first[1].endswith("or choose another folder.")
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]
    assert {each.name: each.read_bytes() for each in (folder / "step-00000002").iterdir()} == before
    ranks(2)(save_on_ranks, folder / "step-00000002", 2)
    storage.verify(folder / "step-00000002")


def _save_elsewhere(folder: Path, told: bool) -> Exception | None:
    """On disks of their own: under names of their own, or under one name, so that rank 1 does not see what rank 0 made."""
    with pytest.MonkeyPatch.context() as patch:
        if not told and dist.get_rank() == 1:
            patch.setattr(Path, "is_dir", lambda path: False)
        try:
            storage.save(
                {"x": torch.ones(2)}, folder / (f"disk {dist.get_rank()}" if told else "disk") / "a"
            )
        except (CheckpointError, StorageError) as error:
            return error
    return None


@pytest.mark.parametrize("told", [True, False])
def test_ranks_with_disks_of_their_own_are_told_so(ranks, tmp_path, told):
    first, second = ranks(2)(_save_elsewhere, tmp_path, told)
    assert str(first) == str(second)
    for error in (first, second):
        require(error, "checkpoint.unshared-files" if told else "checkpoint.unshared-folder")
    assert list(tmp_path.rglob("*.json")) == []


# Formats


def load_of_one_process(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "weights": {"a": _spread(torch.zeros(5, 2), mesh, [Shard(0)]), "tied": _spread(torch.zeros(5, 2), mesh, [Shard(0)])},
        "scaling": {"b": torch.zeros(3, dtype=torch.uint8)},
        "facts": {"lr": 0.0, "state": None},
    }  # fmt: skip
    storage.load(state, folder)
    return whole(state)


def test_a_checkpoint_of_one_process_is_read_on_two_ranks_and_on_none(ranks, tmp_path):
    weight = torch.randn(5, 2)
    facts = {"lr": 0.5, "state": [1, 2.0, "x"]}
    path = store.save(
        tmp_path,
        4,
        {
            "weights": {"a": weight, "tied": weight},
            "scaling": {"b": torch.arange(3, dtype=torch.uint8)},
        },
        facts,
    )
    wanted = {
        "weights": {"a": weight, "tied": weight},
        "scaling": {"b": torch.arange(3, dtype=torch.uint8)},
        "facts": facts,
    }
    for found in ranks(2)(load_of_one_process, path):
        assert_equal(found, wanted)
    assert_equal(storage.read(path), wanted)
    storage.verify(path)


def save_stages(folder: Path) -> None:
    """As two stages of a pipeline: each rank has layers of its own."""
    rank = dist.get_rank()
    storage.save(
        {
            "model": {f"layer{rank}": torch.full((2,), float(rank))},
            "lr": 0.5,
            f"of rank {rank}": rank,
        },
        folder,
    )


def test_ranks_may_hold_different_entries(ranks, tmp_path):
    ranks(2)(save_stages, tmp_path / "a")
    wanted = {
        "model": {"layer0": torch.zeros(2), "layer1": torch.ones(2)},
        "lr": 0.5,
        "of rank 0": 0,
        "of rank 1": 1,
    }
    assert_equal(storage.read(tmp_path / "a"), wanted)


def _loaded_stages(folder: Path, has_more: bool) -> tuple[float, int, str]:
    rank = dist.get_rank()
    state = {"model": {f"layer{rank}": torch.zeros(2)}, "lr": 0.0, f"of rank {rank}": -1}
    if not has_more:
        state.pop(f"of rank {rank}")
    try:
        storage.load(state, folder)
    except CheckpointError as error:
        return 0.0, 0, str(error)
    return float(state["model"][f"layer{rank}"].sum()), state[f"of rank {rank}"], ""


def test_ranks_load_what_is_their_own(ranks, tmp_path):
    """What no rank reads is told."""
    ranks(2)(save_stages, tmp_path / "a")
    assert ranks(2)(_loaded_stages, tmp_path / "a", True) == [(0.0, 0, ""), (2.0, 1, "")]
    for _, _, said in ranks(2)(_loaded_stages, tmp_path / "a", False):
        assert "of rank 0 is not part of this state" in said


def loop_of_ones_own(folder: Path, how: str, start: int) -> list[float]:
    """The example of docs/distributed/checkpoints.md: two steps from `start` on, a checkpoint, two more; losses of a step's two halves."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(0)
    model: nn.Module = ng.convert(
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), "int4-hq-bs"
    )
    if how == "copies":
        model = DistributedDataParallel(model)
    elif how == "shards":
        fully_shard(model)
    ng.distribute(model)
    optimizer = ng.optim.AdamW(model.parameters(), lr=1e-3, states="8bit")

    def state_of(step: int) -> dict[str, Any]:
        weights, states = get_state_dict(model, optimizer)
        return {
            "model": weights,
            "optimizer": states,
            "agreement": distributed_state(model).state_dict(),
            "step": step,
        }

    if start:
        state = state_of(0)
        storage.load(state, folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        distributed_state(model).load_state_dict(state["agreement"])
        assert state["step"] == start
    losses = []
    for step in range(start, 4):
        if step == 2 and not start:
            storage.save(state_of(2), folder)
        for number in range(rank, 2, world):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + number))
            loss = (model(x) - x.roll(1, 1)).square().mean()
            (loss * world / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_copies_go_on_as_shards_and_in_one_process(ranks, tmp_path):
    """Random numbers of the recipe too. By `model.state_dict()` copies would have other names."""
    whole = ranks(2)(loop_of_ones_own, tmp_path / "a", "copies", 0)
    assert ranks(2)(loop_of_ones_own, tmp_path / "a", "shards", 2) == [each[2:] for each in whole]
    assert loop_of_ones_own(tmp_path / "a", "plain", 2) == [
        loss for step in (2, 3) for loss in (each[step] for each in whole)
    ]
