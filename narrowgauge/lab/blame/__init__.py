"""Blame: find inaccurate GEMMs in a model, the reason for the error, and its effect.

    from narrowgauge.lab.blame import blame

    sound = blame(model, batch)                    # a batch of keyword arguments, or a function
                                                   # that runs forward and backward
    found = blame(model, batch, baseline=sound)    # at a later step, or without a baseline
    print(found)                                   # a table, sentences, and the setting to use:
                                                   # recipe.layers = ["layers.1.up_proj=bf16:grad_weight"]

Each GEMM (output, grad_input, grad_weight) of each converted Linear is measured in one step
(`measure`) and judged (`judge`), and the first suspects are confirmed (`confirm`). Model, amax
histories, random generators and gradients are restored bit for bit (`undisturbed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge.errors import ConfigError, Reason
from narrowgauge.lab.blame.confirm import by_gradient
from narrowgauge.lab.blame.judge import SMALLEST, Baseline, found_in
from narrowgauge.lab.blame.report import Blame, Confirmation
from narrowgauge.lab.blame.watch import OPERANDS, Key, converted, of_all_ranks, watching
from narrowgauge.nn.narrow_layer import unobserved, words_on_unknown
from narrowgauge.snapshot import undisturbed
from narrowgauge.structure import require_module

if TYPE_CHECKING:
    from narrowgauge.lab.blame.measure import Product
    from narrowgauge.nn.narrow_layer import NarrowLayer

__all__ = ["Blame", "Confirmation", "blame", "observed"]

CONFIRMED = 3  # number of suspects that are confirmed by default


def blame(
    model: nn.Module,
    step: Mapping[str, Any] | Callable[[], object],
    *,
    baseline: Blame | Baseline | None = None,
    confirm: int = CONFIRMED,
    at_once: int = 0,
) -> Blame:
    """Observe one step and name the inaccurate GEMMs.

    step      keyword arguments of the model, which must return a loss (`.loss`, or the first of a
              tuple); or a function without arguments that runs forward and backward of all
              micro-batches. Confirmations call it again, so it must be repeatable
    baseline  result of `blame` at a sound step of the same model, or its `baseline`; None: GEMMs
              are compared with others of their kind
    confirm   number of suspects to confirm, by the gradient with each one alone in 16 bits; 0 on
              several ranks
    at_once   layers observed in one pass; 0: all. Inputs of observed layers are saved unquantized
              until their backward pass, so more layers need more memory

    Costs a step, two float32 or float64 GEMMs for each GEMM, and the memory given in `measure`. On
    several ranks (DistributedDataParallel, fully_shard, tensor parallel) all ranks call it with
    their own data; it adds one collective. Raises ConfigError for a model without converted
    Linears, for one whose GEMMs are not visible (compiled), and for optimizers that step in
    backward hooks.
    """
    require_module(model, "blame")
    compute = step if callable(step) else _of_batch(model, step)
    _refuse(model)
    found = observed(model, compute, at_once=at_once)
    if baseline is not None:
        found = found.beside(baseline)
    suspects = found.suspects[:confirm]
    if not suspects:
        return found
    # Each rank has only its part of the gradient, so a comparison would need collectives per
    # suspect.
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        note = Reason(
            "blame.unconfirmed",
            "Suspects are not confirmed on several ranks, of which each has its part of the gradient.",
        )
        return replace(found, notes=(*found.notes, note))
    return replace(found, confirmations=tuple(by_gradient(model, compute, suspects)))


def observed(
    model: nn.Module, compute: Callable[[], object], *, at_once: int = 0, trace: bool = False
) -> Blame:
    """Findings of one step, without confirmation. trace: the caller restores the model."""
    layers = converted(model)
    if not layers:
        raise ConfigError(
            "blame: no Linear of the model computes by a recipe. Convert it first, and leave `suspended`.",
            code="blame.not-converted",
        )
    products: dict[Key, Product] = {}
    for first in range(0, len(layers), at_once or len(layers)):
        some = layers[first : first + (at_once or len(layers))]
        # Each pass repeats the whole step for the next layers, so every pass must start from the
        # same state.
        with nullcontext() if trace else undisturbed(model), watching(some, products):
            compute()
    products = of_all_ranks(products)
    hidden = {name: reason for name, each in layers if (reason := unobserved(each))}
    if not products and hidden:
        name, reason = next(iter(hidden.items()))
        raise ConfigError(
            f"blame: no product was seen in the step. Of {len(hidden)} layers, {name} the first, {reason}. narrowgauge.Guard judges them "
            "by their loss and gradients.",
            code="blame.hidden",
        )
    if not products:
        raise ConfigError(
            "blame: no product was seen in the step. Compiled code cannot be observed: give the model that was compiled, and a step that "
            "calls it.",
            code="blame.compiled",
        )
    recipes = {name: layer.recipe for name, layer in layers}
    notes = [*_notes(products, layers), *_notes_on_foreign(model, layers)]
    foreign = tuple(name for name, each in layers if not isinstance(each, nn.Module))
    return Blame(tuple(found_in(products, recipes)), notes=tuple(notes), foreign=foreign)


def _notes(products: Mapping[Key, Product], layers: list[tuple[str, NarrowLayer]]) -> list[str]:
    notes: list[str] = []
    # Sampling noise averages out over steps, and a comparison with all rows would count it as an
    # error.
    if sampling := [
        layer.sampling
        for _, layer in layers
        if layer.sampling is not None and layer.sampling.active
    ]:
        most = max(
            float(each.variance[each.PRODUCTS.index(name)])
            for each in sampling
            for name in each.active
        )
        notes.append(
            Reason(
                "blame.sampling",
                f"{len(sampling)} layers sample rows of the gradient, which adds a variance of up "
                f"to {most:.2g} of its square. That averages "
                "out over steps and is not counted: products are judged by the rows that they read.",
            )
        )
    if unseen := [
        name for name, each in layers if (name, "output") not in products and not unobserved(each)
    ]:
        notes.append(
            Reason(
                "blame.not-called",
                f"{len(unseen)} converted layers were not called in the step, {unseen[0]} the first.",
            )
        )
    for product in OPERANDS:
        narrow = sum(
            name == product and (each.lhs.is_narrow or each.rhs.is_narrow)
            for (_, name), each in products.items()
        )
        if 0 < narrow < SMALLEST:
            notes.append(
                Reason(
                    "blame.too-few",
                    f"Of {product} {narrow} products are narrow, too few to judge one by the others: give a healthy step as baseline.",
                )
            )
    if any(product == "output" for _, product in products) and not any(
        name != "output" for _, name in products
    ):
        notes.append(
            Reason(
                "blame.no-gradient",
                "No gradient was seen: the step has no backward pass, or nothing of these layers trains.",
            )
        )
    return notes


def _notes_on_foreign(model: nn.Module, layers: list[tuple[str, NarrowLayer]]) -> list[str]:
    """Notes on layers of other libraries: which are not observed, and how they get 16 bits."""
    notes: list[str] = []
    for reason in dict.fromkeys(unobserved(each) for _, each in layers):
        own = [name for name, each in layers if unobserved(each) == reason]
        if reason:
            words = f"{len(own)} layers were not observed, {own[0]} the first: {reason}."
            notes.append(Reason("blame.hidden", words))
    if words := words_on_unknown(model):
        notes.append(words)
    foreign = [name for name, each in layers if not isinstance(each, nn.Module)]
    if foreign:
        notes.append(
            Reason(
                "blame.foreign",
                f"{len(foreign)} layers are computed by another library, {foreign[0]} the first. Leave a suspect in 16 "
                "bits where that library converts the model (torchao: module_filter_fn).",
            )
        )
    return notes


def _of_batch(model: nn.Module, batch: Mapping[str, Any]) -> Callable[[], object]:
    def compute() -> object:
        output = model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = output[0] if isinstance(output, tuple) else output
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"blame: the model returned {type(output).__name__} without a loss. Put the labels into the batch, or give a function "
                "that does forward and backward.",
                code="blame.no-loss",
            )
        loss.backward()
        return loss

    return compute


def _refuse(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        # An optimizer step in such a hook would change weights before later layers are observed.
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"blame: a hook acts on the gradient of {name!r} as soon as it is whole, as a step in backward does, and would change the "
                "model. Remove the hooks for the call.",
                code="blame.step-in-backward",
            )
