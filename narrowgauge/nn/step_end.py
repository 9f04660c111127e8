"""The end of an optimizer step, by `advance` in the loop or by a hook of torch's optimizers.

torch calls `_after_step` after every `optimizer.step()`
(register_optimizer_step_post_hook, registered with the first layer). It ends the step of
converted models, and of layers outside such a model, if the optimizer holds a parameter
of the model or layer. Frozen weights of such a model, as under LoRA, are included.
Weights written without a version change, by a fused optimizer, are therefore recast.

`advance` after `optimizer.step()` only clears casts made since. A layer that trains again in
between (eager mode) has begun another step, which `advance` ends.

Not covered, so that `advance` is needed: a step traced by torch.compile, optimizers that are not
torch's, weights written by hand. An optimizer that steps inside the backward pass only clears casts
here: histories roll at `advance`.

A step that a GradScaler skips ends in one of three ways. Its non-finite amaxes never enter a
history, and scales of the next step are finite in each case (`ops.quantize.amax_state`).

    torch's optimizers, foreach or not     no hook is called; further passes join the same step
    fused ones, which take the loss scale  `optimizer.step()` is called although nothing changes, so
                                           the hook ends the step: finite amaxes enter the history
    `advance` in the loop                  ends the step, whatever the scaler did

The hook also reports weights that were written behind reused casts on a
GPU (`weight_cache`), and learned steps that no optimizer holds
(`learned_step`). Global state: weak references to models and layers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

QLinear = Any  # nn.linear imports this module
_LAYERS: weakref.WeakSet[QLinear] = weakref.WeakSet()
_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Guards both sets: a WeakSet raises if it grows during iteration.
_LOCK = threading.RLock()
_registered: list[Any] = []  # torch's handle; the hook is registered once


def follow_layer(layer: QLinear) -> None:
    """End steps of this layer with any optimizer of torch that holds a parameter of the layer."""
    with _LOCK:
        if not _registered:
            _registered.append(register_optimizer_step_post_hook(_after_step))
        _LAYERS.add(layer)


def follow_model(model: nn.Module) -> None:
    """End steps of all layers of this model with optimizers that hold any of its parameters."""
    with _LOCK:
        _MODELS.add(model)


def forget(layer: QLinear) -> None:
    with _LOCK:
        _LAYERS.discard(layer)


def end_steps(layers: dict[QLinear, str], held: Collection[QLinear] | None = None) -> None:
    """End an optimizer step: update amax histories, cold starts and samplers, and clear casts.

    layers  layer -> name
    held    layers with a parameter in the optimizer that stepped; None: all

    Ranks that share layers first agree on the recorded state.
    """
    from narrowgauge.nn import bypassed_weights
    from narrowgauge.nn.step_warnings import warn_of_eval, warn_of_ranks

    bypassed_weights.end_step(layers)
    if any(layer.state.write_checks for layer in layers):
        from narrowgauge.nn.step_warnings import warn_of_unseen_writes

        warn_of_unseen_writes(layers)
    warn_of_ranks(layers if held is None else held)
    if held is not None:
        warn_of_eval(layers)
    states = {
        id(peers.state): peers.state for layer in layers if (peers := layer.state.peers) is not None
    }
    # All ranks must run these collectives in one order, and a dict may order them differently.
    for state in sorted(states.values(), key=lambda each: each.creation_index):
        state.end_step(layers.keys())
    # Most recipes add no submodule, and a property costs a call for each layer and step.
    with_state = {layer: name for layer, name in layers.items() if layer._modules}
    learned = [(name, layer.steps) for layer, name in with_state.items() if layer.steps is not None]
    samplings = [layer.sampling for layer in with_state if layer.sampling is not None]
    for layer in layers:
        layer.end_step()
    for _, steps in learned:
        steps.advance()
    if learned:
        from narrowgauge.nn.learned_step import warn_of_untrained

        warn_of_untrained(learned)
    if samplings:
        from narrowgauge.nn.leverage_score import decide

        decide(samplings)
    if histories := [each for layer in with_state for each in (layer.scaling or {}).values()]:
        from narrowgauge.nn.amax_history import roll_history

        roll_history(histories)


@torch.no_grad()
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with _LOCK:
        layers, models = set(_LAYERS), list(_MODELS)
    for layer in layers:
        if layer.steps is not None and (weight := _parameter(layer)) is not None:
            layer.steps.saw_optimizer(weight, held)
    alone = [each for each in layers if any(id(own) in held for own in _held_parameters(each))]
    # Inside a backward pass (an optimizer per parameter): layers further
    # ahead have not received their gradients, and checkpointing repeats
    # forward passes with the old scales. Only clear casts.
    if torch._C._current_graph_task_id() != -1:
        for layer in alone:
            layer.empty_cache(keep=True)
        return
    # By layer, not by name: two models in one optimizer may have layers of equal names.
    ended: dict[QLinear, str] = {}
    for model in models:
        if any(id(parameter) in held for parameter in model.parameters()):
            ended |= {each: name for name, each in model.named_modules() if each in layers}
    ended |= {each: "" for each in alone if each not in ended}
    if ended:
        names = {
            each: name or f"layer {number}" for number, (each, name) in enumerate(ended.items())
        }
        end_steps(names, alone)  # under pipeline parallelism other ranks hold the other layers
    if any(
        (weight := _parameter(each)) is not None and weight.dtype == torch.float16 for each in ended
    ):
        from narrowgauge.nn.step_warnings import warn_of_float16

        warn_of_float16({each: name for each, name in ended.items() if each in alone}, optimizer)
    for layer in ended:
        layer.state.step_ended = True
    from narrowgauge.nn.unconverted_copies import end_step

    end_step(models, ended.keys())


def _parameter(layer: Any) -> torch.Tensor | None:
    """The parameter with the layer's weight, also of an embedding and of one expert's matrix."""
    return layer._parameters.get("weight") if isinstance(layer, nn.Embedding) else layer.parameter


def _held_parameters(layer: Any) -> Iterable[torch.Tensor]:
    own = layer._parameters.values() if isinstance(layer, nn.Embedding) else layer.held_parameters()
    return cast(Iterable[torch.Tensor], own)
