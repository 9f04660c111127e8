"""Index of a checkpoint: its tensors, their chunks and its non-tensor values (file index.json).

    {"tensors": {name: {"path": [...], "dtype": "float8_e4m3fn", "shape": [64, 32],
                        "chunks": [[[0, 0], [32, 32], FILE], ...]}},
     "values":  {name: {"path": [...], "value": ...}}}

A chunk is (offsets, sizes, file): a box of the full tensor, stored in the file under the key
"NAME@0,0" (name and offsets). The chunks of a tensor cover it exactly once. Dtypes unknown to
safetensors are stored as uint8. Paths and values are encoded by `state_tree`.

Checkpoints of one process have no index.json; an equivalent Index is built from their headers.
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

# One-byte dtypes that safetensors cannot store.
AS_BYTES = frozenset(
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
)
STORABLE = {name: getattr(torch, name) for name in DTYPES} | {
    str(each).removeprefix("torch."): each for each in AS_BYTES
}
UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    SafetensorError,
)

# Key of a safetensors header for free text entries.
METADATA = "__metadata__"
# Bounds the cost of _covers_once for a malicious index; a mesh of tp and fsdp cuts two axes.
MAX_CUT_AXES = 8
# The limit that safetensors itself enforces.
HEADER_BYTES = 100_000_000

Box = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and its location: `key` is its entry in the safetensors `file`."""

    offsets: Box
    sizes: Box
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its path in the nested state, and the chunks that cover it."""

    path: state_tree.Path
    dtype: torch.dtype
    shape: Box
    chunks: list[Chunk]


@dataclass(frozen=True)
class Index:
    """Contents of a checkpoint, by name: stored tensors, encoded values, and the paths of both."""

    tensors: dict[str, StoredTensor]
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
        values = {
            name: {"path": self.paths[name], "value": value} for name, value in self.values.items()
        }
        return json.dumps({"tensors": tensors, "values": values}, allow_nan=False).encode()

    def part(self, keep: Callable[[str], bool]) -> Index:
        """Return the entries whose outermost key satisfies `keep`."""
        paths = {name: path for name, path in self.paths.items() if keep(path[0])}
        tensors = {name: stored for name, stored in self.tensors.items() if name in paths}
        return Index(
            tensors, {name: value for name, value in self.values.items() if name in paths}, paths
        )

    def tensors_alone(self) -> Index:
        return Index(self.tensors, {}, {name: self.paths[name] for name in self.tensors})

    def tree(self, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
        """Return the nested state with decoded values; CheckpointError if the index is inconsistent."""
        try:
            values = {name: state_tree.decode(value) for name, value in self.values.items()}
            return state_tree.unflatten(self.paths, {**tensors, **values})
        except UNREADABLE as error:
            raise CheckpointError(
                f"{folder}: its index makes no sense: {error}. Restore the checkpoint.",
                code="checkpoint.index",
            ) from error


def chunk_key(name: str, offsets: Box) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def storage_form(tensor: Tensor) -> Tensor:
    """Return the tensor as safetensors can store it: dtypes in AS_BYTES become uint8."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype in AS_BYTES else tensor


# Reading


def read(folder: Path, listing: Manifest) -> Index:
    """Return the index of a checkpoint, of one or several processes; its files are verified already."""
    try:
        if listing.save:
            return _parse(reading.strict_json(manifest.read_file(folder, INDEX, listing)), listing)
        return _single_process_index(folder, listing)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{folder / (INDEX if listing.save else FACTS)}: has the right hash, but not the right contents: {error}. "
            "Restore the checkpoint.",
            code="checkpoint.contents",
        ) from error


def _parse(body: Any, listing: Manifest) -> Index:
    tensors = {name: _parse_tensor(name, entry, listing) for name, entry in body["tensors"].items()}
    # Refuse an index whose chunks cannot fit into their files before allocating any tensor.
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


