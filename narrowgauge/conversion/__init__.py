"""convert: assign recipes to the Linears of a model, in place.

    convert(model, "fp8-current")
    convert(model, {"*": "fp8-row", "layers.0.*": "bf16", "lm_head": "fp8-row"})  later patterns win
    convert(model, {"*": "fp8-row", "layers.1.down_proj": "bf16:grad_weight"})    one GEMM

A Linear is an nn.Linear, or a module of another class that computes the same (`disguises`).
A layer keeps its identity: only its class becomes QLinear, or one made of QLinear and its own. The module object, its parameters,
hooks, tied weights and users stay the same. Patterns are shell wildcards and ranges over dotted
names (see `structure`). A pattern without a leading `*` also matches the end of a name, from a dot
on: "mlp.up_proj" matches "model.layers.0.mlp.up_proj".

`assignment` decides which recipe each Linear gets; nothing changes before that is settled.

Output heads and routers (`kept_layers.KEPT`) keep their precision unless the last part of a pattern names
them in letters: their errors go straight into the loss or flip a discrete choice. Embeddings and
norms are no Linears and are unchanged. `embeddings` quantizes looked-up rows.

Blocks that the recipe keeps in high precision (`wide_blocks`) become bf16,
unless the pattern that applies to a layer spells out the block's number
("layers.11.*", "layers.10-11.*", "layers.[0-9]*.*").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn

from narrowgauge.conversion.assignment import Assignment, Patterns, assignments
from narrowgauge.conversion.attention_precision import (
    check_fp8_attention,
    restore_attention,
    use_fp8_attention,
)
from narrowgauge.conversion.auto import warn_without_kernels
from narrowgauge.conversion.bypassed import refuse_fast_path, warn
from narrowgauge.conversion.coverage import warn_of_small_share
from narrowgauge.conversion.disguises import reason_to_leave_convolution
from narrowgauge.conversion.embeddings import (
    check_embeddings,
    quantize_embeddings,
    restore_embeddings,
)
from narrowgauge.conversion.kept_layers import LEFT_BY
from narrowgauge.conversion.pretrained_folder import take_up
from narrowgauge.errors import ConfigError
from narrowgauge.fuse import Save, check_save, unfuse
from narrowgauge.fuse import fuse as fuse_producers
from narrowgauge.nn import patches, step_end
from narrowgauge.nn.attention import close, opened
from narrowgauge.nn.cast_sources import SharedInputs
from narrowgauge.nn.converted_model import advance, nonfinite_amax, quantized_linears, suspended
from narrowgauge.nn.disguised import adopt
from narrowgauge.nn.experts import KEPT_BECAUSE
from narrowgauge.nn.linear import QLinear, WeightCodes
from narrowgauge.structure import require_module

if TYPE_CHECKING:
    from narrowgauge.nn.embedding import Codes

__all__ = ["Patterns", "advance", "convert", "nonfinite_amax", "suspended", "use_fp8_attention"]


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
    share_scales: bool = False,
    attention: Literal["fp8"] | None = None,
) -> nn.Module:
    """Assign recipes to the Linears of `model`, in place, and return the model.

    recipe        a name or Recipe for all Linears that kept_layers.KEPT does not exclude; or pattern -> name,
                  Recipe or None (ordinary Linear), later patterns win; "NAME:PRODUCTS" for some
                  GEMMs of a layer. None turns every QLinear back into what it was. "auto": the
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
    share_scales  float32 scales of weights are powers of two in NVFP4 (that of the whole weight) and
                  int8, so that an export gives q, k and v, or gate and up, one scale without a
                  rounding, and GGUF's Q8_0 holds them (narrowgauge/export)
    attention     "fp8": models of transformers multiply Q by K and P by V in E4M3, forward only
                  (nn/fp8_attention.py); active until recipe is None. Attention with dropout, sinks
                  or a learned bias stays in 16 bits, and `describe` names the reason

    A second call replaces the recipes of the layers that its patterns match,
    and leaves the others. Raises ConfigError if a pattern matches nothing,
    with the closest names, and if no layer at all could be converted. Warns if the pattern "*"
    reaches less than half of the multiplied weights (`coverage`), of products that a GPU emulates,
    and if "auto" chose on or beside a GPU without kernels (AMD, Apple, Intel).
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
    check_save(save)
    if embeddings is not None:
        check_embeddings(model, embeddings)
    if attention not in (None, "fp8") or (attention and recipe is None):
        wrong = "recipe = None takes all recipes away" if recipe is None else "it is 'fp8' or None"
        raise ConfigError(
            f"convert: attention = {attention!r}, and {wrong}. Name recipe 'bf16' for FP8 in attention alone, or leave attention out.",
            code="convert.attention-name",
        )
    if recipe is None:
        return _restored(model)
    if attention is not None:
        check_fp8_attention(model)
    was_converted = any(isinstance(each, QLinear) for each in model.modules())
    # Everything that can be refused is refused before `_apply` changes the first layer.
    with opened(model), patches.opened(model, reason_to_leave_convolution):
        given = assignments(model, recipe, tokens=tokens, compiled=compiled, choices=choices)
        if share_scales:
            given = {name: each.with_shared_scales() for name, each in given.items()}
        _apply(model, given, weight_codes)
    # One cache for the whole model, layers of an earlier call included: q,
    # k and v then share the casts of their input.
    shared = SharedInputs()
    for _, quantized in quantized_linears(model, "convert"):
        if not quantized.is_expert:  # each expert has rows of its own
            quantized.state.shared_inputs = shared
    if embeddings is not None:
        quantize_embeddings(model, embeddings)
    if attention is not None:
        use_fp8_attention(model)
    # Modules that torch computes by a fused kernel in eval mode would skip the converted layers.
    refuse_fast_path(model)
    warn(model, quantized_linears(model, "convert"))
    warn_without_kernels(model, given)
    if not isinstance(recipe, Mapping) or recipe.get("*") is not None:
        warn_of_small_share(model, given)
    step_end.follow_model(model)
    if not was_converted:
        take_up(model)  # what `save_pretrained` wrote beside the weights
    # Last, when every layer has its recipe: a producer's cast is the cast that its readers need.
    if fuse:
        fuse_producers(model, save)
    return model


