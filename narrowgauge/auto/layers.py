"""The decisions of `auto` for the Linears of a model: one measurement per shape, and choices that an earlier run made."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from narrowgauge.auto import CANDIDATES, Decision, decide
from narrowgauge.auto.measure import Problem
from narrowgauge.errors import ConfigError, closest
from narrowgauge.nn.linear import QLinear


def decisions(
    layers: Mapping[str, nn.Linear], tokens: int | None, compiled: bool, choices: Mapping[str, str] | None
) -> dict[str, Decision]:
    """Layer -> its decision, equal for layers of one shape.

    tokens   rows of the matrices that a forward pass multiplies: sequences of a micro-batch times their length
    choices  layer -> recipe, of `chosen` in an earlier run: nothing is measured. ConfigError if it is not for these layers.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"convert: 'auto' chooses by the sizes of the products, and tokens is {tokens!r}. "
            "Give tokens=, the sequences of a micro-batch times their length."
        )
    if choices is not None:
        return _given(layers, tokens, choices)
    made: dict[tuple[object, Problem], Decision] = {}
    found = {}
    for name, layer in layers.items():
        weight = layer.weight
        problem = Problem(
            tokens=tokens, inputs=layer.in_features, outputs=layer.out_features, dtype=weight.dtype,
            biased=layer.bias is not None, trains=weight.requires_grad, compiled=compiled,
        )  # fmt: skip
        if (weight.device, problem) not in made:
            made[weight.device, problem] = decide(problem, weight.device)
        found[name] = made[weight.device, problem]
    return found


def _given(layers: Mapping[str, nn.Linear], tokens: int, choices: Mapping[str, str]) -> dict[str, Decision]:
    for name in layers:
        if name not in choices:
            near = closest(name, choices)
            raise ConfigError(
                f"convert: the choices that were given have none for {name!r}{f', only {near}' if near else ''}. "
                "Give those of the same model, or leave them out to choose anew."
            )
        if choices[name] not in CANDIDATES:
            raise ConfigError(
                f"convert: the choice given for {name!r} is {choices[name]!r}; it must be one of {', '.join(CANDIDATES)}."
            )
    return {name: Decision(recipe=choices[name], tokens=tokens, how="given") for name in layers}


def chosen(model: nn.Module) -> dict[str, str]:
    """Layer -> recipe, of the layers that `auto` decided about; what `convert(..., choices=...)` takes."""
    return {name: decision.recipe for name, decision in _decided(model)}


def summary(model: nn.Module) -> list[str]:
    """A line for each shape and decision: "4096 -> 14336 (32 layers): fp8-row (auto, measured at ...)"."""
    groups: dict[str, int] = {}
    for name, decision in _decided(model):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter)
        words = f"{weight.shape[1]} -> {weight.shape[0]} {{}}: {decision.recipe} ({decision})"
        groups[words] = groups.get(words, 0) + 1
    return [words.format(f"({count} layer{'s' if count > 1 else ''})") for words, count in groups.items()]


def _decided(model: nn.Module) -> list[tuple[str, Decision]]:
    return [
        (name, layer.decision)
        for name, layer in model.named_modules()
        if isinstance(layer, QLinear) and isinstance(layer.decision, Decision)
    ]
