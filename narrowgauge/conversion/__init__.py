"""convert: assign recipes to the Linears of a model, in place. advance: end an optimizer step.

    convert(model, "fp8-current")
    convert(model, {"*": "fp8-row", "layers.0.*": "bf16", "lm_head": "fp8-row"})  later patterns win
    convert(model, {"*": "fp8-row", "layers.1.down_proj": "bf16:grad_weight"})    one GEMM

A layer keeps its identity: only its class becomes QLinear. The module object, its parameters,
hooks, tied weights and users stay the same. Patterns are shell wildcards and ranges over dotted
names (see `structure`). A pattern without a leading `*` also matches the end of a name, from a dot
on: "mlp.up_proj" matches "model.layers.0.mlp.up_proj".

Output heads and routers (`kept_layers.KEPT`) keep their precision unless the last part of a pattern names
them in letters: their errors go straight into the loss or flip a discrete choice. Embeddings and
norms are no Linears and are unchanged. `embeddings` quantizes looked-up rows.

Blocks that the recipe keeps in high precision (`wide_blocks`) become bf16,
unless the pattern that applies to a layer spells out the block's number
("layers.11.*", "layers.10-11.*", "layers.[0-9]*.*").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

from torch import nn

from narrowgauge import recipes
from narrowgauge.conversion.auto import Decision, decisions
from narrowgauge.conversion.bypassed import refuse_fast_path, warn
from narrowgauge.conversion.embeddings import (
    check_embeddings,
    quantize_embeddings,
    quantized_embeddings,
    restore_embeddings,
)
from narrowgauge.conversion.kept_layers import LEFT_BY, output_head, reason_to_keep, wide_by_policy
from narrowgauge.conversion.products import Some, composed, parse
from narrowgauge.errors import ConfigError, closest
from narrowgauge.fuse import Save, unfuse
from narrowgauge.fuse import fuse as fuse_producers
from narrowgauge.nn import step_end
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.nn.cast_sources import SharedInputs
from narrowgauge.nn.embedding import Codes, QEmbedding
from narrowgauge.nn.linear import QLinear, WeightCodes
from narrowgauge.recipe import Recipe
from narrowgauge.structure import matches, require_module

_WITHOUT = "Or leave convert out; narrowgauge train does with --recipe none."

Patterns = str | Recipe | Some | Mapping[str, "str | Recipe | Some | None"]


def convert(
    model: nn.Module,
    recipe: Patterns | None,
    *,
    tokens: int | None = None,
    compiled: bool = False,
    choices: Mapping[str, str] | None = None,
    fuse: bool = False,
    save: Save | None = None,
    weight_codes: WeightCodes = "auto",
    embeddings: Codes | None = None,
) -> nn.Module:
    """Assign recipes to the Linears of `model`, in place, and return the model.

    recipe        a name or Recipe for all Linears that kept_layers.KEPT does not exclude; or pattern -> name,
                  Recipe or None (ordinary Linear), later patterns win; "NAME:PRODUCTS" for some
                  GEMMs of a layer. None turns every QLinear back into an nn.Linear. "auto": the
                  fastest recipe for each layer's sizes (conversion/auto.py); the model must have
                  its device and dtype by then
    tokens        (auto) rows of a forward pass: sequences of a micro-batch times their length
    compiled      (auto) the model will be compiled, so the candidates are measured compiled
    choices       (auto) layer -> recipe, from `auto.chosen` in an earlier run; nothing is measured
    fuse          norms and activations quantize their output for the Linears that read it
                  (narrowgauge/fuse); active until recipe is None
    save          (fuse) tensors that fused functions save for backward: "exact", or "fp8" or "int8"
                  with approximate gradients (fuse/saving.py)
    weight_codes  caching of quantized weights, with equal results: "recast" caches nothing, and
                  backward casts the weight again; "step" caches for one optimizer step, 2 bytes per
                  weight, and further micro-batches cast none. "auto": "recast" on a GPU, "step" on
                  a CPU. In compiled code "step" and "auto" save the codes that backward reads, one
                  byte per weight, and each micro-batch casts
    embeddings    "int4" or "int8": rows of every nn.Embedding are quantized with a learned step
                  (nn/embedding.py); active until recipe is None

    A second call replaces the recipes of the layers that its patterns match,
    and leaves the others. Raises ConfigError if a pattern matches nothing,
    with the closest names, and if no layer at all could be converted.
    """
    require_module(model, "convert")
    if weight_codes not in get_args(WeightCodes):
        raise ConfigError(
            f"convert: weight_codes = {weight_codes!r}; it is one of {', '.join(map(repr, get_args(WeightCodes)))}.",
            code="convert.weight-codes",
        )
    if save is not None and not fuse:
        raise ConfigError(
            f"convert: save = {save!r} says what fused norms and activations keep, and fuse is off. Pass fuse=True, or leave save out.",
            code="convert.save-without-fuse",
        )
    if embeddings is not None:
        check_embeddings(model, embeddings)
    if recipe is None:
        # Check every layer before the first one changes, so that an error
        # leaves the model as it was.
        for _, quantized in _quantized(model):
            quantized.refuse(None)
        for _, quantized in _quantized(model):
            quantized.restore()
        for module in model.modules():
            module.__dict__.pop(LEFT_BY, None)
        restore_embeddings(model)
        unfuse(model)
        refuse_fast_path(model)
        return model
    resolved = _resolved(recipe)
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    if not linears:
        raise ConfigError(
            f"convert: {type(model).__name__} holds no nn.Linear, so there is nothing to convert. "
            f"Layers of other classes (such as transformers' Conv1D) must be replaced by nn.Linear first. {_WITHOUT}",
            code="convert.no-linear",
        )
    matching = {
        name: patterns for name, patterns in _matching(model, linears, resolved).items() if patterns
    }
    refuse_lazy(linears, matching, resolved)
    head = output_head(model)
    kept = {
        name: reason_to_keep(name, linears[name], patterns, head)
        for name, patterns in matching.items()
    }
    if all(kept.values()):
        raise ConfigError(
            f"convert: nothing to convert, every Linear that was named is kept: {_reasons(model, kept)}",
            code="convert.all-kept",
        )
    given: dict[
        str, tuple[Recipe | None, str, Decision | None]
    ] = {}  # layer -> its recipe, reason and decision
    wide: dict[str, dict[str, str]] = {}  # pattern -> layer -> reason for bf16
    left_to_auto: dict[str, nn.Linear] = {}
    for name, patterns in matching.items():
        if kept[name] is not None:
            continue
        whole, parts, pattern = _decisive(linears[name], patterns, resolved)
        if isinstance(whole, str):
            left_to_auto[name] = linears[name]
            continue
        # Once per pattern: finding the blocks walks over the whole model.
        if whole is not None and pattern not in wide:
            wide[pattern] = wide_by_policy(model, whole, pattern) if pattern else {}
        reason = wide.get(pattern, {}).get(name, "")
        own = recipes.BF16 if reason else whole
        if own is None and pattern:
            reason = f"pattern {pattern!r} leaves it as it is"
        given[name] = composed(own, parts, name) if parts else own, reason, None
    if left_to_auto:
        for name, decision in decisions(left_to_auto, tokens, compiled, choices).items():
            # On a GPU bf16 is nn.Linear. On a CPU without bfloat16
            # instructions the recipe is faster.
            as_it_is = decision.recipe == "bf16" and linears[name].weight.device.type == "cuda"
            given[name] = None if as_it_is else recipes.get(decision.recipe), "", decision
    # Check every layer before the first one changes, so that an error leaves the model as it was.
    for name, (own, _, _) in given.items():
        if isinstance(layer := linears[name], QLinear):
            layer.refuse(own)
    for name, (own, reason, made) in given.items():
        layer = linears[name]
        if isinstance(layer, QLinear) or own is not None or made is not None:
            quantized = layer if isinstance(layer, QLinear) else QLinear.adopt(layer, None)
            quantized.recipe = own  # resets reason and decision, so it comes first
            quantized.reason, quantized.decision, quantized.weight_codes = (
                reason,
                made,
                weight_codes,
            )
        else:
            layer.__dict__[LEFT_BY] = reason  # for `describe`
    # One cache for the whole model, layers of an earlier call included: q,
    # k and v then share the casts of their input.
    shared = SharedInputs()
    for _, quantized in _quantized(model):
        quantized.state.shared_inputs = shared
    if embeddings is not None:
        quantize_embeddings(model, embeddings)
    refuse_fast_path(model)
    warn(model, _quantized(model))
    step_end.follow_model(model)
    # Last, when every layer has its recipe: a producer's cast is the cast that its readers need.
    if fuse:
        fuse_producers(model, save)
    return model


def refuse_lazy(
    linears: Mapping[str, nn.Linear],
    matching: Mapping[str, list[str]],
    resolved: Mapping[str, str | Recipe | Some | None],
) -> None:
    """Raise ConfigError for an nn.LazyLinear with a recipe: its shape is unknown."""
    for name, patterns in matching.items():
        if nn.parameter.is_lazy(linears[name].weight) and resolved[patterns[-1]] is not None:
            raise ConfigError(
                f"convert: {name!r} is a LazyLinear, which has no shape before its first forward pass. Run one forward pass before "
                f"convert, or leave it as it is by {{{name!r}: None}}.",
                code="convert.lazy-linear",
            )


def _resolved(recipe: Patterns) -> dict[str, str | Recipe | Some | None]:
    """Pattern -> Recipe, Some, None or "auto". Raises ConfigError for anything else."""
    resolved: dict[str, str | Recipe | Some | None] = {}
    for pattern, given in (recipe if isinstance(recipe, Mapping) else {"*": recipe}).items():
        chosen = parse(given) if isinstance(given, str) and given != recipes.AUTO else given
        if not isinstance(pattern, str) or not (
            chosen in (None, recipes.AUTO) or isinstance(chosen, Recipe | Some)
        ):
            raise ConfigError(
                f"convert: {pattern!r}: {chosen!r} is not a pattern and its recipe. Give a name, a Recipe or None for each "
                "pattern; narrowgauge.recipes.names() lists the names.",
                code="convert.pattern-value",
            )
        resolved[pattern] = chosen
    if not resolved:
        raise ConfigError(
            'convert: no pattern was given. Give a recipe, or patterns such as {"*": "fp8-current"}.',
            code="convert.no-pattern",
        )
    return resolved


def _decisive(
    layer: nn.Linear, patterns: list[str], resolved: Mapping[str, str | Recipe | Some | None]
) -> tuple[str | Recipe | None, list[Some], str]:
    """Combine the patterns that match a layer.

    ->  (recipe of the last pattern that gives a whole one, later patterns for some GEMMs, that
        pattern or '' if none gives a whole recipe)
    """
    parts: list[Some] = []
    # From the last pattern back to the nearest one that gives a whole recipe. Earlier ones lose.
    for pattern in reversed(patterns):
        given = resolved[pattern]
        if not isinstance(given, Some):
            if parts and given == recipes.AUTO:
                raise ConfigError(
                    f"convert: {parts[0].name!r} gives a layer some products, and 'auto' decides about all of them. Name its recipe.",
                    code="convert.auto-products",
                )
            return given, parts, pattern
        parts.insert(0, given)
    return layer.recipe if isinstance(layer, QLinear) else None, parts, ""


def _matching(
    model: nn.Module, linears: Mapping[str, nn.Linear], patterns: Mapping[str, object]
) -> dict[str, list[str]]:
    """First name of each Linear -> the patterns that match any of its names.

    patterns  pattern -> recipe

    Raises ConfigError for a pattern without a match, and for two patterns that give one Linear
    different recipes by different names.
    """
    names_by_id = {id(layer): name for name, layer in linears.items()}
    found: dict[str, dict[str, set[str]]] = {name: {} for name in linears}
    aliases = [(alias, id(module)) for alias, module in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        named = [
            (names_by_id[key], alias)
            for alias, key in aliases
            if key in names_by_id and matches(alias, pattern)
        ]
        if not named:
            near = closest(pattern, linears)
            raise ConfigError(
                f"convert: pattern {pattern!r} matched no Linear. "
                + (
                    f"Closest: {near}."
                    if near
                    else f"The first of {len(linears)} Linears is {next(iter(linears))!r}."
                ),
                code="pattern.no-match",
            )
        for name, alias in named:
            found[name].setdefault(pattern, set()).add(alias)
    # A tied Linear has several names. The last pattern may override an earlier one only if both
    # match a common name. Otherwise raise: the user may not know that the two names are one layer.
    for by_pattern in found.values():
        *earlier, (last, names) = by_pattern.items() or [("", set())]
        for pattern, others in earlier:
            if patterns[pattern] != patterns[last] and not others & names:
                first, second = (
                    getattr(patterns[each], "name", patterns[each]) for each in (pattern, last)
                )
                raise ConfigError(
                    f"convert: {min(others)!r} and {min(names)!r} are one Linear, to which {pattern!r} gives {first} and "
                    f"{last!r} gives {second}. Name it once.",
                    code="convert.tied-conflict",
                )
    return {name: list(by_pattern) for name, by_pattern in found.items()}


@contextmanager
def suspended(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the block, every QLinear computes as nn.Linear and embeddings are unquantized."""
    layers: list[QLinear | QEmbedding] = [layer for _, layer in _quantized(model, "suspended")]
    layers += [layer for _, layer in quantized_embeddings(model)]
    before = [layer.is_suspended for layer in layers]
    try:
        for layer in layers:
            layer.is_suspended = True
        yield model
    finally:
        for layer, was in zip(layers, before, strict=True):
            # Not `layer.is_suspended`: nn.Module.__setattr__ fails at interpreter exit.
            layer.state.is_suspended = was


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
    for name, layer in _quantized(model):
        for role, window in (layer.scaling or {}).items():
            assert isinstance(window, AmaxHistory)
            if count := int(window.nonfinite):
                found[name, role] = count
    return found


def _quantized(model: nn.Module, verb: str = "convert") -> Iterator[tuple[str, QLinear]]:
    require_module(model, verb)
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QLinear))


def _reasons(model: nn.Module, kept: Mapping[str, str | None]) -> str:
    """The first three reasons, and a hint for models built from Conv1D (GPT-2 of transformers)."""
    words = [f"{name!r} ({reason})" for name, reason in list(kept.items())[:3]]
    others = sum(type(module).__name__ == "Conv1D" for module in model.modules())
    hint = f" Its {others} Conv1D layers are no nn.Linear: replace them first. {_WITHOUT}"
    return "; ".join(words) + "." + hint * (others > 0)
