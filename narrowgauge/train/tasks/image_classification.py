"""Image classification with Vision Transformers and every other image classifier of transformers.

Images are cached arrays, and batches are randomly cropped and flipped:

    sizes = Preprocessing.plain(224, 3)
    classes = Classification(classes=("cat", "dog"))
    images = prepare_images("photos", classes, "image", sizes, cache="cache")
    images[0]            {"pixels": uint8 [height, width, channels], "labels": 0}
    batch = ImageBatches(images, padding=4, flip=True, seed=0)([3, 1, 4], epoch=2)

Each image is decoded and resized once, before the first step, so a corrupt file is found at once.
The cache entry is memory-mapped and takes height x width x channels bytes per image: 147 KiB at 224
x 224. Reading it takes a fortieth of the time of decoding a photo.

Wherever a run counts tokens, an image counts as its patches: height x width / patch^2, which is 196
for ViT at 224 pixels. Models without patches count patches of 16 x 16. The loss has one target for
each image, so `eval_tokens` limits the number of images.

The patch projection is a convolution whose kernels do not overlap, and has the recipe of the Linears
(nn/patches.py). The classifier is a head and keeps its precision unless a pattern names it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from narrowgauge import data
from narrowgauge.data.cache import Append, CacheEntry, Values, cached, key_of
from narrowgauge.data.image_files import Picture, decoded, pictures
from narrowgauge.data.text import shown
from narrowgauge.errors import DataError, StorageError
from narrowgauge.train.config import augment_syntax
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.console import tell
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.classes import (
    PROBLEM,
    chosen_classes,
    class_notes,
    names_of,
    with_labels,
)
from narrowgauge.train.tasks.classification import Classification
from narrowgauge.train.tasks.confusion import class_scores
from narrowgauge.train.tasks.feed import SampledFeed
from narrowgauge.train.tasks.image_model import (
    IMAGE_CLASSIFIER,
    PATCH,
    image_model,
    own_sizes,
    patches_of,
    preprocessing_of,
    sizes_from,
    unread_border,
)
from narrowgauge.train.tasks.reading import few_notes, header, split_places
from narrowgauge.train.tasks.table import subset_by_hash
from narrowgauge.train.tasks.task import Readings, Shape, TrainTask

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.image_sizes import Preprocessing
    from narrowgauge.train.loss import Batch
    from narrowgauge.train.pretrained import ModelClass

FORMAT = 1  # version of the arrays' layout; part of the key
ARRAYS: dict[str, np.dtype[Any]] = {"pixels": np.dtype("u1"), "labels": np.dtype("<i4")}
TRANSPARENT = "{count} pictures are transparent in parts; what lies below is shown."
PROGRESS_EVERY_S = 20.0
Report = Callable[[str], None]


class Images:
    """Images of one size with class labels; memory-mapped.

    entry          cache entry
    preprocessing  sizes and normalization
    summary        facts about the whole data set
    rows           row numbers in the whole data set
    """

    def __init__(self, entry: CacheEntry, preprocessing: Preprocessing, summary: dict[str, Any]):
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
    report: Report = lambda words: None,
) -> Images:
    """Decodes the images of a folder or table (`image_files`) once and caches them.

    columns        the classes, and the table's label column
    image          column with images
    preprocessing  size of the decoded images
    cache          folder of the cache
    report         called with the progress every 20 seconds

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
        for picture in _with_progress(
            pictures(source, image, columns.label, header=header), count, name, report
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
        texts = [note.replace("{count}", str(number)) for note, number in notes.items() if number]
        return {"source": name, "content_hash": content, "rows": count, "notes": texts}

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


def _with_progress(
    found: Iterator[Picture], count: int, name: str, report: Report
) -> Iterator[Picture]:
    """Yields the same images, and reports progress and remaining time every PROGRESS_EVERY_S."""
    begun_s = reported_s = time.monotonic()
    for done, picture in enumerate(found):
        now_s = time.monotonic()
        if now_s - reported_s > PROGRESS_EVERY_S:
            reported_s, left_s = now_s, (now_s - begun_s) / done * (count - done)
            minutes, seconds = divmod(round(left_s), 60)
            report(f"{name}: {done:,} of {count:,} pictures decoded, {minutes}:{seconds:02} left")
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


@dataclass
class ImageTask(TrainTask):
    """Images of both splits, and the model class that is trained on them.

    tokenizer    the `Preprocessing` of images, in the place of a tokenizer
    model_class  model class with the class names
    train        training images, decoded to uint8 at the model's size
    validation   validation images
    data_facts   entries about the data in run.json
    """

    model_class: ModelClass
    train: Images
    validation: Images
    data_facts: dict[str, Any]

    name: ClassVar[str] = "image-classification"
    options: ClassVar[Mapping[str, Any]] = {}
    loss_words: ClassVar[str] = "of one class for each picture"

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        preprocessing, notes = preprocessing_of(config)

        def rows() -> Iterator[data.Record]:
            return (
                each.row
                for each in pictures(
                    config.data,
                    config.column_of("image"),
                    config.column_of("label"),
                    header=header(config),
                )
            )

        classes = chosen_classes(config, IMAGE_CLASSIFIER, rows)
        columns = Classification(classes=classes, label=config.column_of("label"))

        def prepared(source: str) -> Images:
            cache = resolved(config).cache
            return prepare_images(
                source,
                columns,
                config.column_of("image"),
                preprocessing,
                cache=cache,
                header=header(config),
                report=tell,
            )

        images = held_out = prepared(config.data)
        notes += images.summary["notes"]
        if config.validation_data:
            train, validation = images, (held_out := prepared(config.validation_data))
            words = f"all of {config.validation_data}"
            notes += [f"Validation: {note}" for note in held_out.summary["notes"]]
        else:
            # Hash of decoded pixels, not of file names: copies of an image land on the same side.
            contents = (images.pixels(place).tobytes() for place in range(len(images)))
            sides = split_places(contents, config.validation_fraction, config.data, "picture")
            train, validation = map(images.select, sides)
            words = f"{config.validation_fraction:.4g} of the pictures, by the hash of their pixels"
        notes += few_notes(len(validation))
        content = [
            images.summary["content_hash"],
            held_out.summary["content_hash"],
            repr(columns),
            # Another crop or resize changes the pixels, so it changes the fingerprint too.
            preprocessing.facts(),
        ]
        names = names_of(classes)
        known = {
            "source": images.summary["source"],
            "content_hash": hashlib.sha256(repr(content).encode()).hexdigest(),
            "rows": images.summary["rows"],
            "train_examples": len(train),
            "validation_examples": len(validation),
            "split": words,
            "classes": names,
            "notes": notes,
        }
        notes = [
            *notes,
            *class_notes(train.labels.tolist(), validation.labels.tolist(), known["classes"]),
        ]
        model_class = with_labels(
            IMAGE_CLASSIFIER, names, problem_type=PROBLEM, **sizes_from(config, preprocessing)
        )
        return cls(config, preprocessing, notes, model_class, train, validation, known)

    @classmethod
    def without_data(cls, config: TrainConfig, tokenizer: Any) -> tuple[Self, ModelClass]:
        preprocessing, _ = preprocessing_of(config)
        given = config.classes.split(",")
        # `classes` holds a number or a list of names; 0 means that the configuration does not
        # define it.
        known = (
            int(given[0]) if given[0].strip().isdecimal() else len(given) if config.classes else 0
        )
        classes = known or max(2, getattr(own_sizes(config), "num_labels", None) or 2)
        model_class = with_labels(
            IMAGE_CLASSIFIER,
            names_of(classes),
            problem_type=PROBLEM,
            **sizes_from(config, preprocessing),
        )
        nothing: Any = None
        return cls(config, preprocessing, [], model_class, nothing, nothing, {}), model_class

    def largest_micro_batch(self, parts: int) -> Shape:
        """As wide as the number of patches."""
        return Shape(-(-self.config.batch_size // parts), self.patches)

    def dummy_batch(self, shape: Shape) -> Batch:
        size = self.tokenizer
        pixels = torch.zeros(shape.rows, size.channels, size.height, size.width)
        return {"pixel_values": pixels, "labels": torch.zeros(shape.rows, dtype=torch.int64)}

    @cached_property
    def identity(self) -> dict[str, str]:
        sizes = repr(sorted(self.tokenizer.facts().items())).encode()
        return {
            "tokenizer": hashlib.sha256(sizes).hexdigest(),
            "content_hash": self.data_facts["content_hash"],
        }

    @cached_property
    def evaluation_set(self) -> Images:
        """Images of an evaluation: all, or `eval_tokens` images in hash order.

        Never changes in a run.
        """
        part, most = self.validation, self.config.eval_tokens
        return (
            part
            if len(part) <= most
            else part.select(
                subset_by_hash(np.ones(len(part), np.int64), np.arange(len(part)), most)
            )
        )

    @cached_property
    def patches(self) -> int:
        """Patches of an image, counted as its tokens."""
        return patches_of(self.config, self.tokenizer)

    def steps(self, epochs: int) -> int:
        return epochs * -(-len(self.train) // self.config.batch_size)

    def tokens_per_forward(self) -> int:
        return max(PATCH, self.config.batch_size * self.patches // self.config.micro_batches)

    def summary(self) -> str:
        held_out, looked_at = len(self.validation), len(self.evaluation_set)
        part = (
            ""
            if looked_at == held_out
            else f", of which evaluations see {looked_at:,} (eval_tokens)"
        )
        return (
            f"{len(self.train):,} pictures of {self.patches} patches, {held_out:,} held out{part}"
        )

    def preview(self) -> list[Any]:
        size, config = self.tokenizer, self.config
        words = f"Pictures of {size.height} x {size.width} pixels in {size.channels} channels"
        augment = augment_syntax.parse(config.augment)
        changes = (
            [f"{augment.crop} pixels of black around them, cut at random"] if augment.crop else []
        )
        changes += ["turned left to right at random"] if augment.flip else []
        return [f"{words}; {', '.join(changes) or 'as they are in every epoch'}."]

    def model(self) -> Any:
        return image_model(self.config, self.model_class)

    def feed(self, model: Any) -> ImageFeed:
        # Only here, because the sentence needs the built model, which `prepare` does not have.
        border = unread_border(model, self.tokenizer)
        if border and border not in self.data_facts["notes"]:
            tell(f"Note: {border}")
            self.data_facts["notes"] = [*self.data_facts["notes"], border]
        config, tokens = self.config, np.full(len(self.train), self.patches, np.int64)
        batching = data.Batching(
            # All images have one size: one length class, and no padding to multiples.
            batch_size=config.batch_size,
            seed=config.seed,
            classes=1,
            multiple=1,
            tokens_multiple=1,
        )
        augment = augment_syntax.parse(config.augment)
        made = ImageBatches(self.train, augment.crop, augment.flip, config.seed)
        sampler = data.LengthBatchSampler(tokens, batching)
        return ImageFeed(
            sampler,
            config.micro_batches,
            tokens,
            made,
            self.patches,
            lambda batch: self.align(batch, model),
        )

    @classmethod
    def align(cls, batch: Batch, model: Any) -> Batch:
        """Casts pixels to the dtype of the model's convolution weights.

        Models without convolutions get the dtype of their first parameter.
        """
        parameters = list(model.parameters())
        # Under float16 or bfloat16 weights, conv2d rejects float32 pixels; only convolution weights
        # have 4 axes.
        dtype = next((each for each in parameters if each.ndim == 4), parameters[0]).dtype
        return batch | {"pixel_values": batch["pixel_values"].to(dtype)}

    def evaluation(self, model: Any) -> Iterator[Batch]:
        """Validation batches in the order of the data, each as large as a training micro-batch."""
        made, count = ImageBatches(self.evaluation_set), len(self.evaluation_set)
        rows = max(1, self.config.batch_size // self.config.micro_batches)
        for first in range(0, count, rows):
            yield self.align(made(range(first, min(first + rows, count))), model)

    def trivial(self) -> dict[str, Any]:
        return trivial.of_classes(
            self.evaluation_set.labels.tolist(), len(self.data_facts["classes"])
        )

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        return class_scores(readings, self.evaluation(model), len(self.data_facts["classes"]))

    def facts(self) -> dict[str, Any]:
        size: data.Preprocessing = self.tokenizer
        return {
            "model": {"image_size": [size.height, size.width], "patches": self.patches},
            "data": self.data_facts
            | {"evaluated": len(self.evaluation_set), "preprocessing": size.facts()},
            "tokens_per_step": self.config.batch_size * self.patches,
        }


@dataclass
class ImageFeed(SampledFeed):
    """Image batches, shuffled in every epoch; augmentation is a function of seed, epoch and row."""

    pictures: ImageBatches
    patches: int
    align: Callable[[Batch], Batch]

    def _batch(self, items: Sequence[Any]) -> Batch:
        return self.align(self.pictures(items, self.sampler.epoch))

    def positions(self, batch: Batch) -> int:
        return len(batch["labels"]) * self.patches
