"""Which modules produce what which Linears read, by the names that the blocks of transformers give them.

    Llama and its kin   input_layernorm -> self_attn.{q,k,v}_proj;  post_attention_layernorm (or pre_feedforward_layernorm) ->
                        mlp.{gate,up}_proj;  silu(mlp.gate_proj) * mlp.up_proj -> mlp.down_proj
    GPT-2               ln_1 -> attn.c_attn;  ln_2 -> mlp.c_fc;  mlp.act -> mlp.c_proj
    BERT                attention.output.LayerNorm -> intermediate.dense;  intermediate.intermediate_act_fn -> output.dense;
                        output.LayerNorm -> attention.self.{query,key,value} of the next block
    rotary embedding    in each attention whose `forward` calls `apply_rotary_pos_emb`

A name here only says where to look: what a module computes is tried out (`proof`), and who reads it shows when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from narrowgauge.fuse.rotary import function_of

OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # of an attention: Linears that read something else
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


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
    modules = dict(model.named_modules())
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        yield from _decoder(prefix, module)
        yield from _gpt2(prefix, module)
        yield from _bert(prefix, module, modules)
        if function_of(module) is not None:
            yield Place(name, "rotary", ())
        for gate, up, down in GATED:
            if all(_has(module, part) for part in (gate, up, down)):
                yield Place(name, "gated", (prefix + down,), (prefix + gate, prefix + up))


def _decoder(prefix: str, block: nn.Module) -> Iterator[Place]:
    if not _has(block, "input_layernorm"):
        return
    if _has(block, "self_attn"):
        readers = _inputs_of(block.get_submodule("self_attn"))
        yield Place(f"{prefix}input_layernorm", "module", tuple(f"{prefix}self_attn.{each}" for each in readers))
    before_mlp = "pre_feedforward_layernorm" if _has(block, "pre_feedforward_layernorm") else "post_attention_layernorm"
    if _has(block, before_mlp) and _has(block, "mlp"):
        mlp = block.get_submodule("mlp")
        readers = [each for each in ("gate_proj", "up_proj", "gate_up_proj") if _has(mlp, each)]
        yield Place(prefix + before_mlp, "module", tuple(f"{prefix}mlp.{each}" for each in readers))


def _gpt2(prefix: str, block: nn.Module) -> Iterator[Place]:
    if _has(block, "ln_1") and _has(block, "attn.c_attn"):
        yield Place(f"{prefix}ln_1", "module", (f"{prefix}attn.c_attn",))
    if _has(block, "ln_2") and _has(block, "mlp.c_fc"):
        yield Place(f"{prefix}ln_2", "module", (f"{prefix}mlp.c_fc",))
    if _has(block, "mlp.act") and _has(block, "mlp.c_proj"):
        yield Place(f"{prefix}mlp.act", "module", (f"{prefix}mlp.c_proj",), (f"{prefix}mlp.c_fc",))


def _bert(prefix: str, block: nn.Module, modules: dict[str, nn.Module]) -> Iterator[Place]:
    if not (_has(block, "intermediate.dense") and _has(block, "output.dense")):
        return
    if _has(block, "attention.output.LayerNorm"):
        yield Place(f"{prefix}attention.output.LayerNorm", "module", (f"{prefix}intermediate.dense",))
    if _has(block, "intermediate.intermediate_act_fn"):
        act = f"{prefix}intermediate.intermediate_act_fn"
        yield Place(act, "module", (f"{prefix}output.dense",), (f"{prefix}intermediate.dense",))
    following = _next(prefix)
    if _has(block, "output.LayerNorm") and f"{following}attention.self.query" in modules:
        readers = tuple(f"{following}attention.self.{each}" for each in ("query", "key", "value"))
        yield Place(f"{prefix}output.LayerNorm", "module", readers)


def _next(prefix: str) -> str:
    """ "encoder.layer.3." -> "encoder.layer.4."; what has no number has no next one."""
    stack, _, number = prefix.removesuffix(".").rpartition(".")
    return f"{stack}.{int(number) + 1}." if number.isdecimal() else "?"


def _inputs_of(attention: nn.Module) -> list[str]:
    return [
        name
        for name, child in attention.named_children()
        if name not in OUTPUTS and getattr(child, "weight", None) is not None and child.weight.ndim == 2
    ]


def _has(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        found = module._modules.get(part)
        if found is None:
            return False
        module = found
    return True
