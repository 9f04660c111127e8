"""Which modules produce what which Linears read, by the names that the blocks of transformers give them.

    NORMS       a norm before an attention or an MLP, and its Linears that read it: Llama, Qwen, Gemma, GPT-NeoX, ViT, T5
    GATED       an MLP that multiplies a function of its first Linear by its second one: Llama and its kin, T5
    ONE_READER  a norm or an activation with one Linear behind it: GPT-2, BERT, GPT-NeoX, ViT, T5
    BERT        output.LayerNorm -> attention.self.{query,key,value} of the next block
    rotary      each attention whose `forward` calls `apply_rotary_pos_emb`

A name here only says where to look: what a module computes is tried out (probe.py), and who reads it shows when it is read. Norms that
are found nowhere here are listed too, as read by nobody: those of queries and keys, those between a sublayer and its residual sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from narrowgauge.fuse.rotary import function_of
from narrowgauge.nn.float32_modules import is_norm

# In a block: a norm, and the modules whose Linears read it; of several norms the first that is there.
NORMS = (
    (("input_layernorm", "layernorm_before"), ("self_attn", "attention", "attention.attention")),
    (("pre_feedforward_layernorm", "post_attention_layernorm", "layernorm_after"), ("mlp", "intermediate")),
    (("layer_norm",), ("SelfAttention",)),
    (("layer_norm",), ("EncDecAttention",)),
    (("layer_norm",), ("DenseReluDense",)),
)
# Of an attention or an MLP: Linears that read something else.
OTHERS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "o", "down_proj", "w2", "dense_4h_to_h", "fc2")
ENCODER_READERS = ("k", "v")  # of EncDecAttention: they read what the encoder gave
# In a block: the function, the Linear that reads it, the Linear whose output it reads alone, a dropout between it and its reader.
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
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))


@dataclass(frozen=True)
class Place:
    """A function that is cast where it is computed, and the Linears that read it, by their dotted names.

    form      "module": its output is what is read; "gated": an MLP that multiplies a function of gate by up; "rotary": an attention that
              turns its queries and keys, and nobody's input is cast
    sources   Linears whose outputs it reads alone, so that its gradients are theirs: gate and up, or the Linear before a GELU
    between   a dropout between it and its readers, or None
    """

    name: str
    form: Literal["module", "gated", "rotary"]
    readers: tuple[str, ...]
    sources: tuple[str, ...] = ()
    between: str | None = None


def places(model: nn.Module) -> Iterator[Place]:
    """The places that the model's names suggest, in its order; then norms of which nobody knows who reads them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: set[str] = set()
    for name in modules:
        for place in _places_in(name, modules):
            if place.name not in found:
                found.add(place.name)
                yield place
    yield from (Place(name, "module", ()) for name in modules if name not in found and is_norm(modules[name]))


def _places_in(name: str, modules: dict[str, nn.Module]) -> Iterator[Place]:
    """Those in the module called `name`."""
    prefix = f"{name}." if name else ""
    for norms, owners in NORMS:
        norm = next((prefix + each for each in norms if prefix + each in modules), None)
        readers = tuple(each for owner in owners for each in _inputs(prefix + owner, modules))
        if norm is not None and readers:
            yield Place(norm, "module", readers)
    for function, reader, source, between in ONE_READER:
        if all(prefix + each in modules for each in (function, reader, source or reader)):
            sources = (prefix + source,) if source else ()
            yield Place(prefix + function, "module", (prefix + reader,), sources, between and prefix + between)
    stack, _, number = name.rpartition(".")
    following = f"{stack}.{int(number) + 1}.attention.self" if number.isdecimal() else ""
    if f"{prefix}output.LayerNorm" in modules and f"{following}.query" in modules:
        readers = tuple(f"{following}.{each}" for each in ("query", "key", "value"))
        yield Place(f"{prefix}output.LayerNorm", "module", readers)
    if function_of(modules[name]) is not None:
        yield Place(name, "rotary", ())
    for gate, up, down in GATED:
        if all(prefix + each in modules for each in (gate, up, down)):
            yield Place(name, "gated", (prefix + down,), (prefix + gate, prefix + up))


def _inputs(owner: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """The Linears, and what has a weight as they, directly in an attention or an MLP that read what enters it."""
    if owner not in modules:
        return
    others = OTHERS + ENCODER_READERS * owner.endswith("EncDecAttention")
    for name, child in modules[owner].named_children():
        weight = getattr(child, "weight", None)
        if weight is not None and weight.ndim == 2 and not isinstance(child, nn.Embedding) and name not in others:
            yield f"{owner}.{name}"
