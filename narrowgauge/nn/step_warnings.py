"""Warnings about a training loop at the end of a step, once each.

Ranks that do not agree, training in eval mode, steps that nothing ends, weights that were written behind their casts.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch

from narrowgauge.nn.linear_state import added, words


def warn_of_ranks(layers: Collection[Any]) -> None:
    """Once per model: ranks that do not agree on what their layers remember compute different numbers."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    alone = [each for each in layers if each.peers is None and each.recipe is not None and each.recipe.has_memory]
    if any(not layer.warned_of_ranks for layer in alone):
        warnings.warn(
            f"{distributed.get_world_size()} ranks train, and recipe {alone[0].recipe.name!r} remembers amax, steps or readings, which "
            f"differ from rank to rank in {len(alone)} layers. Call narrowgauge.distribute(model) once, after it was parallelised.",
            stacklevel=4,
        )
    for layer in alone:
        layer.warned_of_ranks = True


def warn_of_eval(layers: Collection[Any]) -> None:
    """Once per layer: in eval mode nothing is remembered of what it trains on. `fp8-delayed` then computes what `fp8-current` does."""
    still = [each for each in layers if not (each.training or each.warned_of_eval) and each.recipe is not None]
    still = [each for each in still if each.recipe.has_memory and each.weight.requires_grad]
    if still:
        warnings.warn(
            f"{still[0].recipe.name}: an optimizer step ended in eval mode, in which the {words(added(still[0]))} of {len(still)} of its "
            "layers stay as they are. Call model.train() before training; models of from_pretrained come in eval mode.",
            stacklevel=4,
        )
    for layer in still:
        layer.warned_of_eval = True


def warn_of_unseen_writes(layers: dict[Any, str]) -> None:
    """Of weights that were written behind casts that were reused; these layers cast their weights at every pass from now on."""
    found = []
    for layer, name in layers.items():
        if not (suspects := layer.suspects):
            continue
        layer.suspects = tuple(each for each in suspects if not each.is_here)
        if any(each.value for each in suspects if each.is_here):
            found.append((layer, name))
    for layer, _ in found:
        layer.weight_codes = "recast"
        if layer.precast is not None:
            layer.precast.disable(
                "its weight was written between the step and the forward pass, where its version shows nothing"
            )
    if found:
        layer, name = found[0]
        warnings.warn(
            f"{layer.recipe and layer.recipe.name}: the weights of {len(found)} layers, the first {name!r}, were written through .data or "
            "raw memory since they were cast, and up to 8 steps computed with the casts of before. From now on these layers cast "
            "their weights at every forward pass. Call narrowgauge.advance(model) after such writes, or convert with "
            "weight_codes='recast'.",
            stacklevel=4,
        )


def warn_of_no_advance(layer: Any, steps: int) -> None:
    """After so many optimizer steps in which nothing ended a step of the layer's state."""
    warnings.warn(
        f"{layer.recipe.name}: in {steps} optimizer steps narrowgauge.advance was not called, so that its "
        f"{words(added(layer))} stay as they began. Call narrowgauge.advance(model) after each optimizer.step().",
        stacklevel=4,
    )
