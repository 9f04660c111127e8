"""convert_like: convert a second copy of a model like the first one, with the state of its recipes.

    policy = ng.convert(AutoModelForCausalLM.from_pretrained(path), "fp8-delayed")
    reference = ng.convert_like(policy, AutoModelForCausalLM.from_pretrained(path))
    trainer = DPOTrainer(model=policy, ref_model=reference, ...)

Preference optimization compares log-probabilities of a policy with those from a frozen
copy (DPO, arXiv 2305.18290, eq. 7). At the first step both models are the same function
and the loss is ln 2. A BF16 reference beside an FP8 policy adds the quantization error
of the policy to every log-ratio. Layers are matched by name. Adapters around a layer
(PEFT) and wrappers (DDP, torch.compile) are removed from the names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from narrowgauge.conversion.attention_precision import follow_attention
from narrowgauge.conversion.bypassed import refuse_fast_path
from narrowgauge.errors import ConfigError, closest, warn
from narrowgauge.fuse import fuse as fuse_producers
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.nn.attention import is_opened, opened
from narrowgauge.nn.cast_sources import SharedInputs
from narrowgauge.nn.converted_model import quantized_embeddings
from narrowgauge.nn.converted_state import ADDED
from narrowgauge.nn.disguised import adopt
from narrowgauge.nn.embedding import FORMATS, QEmbedding
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.patches import opened_like
from narrowgauge.structure import is_linear, plain_name, require_module

BASE = (
    "base_layer",
    "original_module",
)  # the layer inside an adapter of PEFT, and inside its copy that trains


def convert_like(policy: nn.Module, reference: nn.Module) -> nn.Module:
    """Convert `reference` in place like `policy`, and return it. Its weights are unchanged.

    policy     a converted model, with or without adapters around its layers
    reference  a model with the same Linears

    Each Linear gets the recipe of the layer with its name, a copy of the recipe's state (amax
    histories, learned steps, sampler readings), and its suspension. Linears that are ordinary in
    `policy` become ordinary. Quantized embeddings, fused norms and attention in FP8 follow as well. Later steps of
    `policy` change nothing in `reference`.

    With equal weights both models then compute bit-identical results in forward, with two
    exceptions. A recipe that rounds stochastically in forward draws its own noise in each model,
    and a warning reports it. Delayed scaling uses the amax history in training mode only, so a
    policy with a history differs from a reference in evaluation mode.

    Raises ConfigError, before anything changes, if `policy` has no converted layer, or if names or
    shapes of the Linears differ.
    """
    require_module(policy, "convert_like")
    require_module(reference, "convert_like")
    if policy is reference:
        raise ConfigError(
            "convert_like: both models are one object. Pass the converted model first and its copy second.",
            code="convert-like.same-model",
        )
    sources = _without_adapters(policy, is_linear)
    if not any(isinstance(each, QLinear) for each in sources.values()):
        raise ConfigError(
            f"convert_like: no layer of the first model, {type(policy).__name__}, is converted. Call narrowgauge.convert on it before, and "
            "pass the converted model first.",
            code="convert-like.not-converted",
        )
    with (
        opened(reference) if is_opened(policy) else nullcontext(),
        opened_like(policy, reference),
    ):
        _follow_policy(policy, reference, sources)
    follow_attention(policy, reference)
    return reference


def _follow_policy(
    policy: nn.Module, reference: nn.Module, sources: Mapping[str, nn.Module]
) -> None:
    """Convert the layers of the reference. sources: name -> Linear of the policy."""
    pairs = _pairs(sources, _without_adapters(reference, is_linear), "Linear")
    # Check every layer before the first one changes, so that an error leaves the model as it was.
    for _, source, target in pairs:
        if isinstance(target, QLinear):
            target.refuse(source.recipe if isinstance(source, QLinear) else None)
    tables: list[tuple[str, nn.Embedding, nn.Embedding]] = []
    if any(quantized_embeddings(policy)) or any(quantized_embeddings(reference)):
        tables = _pairs(
            _without_adapters(policy, _is_table),
            _without_adapters(reference, _is_table),
            "Embedding",
        )
    for _, source, target in pairs:
        _follow(source, target)
    for _, table, other in tables:
        _follow_embedding(table, other)
    shared = SharedInputs()
    for layer in reference.modules():
        if isinstance(layer, QLinear) and not layer.is_expert:
            layer.state.shared_inputs = shared
    # `fuse` leaves this attribute on the model that it was called with.
    if any("_not_fused" in module.__dict__ for module in policy.modules()):
        fuse_producers(reference)
    refuse_fast_path(reference)
    _warn_of_noise(pairs)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


def _without_adapters(model: nn.Module, is_kind: Callable[[nn.Module], bool]) -> dict[str, Any]:
    """Name -> layer of a kind, named as in the model without adapters and wrappers."""
    adapters = [
        name
        for name, module in model.named_modules()
        if any(hasattr(module, each) for each in BASE)
    ]
    found = {}
    for name, module in model.named_modules():
        own = [each for each in adapters if name.startswith(f"{each}." if each else "")]
        # Below an adapter only the original layer counts, not LoRA's own Linears.
        inside = all(name[len(each) :].lstrip(".").split(".")[0] in BASE for each in own)
        if is_kind(module) and inside:
            found[".".join(part for part in plain_name(name).split(".") if part not in BASE)] = (
                module
            )
    return found


def _pairs(
    sources: Mapping[str, Any], targets: Mapping[str, Any], kind: str
) -> list[tuple[str, Any, Any]]:
    """(name in the reference, layer of the policy, layer of the reference) for each pair.

    Raises ConfigError if the layers do not match one to one.
    """
    prefix, cut = _prefixes(sources, targets)
    named = {name.removeprefix(prefix): layer for name, layer in sources.items()}
    wanted = {name: name.removeprefix(cut) for name in targets}
    for name, own in wanted.items():
        if own not in named:
            near = closest(own, named)
            raise ConfigError(
                f"convert_like: {kind} {name!r} of the second model is not in the first one. "
                + (f"Closest: {near}. " if near else "")
                + "Pass two copies of one model.",
                code="convert-like.missing-in-first",
            )
        one, other = (tuple(layer.weight.shape) for layer in (named[own], targets[name]))
        if one != other:
            raise ConfigError(
                f"convert_like: the weight of {name!r} is {list(other)} in the second model and {list(one)} in the first one. Pass two "
                "copies of one model.",
                code="convert-like.shape",
            )
    if left := named.keys() - wanted.values():
        raise ConfigError(
            f"convert_like: {kind} {min(left)!r} of the first model is not in the second one. Pass two copies of one model.",
            code="convert-like.missing-in-second",
        )
    return [(name, named[own], targets[name]) for name, own in wanted.items()]


def _prefixes(names: Mapping[str, object], others: Mapping[str, object]) -> tuple[str, str]:
    """Find the prefix of each side's names to remove, such that most names agree.

    Examples: "base_model.model." of PEFT, "pretrained_model." of TRL.
    """

    def leading(given: Mapping[str, object]) -> list[str]:
        shared: list[str] = []
        for parts in zip(*(name.split(".")[:-1] for name in given), strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        return ["".join(f"{each}." for each in shared[:count]) for count in range(len(shared) + 1)]

    def agreeing(pair: tuple[str, str]) -> tuple[int, int]:
        ours, theirs = (
            {name.removeprefix(cut) for name in given}
            for cut, given in zip(pair, (names, others), strict=True)
        )
        return len(ours & theirs), -len(pair[0]) - len(pair[1])  # on a tie, the shorter prefixes

    return max(itertools.product(leading(names), leading(others)), key=agreeing)


def _follow(source: nn.Module, target: nn.Module) -> None:
    if not isinstance(source, QLinear):
        if isinstance(target, QLinear):
            target.restore()
        return
    layer = target if isinstance(target, QLinear) else adopt(target)
    layer.recipe = source.recipe  # first: the setter resets reason, decision and state
    layer.reason, layer.decision, layer.weight_codes = (
        source.reason,
        source.decision,
        source.weight_codes,
    )
    layer.is_suspended = source.is_suspended
    for name in ADDED:
        state, own = getattr(source, name), getattr(layer, name)
        if state is not None and own is not None:
            own.load_state_dict(state.state_dict())  # a copy: later steps of the policy do not show
            # Host copies of the state, such as `is_cold` or a lineage, are stale after the load.
            for each in own.modules():
                if isinstance(each, LayerState):
                    each.reread()


def _follow_embedding(source: nn.Embedding, target: nn.Embedding) -> None:
    if isinstance(target, QEmbedding):
        target.restore()
    if isinstance(source, QEmbedding):
        codes = next(name for name, each in FORMATS.items() if each == source.format)
        table = QEmbedding.adopt(target, codes)  # type: ignore[arg-type]
        table.steps.load_state_dict(source.steps.state_dict())
        table.is_suspended = source.is_suspended


def _warn_of_noise(pairs: list[tuple[str, nn.Module, nn.Module]]) -> None:
    drawing = []
    for name, _, layer in pairs:
        recipe = layer.recipe if isinstance(layer, QLinear) else None
        if recipe is None:
            continue
        casts = [each for each in (recipe.output.lhs, recipe.output.rhs) if each is not None]
        turned = recipe.output.rotate is not None and recipe.output.rotate.signs == "random"
        if turned or any(each.rounding != "nearest" for each in casts):
            drawing.append((name, recipe.name))
    if drawing:
        warn(
            f"convert_like: recipe {drawing[0][1]!r} ({drawing[0][0]!r} and {len(drawing) - 1} more layers) draws random numbers in "
            "forward, and each model draws its own, so that the outputs of the two differ by that noise. Give both a recipe that rounds "
            "to nearest in forward.",
            code="convert-like.noise",
            stacklevel=3,
        )