def _parse_tensor(name: str, entry: Any, listing: Manifest) -> StoredTensor:
    chunks = []
    shape = _box(entry["shape"])
    for offsets, sizes, file in entry["chunks"]:
        chunk = Chunk(_box(offsets), _box(sizes), file, chunk_key(name, _box(offsets)))
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if file not in listing.files or any(
            end > most for end, most in zip(ends, shape, strict=True)
        ):
            raise ValueError(f"{name!r} has a chunk outside of it, or in a file that is not listed")
        chunks.append(chunk)
    # Counting elements is not enough: chunks that overlap and leave a row empty can add up to the
    # right number.
    if not _covers_once(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"the chunks of {name!r} do not fill it, or overlap")
    return StoredTensor(list(entry["path"]), STORABLE[entry["dtype"]], shape, chunks)


def _covers_once(shape: Box, boxes: Sequence[tuple[Box, Box]]) -> bool:
    """Return True if the boxes (offsets, sizes) cover each element of `shape` exactly once.

    The mixed difference of a box's indicator function is (-1)^(number of far ends) at each of its
    corners, 0 elsewhere. The sum over all boxes equals the corners of the full box if and only if
    the indicator functions add up to 1 everywhere. Cost: boxes x 2^(number of cut axes).
    """
    filled = [box for box in boxes if math.prod(box[1])]
    if not math.prod(shape):
        return not filled
    full = ((0,) * len(shape), shape)
    cut_axes = [
        axis
        for axis, length in enumerate(shape)
        if any(sizes[axis] != length for _, sizes in filled)
    ]
    if len(cut_axes) > MAX_CUT_AXES:
        raise ValueError(
            f"its chunks cut {len(cut_axes)} axes, and at most {MAX_CUT_AXES} are read"
        )
    sums: Counter[Box] = Counter()
    for (offsets, sizes), sign in (*((box, 1) for box in filled), (full, -1)):
        for far in itertools.product((0, 1), repeat=len(cut_axes)):
            corner = tuple(
                offsets[axis] + end * sizes[axis] for axis, end in zip(cut_axes, far, strict=True)
            )
            sums[corner] += -sign if sum(far) % 2 else sign
    return not any(sums.values())


def _box(numbers: Any) -> Box:
    # `type(...) is`: JSON true and false are ints for isinstance.
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise ValueError(f"{numbers!r} is no shape")
    return tuple(numbers)


def _single_process_index(folder: Path, listing: Manifest) -> Index:
    """Build the Index of a single-process checkpoint.

    Each tensor is one chunk. The outermost keys of the state are the file groups and "facts".
    """
    tensors: dict[str, StoredTensor] = {}
    for file in listing.files:
        if file != FACTS:
            # Files of one process are named GROUP-NUMBER.safetensors.
            group = file.rpartition("-")[0]
            for key, entry in _header(folder / file).items():
                if key != METADATA:
                    shape = _box(entry["shape"])
                    chunk = Chunk((0,) * len(shape), shape, file, key)
                    tensors[f"{group}.{key}"] = StoredTensor(
                        [group, key], _header_dtypes()[entry["dtype"]], shape, [chunk]
                    )
    for group, ties in listing.ties.items():
        for name, first in ties.items():
            # Tied names share the list of chunks; `storage.read` restores the tie by its identity.
            tied = tensors[f"{group}.{first}"]
            tensors[f"{group}.{name}"] = StoredTensor(
                [group, name], tied.dtype, tied.shape, tied.chunks
            )
    facts = reading.strict_json(manifest.read_file(folder, FACTS, listing))
    flat = state_tree.flatten({"facts": facts})
    return Index(
        tensors, flat.values, {name: stored.path for name, stored in tensors.items()} | flat.paths
    )


def check_header(path: Path, chunks: Sequence[tuple[str, StoredTensor, Chunk]]) -> None:
    """Raise CheckpointError if a file's header lacks a chunk or has it with another dtype or shape."""
    try:
        header = _header(path) if chunks else {}
        for _, stored, chunk in chunks:
            entry = header.get(chunk.key)
            found = (
                None if entry is None else (_header_dtypes()[entry["dtype"]], _box(entry["shape"]))
            )
            _require_chunk(path, stored, chunk, found)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path}: has the right hash, but not the right contents: {error}. Restore the checkpoint.",
            code="checkpoint.contents",
        ) from error


