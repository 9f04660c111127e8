"""fuse: norms and activations hand the Linears that read them their input already cast. `convert(model, recipe, fuse=True)`.

    before   norm writes y; q, k and v find in `nn.caches` that they read one tensor, and the first casts it
    after    the kernel that computes y casts it in the same pass, and hands the codes over with y

What is fused, found by structure in the blocks of transformers (patterns.py):

    RMSNorm, LayerNorm         before q, k, v, before gate and up, before the first Linear of an MLP
    silu(gate) * up            before down; its backward pass hands gate and up their gradients, cast
    GELU, and GELU by tanh     before the second Linear of an MLP; its backward pass hands the first one its gradient, cast
    rotary embedding           queries and keys of an attention in one kernel, forward and backward; casts nothing

Nothing is taken on a name alone: a module is fused only if it computes, on random numbers, what the kernel computes. A layer takes
what is handed over only if it reads that very tensor and its recipe asks for that very cast (`nn.caches`); else it casts for itself, as
ever. So fusing changes no number but those of the functions themselves, which a kernel rounds once where PyTorch rounds between
operations; where no kernel runs (on the CPU, under torch.compile, by a recipe that rotates) the module's own code does, and the
numbers are to the bit those without.

With delayed scaling the window of the first reader is the window of all: they see the same tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.errors import ConfigError
from narrowgauge.fuse.forward import FusedForward, Fusion, Save
from narrowgauge.fuse.patterns import Place, places
from narrowgauge.fuse.precast import FusedMlp, FusedModule
from narrowgauge.fuse.probe import gated, kind_of, refuse_rotary
from narrowgauge.fuse.rotary import FusedAttention, function_of
from narrowgauge.nn.float32_modules import Float32Forward
from narrowgauge.nn.linear import QLinear

__all__ = ["Fusion", "Save", "fuse", "fusions", "unfuse"]


def fuse(model: nn.Module, save: Save | None = None) -> list[Fusion]:
    """Puts fused functions where the structure of the model and its recipes allow them; in place. Those of before are made anew.

    save  what they keep for backward: "exact", or "fp8" or "int8" with gradients that are near (keeping.py); where no kernel computes,
          the definition in plain torch does. None: "exact" where a kernel computes, and elsewhere the module's own code
    """
    if save not in (None, *get_args(Save)):
        names = ", ".join(map(repr, get_args(Save)))
        raise ConfigError(f"fuse: save = {save!r}; it is one of {names}, or None for what a kernel does by itself.")
    unfuse(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    holders = Counter(child for module in model.modules() for child in module.children())
    refused: dict[str, str] = {}
    for place in places(model):
        # On the CPU and with numbers, whatever the default device is, or a mode that makes tensors fake.
        with torch.device("cpu"), _disable_current_modes():
            found = _fused(place, modules, holders, save)
        if isinstance(found, str):
            refused[place.name] = found
        else:
            modules[place.name].__dict__["forward"] = found
    model.__dict__["_not_fused"] = refused
    return fusions(model)


def unfuse(model: nn.Module) -> None:
    """Gives every module its own forward back."""
    for module in model.modules():
        fused = module.__dict__.get("forward")
        if isinstance(fused, FusedForward):
            del module.__dict__["forward"]
            if fused.kept is not None:
                module.__dict__["forward"] = fused.kept
    model.__dict__.pop("_not_fused", None)


def fusions(model: nn.Module) -> list[Fusion]:
    """What `fuse` did, and what the recipes make of it now; empty for a model that was not fused."""
    if "_not_fused" not in model.__dict__:
        return []
    found = []
    for place in places(model):
        forward = model.get_submodule(place.name).__dict__.get("forward")
        if isinstance(forward, FusedForward):
            found.append(forward.fusion(place.name, place.readers))
        else:
            reason = model.__dict__["_not_fused"].get(place.name, "it came after the model was fused")
            found.append(Fusion(name=place.name, readers=place.readers, reason=reason))
    return found


def _fused(
    place: Place, modules: dict[str, nn.Module], holders: Counter[nn.Module], save: Save | None
) -> FusedForward | str:
    """What stands in for a module's forward, or why nothing does. holders: by how many modules each is held."""
    module = modules[place.name]
    if place.form != "rotary" and not place.readers:
        return "no Linear is found that reads it"
    if place.between is not None and getattr(modules[place.between], "p", 0.0) > 0:
        return f"{place.between} lies between it and its reader"
    kept = module.__dict__.get("forward")
    if kept is not None and not (isinstance(kept, Float32Forward) and place.form == "module"):
        return "its forward was replaced by somebody else"
    if place.form == "rotary":
        function = function_of(module)
        assert function is not None
        return refuse_rotary(function) or FusedAttention(module, function, save=save)
    shared = [name for name in (place.name, *place.readers, *place.sources) if holders[modules[name]] > 1]
    if shared:
        return f"several modules share {shared[0]}"
    readers, sources = (tuple(modules[name] for name in names) for names in (place.readers, place.sources))
    if not any(isinstance(each, QLinear) for each in readers):
        kind = type(readers[0]).__name__
        return f"{place.readers[0]} is {'an' if kind[0] in 'AEIOU' else 'a'} {kind}, which has no recipe"
    if place.form == "module":
        found = kind_of(module)
        if isinstance(found, str):
            return found
        kind = replace(found, wide=kept is not None)
        return FusedModule(module, kind, readers, sources, save=save, kept=kept)
    if len({each.weight.dtype for each in (*readers, *sources)}) > 1:  # T5 converts what its wider last one reads
        return "its Linears have weights of several types"
    names = [name.rpartition(".")[2] for name in (*place.sources, *place.readers)]
    found = gated(module, *names)
    return found if isinstance(found, str) else FusedMlp(module, found, readers, sources, names=tuple(names), save=save)
