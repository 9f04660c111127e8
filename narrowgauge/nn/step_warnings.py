"""Warnings about a training loop at the end of a step, each issued once.

Causes: ranks without agreement, training in eval mode, steps that nothing ends, weights written
behind their casts, gradients outside float16's range.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from narrowgauge.addresses import holds_numbers
from narrowgauge.errors import Reason, warn
from narrowgauge.nn.state_loading import added, words


def warn_of_ranks(layers: Collection[Any]) -> None:
    """Warn once per model if several ranks train without `distribute`.

    Their amax histories, learned steps or samplers then differ, and so do their results.
    """
    distributed = torch.distributed
    if (
        not distributed.is_available()
        or not distributed.is_initialized()
        or distributed.get_world_size() == 1
    ):
        return
    alone = [
        each
        for each in layers
        if each.state.peers is None and each.recipe is not None and each.recipe.has_state
    ]
    if any(not layer.state.warned_of_ranks for layer in alone):
        warn(
            f"{distributed.get_world_size()} ranks train, and recipe {alone[0].recipe.name!r} remembers amax, steps or readings, which "
            f"differ from rank to rank in {len(alone)} layers. Call narrowgauge.distribute(model) once, after it was parallelised.",
            code="advance.ranks",
            stacklevel=4,
        )
    for layer in alone:
        layer.state.warned_of_ranks = True


def warn_of_eval(layers: Collection[Any]) -> None:
    """Warn once per layer if an optimizer step ended in eval mode.

    No state is recorded in eval mode: `fp8-delayed` then computes as
    `fp8-current`, and no loss shows it.
    """
    # transformers' from_pretrained returns models in eval mode.
    still = [
        each
        for each in layers
        if not (each.training or each.state.warned_of_eval) and each.recipe is not None
    ]
    still = [each for each in still if each.recipe.has_state and each.weight.requires_grad]
    if still:
        warn(
            f"{still[0].recipe.name}: an optimizer step ended in eval mode, in which the {words(added(still[0]))} of {len(still)} of its "
            "layers stay as they are. Call model.train() before training; models of from_pretrained come in eval mode.",
            code="advance.eval-mode",
            stacklevel=4,
        )
    for layer in still:
        layer.state.warned_of_eval = True


def warn_of_unseen_writes(layers: dict[Any, str]) -> None:
    """Warn of weights that were written behind reused casts. Those layers recast from now on."""
    found = []
    for layer, name in layers.items():
        if not (suspects := layer.state.write_checks):
            continue
        layer.state.write_checks = tuple(each for each in suspects if not each.is_here)
        if any(each.value for each in suspects if each.is_here):
            found.append((layer, name))
    for layer, _ in found:
        layer.state.weight_codes = "recast"
        if layer.state.precast is not None:
            layer.state.precast.disable(
                Reason(
                    "unseen-write",
                    "its weight was written between the step and the forward pass, where its version shows nothing",
                )
            )
    if found:
        layer, name = found[0]
        warn(
            f"{layer.recipe and layer.recipe.name}: the weights of {len(found)} layers, the first {name!r}, were written through .data or "
            "raw memory since they were cast, and up to 8 steps computed with the casts of before. From now on these layers cast "
            "their weights at every forward pass. Call narrowgauge.advance(model) after such writes, or convert with "
            "weight_codes='recast'.",
            code="advance.unseen-writes",
            stacklevel=4,
        )


def warn_of_no_advance(layer: Any, steps: int) -> None:
    """Warn that the state of a layer stayed as it began in `steps` optimizer steps."""
    warn(
        f"{layer.recipe.name}: in {steps} optimizer steps narrowgauge.advance was not called, so that its "
        f"{words(added(layer))} stay as they began. Call narrowgauge.advance(model) after each optimizer.step().",
        code="advance.not-called",
        stacklevel=4,
    )


def warn_of_float16(layers: dict[Any, str], optimizer: torch.optim.Optimizer) -> None:
    """Warn once per layer if float16 weights are updated by float16 gradients without a loss scale.

    torch's GradScaler refuses float16 gradients, except for fused optimizers, which hold
    `grad_scale` during the step. Runs that scale the loss by hand are judged by their gradients,
    which are read in the layer's steps 1, 2, 4, 8 and so on: one copy to the host per layer.
    """
    if (
        getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    ):
        return
    found = []
    seen: set[int] = set()  # the matrices of experts share one parameter
    for layer, name in layers.items():
        weight = (
            layer._parameters.get("weight")
            if isinstance(layer, torch.nn.Embedding)
            else layer.parameter
        )
        if weight is None or id(weight) in seen:
            continue
        seen.add(id(weight))
        if weight.dtype != torch.float16 or weight.grad is None or layer.recipe is None:
            continue
        if weight.grad.dtype != torch.float16 or layer.state.warned_of_float16:
            continue
        layer.state.float16_steps += 1
        if layer.state.float16_steps & (layer.state.float16_steps - 1) == 0 and (
            why := _outside_float16(weight.grad)
        ):
            found.append((layer, name, why))
    for layer, _, _ in found:
        layer.state.warned_of_float16 = True
    if found:
        layer, name, why = found[0]
        warn(
            f"{layer.recipe.name}: {type(optimizer).__name__} stepped the float16 weights of {len(found)} layers with float16 "
            f"gradients and no loss scale. In the first, {name!r}, {why}. Keep the weights in float32 and train under "
            "torch.autocast with torch.amp.GradScaler, use bfloat16, or call narrowgauge.optim.float16_weights(model), whose "
            "gradients are bfloat16.",
            code="advance.float16",
            stacklevel=4,
        )


def _outside_float16(gradient: Any) -> str:
    """Describe a gradient outside float16's range; '' if most values are normal or zero."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if not gradient.numel() or not holds_numbers(gradient):
        return ""
    if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return ""
    size, smallest = gradient.abs(), torch.finfo(torch.float16).smallest_normal
    counts = torch.stack(
        [(~size.isfinite()).sum(), (size > 0).sum(), ((size > 0) & (size < smallest)).sum()]
    )
    wild, other, small = counts.tolist()
    if wild:
        return f"{wild:,} of {gradient.numel():,} gradients are not finite"
    if not other:
        return f"all {gradient.numel():,} gradients are 0, as are magnitudes below 3e-8 in float16"
    if 2 * small > other:
        return f"{small:,} of {other:,} gradients that are not 0 are below {smallest:.1e}, where float16 loses digits"
    return ""
