"""The end of an optimizer step: by `advance`, a line of the training loop, or by torch's optimizers themselves.

torch calls `_after_step` after every `optimizer.step()` (torch.optim.optimizer.register_optimizer_step_post_hook, registered with the
first layer). It ends the step of the models that were converted as a whole, and of the layers that stand alone, of which the
optimizer holds a parameter: also of those whose weights it does not move, as under LoRA. So a weight that is written without a sign,
by a fused optimizer, is cast anew. `advance` after it only forgets the casts of those layers made since: their step has ended already.
In eager mode a layer that trains again in between has begun another step, which `advance` ends.

Casts that were reused on a GPU although the weight was written meanwhile, as `nn.caches` tells later, are reported here.

A step inside a backward pass (an optimizer per parameter) ends nothing, since layers further ahead have not seen their gradients; the
casts of its weights are forgotten. Where a GradScaler skips the step, torch calls nothing, and the windows go on taking maxima. A step
that torch.compile traces, an optimizer that is none of torch's, and weights written by hand need the line.

Learned steps are told of the optimizer as well: none may hold them (`learned_step`). Followed are weak references to models and layers,
and nothing else is global.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

QLinear = Any  # nn.linear imports this
_LAYERS: weakref.WeakSet[QLinear] = weakref.WeakSet()
_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_LOCK = threading.RLock()  # of both: weak sets may not grow while they are read
_registered: list[Any] = []  # torch's handle, so that it is done once


def follow_layer(layer: QLinear) -> None:
    """From now on the steps of torch's optimizers that hold a parameter of the layer are steps of it."""
    with _LOCK:
        if not _registered:
            _registered.append(register_optimizer_step_post_hook(_after_step))
        _LAYERS.add(layer)


def follow_model(model: nn.Module) -> None:
    """And of all layers of a model, whichever of its parameters the optimizer holds."""
    with _LOCK:
        _MODELS.add(model)


def forget(layer: QLinear) -> None:
    with _LOCK:
        _LAYERS.discard(layer)


def end_steps(layers: dict[QLinear, str], held: Collection[QLinear] | None = None) -> None:
    """Layer -> name. Windows take over the amax that was seen, learned steps count their cold start down, samplers decide.

    Before that, what ranks saw of the layers that they share is agreed on. held: those whose parameters an optimizer steps; None: all.
    """
    from narrowgauge.nn import reached
    from narrowgauge.nn.step_warnings import warn_of_eval, warn_of_ranks

    reached.end_step(layers)
    if any(layer.suspects for layer in layers):
        from narrowgauge.nn.step_warnings import warn_of_unseen_writes

        warn_of_unseen_writes(layers)
    warn_of_ranks(layers if held is None else held)
    if held is not None:
        warn_of_eval(layers)
    states = {id(layer.peers.state): layer.peers.state for layer in layers if layer.peers is not None}
    for state in sorted(states.values(), key=lambda each: each.creation_index):
        state.end_step(layers.keys())
    learned = [(name, layer.steps) for layer, name in layers.items() if layer.steps is not None]
    samplings = [layer.sampling for layer in layers if layer.sampling is not None]
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
    if windows := [each for layer in layers for each in (layer.scaling or {}).values()]:
        from narrowgauge.nn.amax_history import roll_history

        roll_history(windows)


@torch.no_grad()
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with _LOCK:
        layers, models = set(_LAYERS), list(_MODELS)
    for layer in layers:
        if layer.steps is not None and (weight := layer._parameters.get("weight")) is not None:
            layer.steps.saw_optimizer(weight, held)
    alone = [each for each in layers if any(id(own) in held for own in each._parameters.values())]
    if torch._C._current_graph_task_id() != -1:  # inside a backward pass
        for layer in alone:
            layer.empty_cache(keep=True)
        return
    ended: dict[QLinear, str] = {}
    for model in models:
        if any(id(parameter) in held for parameter in model.parameters()):
            ended |= {each: name for name, each in model.named_modules() if each in layers}
    ended |= {each: "" for each in alone if each not in ended}
    if ended:
        names = {each: name or f"layer {number}" for number, (each, name) in enumerate(ended.items())}
        end_steps(names, alone)  # of a model that is cut, other ranks hold the others
    if any((weight := each._parameters.get("weight")) is not None and weight.dtype == torch.float16 for each in ended):
        from narrowgauge.nn.step_warnings import warn_of_float16

        warn_of_float16({each: name for each, name in ended.items() if each in alone}, optimizer)
    for layer in ended:
        layer.step_ended = True
    from narrowgauge.nn.wide_copies import end_step

    end_step(models, ended.keys())
