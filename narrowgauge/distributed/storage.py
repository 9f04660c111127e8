"""Atomic, verified checkpoints of several ranks, readable on any number of ranks.

    save(state, folder)  called by all ranks; the checkpoint is durable when it returns on any rank
    load(state, folder)  into tensors sharded as they are now, on the current number of ranks
    read(folder)         full tensors on the CPU, in one process without a process group
    verify(folder)       raise CheckpointError unless every byte is as written

A state is a nested dict. DTensors are stored as the shards that ranks hold (shards.py) and
resharded by torch's planners. Plain tensors must be identical on all ranks and are stored once.
Other values are stored as JSON (state_tree.py). Ranks may lack entries that others have, as
pipeline stages do.

If any rank fails (full disk, differing tensor, damaged file), all ranks raise the same error, which
names that rank. If a rank dies, the others raise after the process group's timeout.

`load` first verifies all files, divided among the ranks, and changes nothing unless all are intact.
Each rank hashes again the files that it then reads. The cost is two reads of the checkpoint, mostly
from the page cache.

Not supported: asynchronous saves; storing tied weights once (each name is stored).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as planned_load
from torch.distributed.checkpoint.state_dict_saver import save as planned_save

from narrowgauge import manifest
from narrowgauge.distributed import index as indexes
from narrowgauge.distributed import state_tree
from narrowgauge.distributed.all_ranks import (
    Group,
    first_rank_error,
    rank_and_world,
    run_on_all_ranks,
)
from narrowgauge.distributed.replicas import CheckedSavePlanner
from narrowgauge.distributed.shards import ShardReader, ShardWriter
from narrowgauge.errors import CheckpointError, NarrowgaugeError
from narrowgauge.manifest import NAME, STEP, Manifest

if TYPE_CHECKING:
    from narrowgauge.distributed.index import Index

# Number of mismatched entries that an error message lists.
SHOWN = 3


def save(state_dict: dict[str, Any], folder: Path | str, process_group: Group = None) -> Path:
    """Write the state of all ranks as one checkpoint and return its absolute path.

    state_dict     nested dict of tensors and values
    folder         path on a file system that all ranks share; a name such as step-00000100 sets the
                   step stored in the manifest
    process_group  of all saving ranks; None: the default group

    An older checkpoint at the path is replaced once the new one is durable.

    StorageError if the file system refuses on any rank; CheckpointError for entries that cannot be
    stored, or that must not differ between ranks but do. Errors are raised on all ranks, nothing is
    left behind, and older checkpoints stay untouched.
    """
    folder = Path(folder).absolute()

    def prepare() -> ShardWriter:
        _require_checkpoint_folder(folder)
        step = int(folder.name[5:]) if STEP.fullmatch(folder.name) else 0
        return ShardWriter(folder, state_tree.flatten(state_dict), step)

    # A relative path may resolve to another folder on another rank.
    writer = run_on_all_ranks(
        prepare, process_group, compare=lambda writer: str(writer.folder), what="save: the folder"
    )
    try:
        with first_rank_error(process_group):
            planned_save(
                dict(writer.flat.tensors),
                storage_writer=writer,
                planner=CheckedSavePlanner(),
                process_group=process_group,
            )
    except BaseException as error:
        _, world = rank_and_world(process_group)
        # Any other error means that a rank is gone, and a third rank may still be writing: keep the
        # draft.
        if world == 1 or isinstance(error, NarrowgaugeError | KeyboardInterrupt):
            writer.discard()
        raise
    return folder


def load(
    state_dict: dict[str, Any],
    folder: Path | str,
    process_group: Group = None,
    partial: bool = False,
) -> None:
    """Load a checkpoint into the tensors of `state_dict` and replace its other values.

    The checkpoint may come from any number of ranks, or from one process. Names, dtypes and shapes
    must match `state_dict`; with `partial` the checkpoint may have more entries. The optimizer's
    state must exist, as created by
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

    CheckpointError on all ranks, before any change, if the checkpoint is damaged or does not fit.
    """
    load_opened(state_dict, *opened(folder, process_group), process_group, partial)


def opened(folder: Path | str, process_group: Group = None) -> tuple[Path, Manifest, Index]:
    """Verify a checkpoint and return (absolute path, manifest, index).

    Each file is read and hashed by a single rank.
    """
    folder = Path(folder).absolute()
    rank, world = rank_and_world(process_group)

    def look() -> tuple[Manifest, str]:
        listing = manifest.read(folder)
        return listing, hashlib.sha256(listing.signed()).hexdigest()

    # Ranks must see the same manifest; without a shared file system they may not.
    found = run_on_all_ranks(
        look, process_group, compare=lambda found: found[1], what=f"{folder}: the checkpoint"
    )

    def check() -> Index:
        own = _files_of_rank(found[0], rank, world)
        for name in own:
            indexes.verified(folder, name, found[0])
        index = indexes.read(folder, found[0])
        chunks = dict(indexes.by_file(index.tensors))
        for name in own:
            indexes.check_header(folder / name, chunks.get(name, ()))
        return index

    return folder, found[0], run_on_all_ranks(check, process_group)


def load_opened(
    state_dict: dict[str, Any],
    folder: Path,
    listing: Manifest,
    index: Index,
    process_group: Group,
    partial: bool,
) -> None:
    """Load a checkpoint that `opened` has verified; arguments as in `load`."""

    # A collective, so it must not run inside `fit`, which may raise on one rank.
    foreign = set() if partial else _entries_read_by_no_rank(state_dict, index, process_group)

    def fit() -> tuple[state_tree.Flat, dict[str, Any]]:
        flat = state_tree.flatten(state_dict)
        _require_matching_state(flat, index, folder, foreign)
        return flat, {name: state_tree.decode(index.values[name]) for name in flat.values}

    flat, values = run_on_all_ranks(fit, process_group)
    with first_rank_error(process_group):
        planned_load(
            dict(flat.tensors),
            storage_reader=ShardReader(folder, listing, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=process_group,
        )
    # Last: values change only after all tensors were loaded.
    state_tree.fill(state_dict, values)


def read(folder: Path | str, only: str = "") -> dict[str, Any]:
    """Return the full state, with plain tensors on the CPU; needs no process group.

    only  return the part below this outermost key; "": everything

    Every file is hashed as it is read. Peak memory besides the tensors: one file.
    """
    folder = Path(folder).absolute()
    listing, index = _index_of(folder)
    index = index.part(lambda key: only in ("", key))
    # Tied names share one list of chunks, so they are read into one tensor.
    by_chunks: dict[int, Tensor] = {}
    tensors = {
        name: by_chunks.setdefault(id(stored.chunks), torch.empty(stored.shape, dtype=stored.dtype))
        for name, stored in index.tensors.items()
    }
    for file, chunks_of_file in indexes.by_file(index.tensors):
        shard = indexes.shard(folder, file, listing)
        for name, stored, chunk in chunks_of_file:
            box = tuple(
                slice(start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            tensors[name][box].copy_(indexes.read_chunk(shard, stored, chunk, folder / file))
    return index.tree(tensors, folder)


def verify(folder: Path | str) -> None:
    """Raise CheckpointError unless every file is intact and its contents match the index."""
    folder = Path(folder).absolute()
    listing, index = _index_of(folder)
    chunks = dict(indexes.by_file(index.tensors))
    # Files without chunks, such as index.json.
    for file in listing.files.keys() - chunks:
        indexes.verified(folder, file, listing)
    for file, chunks_of_file in chunks.items():
        shard = indexes.shard(folder, file, listing)
        for _, stored, chunk in chunks_of_file:
            indexes.read_chunk(shard, stored, chunk, folder / file)


def _index_of(folder: Path) -> tuple[Manifest, Index]:
    """Return manifest and index.

    Files of a single-process checkpoint are verified first: the index is built from their headers.
    """
    listing = manifest.read(folder)
    if not listing.save:
        manifest.verify(folder)
    return listing, indexes.read(folder, listing)


def _require_checkpoint_folder(folder: Path) -> None:
    """Raise CheckpointError unless the folder is absent, empty or a checkpoint."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(
            f"{folder}: is not a folder. Choose another one for the checkpoint.",
            code="checkpoint.not-a-folder",
        )
    if folder.is_dir() and not (folder / NAME).exists() and any(folder.iterdir()):
        raise CheckpointError(
            f"{folder}: holds files that are no checkpoint. Choose another folder, or empty it.",
            code="checkpoint.other-files",
        )


