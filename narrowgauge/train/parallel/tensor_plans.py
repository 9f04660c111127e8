"""Tensor-parallel plans: which layers are sharded by columns and which by rows.

    q, k, v, gate, up    column-wise: a rank has its heads or features     x is equal on all ranks
    o, down              row-wise: partial sums                            y is all-reduced

A model's own plan from its transformers configuration has priority. Norms, embeddings and a tied or
missing head stay whole on every rank. A plan is a dict {pattern below the base model: style}; *
stands for a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from narrowgauge.errors import ConfigError

# Supported styles of transformers' plans. gather_output: the output is gathered on every rank.
# split_input: the input is whole on every rank and is sliced first.
COLUMNS, GATHERED_COLUMNS = "colwise", "colwise_gather_output"
ROWS, SPLIT_ROWS = "rowwise", "rowwise_split_input"
# Norm over each head, as in Qwen3: its weight is replicated, its input holds the rank's own heads.
PER_HEAD = "replicated_with_grad_allreduce"
STYLES = frozenset({COLUMNS, GATHERED_COLUMNS, ROWS, SPLIT_ROWS, PER_HEAD})


def _plan(columns: str, rows: str, *stacks: str) -> dict[str, str]:
    """Plan of column-wise and row-wise names (separated by spaces) below each of the stacks."""
    return {
        f"{stack}.{name}": style
        for stack in stacks
        for style, names in ((COLUMNS, columns), (ROWS, rows))
        for name in names.split()
    }


_BERT = _plan(
    "attention.self.query attention.self.key attention.self.value intermediate.dense",
    "attention.output.dense output.dense",
    "encoder.layer.*",
)
_BART = _plan(
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj encoder_attn.q_proj encoder_attn.k_proj encoder_attn.v_proj fc1",
    "self_attn.out_proj encoder_attn.out_proj fc2",
    "encoder.layers.*",
    "decoder.layers.*",
)
_T5 = _plan(
    "SelfAttention.q SelfAttention.k SelfAttention.v SelfAttention.relative_attention_bias EncDecAttention.q EncDecAttention.k "
    "EncDecAttention.v DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1",
    "SelfAttention.o EncDecAttention.o DenseReluDense.wo",
    "encoder.block.*.layer.*",
    "decoder.block.*.layer.*",
)
_DISTILBERT = _plan(
    "attention.q_lin attention.k_lin attention.v_lin ffn.lin1",
    "attention.out_lin ffn.lin2",
    "transformer.layer.*",
)
_VIT = {  # module names of transformers 5, then those of older versions
    **_plan(
        "attention.q_proj attention.k_proj attention.v_proj mlp.fc1",
        "attention.o_proj mlp.fc2",
        "layers.*",
    ),
    **_plan(
        "attention.attention.query attention.attention.key attention.attention.value intermediate.dense",
        "attention.output.dense output.dense",
        "encoder.layer.*",
    ),
}
# By model_type: models that `narrowgauge train` supports and transformers has no plan for.
OWN: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
    **dict.fromkeys(("marian", "bart", "mbart", "pegasus"), _BART),
    **dict.fromkeys(("t5", "mt5"), _T5),
    "distilbert": _DISTILBERT,
    "vit": _VIT,
}
# Attribute that holds the number of heads, where attention code does not derive it from the shape.
HEADS_IN_CODE = {"t5": "n_heads", "mt5": "n_heads"}
HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)


def plan_of(model: Any, ways: int) -> dict[str, str]:
    """{module name: style} for a tp group of `ways` ranks.

    Raises ConfigError if there is no valid plan.
    """
    config = model.config
    asked, kind = f"parallel with tp={ways}", config.model_type
    patterns = getattr(config, "base_model_tp_plan", None) or OWN.get(kind)
    if not patterns:
        raise ConfigError(
            f"{asked}: no plan is known by which ranks share the products of {type(model).__name__} ({kind}): transformers' "
            f"configuration has none, as those of Llama, Qwen and Mistral have, and it is none of {', '.join(OWN)}. Take fsdp instead.",
            code="tensor-parallel.no-plan",
        )
    if unknown := sorted(set(patterns.values()) - STYLES):
        raise ConfigError(
            f"{asked}: transformers' plan for {type(model).__name__} ({kind}) asks for {', '.join(unknown)}, which narrowgauge train "
            "does not know: experts, and matrices that hold several others. Take fsdp instead.",
            code="tensor-parallel.unknown-style",
        )
    for key in HEADS:
        count = getattr(config, key, None)
        # Key-value heads count too: with fewer of them than ranks, a rank would have none.
        if isinstance(count, int) and count % ways:
            raise ConfigError(
                f"{asked}: {key} = {count} of {type(model).__name__} is no multiple of {ways}, and no rank computes part of a head. "
                "Take a tp that divides it, or fsdp.",
                code="tensor-parallel.head-count",
            )
    found = _matching(model, patterns)
    if not found:
        raise ConfigError(
            f"{asked}: the plan for {kind} names no layer of {type(model).__name__}. Take fsdp instead.",
            code="tensor-parallel.no-layer",
        )
    for name, style in found.items():
        # A per-head norm is not sharded, so its size need not be divisible.
        if style != PER_HEAD:
            _refuse_sizes(name, model.get_submodule(name), style, ways)
    return found


def _matching(model: Any, patterns: Mapping[str, str]) -> dict[str, str]:
    base = next(
        (
            f"{name}."
            for name, module in model.named_modules()
            if name and module is model.base_model
        ),
        "",
    )
    compiled = [
        (re.compile(re.escape(base + key).replace(r"\*", r"\d+")), style)
        for key, style in patterns.items()
    ]
    return {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in compiled
        if pattern.fullmatch(name) is not None
    }


def _refuse_sizes(name: str, layer: nn.Module, style: str, ways: int) -> None:
    if (
        not isinstance(layer, nn.Linear | nn.Embedding)
        or (isinstance(layer, nn.Embedding) and style != COLUMNS)
        or getattr(layer, "is_transposed", False)
    ):
        raise ConfigError(
            f"parallel with tp={ways}: the plan cuts {name!r}, a {type(layer).__name__}, which is no nn.Linear. Take fsdp instead.",
            code="tensor-parallel.not-linear",
        )
    if isinstance(layer, nn.Embedding):
        what, size = "width", layer.embedding_dim
    elif style in (COLUMNS, GATHERED_COLUMNS):
        what, size = "outputs", layer.out_features
    else:
        what, size = "inputs", layer.in_features
    if size % ways:
        raise ConfigError(
            f"parallel with tp={ways}: {name!r} has {size} {what}, no multiple of {ways}. Take a tp that divides them, or fsdp.",
            code="tensor-parallel.divisor",
        )
