"""Which modules produce what which Linears read, by the names that the blocks of transformers give them.

    Llama and its kin   input_layernorm -> self_attn.{q,k,v}_proj;  post_attention_layernorm (or pre_feedforward_layernorm) ->
                        mlp.{gate,up}_proj;  silu(mlp.gate_proj) * mlp.up_proj -> mlp.down_proj
    GPT-2, BERT         ONE_READER;  BERT's output.LayerNorm -> attention.self.{query,key,value} of the next block
    rotary embedding    in each attention whose `forward` calls `apply_rotary_pos_emb`

A name here only says where to look: what a module computes is tried out (probe.py), and who reads it shows when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from narrowgauge.fuse.rotary import function_of

# In a block: the function, the Linear that reads it, the Linear whose output it reads alone.
ONE_READER = (
    ("ln_1", "attn.c_attn", None),
    ("ln_2", "mlp.c_fc", None),
    ("mlp.act", "mlp.c_proj", "mlp.c_fc"),
    ("attention.output.LayerNorm", "intermediate.dense", None),
    ("intermediate.intermediate_act_fn", "output.dense", "intermediate.dense"),
)
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
MLP_INPUTS = ("gate_proj", "up_proj", "gate_up_proj")
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # of an attention: Linears that read something else


@dataclass(frozen=True)
class Place:
    """A function that is cast where it is computed, and the Linears that read it, by their dotted names.

    form      "module": its output is what is read; "gated": an MLP that multiplies silu(gate) by up; "rotary": an attention that turns
              its queries and keys, and nobody's input is cast
    sources   Linears whose outputs it reads alone, so that its gradients are theirs: gate and up, or the Linear before a GELU
    """

    name: str
    form: Literal["module", "gated", "rotary"]
    readers: tuple[str, ...]
    sources: tuple[str, ...] = ()


def places(model: nn.Module) -> Iterator[Place]:
    """The places that the model's names suggest, in its order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        yield from _norms_of_decoder(prefix, modules)
        for function, reader, source in ONE_READER:
            if all(prefix + each in modules for each in (function, reader, source or reader)):
                yield Place(prefix + function, "module", (prefix + reader,), (prefix + source,) if source else ())
        stack, _, number = name.rpartition(".")
        following = f"{stack}.{int(number) + 1}.attention.self" if number.isdecimal() else ""
        if f"{prefix}output.LayerNorm" in modules and f"{following}.query" in modules:
            readers = tuple(f"{following}.{each}" for each in ("query", "key", "value"))
            yield Place(f"{prefix}output.LayerNorm", "module", readers)
        if function_of(module) is not None:
            yield Place(name, "rotary", ())
        for gate, up, down in GATED:
            if all(prefix + each in modules for each in (gate, up, down)):
                yield Place(name, "gated", (prefix + down,), (prefix + gate, prefix + up))


def _norms_of_decoder(prefix: str, modules: dict[str, nn.Module]) -> Iterator[Place]:
    """Of Llama and its kin, also where nobody is known who reads them."""
    first, attention, mlp = (prefix + name for name in ("input_layernorm", "self_attn", "mlp"))
    if first not in modules:
        return
    if attention in modules:
        weights = {name: getattr(child, "weight", None) for name, child in modules[attention].named_children()}
        inputs = [name for name, weight in weights.items() if weight is not None and weight.ndim == 2]
        yield Place(first, "module", tuple(f"{attention}.{name}" for name in inputs if name not in OUTPUTS))
    second = next(
        (name for name in ("pre_feedforward_layernorm", "post_attention_layernorm") if prefix + name in modules), None
    )
    if second is not None and mlp in modules:
        readers = [f"{mlp}.{name}" for name in MLP_INPUTS]
        yield Place(prefix + second, "module", tuple(each for each in readers if each in modules))
