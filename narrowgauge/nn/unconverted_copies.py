"""Detect a copy of a converted model that computes without its recipes, such as a DPO reference.

The search runs once per converted model, at the end of its first optimizer step. A copy is another
module of the same class whose ordinary Linears have the same names, shapes and nearly the same
weights. The warning follows if a copy computes without gradients in the second step, after the
model. Two models that train side by side are compared on purpose and are not reported.

Cost: one pass over Python's objects, some tens of milliseconds, and
forward hooks for one step if there is a copy. Nothing is searched if
torch.compile has compiled anything: its guards would see the hook.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from narrowgauge.addresses import dry_run_on
from narrowgauge.errors import warn
from narrowgauge.nn.bypassed_weights import has_compiled

NEAR = 0.1  # relative difference of the first weight; independent initializations differ by 1.4
_looked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def end_step(models: Iterable[nn.Module], ended: Collection[Any]) -> None:
    """Run the search at the end of an optimizer step.

    models  converted models
    ended   layers whose step has ended
    """
    if dry_run_on() is not None:  # fake weights cannot be compared
        return
    for model in models:
        if any(layer in ended for layer in model.modules()):
            _end_step_of(model, ended)


def _end_step_of(model: nn.Module, layers: Collection[Any]) -> None:
    for handle in _hooks.pop(model, ()):
        handle.remove()
    if model in _looked:
        return
    _looked.add(model)
    own = {
        name: layer
        for name, layer in model.named_modules()
        # A copy has no layers for the matrices of its experts.
        if layer in layers and layer.recipe is not None and "weight" in layer._parameters
    }
    if not own or has_compiled():
        return
    inside = {id(module) for module in model.modules()}
    others = [
        each for each in gc.get_objects() if type(each) is type(model) and id(each) not in inside
    ]
    copies = [each for each in others if _is_wide_copy(each, own)]
    if copies:
        hook = _Hook(model, list(own.values()), copies)
        _hooks[model] = [each.register_forward_pre_hook(hook) for each in copies]


def _is_wide_copy(other: nn.Module, own: dict[str, Any]) -> bool:
    modules = dict(other.named_modules())
    for name, layer in own.items():
        found: Any = modules.get(name)
        if type(found) is not layer.original or found.weight.shape != layer.weight.shape:
            return False
    name, first = next(iter(own.items()))
    one, two = first.weight.detach(), modules[name].weight.detach()
    if type(one) is not type(two) or one.is_meta or two.is_meta:
        return False
    one, two = one.float(), two.float().to(one.device)
    return bool((one - two).norm() < NEAR * one.norm())


def _nothing(module: nn.Module, inputs: Any) -> None:
    """The hook of a copied copy: does nothing."""


class _Hook:
    """Forward hook for one step: warns once, of the first copy that computes."""

    def __init__(self, model: nn.Module, layers: list[Any], copies: list[nn.Module]) -> None:
        self.model = weakref.ref(model)
        self.layers = [weakref.ref(layer) for layer in layers]
        self.copies = weakref.WeakSet(copies)

    def __reduce__(self) -> Any:
        """Copies and pickles of a model get a hook that does nothing."""
        return "_nothing"

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() or module not in self.copies or (model := self.model()) is None:
            return
        # The model must have computed in this step already, as a policy does before its reference.
        if not any(
            layer is not None and layer.state.was_called
            for layer in (each() for each in self.layers)
        ):
            return
        self.copies.clear()
        recipe = next(layer.recipe.name for each in self.layers if (layer := each()) is not None)
        warn(
            f"A second {type(model).__name__} with the weights of the one that trains in recipe {recipe!r} computes without a recipe "
            "beside it, so that their outputs differ by the error of the casts. Call narrowgauge.convert_like(model, copy) before "
            "training, where the two are compared as policy and reference.",
            code="convert.second-copy",
            stacklevel=2,
        )
