"""The index of a checkpoint of several ranks: chunks that fill a tensor exactly once, and nothing else (exact, over random chunkings)."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from narrowgauge import manifest
from narrowgauge.distributed import index as indexes
from narrowgauge.distributed import storage
from narrowgauge.errors import CheckpointError
from tests.raising import raises

SAVE = "0" * 32
FILE = "rank-00000-0.safetensors"
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def random_tiling(dice: random.Random, shape: list[int]) -> list[tuple[list[int], list[int]]]:
    """Boxes (offsets, sizes) that tile `shape`, by repeated cuts of random boxes along random axes."""
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(dice.randrange(8)):
        offsets, sizes = boxes.pop(dice.randrange(len(boxes)))
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if not axes:
            boxes.append((offsets, sizes))
            continue
        axis = dice.choice(axes)
        at = dice.randrange(1, sizes[axis])
        low, high, behind = list(sizes), list(sizes), list(offsets)
        low[axis], high[axis], behind[axis] = at, sizes[axis] - at, offsets[axis] + at
        boxes += [(offsets, low), (behind, high)]
    dice.shuffle(boxes)
    return boxes


def change(dice: random.Random, boxes: list[tuple[list[int], list[int]]]) -> None:
    """One random change of a random box: moved, resized, dropped, doubled, swapped with another shape."""
    place = dice.randrange(len(boxes))
    offsets, sizes = (list(each) for each in boxes[place])
    kind = dice.randrange(4)
    if kind == 0:
        boxes.pop(place)
    elif kind == 1:
        boxes.append(boxes[place])
    elif sizes:
        part = offsets if kind == 2 else sizes
        part[dice.randrange(len(part))] += dice.choice((-2, -1, 1, 2))
        boxes[place] = (offsets, sizes)


def fills_once(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> bool:
    """The definition: counts how often each element is written."""
    count = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        if min([0, *offsets, *sizes]) < 0 or any(
            a + b > c for a, b, c in zip(offsets, sizes, shape, strict=True)
        ):
            return False
        count[tuple(slice(a, a + b) for a, b in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


def written(folder: Path, whole: torch.Tensor, boxes: list[tuple[list[int], list[int]]]) -> None:
    """A checkpoint with these chunks and right hashes. A chunk outside of the tensor holds zeros."""
    folder.mkdir()
    chunks = {}
    for offsets, sizes in boxes:
        part = torch.zeros([max(0, size) for size in sizes], dtype=whole.dtype)
        inside = whole[
            tuple(slice(max(0, a), max(0, a + b)) for a, b in zip(offsets, sizes, strict=True))
        ]
        chunks[f"w@{','.join(map(str, offsets))}"] = (
            inside.clone() if inside.shape == part.shape else part
        )
    data = safetensors.torch.save(chunks, metadata={"save": SAVE, "step": "1"})
    entry = {
        "path": ["w"],
        "dtype": str(whole.dtype).removeprefix("torch."),
        "shape": list(whole.shape),
        "chunks": [[offsets, sizes, FILE] for offsets, sizes in boxes],
    }
    index = json.dumps({"tensors": {"w": entry}, "values": {}}).encode()
    sign(folder, {FILE: data, "index.json": index})


def sign(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    listed = {name: manifest.listed((folder / name).read_bytes()) for name in (FILE, "index.json")}
    (folder / "manifest.json").write_bytes(manifest.Manifest(1, [], {}, listed, SAVE).signed())


@pytest.mark.slow
def test_random_chunkings_are_read_whole_or_refused(tmp_path: Path) -> None:
    """500 chunkings of up to four axes, most of them with gaps, overlaps, negative or zero sizes, or chunks outside."""
    dice = random.Random(0)
    counts = {True: 0, False: 0}
    for number in range(500):
        shape = [
            dice.choice((0, 1, 2, 3, 5, 8)) if dice.random() < 0.9 else 1
            for _ in range(dice.randrange(5))
        ]
        whole = torch.arange(1, 1 + math.prod(shape)).reshape(shape).to(dice.choice(DTYPES))
        boxes = random_tiling(dice, shape)
        for _ in range(dice.choice((0, 1, 1, 2, 2))):
            if boxes:
                change(dice, boxes)
        folder = tmp_path / str(number)
        written(folder, whole, boxes)
        room = {"w": torch.zeros_like(whole)}
        is_whole = fills_once(shape, boxes)
        has_own_keys = len({tuple(offsets) for offsets, _ in boxes}) == len(
            boxes
        )  # an empty chunk may take another's
        if math.prod(shape) and is_whole and has_own_keys:
            found = storage.read(folder)["w"]
            storage.load(room, folder)
            assert torch.equal(found.float(), whole.float()) and torch.equal(
                room["w"].float(), whole.float()
            )
            storage.verify(folder)
        else:
            for read in (
                storage.read,
                storage.verify,
                lambda path, room=room: storage.load(room, path),
            ):
                try:
                    read(folder)
                    assert is_whole, (shape, boxes)
                except CheckpointError as error:
                    assert error.code.startswith("checkpoint."), error
            assert is_whole or not room["w"].float().any()
        counts[is_whole] += 1
    assert min(counts.values()) > 100, counts


def test_an_overlap_that_hides_a_gap_is_refused(tmp_path: Path) -> None:
    """Rows 0-1 twice by different offsets, row 3 never: the number of elements is right."""
    written(tmp_path / "c", torch.ones(4, 2), [([0, 0], [2, 2]), ([1, 0], [2, 2])])
    with raises(
        CheckpointError, "checkpoint.contents", "the chunks of 'w' do not fill it, or overlap"
    ):
        storage.read(tmp_path / "c")


@pytest.mark.slow
def test_many_chunks_of_an_irregular_grid_are_checked_in_linear_time() -> None:
    """2,048 x 16 chunks: a check of all pairs would take 5e8 comparisons."""
    boxes = [((row, column), (1, 1)) for row, column in itertools.product(range(2048), range(16))]
    assert indexes._covers_once((2048, 16), boxes)
    boxes[-1] = boxes[0]
    assert not indexes._covers_once((2048, 16), boxes)


def test_chunks_that_cut_many_axes_are_refused_at_once() -> None:
    boxes = [((0,) * 40, (1,) * 40), ((1,) * 40, (1,) * 40)]
    with pytest.raises(ValueError, match="cut 40 axes"):
        indexes._covers_once((2,) * 40, boxes)


@pytest.mark.parametrize("how", ["type", "shape", "missing"])
def test_a_shard_with_other_chunks_changes_nothing(tmp_path: Path, how: str) -> None:
    """The index and the hashes are right, and the second of two tensors is another one: the first must not be loaded either."""
    folder = tmp_path / "c"
    written(folder, torch.ones(4), [([0], [4])])
    index: dict[str, Any] = json.loads((folder / "index.json").read_bytes())
    index["tensors"]["x"] = {**index["tensors"]["w"], "path": ["x"]}
    other = {
        "type": {"x@0": torch.ones(4, dtype=torch.int32)},
        "shape": {"x@0": torch.ones(2, 2)},
        "missing": {},
    }[how]
    data = safetensors.torch.save(
        {"w@0": torch.ones(4), **other, "pad": torch.ones(8)}, metadata={"save": SAVE}
    )
    sign(folder, {FILE: data, "index.json": json.dumps(index).encode()})
    state = {"w": torch.zeros(4), "x": torch.zeros(4)}
    with raises(CheckpointError, "checkpoint.chunk-form"):
        storage.load(state, folder)
    assert not state["w"].any()
