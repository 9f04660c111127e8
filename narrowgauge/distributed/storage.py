"""Checkpoints of several ranks: whole or absent, every changed bit detected, readable on any number of ranks, and without any.

    save(state, folder)     all ranks call it; when it returns on one of them, the checkpoint is on the disk
    load(state, folder)     into tensors that are sharded as they are now, on as many ranks as there are now
    read(folder)            the whole of it as ordinary tensors on the CPU, in one process, without a process group
    verify(folder)          CheckpointError unless every byte is the one that was written

A state is a nested dict. DTensors are stored in the parts that ranks hold (narrowgauge/distributed/shards.py) and resharded by
torch's planners; plain tensors are the same on all ranks by invariant and stored once; what is no tensor is stored as JSON
(narrowgauge/distributed/state_tree.py). Ranks may lack entries that others have, as stages of a pipeline do.

Whatever one rank runs into (a full disk, a tensor that differs, a damaged file), all ranks raise the same error, which begins with
that rank. A rank that dies is not waited for longer than the process group's time-out; its error is the process group's.

`load` verifies all files first, each once, shared between the ranks, and changes nothing unless all are whole; what a rank then
reads, it hashes again. So loading costs two reads of the checkpoint, of which most come from the page cache.
Left out: asynchronous saves; one copy of tied weights (each name is stored).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as planned_load
from torch.distributed.checkpoint.state_dict_saver import save as planned_save

from narrowgauge import manifest
from narrowgauge.distributed import index as indexes
from narrowgauge.distributed import state_tree
from narrowgauge.distributed.index import Index
from narrowgauge.distributed.replicas import AgreedSavePlanner
from narrowgauge.distributed.shards import ShardReader, ShardWriter
from narrowgauge.distributed.together import Group, one_sentence, rank_and_world, together
from narrowgauge.errors import CheckpointError, NarrowgaugeError
from narrowgauge.manifest import NAME, STEP, Manifest

SHOWN = 3  # entries that an error names


def save(state_dict: dict[str, Any], folder: Path | str, process_group: Group = None) -> Path:
    """Writes the state of all ranks as one checkpoint `folder`, on a file system that all ranks share, and returns its path.

    An older checkpoint there is replaced once the new one is on the disk. Of a folder named step-00000100 the step is kept.
    StorageError if the file system refuses on any rank, CheckpointError if something cannot be stored, or differs between ranks
    and may not; in each case on all ranks, nothing is left behind and older checkpoints are untouched.
    """
    folder = Path(folder).absolute()

    def prepare() -> ShardWriter:
        _refuse_other_folder(folder)
        step = int(folder.name[5:]) if STEP.fullmatch(folder.name) else 0
        return ShardWriter(folder, state_tree.flatten(state_dict), step)

    writer = together(prepare, process_group, compare=lambda writer: str(writer.folder), what="save: the folder")
    try:
        with one_sentence(process_group):
            planned_save(
                dict(writer.flat.tensors),
                storage_writer=writer,
                planner=AgreedSavePlanner(),
                process_group=process_group,
            )
    except BaseException as error:
        _, world = rank_and_world(process_group)
        if world == 1 or isinstance(error, NarrowgaugeError | KeyboardInterrupt):
            writer.discard()  # else another rank is gone, and a third may still write
        raise
    return folder


def load(state_dict: dict[str, Any], folder: Path | str, process_group: Group = None, partial: bool = False) -> None:
    """Reads a checkpoint into the tensors of `state_dict`, and replaces its other values.

    The checkpoint may be of any number of ranks, or of one process. Names, types and shapes must be those of `state_dict`; with
    `partial` the checkpoint may have more. CheckpointError, before anything is changed and on all ranks, if it is damaged or does
    not fit. The optimizer's state must exist: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` makes it.
    """
    load_opened(state_dict, *opened(folder, process_group), process_group, partial)


def opened(folder: Path | str, process_group: Group = None) -> tuple[Path, Manifest, Index]:
    """A checkpoint all of whose files are whole. Each file is read and hashed by one of the ranks."""
    folder = Path(folder).absolute()
    rank, world = rank_and_world(process_group)

    def look() -> tuple[Manifest, str]:
        listing = manifest.read(folder)
        return listing, hashlib.sha256(listing.signed()).hexdigest()

    found = together(look, process_group, compare=lambda found: found[1], what=f"{folder}: the checkpoint")

    def check() -> Index:
        own = _share(found[0], rank, world)
        for name in own:
            indexes.verified(folder, name, found[0])
        index = indexes.read(folder, found[0])
        chunks = dict(indexes.by_file(index.tensors))
        for name in own:
            indexes.refuse_other_chunks(folder / name, chunks.get(name, ()))
        return index

    return folder, found[0], together(check, process_group)


def load_opened(
    state_dict: dict[str, Any], folder: Path, listing: Manifest, index: Index, process_group: Group, partial: bool
) -> None:
    """`load` of a checkpoint that has been verified."""

    foreign = set() if partial else _of_nobody(state_dict, index, process_group)

    def fit() -> tuple[state_tree.Flat, dict[str, Any]]:
        flat = state_tree.flatten(state_dict)
        _refuse_unfit(flat, index, folder, foreign)
        return flat, {name: state_tree.decode(index.values[name]) for name in flat.values}

    flat, values = together(fit, process_group)
    with one_sentence(process_group):
        planned_load(
            dict(flat.tensors),
            storage_reader=ShardReader(folder, listing, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=process_group,
        )
    state_tree.fill(state_dict, values)


def read(folder: Path | str, only: str = "") -> dict[str, Any]:
    """The whole state, with ordinary tensors on the CPU; with `only` the part below that outermost key. Needs no process group.

    Every file that it needs is hashed as it is read. Peak memory beside the tensors: one file.
    """
    folder = Path(folder).absolute()
    listing, index = _index_of(folder)
    index = index.part(lambda key: only in ("", key))
    room: dict[int, Tensor] = {}  # names that are stored as one tensor come back as one
    whole = {
        name: room.setdefault(id(stored.chunks), torch.empty(stored.shape, dtype=stored.dtype))
        for name, stored in index.tensors.items()
    }
    for file, wanted in indexes.by_file(index.tensors):
        shard = indexes.shard(folder, file, listing)
        for name, stored, chunk in wanted:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[name][box].copy_(indexes.piece(shard, stored, chunk, folder / file))
    return index.tree(whole, folder)


def verify(folder: Path | str) -> None:
    """CheckpointError unless every byte of the checkpoint is the one that was written, and its shards hold what its index says."""
    folder = Path(folder).absolute()
    listing, index = _index_of(folder)
    chunks = dict(indexes.by_file(index.tensors))
    for file in listing.files.keys() - chunks:
        indexes.verified(folder, file, listing)
    for file, wanted in chunks.items():
        shard = indexes.shard(folder, file, listing)
        for _, stored, chunk in wanted:
            indexes.piece(shard, stored, chunk, folder / file)


def _index_of(folder: Path) -> tuple[Manifest, Index]:
    """The headers of one process's files are read for it, so these are verified first."""
    listing = manifest.read(folder)
    if not listing.save:
        manifest.verify(folder)
    return listing, indexes.read(folder, listing)


