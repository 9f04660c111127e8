"""What a checkpoint of several ranks holds and where: the file index.json, and the same of a checkpoint of one process.

    {"tensors": {name: {"path": [...], "dtype": "float8_e4m3fn", "shape": [64, 32], "chunks": [[[0, 0], [32, 32], FILE], ...]}},
     "values":  {name: {"path": [...], "value": ...}}}

A chunk is (offsets, sizes, file): a box of the whole tensor, stored in that file under the key "NAME@0,0" of its offsets. Types that
safetensors lacks are stored as bytes (uint8). Paths and values are those of `state_tree`. The chunks of a tensor fill it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from narrowgauge import manifest
from narrowgauge.distributed import state_tree
from narrowgauge.errors import CheckpointError
from narrowgauge.manifest import DTYPES, FACTS, INDEX, Manifest
from narrowgauge.storage import reading

# Of one byte, and not held by safetensors.
AS_BYTES = frozenset(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name))
STORABLE = {name: getattr(torch, name) for name in DTYPES} | {
    str(each).removeprefix("torch."): each for each in AS_BYTES
}
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SafetensorError)

METADATA = "__metadata__"  # of a safetensors header: text by key
MOST_CUT_AXES = 8  # of one tensor; a mesh of tp and fsdp cuts two
HEADER_BYTES = 100_000_000  # safetensors' own limit

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
            return _parse(reading.strict_json(manifest.read_file(folder, INDEX, listing)), listing)
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
    if not _is_filled_once(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"the chunks of {name!r} do not fill it, or overlap")
    return Stored(list(entry["path"]), STORABLE[entry["dtype"]], shape, chunks)


def _is_filled_once(shape: Box, boxes: Sequence[tuple[Box, Box]]) -> bool:
    """Whether boxes (offsets, sizes) inside `shape` hold each of its elements exactly once.

    Compares mixed differences: that of a box's indicator function is (-1)^(number of far ends) at each of its corners. They add up to
    the corners of the whole if and only if the indicator functions add up to 1 everywhere. Cost: boxes x 2^(axes that are cut).
    """
    filled = [box for box in boxes if math.prod(box[1])]
    if not math.prod(shape):
        return not filled
    whole = ((0,) * len(shape), shape)
    cut = [axis for axis, length in enumerate(shape) if any(sizes[axis] != length for _, sizes in filled)]
    if len(cut) > MOST_CUT_AXES:
        raise ValueError(f"its chunks cut {len(cut)} axes, and at most {MOST_CUT_AXES} are read")
    sums: Counter[Box] = Counter()
    for (offsets, sizes), sign in (*((box, 1) for box in filled), (whole, -1)):
        for far in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[axis] + end * sizes[axis] for axis, end in zip(cut, far, strict=True))
            sums[corner] += -sign if sum(far) % 2 else sign
    return not any(sums.values())


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
            for key, entry in _header(folder / file).items():
                if key != METADATA:
                    shape = _box(entry["shape"])
                    chunk = Chunk((0,) * len(shape), shape, file, key)
                    tensors[f"{group}.{key}"] = Stored([group, key], _header_dtypes()[entry["dtype"]], shape, [chunk])
    for group, ties in listing.ties.items():
        for name, first in ties.items():
            tied = tensors[f"{group}.{first}"]
            tensors[f"{group}.{name}"] = Stored([group, name], tied.dtype, tied.shape, tied.chunks)
    facts = reading.strict_json(manifest.read_file(folder, FACTS, listing))
    flat = state_tree.flatten({"facts": facts})
    return Index(tensors, flat.values, {name: stored.path for name, stored in tensors.items()} | flat.paths)


def refuse_other_chunks(path: Path, chunks: Sequence[tuple[str, Stored, Chunk]]) -> None:
    """CheckpointError unless the header of a file has the chunks that the index expects there, in type and shape."""
    try:
        header = _header(path) if chunks else {}
        for _, stored, chunk in chunks:
            entry = header.get(chunk.key)
            found = None if entry is None else (_header_dtypes()[entry["dtype"]], _box(entry["shape"]))
            _refuse_other_form(path, stored, chunk, found)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path}: has the right hash, but not the right contents: {error}. Restore the checkpoint."
        ) from error


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
        told = _header(path).get(METADATA) or {}
        save, step = told.get("save", listing.save), told.get("step")
    except (CheckpointError, *UNREADABLE):
        return ""
    if not listing.save or save == listing.save:
        return ""
    return f" It belongs to another checkpoint, of step {step}."


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: its length in 8 bytes, little-endian, then the text. Reads nothing else."""
    with reading.opened(path, manifest.PART) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(HEADER_BYTES, os.fstat(file.fileno()).st_size):
            raise ValueError(f"its header would have {length} bytes")
        header = reading.strict_json(file.read(length))
    if not isinstance(header, dict):
        raise TypeError("its header is no JSON object")
    return header


@cache
def _header_dtypes() -> dict[str, torch.dtype]:
    """safetensors' names of types, as it writes them itself."""
    found: dict[str, torch.dtype] = {}
    for name in DTYPES:
        data = safetensors.torch.save({"t": torch.empty(0, dtype=getattr(torch, name))})
        found[json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["t"]["dtype"]] = getattr(torch, name)
    return found


def piece(shards: Mapping[str, Tensor], stored: Stored, chunk: Chunk, path: Path) -> Tensor:
    """A chunk, from the tensors of its file."""
    found = shards.get(chunk.key)
    _refuse_other_form(path, stored, chunk, None if found is None else (found.dtype, tuple(found.shape)))
    return shards[chunk.key].view(stored.dtype)


def _refuse_other_form(path: Path, stored: Stored, chunk: Chunk, found: tuple[torch.dtype, Box] | None) -> None:
    """CheckpointError unless a chunk was found in its file with this type and shape."""
    expected = torch.uint8 if stored.dtype in AS_BYTES else stored.dtype
    if found != (expected, chunk.sizes):
        form = "nothing" if found is None else f"{found[0]} {list(found[1])}"
        raise CheckpointError(
            f"{path}: has {form} under {chunk.key!r}, not {expected} {list(chunk.sizes)} as the index says. Restore the checkpoint."
        )


def by_file(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, list[tuple[str, Stored, Chunk]]]]:
    """The chunks that each file holds, with name and tensor."""
    files: dict[str, list[tuple[str, Stored, Chunk]]] = {}
    for name, stored in tensors.items():
        for chunk in stored.chunks:
            files.setdefault(chunk.file, []).append((name, stored, chunk))
    yield from files.items()