def shard(folder: Path, file: str, listing: Manifest) -> dict[str, Tensor]:
    """Return the tensors of a file by key. The file is read once, hashed and parsed from memory."""
    try:
        return safetensors.torch.load(verified(folder, file, listing))
    except UNREADABLE as error:
        raise CheckpointError(
            f"{folder / file}: has the right hash, but not the right contents: {error}. Restore the checkpoint.",
            code="checkpoint.contents",
        ) from error


def verified(folder: Path, file: str, listing: Manifest) -> bytes:
    """Return a file's bytes, as `manifest.read_file`; the error names a file of another checkpoint."""
    try:
        return manifest.read_file(folder, file, listing)
    except CheckpointError as error:
        foreign = _describe_foreign(folder / file, listing)
        code = "checkpoint.foreign" if foreign else error.code
        raise CheckpointError(f"{error}{foreign}", code=code) from error


def _describe_foreign(path: Path, listing: Manifest) -> str:
    """Return a sentence if a mismatched file is an intact shard of another checkpoint, else ""."""
    try:
        metadata = _header(path).get(METADATA) or {}
        save, step = metadata.get("save", listing.save), metadata.get("step")
    except (CheckpointError, *UNREADABLE):
        return ""
    if not listing.save or save == listing.save:
        return ""
    return f" It belongs to another checkpoint, of step {step}."


def _header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a safetensors file: 8 bytes of length (little-endian), then the text.

    Reads nothing beyond the header.
    """
    with reading.opened(path, manifest.PART) as file:
        length = int.from_bytes(file.read(8), "little")
        # A damaged length must not make the reader allocate gigabytes.
        if length > min(HEADER_BYTES, os.fstat(file.fileno()).st_size):
            raise ValueError(f"its header would have {length} bytes")
        header = reading.strict_json(file.read(length))
    if not isinstance(header, dict):
        raise TypeError("its header is no JSON object")
    return header


@cache
def _header_dtypes() -> dict[str, torch.dtype]:
    """Return {safetensors' dtype name: torch dtype}, obtained by saving empty tensors."""
    found: dict[str, torch.dtype] = {}
    for name in DTYPES:
        # safetensors has its own dtype names, such as F8_E4M3: read them from a saved header.
        data = safetensors.torch.save({"t": torch.empty(0, dtype=getattr(torch, name))})
        found[json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["t"]["dtype"]] = getattr(
            torch, name
        )
    return found


def read_chunk(
    shards: Mapping[str, Tensor], stored: StoredTensor, chunk: Chunk, path: Path
) -> Tensor:
    """Return a chunk from the tensors of its file, in its dtype; CheckpointError if it does not fit."""
    found = shards.get(chunk.key)
    _require_chunk(
        path, stored, chunk, None if found is None else (found.dtype, tuple(found.shape))
    )
    return shards[chunk.key].view(stored.dtype)


def _require_chunk(
    path: Path, stored: StoredTensor, chunk: Chunk, found: tuple[torch.dtype, Box] | None
) -> None:
    """Raise CheckpointError unless `found` is the chunk's stored dtype and shape."""
    expected = torch.uint8 if stored.dtype in AS_BYTES else stored.dtype
    if found != (expected, chunk.sizes):
        form = "nothing" if found is None else f"{found[0]} {list(found[1])}"
        raise CheckpointError(
            f"{path}: has {form} under {chunk.key!r}, not {expected} {list(chunk.sizes)} as the index says. Restore the checkpoint.",
            code="checkpoint.chunk-form",
        )


def by_file(
    tensors: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, list[tuple[str, StoredTensor, Chunk]]]]:
    """Yield each file with its chunks: (file, [(tensor name, tensor, chunk)])."""
    files: dict[str, list[tuple[str, StoredTensor, Chunk]]] = {}
    for name, stored in tensors.items():
        for chunk in stored.chunks:
            files.setdefault(chunk.file, []).append((name, stored, chunk))
    yield from files.items()
