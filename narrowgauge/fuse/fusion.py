"""fuse and unfuse: put fused functions in the place of modules' `forward`, take them out again, and say of each what became of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.fuse.forward import FusedForward, Fusion
from narrowgauge.fuse.patterns import Place, places
from narrowgauge.fuse.precast import FusedMlp, FusedModule
from narrowgauge.fuse.probe import gated, kind_of, refuse_rotary
from narrowgauge.fuse.rotary import FusedAttention, function_of
from narrowgauge.nn.linear import QLinear


def fuse(model: nn.Module) -> list[Fusion]:
    """Puts fused functions where the structure of the model and its recipes allow them; in place. Those of before are made anew."""
    unfuse(model)
    modules = dict(model.named_modules())
    refused: dict[str, str] = {}
    for place in places(model):
        # On the CPU and with numbers, whatever the default device is, or a mode that makes tensors fake.
        with torch.device("cpu"), _disable_current_modes():
            found = _fused(place, modules)
        if isinstance(found, str):
            refused[place.name] = found
        else:
            modules[place.name].__dict__["forward"] = found
    model.__dict__["_not_fused"] = refused
    return fusions(model)


def unfuse(model: nn.Module) -> None:
    """Gives every module its own forward back."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), FusedForward):
            del module.__dict__["forward"]
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


def _fused(place: Place, modules: dict[str, nn.Module]) -> FusedForward | str:
    """What stands in for a module's forward, or why nothing does."""
    module = modules[place.name]
    if place.form != "rotary" and not place.readers:
        return "no Linear is found that reads it"
    if "forward" in module.__dict__:
        return "its forward was replaced by somebody else"
    if place.form == "rotary":
        function = function_of(module)
        assert function is not None
        return refuse_rotary(function) or FusedAttention(module, function)
    if sum(any(child is module for child in each.children()) for each in modules.values()) > 1:
        return "several modules share it, each with a reader of its own"
    readers, sources = (tuple(modules[name] for name in names) for names in (place.readers, place.sources))
    if not any(isinstance(each, QLinear) for each in readers):
        kind = type(readers[0]).__name__
        return f"{place.readers[0]} is {'an' if kind[0] in 'AEIOU' else 'a'} {kind}, which has no recipe"
    if place.form == "module":
        found = kind_of(module)
        return found if isinstance(found, str) else FusedModule(module, found, readers, sources)
    names = [name.rpartition(".")[2] for name in (*place.sources, *place.readers)]
    found = gated(module, *names)
    return found if isinstance(found, str) else FusedMlp(module, found, readers, sources, names=tuple(names))
