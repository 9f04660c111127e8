"""Storage backend for torch.distributed.checkpoint; torch's planners decide who stores what.

    rank-00000-0.safetensors  chunks stored by rank 0, in files of at most SHARD_BYTES
    rank-00001-0.safetensors  ...
    index.json                location of each tensor, and non-tensor values (index.py)
    manifest.json             size and SHA-256 of every other file (narrowgauge/manifest.py)

Writing: rank 0 creates a draft folder. All ranks write and sync their shards there and send the
digests to rank 0. Rank 0 then writes index and manifest, syncs, and renames the draft. Before the
rename there is no checkpoint, after it the checkpoint is durable.

Messages between the planners are torch's own and pickled; no file is pickled.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from narrowgauge import manifest, storage
from narrowgauge.addresses import own
from narrowgauge.distributed import index as indexes
from narrowgauge.distributed import replicas, state_tree
from narrowgauge.distributed.index import STORABLE, Chunk, Index, StoredTensor
from narrowgauge.errors import CheckpointError, StorageError
from narrowgauge.manifest import INDEX, NAME, SHARD_BYTES, Manifest

if TYPE_CHECKING:
    from narrowgauge.distributed.replicas import RankFacts

NEXT_STEP = "choose another folder"
SAMPLE = "Write the checkpoint with narrowgauge.distributed.storage.save."


@dataclass(frozen=True)
class ShardPlan:
    """Instructions from rank 0 to a rank, sent with the final plan.

    draft  path of the draft folder
    save   random id of this save, stored in every shard
    rank   index of the rank, used in file names
    """

    draft: str
    save: str
    rank: int


class ShardWriter(StorageWriter):
    """StorageWriter that saves a flat state as the checkpoint `folder`.

    The tensors of `flat` are passed to `torch.distributed.checkpoint.save`.
    """

    def __init__(self, folder: Path, flat: state_tree.Flat, step: int) -> None:
        self.folder, self.flat, self.step = folder, flat, step
        # Set on rank 0 alone, from the creation of the draft folder until its rename.
        self.draft: Path | None = None
        self.save = ""
        self.rank_facts: list[RankFacts] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.draft = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            _refuse_unstorable(item, self.flat.tensors.get(item.index.fqn))
        return replace(plan, storage_data=replicas.rank_facts(plan, self.flat))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.rank_facts = [plan.storage_data for plan in plans]
        # Stored in every shard: a shard left over from another save is recognized.
        self.save = secrets.token_hex(16)
        total_bytes = sum(_bytes(item) for plan in plans for item in plan.items)
        values_bytes = len(json.dumps([each.values for each in self.rank_facts[:1]]))
        draft = self.folder.with_name(f".tmp-{self.folder.name}-{os.getpid()}")
        with storage.refusals("save a checkpoint in", self.folder, NEXT_STEP):
            storage.make_folder(self.folder.parent)
            # Remove drafts of killed saves, and restore a checkpoint that was moved aside, before the
            # free space is measured.
            storage.recover(self.folder.parent, re.escape(self.folder.name))
            storage.require_space(
                self.folder.parent,
                1.2 * (total_bytes + values_bytes),
                f"checkpoint {self.folder.name}",
            )
            storage.remove(draft)
            # Set before mkdir, so that `discard` also removes a folder from a failure in between.
            self.draft = draft
            draft.mkdir()
        return [
            replace(plan, storage_data=ShardPlan(str(draft), self.save, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shard_plan: ShardPlan = plan.storage_data
        draft = Path(shard_plan.draft)
        # Without a shared file system, rank 0's folder does not exist here.
        if not draft.is_dir():
            raise StorageError(
                f"cannot save a checkpoint in {self.folder}: the folder that rank 0 made is not seen here. "
                "Choose a folder on a file system that all ranks share.",
                code="checkpoint.unshared-folder",
            )
        results: list[WriteResult] = []
        with storage.refusals("save a checkpoint in", self.folder, NEXT_STEP):
            for number, (tensors, items) in enumerate(_in_shards(plan.items, planner)):
                name = f"rank-{shard_plan.rank:05d}-{number}.safetensors"
                data = safetensors.torch.save(
                    tensors, metadata={"save": shard_plan.save, "step": str(self.step)}
                )
                storage.write_synced(draft / name, data)
                listed = manifest.listed(data)
                results += [WriteResult(item.index, _bytes(item), (name, listed)) for item in items]
            storage.flush(draft)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.draft is not None
        written = [result for of_rank in results for result in of_rank]
        # Many chunks report the same file; a dict lists it once.
        files = {name: listed for name, listed in (result.storage_data for result in written)}
        index = _index(metadata, written, self.rank_facts).json()
        with storage.refusals("save a checkpoint in", self.folder, NEXT_STEP):
            # Order matters for crash safety: shards are synced, then index, manifest and folder,
            # and the rename comes last.
            storage.write_synced(self.draft / INDEX, index)
            files[INDEX] = manifest.listed(index)
            storage.write_synced(
                self.draft / NAME, Manifest(self.step, [], {}, files, self.save).signed()
            )
            storage.flush(self.draft)
            storage.replace_folder(self.folder, self.draft)
        self.draft = None

    def discard(self) -> None:
        """Delete the draft of a failed save; call it once no rank writes any more.

        Files that cannot be deleted are left to the next save.
        """
        if self.draft is not None:
            with suppress(OSError):
                storage.remove(self.draft)
            self.draft = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        # torch must not select this class for a plain path.
        return False


def _refuse_unstorable(item: WriteItem, tensor: Tensor | None) -> None:
    name, reason = item.index.fqn, ""
    if item.type == WriteItemType.BYTE_IO or tensor is None:
        raise CheckpointError(
            f"{name!r} is no tensor, and would be pickled. {SAMPLE}", code="checkpoint.would-pickle"
        )
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Exact types: a tensor subclass may keep data outside its storage.
    if type(local) not in (Tensor, torch.nn.Parameter):
        reason = f"is a {type(local).__name__}, not a plain tensor"
    elif local.layout != torch.strided or local.is_meta or local.dtype not in STORABLE.values():
        reason = f"is a {local.layout} tensor of {local.dtype} on {local.device}, which safetensors does not hold"
    elif item.tensor_data is None or tuple(local.shape) != tuple(item.tensor_data.chunk.sizes):
        reason = f"has a local shard of {list(local.shape)} that is no box of the whole tensor"
    if reason:
        raise CheckpointError(
            f"save: {name!r} {reason}. Store plain dense tensors, as `uint8` codes if need be.",
            code="checkpoint.tensor-kind",
        )


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _in_shards(
    items: list[WriteItem], planner: SavePlanner
) -> Iterator[tuple[dict[str, Tensor], list[WriteItem]]]:
    """Yield a rank's tensors, on the CPU and without shared storage, one file at a time."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        if batch and size + _bytes(item) > SHARD_BYTES:
            yield tensors, batch
            tensors, storages, batch, size = {}, set(), [], 0
        size += _bytes(item)
        resolved = planner.resolve_data(item)
        assert isinstance(resolved, Tensor)
        # safetensors refuses tensors that share a storage.
        stored = own(indexes.storage_form(resolved.detach()), storages)
        tensors[indexes.chunk_key(item.index.fqn, tuple(item.index.offset or ()))] = stored
        batch.append(item)
    if batch:
        yield tensors, batch


