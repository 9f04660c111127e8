"""Find fusable functions and their readers by the module names of transformers' blocks.

    NORMS       norm before attention or MLP, read by Linears: Llama, Qwen, Gemma, GPT-NeoX, ViT, T5
    GATED       MLP with act(first(x)) * second(x): Llama and relatives, T5
    ONE_READER  norm or activation followed by a single Linear: GPT-2, BERT, GPT-NeoX, ViT, T5
    BERT        output.LayerNorm -> attention.self.{query,key,value} of the next block
    rotary      attention whose `forward` calls `apply_rotary_pos_emb`
    attention   module on a CPU whose `forward` looks up its attention by the configuration's name

A match is only a candidate. The function is tested numerically (probe.py), and a cast is used only
by a layer that reads that tensor. Norms that match no pattern are listed without readers, for
instance norms of queries and keys, or norms between a sublayer and its residual sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from narrowgauge.fuse.attention import looks_up
from narrowgauge.fuse.rotary import function_of
from narrowgauge.nn.float32_modules import is_norm

# Per entry: names of the norm, and the modules whose Linears read it. The first norm that exists in
# the block is taken.
NORMS = (
    (("input_layernorm", "layernorm_before"), ("self_attn", "attention", "attention.attention")),
    (
        ("pre_feedforward_layernorm", "post_attention_layernorm", "layernorm_after"),
        ("mlp", "intermediate"),
    ),
    (("layer_norm",), ("SelfAttention",)),
    (("layer_norm",), ("EncDecAttention",)),
    (("layer_norm",), ("DenseReluDense",)),
)
# Linears of an attention or MLP that do not read its input.
NOT_READERS = (
    "o_proj",
    "out_proj",
    "dense",
    "c_proj",
    "wo",
    "o",
    "down_proj",
    "w2",
    "dense_4h_to_h",
    "fc2",
)
# In T5's EncDecAttention: these read the encoder's output.
ENCODER_READERS = ("k", "v")
# Per entry: the function, its reader, its source, and a dropout between function and reader.
ONE_READER = (
    ("ln_1", "attn.c_attn", None, None),
    ("ln_2", "mlp.c_fc", None, None),
    ("mlp.act", "mlp.c_proj", "mlp.c_fc", None),
    ("mlp.act", "mlp.dense_4h_to_h", "mlp.dense_h_to_4h", None),
    ("mlp.activation_fn", "mlp.fc2", "mlp.fc1", None),
    ("attention.output.LayerNorm", "intermediate.dense", None, None),
    ("intermediate.intermediate_act_fn", "output.dense", "intermediate.dense", None),
    ("DenseReluDense.act", "DenseReluDense.wo", "DenseReluDense.wi", "DenseReluDense.dropout"),
)
# Of these norms only the one reader reads the output; BERT's is also the residual stream.
PRE_NORMS = ("ln_1", "ln_2")
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))


@dataclass(frozen=True)
class FusionCandidate:
    """A candidate for fusion, by dotted module names.

    name             the module whose forward would be replaced
    form             "module": its output is read; "gated": an MLP that computes act(gate) * up;
                     "rotary": an attention that rotates queries and keys, without a cast;
                     "attention": its attention itself, without a cast
    readers          Linears that read the function's output
    sources          Linears whose outputs only this function reads, so its input gradients are
                     their output gradients: gate and up, or the Linear before a GELU
    dropout_between  a dropout between the function and its readers, or None
    is_private       by the structure of the block, its Linears alone read the output: neither a
                     residual sum nor experts do
    """

    name: str
    form: Literal["module", "gated", "rotary", "attention"]
    readers: tuple[str, ...]
    sources: tuple[str, ...] = ()
    dropout_between: str | None = None
    is_private: bool = False

    @property
    def key(self) -> str:
        """Name of the function: an attention module may have two."""
        return f"{self.name}: attention" if self.form == "attention" else self.name


def candidates(model: nn.Module) -> Iterator[FusionCandidate]:
    """Yield the candidates in the model's order, then the norms that match no pattern."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: set[str] = set()
    for name in modules:
        for candidate in _candidates_in(name, modules):
            if candidate.key not in found:
                found.add(candidate.key)
                yield candidate
    yield from (
        FusionCandidate(name, "module", ())
        for name in modules
        if name not in found and is_norm(modules[name])
    )


def _candidates_in(name: str, modules: dict[str, nn.Module]) -> Iterator[FusionCandidate]:
    """Yield the candidates directly in the module called `name`."""
    prefix = f"{name}." if name else ""
    for norms, owners in NORMS:
        norm = next((prefix + each for each in norms if prefix + each in modules), None)
        readers = tuple(each for owner in owners for each in _inputs(prefix + owner, modules))
        if norm is not None and readers:
            private = _is_pre_norm(norm, prefix, modules) and all(
                _has_linears_alone(prefix + owner, modules) for owner in owners
            )
            yield FusionCandidate(norm, "module", readers, is_private=private)
    for function, reader, source, dropout_between in ONE_READER:
        if all(prefix + each in modules for each in (function, reader, source or reader)):
            sources = (prefix + source,) if source else ()
            yield FusionCandidate(
                prefix + function,
                "module",
                (prefix + reader,),
                sources,
                dropout_between and prefix + dropout_between,
                is_private=function in PRE_NORMS,
            )
    stack, _, number = name.rpartition(".")
    # BERT normalizes after the residual sum, so the readers are in the next block.
    following = f"{stack}.{int(number) + 1}.attention.self" if number.isdecimal() else ""
    if f"{prefix}output.LayerNorm" in modules and f"{following}.query" in modules:
        readers = tuple(f"{following}.{each}" for each in ("query", "key", "value"))
        yield FusionCandidate(f"{prefix}output.LayerNorm", "module", readers)
    if function_of(modules[name]) is not None:
        yield FusionCandidate(name, "rotary", ())
    if looks_up(modules[name]):
        yield FusionCandidate(name, "attention", ())
    for gate, up, down in GATED:
        if all(prefix + each in modules for each in (gate, up, down)):
            yield FusionCandidate(name, "gated", (prefix + down,), (prefix + gate, prefix + up))


def _is_pre_norm(norm: str, prefix: str, modules: dict[str, nn.Module]) -> bool:
    """Return False for a norm between a sublayer and its residual sum, as OLMo 2 has it."""
    own = norm.removeprefix(prefix)
    return own != "post_attention_layernorm" or f"{prefix}input_layernorm" in modules


def _has_linears_alone(owner: str, modules: dict[str, nn.Module]) -> bool:
    """Return True if all matrices of an attention or MLP are weights of its own children."""
    if owner not in modules:
        return True
    return all(
        parameter.ndim < 2 or (parameter.ndim == 2 and name.count(".") == 1)
        for name, parameter in modules[owner].named_parameters()
    )


def _inputs(owner: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the Linears (or modules with a 2-d weight) of an attention or MLP that read its input."""
    if owner not in modules:
        return
    others = NOT_READERS + ENCODER_READERS * owner.endswith("EncDecAttention")
    for name, child in modules[owner].named_children():
        weight = getattr(child, "weight", None)
        if (
            weight is not None
            and weight.ndim == 2
            and not isinstance(child, nn.Embedding)
            and name not in others
        ):
            yield f"{owner}.{name}"