def _entries_read_by_no_rank(
    state_dict: dict[str, Any], index: Index, process_group: Group
) -> set[str]:
    """Return the checkpoint's entries that no rank reads.

    An entry may belong to one rank alone, so all ranks must lack it before it counts as foreign.
    """
    unread = run_on_all_ranks(
        lambda: set(index.paths) - set(state_tree.flatten(state_dict).paths), process_group
    )
    unread_by_rank: list[Any] = [unread]
    if (world := rank_and_world(process_group)[1]) > 1:
        unread_by_rank = [None] * world
        dist.all_gather_object(unread_by_rank, unread, group=process_group)
    return set.intersection(*unread_by_rank)


def _require_matching_state(
    flat: state_tree.Flat, index: Index, folder: Path, foreign: set[str]
) -> None:
    """Raise CheckpointError for a checkpoint of another model, recipe or optimizer.

    Nothing is converted or filled in silently.
    """
    clauses = [f"it has no {name}" for name in flat.paths if name not in index.paths]
    clauses += [f"{name} is not part of this state" for name in index.paths if name in foreign]
    for name, tensor in flat.tensors.items():
        stored = index.tensors.get(name)
        if stored is not None:
            stored_form, own_form = (f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in (
                (stored.dtype, stored.shape), (tensor.dtype, tensor.shape)))  # fmt: skip
            if stored_form != own_form:
                clauses.append(f"{name} is {stored_form}, here {own_form}")
            elif tensor.is_meta:
                clauses.append(f"{name} is a meta tensor here, without memory")
        elif name in index.values:
            clauses.append(f"{name} is a value, here a tensor")
    clauses += [
        f"{name} is a tensor, here a value" for name in flat.values if name in index.tensors
    ]
    if clauses:
        more = f"; and {len(clauses) - SHOWN} more" if len(clauses) > SHOWN else ""
        raise CheckpointError(
            f"{folder}: a checkpoint of another state: {'; '.join(clauses[:SHOWN])}{more}. Load it into the model, recipe and "
            "optimizer that wrote it, with the optimizer's state made first.",
            code="checkpoint.other-state",
        )


def _files_of_rank(listing: Manifest, rank: int, world: int) -> list[str]:
    """Return the files that this rank verifies.

    Greedy: the largest file first, each to the rank with the fewest bytes so far.
    """
    loads, shares = [0] * world, [[] for _ in range(world)]  # type: ignore[var-annotated]
    # Ties are broken by name: every rank must compute the same shares.
    for name in sorted(listing.files, key=lambda name: (-listing.files[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += listing.files[name]["bytes"]
        shares[least].append(name)
    return shares[rank]
