"""Attention in FP8 for models of transformers: which modules can have it, and why the others cannot.

    use_fp8_attention(model)      `convert(model, recipe, attention="fp8")` calls it
    restore_attention(model)      the attention that the model had

transformers looks up the function of a model's attention by a name in its configuration, at each
call. The name NAME leads to `fp8_attention_forward` here. It gets the masks of "sdpa": bool masks
for causal, windowed, chunked and packed attention, or no mask and `is_causal`.

A configuration has one name for all its attention modules, so they change together. CLIP has one
configuration for images and one for text, and only one of them may get FP8.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import ConfigError, Reason
from narrowgauge.nn.fp8_attention import (
    STATE,
    Fp8State,
    fp8_attention,
    fp8_states,
    state_of,
)

NAME = "narrowgauge_fp8"
# Attention that computes softmax(scale * Q @ K.T + mask) @ V and nothing else, and the beginning of
# narrowgauge's own names for it (train/attention.py).
SAME, OURS = ("eager", "sdpa"), "narrowgauge_"
# Arguments of transformers' attention functions that `fp8_attention` lacks, and what they are.
LACKED = {
    "position_bias": "adds a learned bias to the scores",
    "s_aux": "has learned sinks",
    "sinks": "has learned sinks",
    "softcap": "caps its scores softly",
    "indices": "chooses its keys",
    "block_indices": "chooses its keys",
}
DROPOUTS = ("attention_dropout", "attn_dropout", "dropout_p", "dropout")


def check_fp8_attention(model: nn.Module) -> dict[Any, str]:
    """Return {attention module: the reason for staying in 16 bits, or ''}. Changes nothing.

    Raises ConfigError if no module can change.
    """
    found = list(_attentions(model))
    if not found:
        raise ConfigError(
            f"convert: attention = 'fp8', and {type(model).__name__} has no attention that transformers looks up by name. "
            "Leave attention out.",
            code="convert.no-attention",
        )
    reasons: dict[int, str] = {}  # id of a configuration -> the first reason
    for module in found:
        reasons[id(module.config)] = reasons.get(id(module.config), "") or reason_to_leave(module)
    if all(reasons.values()):
        raise ConfigError(
            f"convert: attention = 'fp8', and no attention of {type(model).__name__} can have it: {next(iter(reasons.values()))}. "
            "Leave attention out.",
            code="convert.attention",
        )
    return {module: reasons[id(module.config)] for module in found}


def use_fp8_attention(model: nn.Module) -> None:
    """Switch the attention of a model to FP8 where its definition has all that it needs.

    The others stay as they are, and `describe` says why. Raises as `check_fp8_attention`.
    """
    found = check_fp8_attention(model)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, fp8_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for module, reason in found.items():
        own = module.config._attn_implementation
        before = own if (known := state_of(module)) is None else known.before
        # The configuration is that of another converted model, or its copy.
        before = "sdpa" if before == NAME else before
        vars(module)[STATE] = Fp8State(before, reason)
    for module, reason in found.items():
        if not reason:
            # Not `model.set_attn_implementation`, which changes the configurations of all parts.
            module.config._attn_implementation_internal = NAME


def restore_attention(model: nn.Module) -> None:
    """Give every attention of the model the name that it had before."""
    for module in model.modules():
        if (state := vars(module).pop(STATE, None)) is not None:
            config: Any = module.config
            if (config._attn_implementation or "").startswith(NAME):
                config._attn_implementation_internal = state.before


def follow_attention(policy: nn.Module, reference: nn.Module) -> None:
    """Give the reference attention in FP8 if the policy has it, and else what it had before."""
    if any(fp8_states(policy)):
        use_fp8_attention(reference)
    else:
        restore_attention(reference)


def reason_to_leave(module: Any) -> str:
    """Return the reason for leaving an attention module in 16 bits, or ''."""
    kind, asked = type(module).__name__, module.config._attn_implementation or "eager"
    if asked not in SAME and not asked.startswith(OURS):
        return Reason(
            "attention-kernel",
            f"the configuration asks for attention by {asked!r}: load the model with attn_implementation='sdpa'",
        )
    for name in sorted(_keywords(type(module)) & LACKED.keys()):
        if name != "softcap" or getattr(module, "attn_logit_softcapping", None) is not None:
            return Reason("attention-terms", f"{kind} {LACKED[name]}")
    rate: Any = next((getattr(module, name) for name in DROPOUTS if hasattr(module, name)), 0)
    rate = getattr(rate, "p", rate)
    if rate:
        return Reason(
            "attention-dropout",
            f"{kind} drops out attention weights ({rate:g}): set its dropout to 0 in the configuration",
        )
    return ""


def attention_words(model: nn.Module) -> list[str]:
    """Sentences without a full stop on attention in FP8 and on what stays in 16 bits."""
    narrow: Counter[str] = Counter()
    wide: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        if (state := state_of(module)) is not None:
            config: Any = module.config
            kind, asked = type(module).__name__, config._attn_implementation
            if state.reason:
                wide[kind, state.reason] += 1
            elif asked != NAME:  # by its owner, or with another model of the same configuration
                wide[kind, f"the configuration was changed after convert, to {asked!r}"] += 1
            else:
                narrow[kind + (" (suspended)" if state.is_suspended else "")] += 1
    said = [
        f"Attention in FP8 (E4M3), forward only, by its definition in torch: {_modules(count, kind)}"
        for kind, count in narrow.items()
    ]
    said += [
        f"Attention in 16 bits: {_modules(count, kind)}: {reason}"
        for (kind, reason), count in wide.items()
    ]
    return said


def _modules(count: int, kind: str) -> str:
    return f"{count} module{'s' * (count > 1)} of {kind}"


def fp8_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface: in FP8, or in 16 bits in a module that is suspended.

    query  [batch, heads, tokens, width]; key and value may have fewer heads
    ->     ([batch, tokens, heads, width], None)
    """
    state = state_of(module)
    if state is None or not state.is_narrow:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # "eager" is a function of each modeling file and takes other masks; sdpa computes the same.
        before = None if state is None else state.before
        named = before in ALL_ATTENTION_FUNCTIONS.valid_keys() and before != "narrowgauge_eager"
        forward = ALL_ATTENTION_FUNCTIONS[before] if named else sdpa_attention_forward
        options |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        found: tuple[Tensor, None] = forward(module, query, key, value, attention_mask, **options)
        return found
    lacked = [LACKED[name] for name in LACKED if options.get(name) is not None]
    if dropout or lacked:
        what = lacked[0] if lacked else f"drops out attention weights ({dropout:g})"
        raise ConfigError(
            f"{type(module).__name__}: attention in FP8, and this call {what}. Convert the model without attention='fp8'.",
            code="fp8-attention.call",
        )
    tokens = query.shape[2]
    wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(wanted) and attention_mask is None and tokens > 1
    if causal and key.shape[2] > tokens:  # an empty cache of fixed length, as sdpa has it
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    y = fp8_attention(query, key, value, attention_mask, is_causal=causal, scale=scaling)
    return y.transpose(1, 2).contiguous(), None


def _attentions(model: nn.Module) -> Iterator[Any]:
    """Modules whose forward looks up its attention by the name in its configuration."""
    for module in model.modules():
        if hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in _code(type(module)).co_names:
            yield module


def _keywords(kind: type[nn.Module]) -> set[str]:
    """Names of the arguments that a forward passes by keyword."""
    groups = (each for each in _code(kind).co_consts if isinstance(each, tuple))
    return {name for group in groups for name in group if isinstance(name, str)}


def _code(kind: type[nn.Module]) -> Any:
    """Return the code of a class's forward without its decorators; other code if it has none."""
    return getattr(inspect.unwrap(kind.forward), "__code__", _code.__code__)
