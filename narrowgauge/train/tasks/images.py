"""Image classification with Vision Transformers and every other image classifier of transformers.

Wherever a run counts tokens, an image counts as its patches: height x width / patch^2, which is 196
for ViT at 224 pixels. Models without patches count patches of 16 x 16. The loss has one target for
each image, so `eval_tokens` limits the number of images.

The patch projection is a convolution and the classifier is a head. Both keep their precision under
every recipe unless a pattern names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch

from narrowgauge import data
from narrowgauge.data.image_files import pictures
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.console import tell
from narrowgauge.train.loss import Batch, Objective
from narrowgauge.train.model import ModelClass
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.classes import PROBLEM, chosen_classes, class_notes, labelled, names_of
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
from narrowgauge.train.tasks.tables import hashed_share
from narrowgauge.train.tasks.task import Readings, TrainTask


@dataclass
class ImageTask(TrainTask):
    """Images of both splits, and the model class that is trained on them.

    tokenizer    the `Preprocessing` of images, in the place of a tokenizer
    model_class  model class with the class names
    train        training images, decoded to uint8 at the model's size
    validation   validation images
    known        entries about the data in run.json
    """

    model_class: ModelClass
    train: data.Images
    validation: data.Images
    known: dict[str, Any]

    name: ClassVar[str] = "image-classification"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "accuracy"

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        preprocessing, notes = preprocessing_of(config)

        def rows() -> Iterator[data.Record]:
            return (
                each.row
                for each in pictures(
                    config.data, config.image_column, config.label_column, header=header(config)
                )
            )

        classes = chosen_classes(config, IMAGE_CLASSIFIER, rows)
        columns = data.Classification(classes=classes, label=config.label_column)

        def prepared(source: str) -> data.Images:
            cache = resolved(config).cache
            return data.prepare_images(
                source,
                columns,
                config.image_column,
                preprocessing,
                cache=cache,
                header=header(config),
                say=tell,
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
        model_class = labelled(
            IMAGE_CLASSIFIER, names, problem_type=PROBLEM, **sizes_from(config, preprocessing)
        )
        return cls(config, preprocessing, notes, model_class, train, validation, known)

    @classmethod
    def without_data(cls, config: TrainConfig) -> Self:
        """Task for `plan`: builds models, objectives and batches, but has no images."""
        preprocessing, _ = preprocessing_of(config)
        given = config.classes.split(",")
        # `classes` holds a number or a list of names; 0 means that the configuration does not
        # define it.
        known = (
            int(given[0]) if given[0].strip().isdecimal() else len(given) if config.classes else 0
        )
        classes = known or max(2, getattr(own_sizes(config), "num_labels", None) or 2)
        model_class = labelled(
            IMAGE_CLASSIFIER,
            names_of(classes),
            problem_type=PROBLEM,
            **sizes_from(config, preprocessing),
        )
        nothing: Any = None
        return cls(config, preprocessing, [], model_class, nothing, nothing, {})

    def blank(self, rows: int) -> Batch:
        """A batch of `rows` zero images, for `plan`."""
        size = self.tokenizer
        pixels = torch.zeros(rows, size.channels, size.height, size.width)
        return {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.int64)}

    @cached_property
    def identity(self) -> dict[str, str]:
        sizes = repr(sorted(self.tokenizer.facts().items())).encode()
        return {
            "tokenizer": hashlib.sha256(sizes).hexdigest(),
            "content_hash": self.known["content_hash"],
        }

    @cached_property
    def _evaluated(self) -> data.Images:
        """Images of an evaluation: all, or `eval_tokens` images in hash order.

        Never changes in a run.
        """
        part, most = self.validation, self.config.eval_tokens
        return (
            part
            if len(part) <= most
            else part.select(hashed_share(np.ones(len(part), np.int64), np.arange(len(part)), most))
        )

    @cached_property
    def patches(self) -> int:
        """Patches of an image, counted as its tokens."""
        return patches_of(self.config, self.tokenizer)

    def steps(self, epochs: int) -> int:
        return epochs * -(-len(self.train) // self.config.batch_size)

    def tokens_at_once(self) -> int:
        return max(PATCH, self.config.batch_size * self.patches // self.config.micro_batches)

    def summary(self) -> str:
        held_out, looked_at = len(self.validation), len(self._evaluated)
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
        changes = [
            *(
                [f"{config.crop_padding} pixels of black around them, cut at random"]
                if config.crop_padding
                else []
            ),
            *(["turned left to right at random"] if config.flip else []),
        ]
        return [f"{words}; {', '.join(changes) or 'as they are in every epoch'}."]

    def model(self) -> Any:
        return image_model(self.config, self.model_class)

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        return Objective(
            torch.compile(model) if self.config.compile else model,
            {},
            "of one class for each picture",
        )

    def feed(self, model: Any) -> ImageFeed:
        # Only here, because the sentence needs the built model, which `prepare` does not have.
        border = unread_border(model, self.tokenizer)
        if border and border not in self.known["notes"]:
            tell(f"Note: {border}")
            self.known["notes"] = [*self.known["notes"], border]
        config, tokens = self.config, np.full(len(self.train), self.patches, np.int64)
        batching = data.Batching(
            # All images have one size: one length class, and no padding to multiples.
            batch_size=config.batch_size,
            seed=config.seed,
            classes=1,
            multiple=1,
            tokens_multiple=1,
        )
        made = data.ImageBatches(self.train, config.crop_padding, config.flip, config.seed)
        sampler = data.LengthBatchSampler(tokens, batching)
        return ImageFeed(
            sampler,
            config.micro_batches,
            tokens,
            made,
            self.patches,
            lambda batch: self.align(batch, model),
        )

    def align(self, batch: Batch, model: Any) -> Batch:
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
        made, count = data.ImageBatches(self._evaluated), len(self._evaluated)
        rows = max(1, self.config.batch_size // self.config.micro_batches)
        for first in range(0, count, rows):
            yield self.align(made(range(first, min(first + rows, count))), model)

    def trivial(self) -> dict[str, Any]:
        return trivial.of_classes(self._evaluated.labels.tolist(), len(self.known["classes"]))

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        return class_scores(readings, self.evaluation(model), len(self.known["classes"]))

    def facts(self) -> dict[str, Any]:
        size: data.Preprocessing = self.tokenizer
        return {
            "model": {"image_size": [size.height, size.width], "patches": self.patches},
            "data": self.known | {"evaluated": len(self._evaluated), "preprocessing": size.facts()},
            "tokens_per_step": self.config.batch_size * self.patches,
        }


@dataclass
class ImageFeed(SampledFeed):
    """Image batches, shuffled in every epoch; augmentation is a function of seed, epoch and row."""

    pictures: data.ImageBatches
    patches: int
    align: Callable[[Batch], Batch]

    def _batch(self, items: Sequence[Any]) -> Batch:
        return self.align(self.pictures(items, self.sampler.epoch))

    def positions(self, batch: Batch) -> int:
        return len(batch["labels"]) * self.patches
