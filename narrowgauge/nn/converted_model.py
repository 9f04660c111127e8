"""Functions for a model with converted layers: end its step, suspend its recipes, count bad amaxes.

    advance(model)              the optimizer has stepped
    with suspended(model): ...  a reference pass with the same weights, without recipes
    nonfinite_amax(model)       {("layers.0.up", "x"): 3}

`narrowgauge.conversion` makes such models. This file is below it, so that a training loop, a guard
and a pipeline stage need not import what chooses recipes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from narrowgauge.nn import step_end
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.nn.embedding import QEmbedding
from narrowgauge.nn.fp8_attention import fp8_states
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.narrow_layer import narrow_layers, resumption
from narrowgauge.structure import require_module


def quantized_linears(model: nn.Module, verb: str) -> Iterator[tuple[str, QLinear]]:
    """(name, layer) of each converted Linear. Raises ConfigError, naming `verb`, if `model` is no module."""
    require_module(model, verb)
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QLinear))


def quantized_embeddings(model: nn.Module) -> Iterator[tuple[str, QEmbedding]]:
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, QEmbedding)
    )


@contextmanager
def suspended(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the block, every QLinear computes as nn.Linear and embeddings are unquantized.

    Attention in FP8, and low-precision Linears of other libraries (`foreign_modules`), compute in
    16 bits too.

    Of a QLinear only a flag is set. A suspended pass reads and records no amax, reads and fills no cache, and
    draws no random number, since `QLinear.forward` returns before any of these. Histories and casts
    stay as they are. A step that ends inside the block ends as always (`step_end`).
    """
    require_module(model, "suspended")
    layers: list[Any] = [layer for _, layer in narrow_layers(model)]
    layers += [layer for _, layer in quantized_embeddings(model)]
    layers += fp8_states(model)
    resumptions = [resumption(layer) for layer in layers]
    try:
        for layer in layers:
            layer.is_suspended = True
        yield model
    finally:
        for resume in resumptions:
            resume()


def advance(model: nn.Module) -> None:
    """End an optimizer step: update amax histories and clear the quantized weights.

    Learned steps count down their cold start and are clamped to positive values. A GEMM that may
    sample its rows decides for the next step, by the variance that was predicted in this one.

    The optimizers of torch and of narrowgauge.optim end the step themselves (nn/step_end.py). A
    call after `optimizer.step()` then only clears casts made since, and makes the end of the step
    visible in the loop. The call is required if no such optimizer steps: weights written by hand, a
    step traced by torch.compile, steps inside a backward pass.

    With weight_codes="step", the default on a CPU and in compiled code, each weight is cast once per
    step and reused over micro-batches. Before the first step it is cast at each forward pass.

    No host synchronization, except one small read if a recipe samples rows, and one per layer in the
    cold start of learned steps. Warns once of learned steps that no optimizer updates.
    """
    require_module(model, "advance")
    layers = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, QLinear | QEmbedding)
    }
    step_end.end_steps(
        {layer: name for layer, name in layers.items() if not layer.state.step_ended}
    )
    for layer in layers:
        # The hook of an optimizer has ended this step already: only clear casts made since.
        if layer.state.step_ended:
            layer.end_step()
            layer.state.step_ended = False


def nonfinite_amax(model: nn.Module) -> dict[tuple[str, str], int]:
    """(layer, role) -> number of steps with a non-finite amax; layers without any are omitted.

    Synchronizes with the device.
    """
    found = {}
    for name, layer in quantized_linears(model, "nonfinite_amax"):
        for role, history in (layer.scaling or {}).items():
            assert isinstance(history, AmaxHistory)
            if count := int(history.nonfinite):
                found[name, role] = count
    return found
