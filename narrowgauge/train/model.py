"""The model of a run: a float32 model with its precision and recipes.

On a CPU without bfloat16 instructions, Linears without a recipe get the recipe `bf16`. It rounds
the operands to bfloat16 and multiplies in float32. Attention is computed in float32 there. The step
is the same and many times faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge import recipes
from narrowgauge.conversion import convert, embeddings, products, use_fp8_attention
from narrowgauge.conversion.description import describe
from narrowgauge.conversion.kept_layers import SMALLEST
from narrowgauge.errors import ConfigError
from narrowgauge.fuse import fuse
from narrowgauge.nn import step_end
from narrowgauge.nn.dropout import use_counted_dropout
from narrowgauge.nn.float32_modules import SOFTMAX
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.rng import seed_all
from narrowgauge.optim import precision as precisions
from narrowgauge.train.adapter import adapt
from narrowgauge.train.attention import use_float32_attention, use_float32_softmax
from narrowgauge.train.config.settings import FUSED_SAVES, NO_RECIPE, TrainConfig
from narrowgauge.train.recipe_schedule import chosen_recipe

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe


@contextmanager
def _naming_layers() -> Iterator[None]:
    """Names the setting where a pattern of recipe.layers matches nothing."""
    try:
        yield
    except ConfigError as error:
        if error.code != "pattern.no-match":
            raise
        words = str(error).removeprefix("convert: ")
        raise ConfigError(f"recipe.layers: {words}", code=error.code) from None


def build(
    config: TrainConfig,
    make: Callable[[], Any],
    device: torch.device,
    tokens: int,
    choices: Mapping[str, str] | None,
) -> Any:
    """The converted model on `device`, in training mode and in the dtype of its precision.

    make     returns the float32 model: `pretrained.language_model`, or `pretrained.pretrained` for another task
    tokens   rows of the matmuls in a forward pass, for the choices of recipe "auto"
    choices  recorded choices of recipe "auto", for a resumed run; else None

    config.seed determines random weights.
    """
    precision = precisions.get(config.precision)
    seed_all(config.seed)
    model = make().train()
    precision.prepare(model, config.keep_float32)
    if SOFTMAX in precision.keep_list(config.keep_float32):
        use_float32_softmax(model)
    is_empty = any(each.is_meta for each in model.parameters())  # a base that `adapt` reads
    if device.type != "cpu" and not is_empty:
        model.to(device)  # cast before the move: the float32 weights may not fit in GPU memory
    names = {"*": config.recipe, **config.layers_recipe}
    patterns = {pattern: _pattern_recipe(config, name) for pattern, name in names.items()}
    if config.embedding_codes and (words := embeddings.problem(model)):
        raise ConfigError(
            f"recipe.embedding_codes = {config.embedding_codes!r}: {words} Or leave embedding_codes out.",
            code="convert.embedding-codes",
        )
    # Without any recipe, skip convert: it requires at least one Linear.
    if config.layers_recipe or patterns["*"] is not None:
        # `run_metadata.emulated_on_gpu` prints this before the first step
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="convert: products of recipe .* are emulated")
            with _naming_layers():
                convert(model, patterns, tokens=tokens, compiled=config.compile, choices=choices)
    if config.embedding_codes:
        embeddings.quantize_embeddings(model, config.embedding_codes)  # type: ignore[arg-type]
        step_end.follow_model(model)
    if (
        precision.computes_in == torch.bfloat16
        and not device_facts(device.type, device.index).bf16_gemm
    ):
        use_float32_attention(model)
        untouched = {row.name for row in describe(model) if row.recipe == "none"}
        kept = {
            name: "bf16"
            for name, module in model.named_modules()
            if name in untouched and _is_wide(module)
        }
        if kept:
            convert(model, kept)
    if config.attention:
        use_fp8_attention(model)  # after the attention that a suspended pass computes
    if config.fuse:
        fuse(model, config.save if config.save in FUSED_SAVES else None)  # type: ignore[arg-type]
    if config.lora:
        adapt(model, config, device, precision.weights)
    if device.type == "cpu":
        use_counted_dropout(model)
    return model


def _is_wide(layer: nn.Module) -> bool:
    """True if both dimensions of a Linear reach SMALLEST.

    A classifier's head is smaller, and fast anyway.
    """
    return type(layer) in (nn.Linear, QLinear) and min(layer.weight.shape) >= SMALLEST  # type: ignore[arg-type]


def _pattern_recipe(config: TrainConfig, name: str) -> str | Recipe | products.Some | None:
    if name == NO_RECIPE:
        return None
    return name if name == recipes.AUTO else products.parse(name, partial(chosen_recipe, config))
