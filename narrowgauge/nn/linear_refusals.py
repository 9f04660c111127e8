"""Error messages for operands and recipes that a Linear does not accept.

Imported on the first error.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from narrowgauge.addresses import is_compiling
from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.nn.transforms import refuse_active
from narrowgauge.recipe import Recipe


def refuse(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    floats: tuple[torch.dtype, ...],
    recipe: Recipe | None,
) -> None:
    """Raise TransformError for an unsupported transform, ShapeError for unsupported operands."""
    if not is_compiling():
        refuse_active(recipe, x=x, weight=weight, bias=bias)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype not in floats
            or tensor.layout != torch.strided
            or tensor.is_nested
        ):
            kind = (
                f"{tensor.dtype} {tensor.layout}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            kind = f"nested {kind}" if isinstance(tensor, Tensor) and tensor.is_nested else kind
            raise ShapeError(
                f"linear: {name} is a {kind}; it must be a dense tensor of float32, float64, bfloat16 or float16. Convert it first.",
                code="linear.dtype",
            )
        if tensor.device != x.device:
            raise ShapeError(
                f"linear: x is on {x.device}, {name} on {tensor.device}. Move them to one device.",
                code="linear.device",
            )
    if weight.ndim != 2:
        raise ShapeError(
            f"linear: weight is {list(weight.shape)}; it must be [out_features, in_features].",
            code="linear.weight-shape",
        )
    n, k = weight.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ShapeError(
            f"linear: x is {list(x.shape)}, weight {[n, k]}; the last axis of x must be {k}.",
            code="linear.x-shape",
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != n):
        raise ShapeError(
            f"linear: bias is {list(bias.shape)}, weight {[n, k]}; bias must be [{n}].",
            code="linear.bias-shape",
        )


def transposed_shards(weight: Tensor) -> ConfigError:
    """The error for a transposed weight whose shards are multiplied, as under tensor parallelism."""
    return ConfigError(
        f"linear: the weight {list(weight.shape)} is a DTensor, and it is stored [in_features, out_features], as transformers' Conv1D "
        "does. Styles of tensor parallelism cut an nn.Linear along the other axis. Shard such a model with fully_shard.",
        code="linear.transposed-shards",
    )


def refuse_recipe(recipe: object, name: str = "") -> NoReturn:
    """Raise ConfigError for a recipe that a layer or the function `linear` does not accept.

    name  the layer's attribute; '' for the function
    """
    if name:
        raise ConfigError(
            f"{name} is {recipe!r}; it must be a Recipe, a name or None. narrowgauge.recipes.names() lists the names.",
            code="linear.recipe",
        )
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"linear: recipe is {recipe!r}; it must be a Recipe. Look a name up with recipes.get.",
            code="linear.recipe",
        )
    raise ConfigError(
        f"linear: recipe {recipe.name!r} remembers amax, steps or readings from step to step and a function cannot. "
        "Use narrowgauge.QLinear, or convert the model.",
        code="linear.has-memory",
    )