def _index(metadata: Metadata, written: list[WriteResult], rank_facts: list[RankFacts]) -> Index:
    files_of_chunks = {
        (result.index.fqn, tuple(result.index.offset or ())): result.storage_data[0]
        for result in written
    }
    paths = {name: path for each in rank_facts for name, path in each.paths.items()}
    tensors: dict[str, StoredTensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            offsets = tuple(chunk.offsets)
            chunks.append(
                Chunk(
                    offsets,
                    tuple(chunk.sizes),
                    files_of_chunks[name, offsets],
                    indexes.chunk_key(name, offsets),
                )
            )
        tensors[name] = StoredTensor(paths[name], entry.properties.dtype, tuple(entry.size), chunks)
    return Index(
        tensors, {name: value for each in rank_facts for name, value in each.values.items()}, paths
    )


class ShardReader(StorageReader):
    """StorageReader for the checkpoint `folder` with a parsed index."""

    def __init__(self, folder: Path, listing: Manifest, index: Index) -> None:
        self.folder, self.listing, self.index = folder, listing, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any) -> Metadata:
        entries: dict[str, Any] = {}
        for name, stored in self.index.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in stored.chunks
            ]
            entries[name] = TensorStorageMetadata(
                TensorProperties(stored.dtype), torch.Size(stored.shape), chunks
            )
        return Metadata(entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read one file at a time; each is verified as it is read."""
        chunks = {
            (name, chunk.offsets): chunk
            for name, stored in self.index.tensors.items()
            for chunk in stored.chunks
        }
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            chunk = chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            files.setdefault(chunk.file, []).append((item, chunk))
        for file, items in files.items():
            shard = indexes.shard(self.folder, file, self.listing)
            for item, chunk in items:
                stored = self.index.tensors[item.storage_index.fqn]
                part = indexes.read_chunk(shard, stored, chunk, self.folder / file)
                for dimension, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dimension, start, length)
                with torch.no_grad():
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
