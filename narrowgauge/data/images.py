"""Pictures with a class as arrays, cached on disk; and their batches, cropped and flipped at random.

    images = prepare_images("photos", Classification(classes=("cat", "dog")), "image", Preprocessing.plain(224, 3), cache="cache")
    images[0]            {"pixels": uint8 [height, width, channels], "labels": 0}
    batch = ImageBatches(images, images.preprocessing, padding=4, flip=True, seed=0)([3, 1, 4], epoch=2)

Each picture is decoded and resized once, one after the other, before the first step, so a corrupt one is found there. The entry is
memory-mapped and holds height x width x channels bytes for each: 147 KiB at 224 x 224, a fortieth of the time of decoding a photo again.
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

FORMAT = 1  # of the files; part of the key
ARRAYS: dict[str, np.dtype[Any]] = {"pixels": np.dtype("u1"), "labels": np.dtype("<i4")}
TRANSPARENT = "{count} pictures are transparent in parts; what lies below is shown."
SAID_EVERY_S = 20.0
Say = Callable[[str], None]


class Images:
    """Pictures of one size with their classes; memory-mapped. `rows` are their numbers in the whole data."""

    def __init__(self, entry: Entry, preprocessing: Preprocessing, summary: dict[str, Any]):
        self.entry, self.preprocessing, self.summary = entry, preprocessing, summary
        self.rows: Indices = np.arange(len(entry.arrays["labels"]))

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: Indices) -> Images:
        """A subset in the given order. The summary stays that of all."""
        part = copy(self)
        part.rows = self.rows[places]
        return part

    def pixels(self, place: int) -> Values:
        """[height, width, channels] uint8, a view of the file."""
        size, row = self.preprocessing, int(self.rows[place])
        flat = self.entry.arrays["pixels"][row * size.nbytes : (row + 1) * size.nbytes]
        return flat.reshape(size.height, size.width, size.channels)

    @property
    def labels(self) -> Indices:
        return self.entry.arrays["labels"][self.rows].astype(np.int64)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"pixels": self.pixels(place), "labels": int(self.entry.arrays["labels"][self.rows[place]])}

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
    """The pictures of a folder or table (`image_files`), decoded once and cached in the folder `cache`.

    columns  the classes, and the column of a table that holds them
    image    the column with pictures
    say      hears how far it is, every 20 seconds

    Reads all files once for the key, and again if they are not cached. Memory: one picture. Raises DataError for faulty data with path
    or row, StorageError if the cache cannot be written or has no room.
    """
    name = shown(source)
    digest, count = hashlib.sha256(), 0
    for picture in pictures(source, image, columns.label, header=header):
        digest.update(b"%d:" % columns.class_of(picture.row) + hashlib.sha256(picture.raw()).digest())
        count += 1
    if not count:
        raise DataError(
            f"{name}: holds no picture. Pass a folder with a folder of pictures for each class, or a table."
        )
    content = digest.hexdigest()
    import PIL

    facts = {"images": FORMAT, "content": content, "sizes": preprocessing.facts(), "pillow": PIL.__version__}
    path = Path(cache) / f"images-{key_of({**facts, 'task': asdict(columns)})}"
    if not path.exists():
        _refuse_full(path.parent, count * preprocessing.nbytes, count, preprocessing)

    def fill(append: Append) -> dict[str, Any]:
        again, notes = hashlib.sha256(), Counter[str]()
        for picture in _told(pictures(source, image, columns.label, header=header), count, name, say):
            raw, label = picture.raw(), columns.class_of(picture.row)
            again.update(b"%d:" % label + hashlib.sha256(raw).digest())
            pixels, is_transparent = decoded(raw, picture.row.origin, preprocessing.channels)
            append("pixels", preprocessing.apply(pixels, picture.row.origin).reshape(-1))
            append("labels", np.array([label]))
            notes[TRANSPARENT] += is_transparent
        if again.hexdigest() != content:
            raise DataError(
                f"{name}: the pictures changed while they were read. Start again when nothing writes to them."
            )
        said = [note.replace("{count}", str(number)) for note, number in notes.items() if number]
        return {"source": name, "content_hash": content, "rows": count, "notes": said}

    entry, notes = cached(path, ARRAYS, fill)
    summary = {**entry.facts, "source": name, "notes": [*entry.facts["notes"], *notes]}
    return Images(entry, preprocessing, summary)


def _refuse_full(folder: Path, needed: int, count: int, size: Preprocessing) -> None:
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise StorageError(
            f"{shown(folder)}: {count:,} pictures of {size.height} x {size.width} pixels take {needed / 2**30:.1f} GiB in the cache, "
            f"and the disk has {free / 2**30:.1f} GiB left. Free some, lower image_size, or pass another cache folder."
        )


def _told(found: Iterator[Picture], count: int, name: str, say: Say) -> Iterator[Picture]:
    """The same, and now and then how many of `count` are done, with the time left."""
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
    """Batches of pictures: pixel_values [rows, channels, height, width] float32, labels [rows] int64.

    padding  pixels of black around a picture, of which a part of its size is cut out at random; 0: none. Random crops of CIFAR have 4.
    flip     every other picture, by chance, is turned left to right

    Random numbers are a pure function of (seed, epoch, row of the data): neither the order of batches nor a resumption changes them.
    """

    images: Images
    padding: int = 0
    flip: bool = False
    seed: int = 0

    def __call__(self, places: Sequence[int], epoch: int | None = None) -> Batch:
        """The pictures at these places; epoch None: as they are."""
        images = self.images
        pixels = [
            images.pixels(place)
            if epoch is None
            else self._changed(images.pixels(place), epoch, int(images.rows[place]))
            for place in places
        ]
        labels = torch.from_numpy(images.entry.arrays["labels"][images.rows[list(places)]].astype(np.int64))
        return {"pixel_values": images.preprocessing.values(np.stack(pixels)), "labels": labels}

    def _changed(self, pixels: Values, epoch: int, row: int) -> Values:
        """A picture cropped and flipped for this epoch."""
        if not (self.padding or self.flip):
            return pixels
        drawn = hashlib.sha256(b"picture:%d:%d:%d" % (self.seed, epoch, row)).digest()
        top, left, turn = (int.from_bytes(drawn[first : first + 8], "little") for first in (0, 8, 16))
        if self.padding:
            height, width, _ = pixels.shape
            top, left = top % (2 * self.padding + 1), left % (2 * self.padding + 1)
            around = ((self.padding, self.padding), (self.padding, self.padding), (0, 0))
            pixels = np.pad(pixels, around)[top : top + height, left : left + width]
        return pixels[:, ::-1] if self.flip and turn % 2 else pixels
