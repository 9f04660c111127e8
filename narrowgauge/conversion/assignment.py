"""`assignments`: a recipe for each Linear, from the arguments of `convert`. Nothing changes here.

`_matching` matches patterns to layers, `_decisive` combines them, and `kept_layers` names the layers
that keep their precision. `auto.decisions` measures the layers under "auto".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from narrowgauge import recipes
from narrowgauge.conversion.auto import Decision, decisions
from narrowgauge.conversion.kept_layers import output_head, reason_to_keep, wide_by_policy
from narrowgauge.conversion.products import Some, composed, parse
from narrowgauge.errors import ConfigError, Reason, closest
from narrowgauge.nn.experts import refuse as refuse_experts
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.mm.spec import OTHER_GPUS
from narrowgauge.recipe import Recipe
from narrowgauge.structure import holds_experts, is_linear, matches, other_weights

_NO_AUTO = Reason(
    "experts-auto",
    "auto measures no experts: name a recipe for them",
)
_WITHOUT = "Or leave convert out; narrowgauge train does with --recipe none."

Patterns = str | Recipe | Some | Mapping[str, "str | Recipe | Some | None"]


@dataclass(frozen=True)
class Assignment:
    """Outcome for one Linear.

    recipe    None: an ordinary nn.Linear
    reason    why it is not the recipe that was asked for, or ''
    decision  of the measurement under "auto", else None
    """

    recipe: Recipe | None
    reason: str = ""
    decision: Decision | None = None

    def with_shared_scales(self) -> Assignment:
        """The same with `Recipe.with_shared_scales`."""
        own = None if self.recipe is None else self.recipe.with_shared_scales()
        return replace(self, recipe=own)

    @property
    def is_plain(self) -> bool:
        """True if the layer stays an nn.Linear: only the reason is recorded."""
        return self.recipe is None and self.decision is None


def assignments(
    model: nn.Module,
    recipe: Patterns,
    *,
    tokens: int | None,
    compiled: bool,
    choices: Mapping[str, str] | None,
) -> dict[str, Assignment]:
    """Name of a Linear -> what it gets; Linears without an entry stay as they are.

    `convert` describes the arguments. Raises ConfigError if the model has no Linear, if a
    pattern matches none, and if every matched one is kept in high precision.
    """
    resolved = _resolved(recipe)
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    if not linears:
        raise ConfigError(
            f"convert: {type(model).__name__} holds no nn.Linear, so there is nothing to convert. "
            f"Layers of other classes must be replaced by nn.Linear first. {_WITHOUT}",
            code="convert.no-linear",
        )
    matching = {
        name: patterns for name, patterns in _matching(model, linears, resolved).items() if patterns
    }
    _refuse_lazy(linears, matching, resolved)
    head = output_head(model)
    kept = {
        name: reason_to_keep(name, linears[name], patterns, head)
        for name, patterns in matching.items()
    }
    if all(kept.values()):
        raise ConfigError(
            f"convert: nothing to convert, every Linear that was named is kept: {_reasons(kept)}. {_WITHOUT}",
            code="convert.all-kept",
        )
    # The order of `matching` is the order of the modules, so reports list layers as the model does.
    given: dict[str, Assignment] = {}
    left_to_auto: dict[str, nn.Module] = {}
    wide: dict[str, dict[str, str]] = {}  # pattern -> layer -> reason for bf16
    for name, patterns in matching.items():
        if kept[name] is not None:
            continue
        whole, parts, pattern = _decisive(linears[name], patterns, resolved)
        if isinstance(whole, str):
            if isinstance(layer := linears[name], QLinear) and layer.is_expert:
                given[name] = Assignment(None, _NO_AUTO)
            else:
                left_to_auto[name] = linears[name]
            continue
        # Once per pattern: finding the blocks walks over the whole model.
        if whole is not None and pattern not in wide:
            wide[pattern] = wide_by_policy(model, whole, pattern) if pattern else {}
        reason = wide.get(pattern, {}).get(name, "")
        own = recipes.BF16 if reason else whole
        if own is None and pattern:
            reason = f"pattern {pattern!r} leaves it as it is"
        given[name] = Assignment(composed(own, parts, name) if parts else own, reason)
    # All at once: layers of one shape are measured once.
    if left_to_auto:
        for name, decision in decisions(left_to_auto, tokens, compiled, choices).items():
            # On a GPU bf16 is nn.Linear. On a CPU without bfloat16
            # instructions the recipe is faster.
            is_on_gpu = linears[name].weight.device.type in ("cuda", *OTHER_GPUS)
            as_it_is = decision.recipe == "bf16" and is_on_gpu
            chosen = None if as_it_is else recipes.get(decision.recipe)
            given[name] = Assignment(chosen, decision=decision)
    return given


def _refuse_lazy(
    linears: Mapping[str, Any],
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
    layer: nn.Module, patterns: list[str], resolved: Mapping[str, str | Recipe | Some | None]
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
    model: nn.Module, linears: Mapping[str, nn.Module], patterns: Mapping[str, object]
) -> dict[str, list[str]]:
    """First name of each Linear -> the patterns that match any of its names.

    patterns  pattern -> recipe

    Raises ConfigError for a pattern without a match, and for two patterns that give one Linear
    different recipes by different names.
    """
    names_by_id = {id(layer): name for name, layer in linears.items()}
    found: dict[str, dict[str, set[str]]] = {name: {} for name in linears}
    aliases = [
        (alias, each, id(module))
        for alias, module in model.named_modules(remove_duplicate=False)
        if id(module) in names_by_id
        for each in (module.names(alias) if isinstance(module, QLinear) else (alias,))
    ]
    for pattern in patterns:
        named = [
            (names_by_id[key], alias) for alias, each, key in aliases if matches(each, pattern)
        ]
        if not named:
            _refuse_experts(model, pattern)
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


def _refuse_experts(model: nn.Module, pattern: str) -> None:
    """Raise ConfigError if the pattern names experts that cannot be converted."""
    for name, module in model.named_modules():
        own = [each for each, _, _ in other_weights(name, module)]
        if not own or not any(matches(each, pattern) for each in (name, *own)):
            continue
        if holds_experts(name, module) and (reason := refuse_experts(module)) is not None:
            raise ConfigError(
                f"convert: pattern {pattern!r} names {name!r}, which keeps its precision: {reason}.",
                code=f"convert.{reason.code}",
            )


def _reasons(kept: Mapping[str, str | None]) -> str:
    """The first three reasons."""
    return "; ".join(f"{name!r} ({reason})" for name, reason in list(kept.items())[:3])
