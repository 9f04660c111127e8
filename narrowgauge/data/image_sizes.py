"""Image preprocessing: resize, crop and normalization.

    pixels   uint8 [height, width, channels]                             once, by Pillow: `apply`
    values   (pixels x rescale - mean[c]) / deviation[c], float32        per batch: `values`

The settings come from `preprocessor_config.json` in a model's folder and mean what they mean to
transformers' processors. Steps that are not implemented here (padding, thumbnails, tiles) raise an
error. Source: transformers' Pillow processors, which a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from PIL.Image import Image

    from narrowgauge.data.cache import Values

FILE = "preprocessor_config.json"
SETTINGS = reading.Kind(
    most_bytes=reading.MIB,
    follow_links=True,
    step="Correct it, or remove it and set image_size: pictures are then resized to it, with values from -1 to 1.",
)
BILINEAR = 2  # Pillow's filter number
RESAMPLES = range(6)  # Pillow's filter numbers, nearest to hamming
WHOLE_BELOW = 384  # pixels; ConvNeXt's processor ignores crop_pct from this size on
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Preprocessing settings; sizes in pixels.

    height, width    size of the model's input
    resize           (height, width), the shorter edge, or None: images have that size already
    resample         Pillow's filter number
    rescale          factor on pixel values
    mean, deviation  one number per channel, applied after `rescale`
    """

    height: int
    width: int
    resize: tuple[int, int] | int | None
    resample: int = BILINEAR
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def plain(cls, size: int, channels: int) -> Self:
        """Resize to size x size and scale to [-1, 1], as ViT was trained."""
        half = (0.5,) * channels
        return cls(height=size, width=size, resize=(size, size), mean=half, deviation=half)

    @classmethod
    def of_file(cls, path: Path, channels: int) -> Self:
        """Reads a `preprocessor_config.json`. Raises ConfigError for unsupported steps."""
        known = reading.json_of(path, SETTINGS)
        try:
            return cls.of(known, channels)
        except (
            ConfigError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as error:
            why, code = f"{type(error).__name__}: {error}", "image-processor.settings"
            if isinstance(error, ConfigError):
                why, code = str(error), error.code
            raise SETTINGS.refusal(path, why, code) from None

    @classmethod
    def of(cls, known: Mapping[str, Any], channels: int) -> Self:
        """Settings from the contents of a `preprocessor_config.json`."""
        unknown = [
            key
            for key, value in known.items()
            if key.startswith("do_") and value and key not in STEPS
        ]
        if unknown:
            raise ConfigError(
                f"asks for {', '.join(unknown)}, which is not done here",
                code="image-processor.unknown",
            )
        resize: tuple[int, int] | int | None = None
        crop: tuple[int, int] | None = None
        if known.get("do_resize", True):
            resize = _edges(known["size"])
        if known.get("do_center_crop", False):
            crop = _pair(_edges(known["crop_size"]))
        # ConvNeXt: resize the shorter edge to size / crop_pct, then crop to size.
        if isinstance(resize, int) and known.get("crop_pct") is not None:
            whole = (resize, resize)
            crop, resize = whole, int(resize / known["crop_pct"]) if resize < WHOLE_BELOW else whole
        seen = crop if crop is not None else resize
        if not isinstance(seen, tuple):
            raise ConfigError(
                f"size {known.get('size')} leaves pictures of different sizes; a model reads one",
                code="image-processor.unequal",
            )
        if (
            crop is not None
            and resize is not None
            and min(_pair(resize)) < max(crop)
            and _pair(resize) != crop
        ):
            raise ConfigError(
                f"crops {crop} from pictures resized to {resize}, which may be smaller",
                code="image-processor.crop",
            )
        normalizes = known.get("do_normalize", True)
        found = cls(
            height=seen[0], width=seen[1], resize=resize, resample=int(known.get("resample", BILINEAR)),
            rescale=float(known.get("rescale_factor", 1 / 255)) if known.get("do_rescale", True) else 1.0,
            mean=_of_channels(known["image_mean"], channels) if normalizes else (0.0,) * channels,
            deviation=_of_channels(known["image_std"], channels) if normalizes else (1.0,) * channels,
        )  # fmt: skip
        if found.resample not in RESAMPLES or not all(found.deviation):
            raise ConfigError(
                f"resample {found.resample} or image_std {list(found.deviation)} cannot be used",
                code="image-processor.numbers",
            )
        return found

    @property
    def channels(self) -> int:
        """Channels of the model's input."""
        return len(self.mean)

    @property
    def nbytes(self) -> int:
        """Bytes of one image in the cache."""
        return self.height * self.width * self.channels

    def apply(self, image: Image, origin: str) -> Values:
        """Resizes and crops an 8-bit image to [height, width, channels] uint8."""
        if self.resize is not None:
            height, width = (
                self.resize if isinstance(self.resize, tuple) else _shorter_edge(image, self.resize)
            )
            if (width, height) != image.size:
                image = image.resize((width, height), resample=self.resample)
        # Pillow's sizes are (width, height), arrays are [height, width].
        left, top = (image.size[0] - self.width) // 2, (image.size[1] - self.height) // 2
        if left < 0 or top < 0:
            raise ConfigError(
                f"{origin}: {image.size[0]} x {image.size[1]} pixels, fewer than the {self.width} x {self.height} that are cut out of "
                "its middle. Give the model's preprocessor_config.json do_resize, or remove it and set image_size.",
                code="image.too-small",
            )
        if (self.width, self.height) != image.size:
            image = image.crop((left, top, left + self.width, top + self.height))
        return np.asarray(image, dtype=np.uint8).reshape(self.height, self.width, self.channels)

    def values(self, pixels: Values) -> Tensor:
        """Normalizes images for the model.

        pixels  uint8 [images, height, width, channels]
        ->      float32 [images, channels, height, width]
        """
        mean = np.asarray(self.mean, np.float32)
        deviation = np.asarray(self.deviation, np.float32)
        found = (pixels.astype(np.float32) * np.float32(self.rescale) - mean) / deviation
        return torch.from_numpy(np.ascontiguousarray(found.transpose(0, 3, 1, 2)))

    def facts(self) -> dict[str, Any]:
        """Everything that determines pixels and values, as JSON."""
        known: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return known

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a preprocessor_config.json for transformers beside an exported model."""
        resize, seen = self.resize, {"height": self.height, "width": self.width}
        size = (
            {"shortest_edge": resize}
            if isinstance(resize, int)
            else dict(zip(seen, resize or seen.values(), strict=True))
        )
        crops = size != seen
        known = {
            # ViT's processor cannot crop; CLIP's can.
            "image_processor_type": "CLIPImageProcessor" if crops else "ViTImageProcessor",
            "do_resize": resize is not None, "size": size, "do_center_crop": crops, "crop_size": seen,
            "resample": self.resample, "do_rescale": True, "rescale_factor": self.rescale, "do_normalize": True,
            "image_mean": list(self.mean), "image_std": list(self.deviation),
        }  # fmt: skip
        Path(folder, FILE).write_text(json.dumps(known, indent=2), encoding="utf-8")


def _edges(size: Any) -> tuple[int, int] | int:
    """(height, width), or the shorter edge. A plain number means a square, as in older files."""
    if isinstance(size, int) and not isinstance(size, bool):
        size = {"height": size, "width": size}
    edges = [
        size[key]
        for key in (("shortest_edge",) if "shortest_edge" in size else ("height", "width"))
    ]
    if any(isinstance(edge, bool) or not isinstance(edge, int) or edge < 1 for edge in edges):
        raise ConfigError(f"size {size} is no number of pixels", code="image-processor.size")
    return edges[0] if len(edges) == 1 else (edges[0], edges[1])


def _pair(size: tuple[int, int] | int) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _of_channels(numbers: Any, channels: int) -> tuple[float, ...]:
    found = tuple(
        map(float, numbers if isinstance(numbers, list | tuple) else [numbers] * channels)
    )
    if len(found) != channels:
        raise ConfigError(
            f"has numbers for {len(found)} channels, and the model reads {channels}",
            code="image-processor.channels",
        )
    return found


def _shorter_edge(image: Image, edge: int) -> tuple[int, int]:
    """(height, width) with this shorter edge and the image's aspect ratio."""
    width, height = image.size
    short, long = sorted((width, height))
    # Truncated, not rounded, as in transformers.
    other = int(edge * long / short)
    return (edge, other) if height <= width else (other, edge)
