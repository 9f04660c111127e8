"""Image classification models, and the preprocessing of their images.

A model comes from a folder with a `preprocessor_config.json`. `from_scratch` uses the folder's
sizes with random weights. Without a folder it is a Vision Transformer with the sizes of the
settings.

If no file defines the preprocessing, images are resized to the model's image_size (else 224 pixels)
and scaled to [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import transformers
from torch import nn

from narrowgauge import data
from narrowgauge.data.image_sizes import FILE
from narrowgauge.diagnose.format_text import plural
from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.model_files import file_of
from narrowgauge.train.pretrained import ModelClass, own_configuration, pretrained

IMAGE_CLASSIFIER = ModelClass(
    transformers.AutoModelForImageClassification, "model that classifies pictures", new=True
)
PLAIN_SIZE = 224  # pixels; used if neither settings nor model define a size
PATCH = 16  # pixels; token count of models without patches, such as convolutional networks


def own_sizes(config: TrainConfig) -> Any:
    """transformers configuration in the model's folder, or None without a folder."""
    return own_configuration(config, IMAGE_CLASSIFIER) if config.model else None


def preprocessing_of(config: TrainConfig) -> tuple[data.Preprocessing, list[str]]:
    """Returns (preprocessing of images, notes).

    A note says that the model's folder has no preprocessing file. Raises ConfigError for image
    sizes that the model cannot read.
    """
    sizes, notes = own_sizes(config), list[str]()
    channels, own = getattr(sizes, "num_channels", 3), _pair(getattr(sizes, "image_size", None))
    asked = _pair(config.image_size or None)
    # Learned position embeddings have one row for each patch, so a pretrained model has one image
    # size.
    if asked and own and not config.from_scratch and asked != own:
        raise ConfigError(
            f"data.image_size = {config.image_size}: the model was trained on {own[0]} x {own[1]} pixels, a position for each patch. "
            "Leave image_size out, or train --model.from-scratch.",
            code="image.size",
        )
    path = file_of(config.model, FILE) if config.model else None
    if path is not None:
        found = data.Preprocessing.of_file(path, channels)
        if asked:
            found = replace(found, height=asked[0], width=asked[1], resize=asked)
    else:
        height, width = asked or own or (PLAIN_SIZE, PLAIN_SIZE)
        found = replace(
            data.Preprocessing.plain(height, channels), width=width, resize=(height, width)
        )
        if config.model:
            notes.append(
                f"{config.model} has no {FILE}: pictures are resized to {height} x {width} pixels, with values from -1 to 1."
            )
    if own and not asked and (found.height, found.width) != own:
        raise ConfigError(
            f"{path}: makes pictures of {found.height} x {found.width} pixels, and the model reads {own[0]} x {own[1]}. Correct it, or "
            "set image_size.",
            code="image.preprocessor",
        )
    return found, notes


def sizes_from(config: TrainConfig, preprocessing: data.Preprocessing) -> dict[str, Any]:
    """Model options for random initialization that follow from the images."""
    size = (
        preprocessing.height
        if preprocessing.height == preprocessing.width
        else (preprocessing.height, preprocessing.width)
    )
    if not config.model:
        return {
            "image_size": size,
            "patch_size": config.patch_size,
            "num_channels": preprocessing.channels,
        }
    # With a folder, all other sizes come from its config.json.
    return {"image_size": size} if config.from_scratch and config.image_size else {}


def image_model(config: TrainConfig, model_class: ModelClass) -> Any:
    """Builds or loads the model in float32 on the CPU."""
    if config.model:
        return pretrained(config, model_class)
    config, options = resolved(config), dict[str, Any](model_class.options)
    height, width = _pair(options["image_size"]) or (0, 0)
    if min(height, width) < config.patch_size:
        raise ConfigError(
            f"model.patch_size = {config.patch_size}: pictures have {height} x {width} pixels. Lower patch_size, or raise image_size.",
            code="image.patch-size",
        )
    sizes = transformers.ViTConfig(
        hidden_size=config.hidden_size, num_hidden_layers=config.layers, num_attention_heads=config.heads,
        intermediate_size=config.intermediate_size, **options,
    )  # fmt: skip
    return transformers.ViTForImageClassification(sizes)


def patches_of(config: TrainConfig, preprocessing: data.Preprocessing) -> int:
    """Number of patches of an image, which a run counts as its tokens."""
    # config.json may hold a pair, a dict or no patch size at all; `_pair` returns None for the last
    # two.
    own: Any = (
        getattr(own_sizes(config), "patch_size", None) or PATCH
        if config.model
        else config.patch_size
    )
    height, width = _pair(own) or (PATCH, PATCH)
    return max(1, (preprocessing.height // height) * (preprocessing.width // width))


def unread_border(model: nn.Module, preprocessing: data.Preprocessing) -> str:
    """A sentence about the rows and columns of pixels that no patch covers, or ''.

    A convolution whose kernel equals its stride, without padding, ignores the remaining rows and
    columns silently. Models that pad the image to whole patches, such as Swin, have a `maybe_pad`
    method beside the convolution.
    """
    for name, module in model.named_modules():
        # The first convolution that reads image channels is taken as the patch embedding.
        if not isinstance(module, nn.Conv2d) or module.in_channels != preprocessing.channels:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if (
            module.kernel_size != module.stride
            or module.padding not in ((0, 0), "valid")
            or hasattr(owner, "maybe_pad")
        ):
            continue
        patch, size = module.kernel_size, (preprocessing.height, preprocessing.width)
        rows, columns = (pixels % each for pixels, each in zip(size, patch, strict=True))
        if not rows and not columns:
            return ""
        # Fraction of the image's pixels outside of all patches.
        share = 1 - (size[0] - rows) * (size[1] - columns) / (size[0] * size[1])
        fits = " or ".join(
            f"{size[0] - rows + more * patch[0]} x {size[1] - columns + more * patch[1]}"
            for more in (0, 1)
        )
        return (
            f"patches of {patch[0]} x {patch[1]} do not fill pictures of {size[0]} x {size[1]} pixels: the model never sees "
            f"{plural(rows, 'row')} at the bottom and {plural(columns, 'column')} at the right, {100 * share:.1f} % of each picture. "
            f"Pictures of {fits} pixels are seen whole (image_size), or those of another patch_size."
        )
    return ""


def _pair(size: Any) -> tuple[int, int] | None:
    """(height, width) from a number or a pair; None for None and for a dict."""
    if size is None or isinstance(size, Mapping):
        return None
    height, *width = np.ravel(size).tolist()
    return (int(height), int(width[0]) if width else int(height))
