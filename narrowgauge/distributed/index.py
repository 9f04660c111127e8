"""What a checkpoint of several ranks holds and where: the file index.json, and the same of a checkpoint of one process.

    {"tensors": {name: {"path": [...], "dtype": "float8_e4m3fn", "shape": [64, 32], "chunks": [[[0, 0], [32, 32], FILE], ...]}},
     "values":  {name: {"path": [...], "value": ...}}}

A chunk is (offsets, sizes, file): a box of the whole tensor, stored in that file under the key "NAME@0,0" of its offsets. Types that
safetensors lacks are stored as bytes (uint8). Paths and values are those of `state_tree`. The chunks of a tensor fill it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from narrowgauge import manifest
from narrowgauge.distributed import state_tree
from narrowgauge.errors import CheckpointError
from narrowgauge.manifest import DTYPES, FACTS, INDEX, Manifest

# Of one byte, and not held by safetensors.
AS_BYTES = frozenset(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name))
STORABLE = {name: getattr(torch, name) for name in DTYPES} | {
    str(each).removeprefix("torch."): each for each in AS_BYTES
}
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SafetensorError)

Box = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and where it is stored."""

    offsets: Box
    sizes: Box
    file: str
    key: str


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: `path` in the state, and the chunks that fill it."""

    path: state_tree.Path
    dtype: torch.dtype
    shape: Box
    chunks: list[Chunk]


@dataclass(frozen=True)
class Index:
    """tensors, and values as they are encoded, both by name; paths of all."""

    tensors: dict[str, Stored]
    values: dict[str, Any]
    paths: dict[str, state_tree.Path]

    def json(self) -> bytes:
        tensors = {
            name: {
                "path": stored.path,
                "dtype": str(stored.dtype).removeprefix("torch."),
                "shape": stored.shape,
                "chunks": [[chunk.offsets, chunk.sizes, chunk.file] for chunk in stored.chunks],
            }
            for name, stored in self.tensors.items()
        }
        values = {name: {"path": self.paths[name], "value": value} for name, value in self.values.items()}
        return json.dumps({"tensors": tensors, "values": values}, allow_nan=False).encode()

    def part(self, keep: Callable[[str], bool]) -> Index:
        """What is below the outermost keys that `keep` takes."""
        paths = {name: path for name, path in self.paths.items() if keep(path[0])}
        tensors = {name: stored for name, stored in self.tensors.items() if name in paths}
        return Index(tensors, {name: value for name, value in self.values.items() if name in paths}, paths)

    def tensors_alone(self) -> Index:
        return Index(self.tensors, {}, {name: self.paths[name] for name in self.tensors})

    def tree(self, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
        """The nested state, with its values decoded."""
        try:
            values = {name: state_tree.decode(value) for name, value in self.values.items()}
            return state_tree.unflatten(self.paths, {**tensors, **values})
        except UNREADABLE as error:
            raise CheckpointError(f"{folder}: its index makes no sense: {error}. Restore the checkpoint.") from error


def chunk_key(name: str, offsets: Box) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def storage_form(tensor: Tensor) -> Tensor:
    """As safetensors holds it."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype in AS_BYTES else tensor


# Reading


def read(folder: Path, listing: Manifest) -> Index:
    """The index of a checkpoint whose files have been verified, of either format."""
    try:
        if listing.save:
            return _parse(json.loads(manifest.read_file(folder, INDEX, listing)), listing)
        return _of_one_process(folder, listing)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{folder / (INDEX if listing.save else FACTS)}: has the right hash, but not the right contents: {error}. "
            "Restore the checkpoint."
        ) from error


def _parse(body: Any, listing: Manifest) -> Index:
    tensors = {name: _stored(name, entry, listing) for name, entry in body["tensors"].items()}
    for file, chunks in by_file(tensors):
        if (
            sum(math.prod(chunk.sizes) * stored.dtype.itemsize for _, stored, chunk in chunks)
            > listing.files[file]["bytes"]
        ):
            raise ValueError(f"{file} is smaller than what it is to hold")
    values = {name: entry["value"] for name, entry in body["values"].items()}
    paths = {name: list(entry["path"]) for part in body.values() for name, entry in part.items()}
    if len(paths) != len(tensors) + len(values) or any(not path for path in paths.values()):
        raise ValueError("an entry stands twice, or nowhere")
    return Index(tensors, values, paths)


