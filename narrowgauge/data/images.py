"""Images with class labels as cached arrays, and their randomly cropped and flipped batches.

    sizes = Preprocessing.plain(224, 3)
    classes = Classification(classes=("cat", "dog"))
    images = prepare_images("photos", classes, "image", sizes, cache="cache")
    images[0]            {"pixels": uint8 [height, width, channels], "labels": 0}
    batch = ImageBatches(images, padding=4, flip=True, seed=0)([3, 1, 4], epoch=2)

Each image is decoded and resized once, before the first step, so a corrupt file is found at once.
The cache entry is memory-mapped and takes height x width x channels bytes per image: 147 KiB at 224
x 224. Reading it takes a fortieth of the time of decoding a photo.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowgauge.data.batches import Batch, Indices
from narrowgauge.data.cache import Append, Entry, Values, cached, key_of
from narrowgauge.data.image_files import Picture, decoded, pictures
from narrowgauge.data.image_sizes import Preprocessing
from narrowgauge.data.tasks import Classification
from narrowgauge.data.text import shown
from narrowgauge.errors import DataError, StorageError

FORMAT = 1  # version of the arrays' layout; part of the key
ARRAYS: dict[str, np.dtype[Any]] = {"pixels": np.dtype("u1"), "labels": np.dtype("<i4")}
TRANSPARENT = "{count} pictures are transparent in parts; what lies below is shown."
SAID_EVERY_S = 20.0
Say = Callable[[str], None]


class Images:
    """Images of one size with class labels; memory-mapped.

    entry          cache entry
    preprocessing  sizes and normalization
    summary        facts about the whole data set
    rows           row numbers in the whole data set
    """

    def __init__(self, entry: Entry, preprocessing: Preprocessing, summary: dict[str, Any]):
        self.entry, self.preprocessing, self.summary = entry, preprocessing, summary
        self.rows: Indices = np.arange(len(entry.arrays["labels"]))

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: Indices) -> Images:
        """A subset in the given order, with the summary of the whole."""
        part = copy(self)
        part.rows = self.rows[places]
        return part

    def pixels(self, place: int) -> Values:
        """Pixels of an image, uint8 [height, width, channels]; a view of the file."""
        size, row = self.preprocessing, int(self.rows[place])
        flat = self.entry.arrays["pixels"][row * size.nbytes : (row + 1) * size.nbytes]
        return flat.reshape(size.height, size.width, size.channels)

    @property
    def labels(self) -> Indices:
        """Class ids, int64."""
        return self.entry.arrays["labels"][self.rows].astype(np.int64)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {
            "pixels": self.pixels(place),
            "labels": int(self.entry.arrays["labels"][self.rows[place]]),
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(len(self)))


def prepare_images(
    source: str | os.PathLike[str],
    columns: Classification,
    image: str,
    preprocessing: Preprocessing,
    *,
    cache: str | os.PathLike[str],
    header: Sequence[str] | None = None,
    say: Say = lambda words: None,
) -> Images:
    """Decodes the images of a folder or table (`image_files`) once and caches them.

    columns        the classes, and the table's label column
    image          column with images
    preprocessing  size of the decoded images
    cache          folder of the cache
    say            called with the progress every 20 seconds

    Reads all files once for the key, and again if they are not cached. Memory: one image. Raises
    DataError for faulty data (with path or row), and StorageError if the cache cannot be written or
    the disk is too small.
    """
    name = shown(source)
    # Hash of file contents and classes in order: a renamed file does not change the key, a moved
    # one to another class does.
    digest, count = hashlib.sha256(), 0
    for picture in pictures(source, image, columns.label, header=header):
        digest.update(
            b"%d:" % columns.class_of(picture.row) + hashlib.sha256(picture.raw()).digest()
        )
        count += 1
    if not count:
        raise DataError(
            f"{name}: holds no picture. Pass a folder with a folder of pictures for each class, or a table.",
            code="image.none",
        )
    content = digest.hexdigest()
    # Pillow's version is part of the key: its filters may change between releases.
    import PIL

    facts = {
        "images": FORMAT,
        "content": content,
        "sizes": preprocessing.facts(),
        "pillow": PIL.__version__,
    }
    path = Path(cache) / f"images-{key_of({**facts, 'task': asdict(columns)})}"
    if not path.exists():
        _refuse_full(path.parent, count * preprocessing.nbytes, count, preprocessing)

    def fill(append: Append) -> dict[str, Any]:
        again, notes = hashlib.sha256(), Counter[str]()
        for picture in _told(
            pictures(source, image, columns.label, header=header), count, name, say
        ):
            raw, label = picture.raw(), columns.class_of(picture.row)
            again.update(b"%d:" % label + hashlib.sha256(raw).digest())
            pixels, is_transparent = decoded(raw, picture.row.origin, preprocessing.channels)
            append("pixels", preprocessing.apply(pixels, picture.row.origin).reshape(-1))
            append("labels", np.array([label]))
            notes[TRANSPARENT] += is_transparent
        # A file that changed between the two readings would be cached under the wrong key.
        if again.hexdigest() != content:
            raise DataError(
                f"{name}: the pictures changed while they were read. Start again when nothing writes to them.",
                code="data.changed",
            )
        said = [note.replace("{count}", str(number)) for note, number in notes.items() if number]
        return {"source": name, "content_hash": content, "rows": count, "notes": said}

    entry, notes = cached(path, ARRAYS, fill)
    summary = {**entry.facts, "source": name, "notes": [*entry.facts["notes"], *notes]}
    return Images(entry, preprocessing, summary)


def _refuse_full(folder: Path, needed: int, count: int, size: Preprocessing) -> None:
    """Raises StorageError if the disk has too little space for the decoded images."""
    # The cache folder may not exist yet: ask for its nearest existing parent.
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise StorageError(
            f"{shown(folder)}: {count:,} pictures of {size.height} x {size.width} pixels take {needed / 2**30:.1f} GiB in the cache, "
            f"and the disk has {free / 2**30:.1f} GiB left. Free some, lower image_size, or pass another cache folder.",
            code="image.cache-space",
        )


def _told(found: Iterator[Picture], count: int, name: str, say: Say) -> Iterator[Picture]:
    """Yields the same images, and reports progress and remaining time every SAID_EVERY_S."""
    begun_s = said_s = time.monotonic()
    for done, picture in enumerate(found):
        now_s = time.monotonic()
        if now_s - said_s > SAID_EVERY_S:
            said_s, left_s = now_s, (now_s - begun_s) / done * (count - done)
            minutes, seconds = divmod(round(left_s), 60)
            say(f"{name}: {done:,} of {count:,} pictures decoded, {minutes}:{seconds:02} left")
        yield picture


# Batches


@dataclass(frozen=True)
class ImageBatches:
    """Batches of images: pixel_values [rows, channels, height, width] float32, labels [rows] int64.

    images   the images
    padding  black pixels added on each side before a random crop to the original size; 0: no crop.
             CIFAR's usual random crop has 4
    flip     flip left to right with probability 1/2
    seed     seed of crops and flips

    Random numbers are a pure function of (seed, epoch, row of the data). Neither the order of
    batches nor a resumption changes them.
    """

    images: Images
    padding: int = 0
    flip: bool = False
    seed: int = 0

    def __call__(self, places: Sequence[int], epoch: int | None = None) -> Batch:
        """Batch of these images. epoch None: without random changes."""
        images = self.images
        pixels = [
            images.pixels(place)
            if epoch is None
            else self._changed(images.pixels(place), epoch, int(images.rows[place]))
            for place in places
        ]
        labels = torch.from_numpy(
            images.entry.arrays["labels"][images.rows[list(places)]].astype(np.int64)
        )
        return {"pixel_values": images.preprocessing.values(np.stack(pixels)), "labels": labels}

    def _changed(self, pixels: Values, epoch: int, row: int) -> Values:
        """An image cropped and flipped for this epoch."""
        if not (self.padding or self.flip):
            return pixels
        drawn = hashlib.sha256(b"picture:%d:%d:%d" % (self.seed, epoch, row)).digest()
        top, left, turn = (
            int.from_bytes(drawn[first : first + 8], "little") for first in (0, 8, 16)
        )
        if self.padding:
            height, width, _ = pixels.shape
            top, left = top % (2 * self.padding + 1), left % (2 * self.padding + 1)
            around = ((self.padding, self.padding), (self.padding, self.padding), (0, 0))
            pixels = np.pad(pixels, around)[top : top + height, left : left + width]
        # Slicing views only; the stride of -1 is resolved by np.stack.
        return pixels[:, ::-1] if self.flip and turn % 2 else pixels
