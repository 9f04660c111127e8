"""Modules of a 16-bit model that keep float32 weights and arithmetic, and the list that names them.

    y = round(module(float32(x)))          weights, statistics and sums in float32; x and y in the 16 bits of the model

Each tensor that goes in is widened and each that comes out is rounded once, to the type of the first that came in, so whoever reads y
finds the type that all other layers have. That holds whatever casts a module has of its own: transformers' RMSNorms widen x and round
before they multiply by their weight, nn.LayerNorm takes x and weight of one type. Kept for backward is what the module keeps in float32;
kernels of `fuse` keep x in its 16 bits.

An entry of the list is a kind or a pattern of names (see `structure`):

    norms         modules without children whose class is called a norm, and whose weights have one axis
    embeddings    nn.Embedding, and the layers that hold the same weight
    softmax       of attention: no module, so it is for whoever chooses the attention (`train.attention`)
    layers.0.*    modules with weights of their own at or below these names
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from narrowgauge.errors import ConfigError, closest
from narrowgauge.structure import matches, require_module

NORMS, EMBEDDINGS, SOFTMAX = KINDS = ("norms", "embeddings", "softmax")


@dataclass(eq=False)
class Float32Forward:
    """Called in the place of the `forward` of `module`. Inputs that are float32 already come out as float32: autocast, a probe."""

    module: nn.Module

    def __call__(self, *given: Any, **options: Any) -> Any:
        narrow = next((each.dtype for each in (*given, *options.values()) if _is_float(each)), self.output)
        forward: Any = type(self.module).forward
        wide = tree_map(_wide, (given, options))
        y = forward(self.module, *wide[0], **wide[1])
        return tree_map(lambda each: each.to(narrow) if _is_float(each) else each, y)

    # of a module that reads no floats: an embedding
    output: torch.dtype = torch.bfloat16


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _wide(x: Any) -> Any:
    return x.to(torch.float32) if _is_float(x) else x


def to_16_bits(model: nn.Module, dtype: torch.dtype, keep: Iterable[str]) -> tuple[str, ...]:
    """Gives the parameters of `model` the type `dtype`, in place, but for those that the list `keep` names; the names of their modules.

    Before `convert` and `fuse`. Buffers stay as they are: rotary frequencies in bfloat16 would be wrong by 2**-9. A parameter that several
    modules hold is kept in all of them. Raises ConfigError for an entry that names nothing, with the closest names; norms and softmax may.
    """
    require_module(model, "to_16_bits")
    names = _named(model, tuple(keep))
    modules = dict(model.named_modules())
    kept = {id(parameter) for name in names for parameter in modules[name].parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    tied = [name for name, module in modules.items() if any(id(p) in kept for p in module.parameters(recurse=False))]
    found = tuple(dict.fromkeys((*names, *tied)))
    for name in found:
        modules[name].__dict__["forward"] = Float32Forward(modules[name], dtype)
    return found


def kept_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those that compute in float32, by their names; also where `fuse` computes them since."""
    found = {}
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(getattr(forward, "replaced_forward", forward), Float32Forward):
            found[name] = module
    return found


def summary(names: Iterable[str]) -> str:
    """Of names of modules, those that differ in numbers alone once: "layers.*.input_layernorm (4)"."""
    groups: dict[str, int] = {}
    for name in names:
        plain = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        groups[plain] = groups.get(plain, 0) + 1
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in groups.items())


def is_norm(module: nn.Module) -> bool:
    """By its class's name, without children, with weights of one axis or none."""
    named = any("norm" in kind.__name__.lower() for kind in type(module).__mro__ if kind is not nn.Module)
    return named and not any(True for _ in module.children()) and all(p.ndim == 1 for p in module.parameters())


def _named(model: nn.Module, keep: tuple[str, ...]) -> list[str]:
    """The modules that a list names, in the model's order."""
    own = {
        name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    # A norm without weights computes in float32 too.
    own |= {name: module for name, module in model.named_modules() if is_norm(module)}
    found: set[str] = set()
    for entry in keep:
        if entry == NORMS:
            found |= {name for name, module in own.items() if is_norm(module)}
        elif entry == EMBEDDINGS:
            found |= {name for name, module in own.items() if isinstance(module, nn.Embedding)}
        elif entry != SOFTMAX:
            below = {name for name in own if _matches(name, entry)}
            if not below:
                raise ConfigError(
                    f"keep_float32: {entry!r} names no module with weights. Closest: {closest(entry, [*KINDS, *own]) or 'none'}. "
                    f"It is one of {', '.join(KINDS)}, or a pattern of names."
                )
            found |= below
    return [name for name in own if name in found]


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern means this module or one that holds it."""
    parts = name.split(".")
    return any(matches(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