def _stored(name: str, entry: Any, listing: Manifest) -> Stored:
    chunks = []
    shape = _box(entry["shape"])
    for offsets, sizes, file in entry["chunks"]:
        chunk = Chunk(_box(offsets), _box(sizes), file, chunk_key(name, _box(offsets)))
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if file not in listing.files or any(end > most for end, most in zip(ends, shape, strict=True)):
            raise ValueError(f"{name!r} has a chunk outside of it, or in a file that is not listed")
        chunks.append(chunk)
    held = sum(math.prod(chunk.sizes) for chunk in chunks)
    places = {chunk.offsets for chunk in chunks if math.prod(chunk.sizes)}
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if held != math.prod(shape) or len(places) != len(filled):
        raise ValueError(f"the chunks of {name!r} do not fill it")
    return Stored(list(entry["path"]), STORABLE[entry["dtype"]], shape, chunks)


def _box(numbers: Any) -> Box:
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"{numbers!r} is no shape")
    return tuple(numbers)


def _of_one_process(folder: Path, listing: Manifest) -> Index:
    """Its tensors are chunks of their own; groups and the facts are the outermost entries of the state."""
    tensors: dict[str, Stored] = {}
    for file in listing.files:
        if file != FACTS:
            group = file.rpartition("-")[0]
            with safetensors.safe_open(folder / file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118  it is no dict
                    tensor = opened.get_tensor(key)
                    shape = tuple(tensor.shape)
                    chunk = Chunk((0,) * len(shape), shape, file, key)
                    tensors[f"{group}.{key}"] = Stored([group, key], tensor.dtype, shape, [chunk])
    for group, ties in listing.ties.items():
        for name, first in ties.items():
            tied = tensors[f"{group}.{first}"]
            tensors[f"{group}.{name}"] = Stored([group, name], tied.dtype, tied.shape, tied.chunks)
    facts = json.loads(manifest.read_file(folder, FACTS, listing))
    flat = state_tree.flatten({"facts": facts})
    return Index(tensors, flat.values, {name: stored.path for name, stored in tensors.items()} | flat.paths)


def shard(folder: Path, file: str, listing: Manifest) -> dict[str, Tensor]:
    """The tensors of a file, by key, read once: hashed, and parsed from memory."""
    try:
        return safetensors.torch.load(verified(folder, file, listing))
    except UNREADABLE as error:
        raise CheckpointError(
            f"{folder / file}: has the right hash, but not the right contents: {error}. Restore the checkpoint."
        ) from error


def verified(folder: Path, file: str, listing: Manifest) -> bytes:
    """`manifest.read_file`, which tells a shard of another checkpoint from a damaged one."""
    try:
        return manifest.read_file(folder, file, listing)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_foreign(folder / file, listing)}") from error


def _foreign(path: Path, listing: Manifest) -> str:
    """If a changed file is a whole shard of another checkpoint: a sentence that says so."""
    try:
        with safetensors.safe_open(path, "pt") as opened:
            told = opened.metadata() or {}
    except (OSError, SafetensorError):
        return ""
    if not listing.save or told.get("save", listing.save) == listing.save:
        return ""
    return f" It belongs to another checkpoint, of step {told.get('step')}."


def piece(shards: Mapping[str, Tensor], stored: Stored, chunk: Chunk, path: Path) -> Tensor:
    """A chunk, from the tensors of its file."""
    found = shards.get(chunk.key)
    expected = torch.uint8 if stored.dtype in AS_BYTES else stored.dtype
    if found is None or found.dtype != expected or tuple(found.shape) != chunk.sizes:
        form = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise CheckpointError(
            f"{path}: has {form} under {chunk.key!r}, not {expected} {list(chunk.sizes)} as the index says. Restore the checkpoint."
        )
    return found.view(stored.dtype)


def by_file(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, list[tuple[str, Stored, Chunk]]]]:
    """The chunks that each file holds, with name and tensor."""
    files: dict[str, list[tuple[str, Stored, Chunk]]] = {}
    for name, stored in tensors.items():
        for chunk in stored.chunks:
            files.setdefault(chunk.file, []).append((name, stored, chunk))
    yield from files.items()
