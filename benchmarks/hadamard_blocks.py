"""calibrate_blocks: choose the Hadamard block of every rotated Linear by what it does to the layer's output.

    error(k) = sum over batches |Y_k - Y|^2 / sum |Y|^2        Y = x w.T exact, Y_k with both operands cast in blocks of 2**k

for k = 0 (no rotation), 1, ..., 7; the smallest error is taken. "Training Transformers with 4-bit Integers" (arXiv 2306.11987,
A.5) minimises the error of x times the error of w instead. That fails where outliers of x meet small columns of w, the shape
that normalisation layers leave behind: rotating makes each operand easier to round and mixes large columns with small ones, so
that the rounding errors of the large no longer meet a small weight. Measured with channels of x at 32 and their weights at 1/32:
the product rule picks k = 5 with 0.61 of the output's energy in error, where k = 0 has 0.06.

    errors = calibrate_blocks(model, batches)     # before the optimizer is built: learned steps begin anew

The model runs in its own precision, without gradients and in evaluation mode; nothing but the recipes changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.hadamard import draw_signs, rotate
from narrowgauge.ops.mm import mm
from narrowgauge.ops.quantize import calibrated_amax, quantize
from narrowgauge.recipe import Cast, Gemm, Hadamard

LARGEST_POWER = 7
ROWS = 1024  # of each batch, evenly spaced: enough for an error that is a mean over rows x outputs

Errors = dict[int, float]  # block (1: no rotation) -> relative squared error of the output


@torch.no_grad()
def calibrate_blocks(
    model: nn.Module, batches: Iterable[Any], *, rows: int = ROWS
) -> dict[str, Errors]:
    """Gives each Linear whose `output` is cast and may be rotated the block with the least error of its output.

    batches  inputs of the model: a tensor, a tuple or list of arguments, or a mapping of named ones; a few are enough
    rows     rows of each input that are looked at
    ->       layer -> {block: relative squared error}; the block with the smallest is now in `layer.recipe.output.rotate`

    Layers of recipes with backward="straight-through", or with a rotation, are chosen for; others are left alone, as are
    layers that the batches do not reach. Cost: eight products of `rows` rows per layer and batch. Raises ConfigError on no
    such layer, no batch, and on an input that is all zeros or not finite, with the layer's name; nothing is changed then.
    """
    if rows < 1:
        raise ConfigError(
            f"calibrate_blocks: rows is {rows}; it must be at least 1. {ROWS} are enough.",
            code="hadamard.rows",
        )
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QLinear) and _may_rotate(layer)
    }
    if not layers:
        raise ConfigError(
            "calibrate_blocks: no Linear of the model has a recipe that rotates. Convert it first, for instance to 'int4-hq-bs'."
        )
    sums: dict[str, dict[int, Tensor]] = {name: {} for name in layers}
    modes = {module: module.training for module in model.modules()}
    suspended = {layer: layer.is_suspended for layer in layers.values()}
    hooks = [
        layer.register_forward_pre_hook(_watch(name, sums[name], rows), with_kwargs=True)
        for name, layer in layers.items()
    ]
    count = 0
    try:
        model.eval()
        for layer in layers.values():
            layer.is_suspended = True
        for count, batch in enumerate(batches, start=1):  # noqa: B007
            _call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, was in suspended.items():
            layer.is_suspended = was
        for module, training in modes.items():
            module.training = training
    if count == 0:
        raise ConfigError(
            "calibrate_blocks: no batch was given. Give a list of a few inputs of the model."
        )
    if not any(sums.values()):
        raise ConfigError(
            f"calibrate_blocks: in {count} batches no row came to a Linear whose recipe rotates. Give batches that are not empty."
        )
    found = {name: _relative(name, parts) for name, parts in sums.items() if parts}
    for name, errors in found.items():
        _set_block(layers[name], min(errors, key=lambda block: (errors[block], block)))
    return found


def _may_rotate(layer: QLinear) -> bool:
    recipe = layer.recipe
    if recipe is None or recipe.output.lhs is None or recipe.output.rhs is None:
        return False
    return recipe.backward == "straight-through" or recipe.output.rotate is not None


def _blocks(features: int) -> list[int]:
    """1, 2, ..., 128, as far as a smaller block does not already hold the whole axis."""
    return [2**k for k in range(LARGEST_POWER + 1) if k == 0 or 2 ** (k - 1) < features]


def _watch(name: str, sums: dict[int, Tensor], rows: int) -> Callable[..., None]:
    def hook(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(layer, QLinear)
        x = (*inputs, *named.values())[0].detach().reshape(-1, layer.in_features)
        if len(x) == 0:
            return
        x = x[:: max(len(x) // rows, 1)].to(torch.float32)
        _check(name, x)
        add_errors(sums, x, layer.weight.detach().to(torch.float32), _product(layer))

    return hook


def _product(layer: QLinear) -> Gemm:
    assert layer.recipe is not None
    return layer.recipe.output


def add_errors(sums: dict[int, Tensor], x: Tensor, weight: Tensor, gemm: Gemm) -> None:
    """Adds |Y_k - Y|^2 of x [T, K] and weight [N, K] to `sums`, by block; |Y|^2 under 0."""
    exact = x.to(torch.float64) @ weight.to(torch.float64).T
    signs = gemm.rotate.signs if gemm.rotate is not None else "none"
    for block in _blocks(x.shape[1]):
        hadamard = None if block == 1 else Hadamard(block=block, signs=signs)
        error = (
            (rounded_product(x, weight, gemm, hadamard).to(torch.float64) - exact).square().sum()
        )
        sums[block] = sums.get(block, torch.zeros_like(error)) + error
    sums[0] = (
        sums.get(0, torch.zeros((), dtype=torch.float64, device=x.device)) + exact.square().sum()
    )


def rounded_product(x: Tensor, weight: Tensor, gemm: Gemm, hadamard: Hadamard | None) -> Tensor:
    assert gemm.lhs is not None and gemm.rhs is not None
    if hadamard is not None:
        signs = draw_signs(hadamard, x.shape[1], x.device)
        x, weight = rotate(x, hadamard, signs), rotate(weight, hadamard, signs)
    lhs, rhs = (_cast(operand, cast) for operand, cast in ((x, gemm.lhs), (weight, gemm.rhs)))
    return mm(lhs, rhs, backend="reference")


def _cast(operand: Tensor, cast: Cast) -> Any:
    noise = torch.rand(cast.noise_shape(tuple(operand.shape))) if cast.draws else None
    return quantize(
        operand, cast, amax=calibrated_amax(operand, cast), noise=noise, expand=torch.float32
    )


def _check(name: str, x: Tensor) -> None:
    if not x.isfinite().all():
        raise ConfigError(
            f"calibrate_blocks: the input of {name!r} holds {int((~x.isfinite()).sum())} numbers that are not finite, so no "
            "block can be judged by it. Give other batches, or mend the layer before it."
        )
    if not x.any():
        raise ConfigError(
            f"calibrate_blocks: the input of {name!r} is all zeros in one of the batches, so every block has the same error. "
            "Give batches of real data."
        )


def _relative(name: str, sums: Mapping[int, Tensor]) -> Errors:
    whole = float(sums[0])
    if not 0 < whole < float("inf"):
        raise ConfigError(
            f"calibrate_blocks: the output of {name!r} has a squared norm of {whole}, so no error can be related to it. "
            "Initialize or load the weights first."
        )
    return {block: float(error) / whole for block, error in sums.items() if block}


def _set_block(layer: QLinear, block: int) -> None:
    recipe = layer.recipe
    assert recipe is not None
    before = recipe.output.rotate
    signs = before.signs if before is not None else "none"
    hadamard = None if block == 1 else Hadamard(block=block, signs=signs)
    if hadamard != before:
        layer.recipe = replace(recipe, output=replace(recipe.output, rotate=hadamard))


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)