def _restored(model: nn.Module) -> nn.Module:
    """Turn every converted layer of `model` back, and return the model."""
    # Check every layer before the first one changes, so that an error leaves the model as it was.
    for _, quantized in quantized_linears(model, "convert"):
        quantized.refuse(None)
    for _, quantized in quantized_linears(model, "convert"):
        quantized.restore()
    close(model)
    patches.close(model)
    # Linears that a pattern left alone carry the reason for `describe`.
    for module in model.modules():
        module.__dict__.pop(LEFT_BY, None)
        module.__dict__.pop(KEPT_BECAUSE, None)
    restore_embeddings(model)
    restore_attention(model)
    unfuse(model)
    refuse_fast_path(model)
    return model


def _apply(model: nn.Module, given: Mapping[str, Assignment], weight_codes: WeightCodes) -> None:
    """Convert the named Linears. A converted one gets its new recipe."""
    linears = {name: model.get_submodule(name) for name in given}
    # Check every layer before the first one changes, so that an error leaves the model as it was.
    for name, assignment in given.items():
        if isinstance(layer := linears[name], QLinear):
            layer.refuse(assignment.recipe)
    for name, assignment in given.items():
        layer = linears[name]
        if isinstance(layer, QLinear) or not assignment.is_plain:
            quantized = layer if isinstance(layer, QLinear) else adopt(layer)
            quantized.recipe = assignment.recipe  # resets reason and decision, so it comes first
            quantized.reason = assignment.reason
            quantized.decision = assignment.decision
            quantized.weight_codes = weight_codes
        else:
            layer.__dict__[LEFT_BY] = assignment.reason  # for `describe`