def _refuse_other_folder(folder: Path) -> None:
    """What is replaced is a checkpoint, or a place that is free."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"{folder}: is not a folder. Choose another one for the checkpoint.")
    if folder.is_dir() and not (folder / NAME).exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: holds files that are no checkpoint. Choose another folder, or empty it.")


def _of_nobody(state_dict: dict[str, Any], index: Index, process_group: Group) -> set[str]:
    """What no rank reads of a checkpoint: an entry may be one rank's own."""
    unread = together(lambda: set(index.paths) - set(state_tree.flatten(state_dict).paths), process_group)
    told: list[Any] = [unread]
    if (world := rank_and_world(process_group)[1]) > 1:
        told = [None] * world
        dist.all_gather_object(told, unread, group=process_group)
    return set.intersection(*told)


def _refuse_unfit(flat: state_tree.Flat, index: Index, folder: Path, foreign: set[str]) -> None:
    """Another model, recipe or optimizer; nothing is converted or filled in silently."""
    clauses = [f"it has no {name}" for name in flat.paths if name not in index.paths]
    clauses += [f"{name} is not part of this state" for name in index.paths if name in foreign]
    for name, tensor in flat.tensors.items():
        stored = index.tensors.get(name)
        if stored is not None:
            there, here = (f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in (
                (stored.dtype, stored.shape), (tensor.dtype, tensor.shape)))  # fmt: skip
            if there != here:
                clauses.append(f"{name} is {there}, here {here}")
            elif tensor.is_meta:
                clauses.append(f"{name} is a meta tensor here, without memory")
        elif name in index.values:
            clauses.append(f"{name} is a value, here a tensor")
    clauses += [f"{name} is a tensor, here a value" for name in flat.values if name in index.tensors]
    if clauses:
        more = f"; and {len(clauses) - SHOWN} more" if len(clauses) > SHOWN else ""
        raise CheckpointError(
            f"{folder}: a checkpoint of another state: {'; '.join(clauses[:SHOWN])}{more}. Load it into the model, recipe and "
            "optimizer that wrote it, with the optimizer's state made first."
        )


def _share(listing: Manifest, rank: int, world: int) -> list[str]:
    """The files that this rank verifies: the largest first, each to the rank with the fewest bytes so far."""
    loads, shares = [0] * world, [[] for _ in range(world)]  # type: ignore[var-annotated]
    for name in sorted(listing.files, key=lambda name: (-listing.files[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += listing.files[name]["bytes"]
        shares[least].append(name)
    return shares[rank]
