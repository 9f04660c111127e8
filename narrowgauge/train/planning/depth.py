"""The same settings with fewer layers, for models whose blocks are identical."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from narrowgauge import recipes
from narrowgauge.train.config import recipe_syntax
from narrowgauge.train.pretrained import ModelClass, own_configuration

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

# Checkpointing policies that treat all blocks but the last one equally.
ALIKE = ("none", "selective", "full", "every-1")
# Attributes of transformers configurations that hold the number of layers: one for a single
# stack, then pairs for encoder-decoders.
_DEPTHS = (
    ("num_hidden_layers",),
    ("encoder_layers", "decoder_layers"),
    ("num_layers", "num_decoder_layers"),
)


def layers_of(config: TrainConfig, model_class: ModelClass) -> tuple[int, str]:
    """Returns (blocks of each stack, reason why fewer layers are no model for all, or '').

    0 blocks means that the depth is unknown or cannot be varied. The reason is a clause.
    """
    if not config.model:
        return config.layers, _differing(config)
    sizes = own_configuration(config, model_class)
    # A multimodal model: the layer count of its text part does not scale the rest.
    if sizes.get_text_config() is not sizes:
        return 0, "the model has parts besides its text model"
    depths = [getattr(sizes, name) for name in depth_names(sizes)]
    if not depths:
        return 0, f"a {type(sizes).__name__} does not tell its depth"
    # One number of layers must describe both stacks.
    if len(set(depths)) > 1:
        return 0, f"its stacks have different depths, {' and '.join(map(str, depths))}"
    kinds = getattr(sizes, "layer_types", None) or ()
    if len(set(kinds)) > 1:
        return depths[0], f"its layers are of several kinds, {', '.join(sorted(set(kinds)))}"
    return depths[0], _differing(config)


def depth_names(sizes: Any) -> tuple[str, ...]:
    """Attributes of a model's configuration that hold the number of layers."""
    decoding = bool(getattr(sizes, "is_encoder_decoder", False))
    for names in _DEPTHS[1:] if decoding else _DEPTHS[:1]:
        if all(isinstance(getattr(sizes, name, None), int) for name in names):
            return names
    return ()


def with_layers(sizes: Any, layers: int) -> dict[str, Any]:
    """Configuration entries that change if the model has `layers` layers."""
    changed: dict[str, Any] = dict.fromkeys(depth_names(sizes), layers)
    if kinds := getattr(sizes, "layer_types", None):
        # transformers requires one entry of layer_types for each layer.
        changed["layer_types"] = list(kinds)[:layers]
    return changed


def _differing(config: TrainConfig) -> str:
    """A clause naming the setting that makes blocks differ, or ''."""
    if config.checkpointing not in ALIKE:
        return f"memory.checkpointing = {config.checkpointing!r} treats its blocks differently"
    numbered = {
        "recipes": config.layers_recipe.keys(), "freeze": [config.freeze], "switch": [config.switch.partition("@")[0]],
    }  # fmt: skip
    for key, patterns in numbered.items():
        # A dotted component that starts with a digit is a block's number.
        if any(re.search(r"(^|\.)\d", pattern) for pattern in patterns):
            return f"{key} names blocks by their numbers"
    for name in sorted(recipe_syntax.names(config.recipe, config.layers_recipe)):
        plain = name.partition("+")[0]  # nvfp4 of "nvfp4+shared-scales"
        if plain in recipes.names() and (wide := recipes.get(name).wide_blocks) is not None:
            return f"recipe {name!r} keeps the {wide}"
    return ""
