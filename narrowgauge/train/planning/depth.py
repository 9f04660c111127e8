"""The same settings with fewer layers, for models of which every block is like its neighbours."""

from __future__ import annotations

import re
from typing import Any

from narrowgauge import recipes
from narrowgauge.train.config import recipe_syntax
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.model import ModelClass, own_configuration

# Policies of checkpointing that treat all blocks but the last one equally.
ALIKE = ("none", "selective", "full", "every-1")
# How configurations of transformers call the depth of a stack; the second row, of encoder-decoders, both.
_DEPTHS = (("num_hidden_layers",), ("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers"))


def layers_of(config: TrainConfig, model_class: ModelClass) -> tuple[int, str]:
    """(blocks of each stack, why a shallow model does not tell of a deep one, a clause, or '')."""
    if not config.model:
        return config.layers, _differing(config)
    sizes = own_configuration(config, model_class)
    if sizes.get_text_config() is not sizes:
        return 0, "the model has parts besides its text model"
    depths = [getattr(sizes, name) for name in depth_names(sizes)]
    if not depths:
        return 0, f"a {type(sizes).__name__} does not tell its depth"
    if len(set(depths)) > 1:
        return 0, f"its stacks have different depths, {' and '.join(map(str, depths))}"
    kinds = getattr(sizes, "layer_types", None) or ()
    if len(set(kinds)) > 1:
        return depths[0], f"its layers are of several kinds, {', '.join(sorted(set(kinds)))}"
    return depths[0], _differing(config)


def depth_names(sizes: Any) -> tuple[str, ...]:
    """The attributes of a model's configuration that hold the depth."""
    decoding = bool(getattr(sizes, "is_encoder_decoder", False))
    for names in _DEPTHS[1:] if decoding else _DEPTHS[:1]:
        if all(isinstance(getattr(sizes, name, None), int) for name in names):
            return names
    return ()


def with_layers(sizes: Any, layers: int) -> dict[str, Any]:
    """What a configuration of so many layers says otherwise."""
    changed: dict[str, Any] = dict.fromkeys(depth_names(sizes), layers)
    if kinds := getattr(sizes, "layer_types", None):
        changed["layer_types"] = list(kinds)[:layers]
    return changed


def _differing(config: TrainConfig) -> str:
    """Which setting makes blocks differ by their numbers, a clause, or ''."""
    if config.checkpointing not in ALIKE:
        return f"checkpointing = {config.checkpointing!r} treats its blocks differently"
    numbered = {
        "recipes": config.layers_recipe.keys(), "freeze": [config.freeze], "switch": [config.switch.partition("@")[0]],
    }  # fmt: skip
    for key, patterns in numbered.items():
        if any(re.search(r"(^|\.)\d", pattern) for pattern in patterns):
            return f"{key} names blocks by their numbers"
    for name in sorted(recipe_syntax.names(config.recipe, config.layers_recipe)):
        if name in recipes.names() and (wide := recipes.get(name).wide_blocks) is not None:
            return f"recipe {name!r} keeps the {wide}"
    return ""
