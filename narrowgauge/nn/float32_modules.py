"""Modules of a 16-bit model that keep float32 weights and arithmetic, and the list that names them.

    y = round(module(float32(x)))     weights, statistics and sums in float32; x, y in 16 bits

Tensor inputs are converted to float32. Outputs are rounded once, to the dtype of the first float
input, so the next layer reads the model's dtype. This holds for modules that cast internally too:
transformers' RMSNorms compute in float32 and round before they multiply by their weight, and
nn.LayerNorm requires x and weight of one dtype. The module saves float32 tensors for backward. The
kernels of `fuse` save x in 16 bits.

The list is the setting `recipe.keep_float32`, or that of the precision (`optim.precision`):
norms and softmax under `bf16-o2`, nothing under `bf16-o3`.

An entry of the list is a kind, as below, or a pattern of module names (see `structure`):

    norms         modules without children, named as a norm by their class, with 1-d weights
    embeddings    nn.Embedding, and layers that hold the same weight
    softmax       softmax of attention: not a module, so `train.attention` reads this entry
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
    """Replaces the `forward` of `module`.

    module   the module, with float32 weights
    output   dtype of the result if no input is a float tensor, as for an embedding

    float32 inputs give float32 outputs, under autocast and in probes too.
    """

    module: nn.Module

    def __call__(self, *given: Any, **options: Any) -> Any:
        narrow = next(
            (each.dtype for each in (*given, *options.values()) if _is_float(each)), self.output
        )
        # The class's forward: the instance attribute `forward` is this object.
        forward: Any = type(self.module).forward
        wide = tree_map(_wide, (given, options))
        y = forward(self.module, *wide[0], **wide[1])
        return tree_map(lambda each: each.to(narrow) if _is_float(each) else each, y)

    output: torch.dtype = torch.bfloat16


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _wide(x: Any) -> Any:
    return x.to(torch.float32) if _is_float(x) else x


def to_16_bits(model: nn.Module, dtype: torch.dtype, keep: Iterable[str]) -> tuple[str, ...]:
    """Convert the parameters of `model` to `dtype` in place, except for the modules in `keep`.

    keep    entries as in the module docstring
    ->      names of the modules that stay in float32

    Call it before `convert` and `fuse`. A shared parameter stays float32 in
    every module that holds it. Raises ConfigError, with the closest names,
    for a pattern that matches nothing. The kinds may match nothing.
    """
    require_module(model, "to_16_bits")
    names = _named(model, tuple(keep))
    modules = dict(model.named_modules())
    kept = {
        id(parameter) for name in names for parameter in modules[name].parameters(recurse=False)
    }
    # Buffers keep their dtype: rotary frequencies in bfloat16 would have an error of 2**-9.
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    tied = [
        name
        for name, module in modules.items()
        if any(id(p) in kept for p in module.parameters(recurse=False))
    ]
    found = tuple(dict.fromkeys((*names, *tied)))
    for name in found:
        modules[name].__dict__["forward"] = Float32Forward(modules[name], dtype)
    return found


def kept_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module for all modules that compute in float32, fused ones included."""
    found = {}
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(getattr(forward, "replaced_forward", forward), Float32Forward):
            found[name] = module
    return found


def summary(names: Iterable[str]) -> str:
    """Join module names, equal but for numbers only once: "layers.*.input_layernorm (4)"."""
    groups: dict[str, int] = {}
    for name in names:
        plain = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        groups[plain] = groups.get(plain, 0) + 1
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in groups.items())


def is_norm(module: nn.Module) -> bool:
    """True for a class named as a norm, without children, with 1-d weights or none."""
    named = any(
        "norm" in kind.__name__.lower() for kind in type(module).__mro__ if kind is not nn.Module
    )
    return (
        named
        and not any(True for _ in module.children())
        and all(p.ndim == 1 for p in module.parameters())
    )


def _named(model: nn.Module, keep: tuple[str, ...]) -> list[str]:
    """Names of the modules that the entries select, in the model's order."""
    own = {
        name: module
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
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
                    f"It is one of {', '.join(KINDS)}, or a pattern of names.",
                    code="pattern.no-match",
                )
            found |= below
    return [name for name in own if name in found]


def _matches(name: str, pattern: str) -> bool:
    """True if the pattern matches this name or the name of a module that contains it."""
    parts = name.split(".")
    return any(matches(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
