"""fuse and unfuse: put fused functions in the place of modules' `forward`, take them out again, and say of each what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.fuse.patterns import Place, places
from narrowgauge.fuse.precast import FusedCast, refuse_reader
from narrowgauge.fuse.probe import gated, kind_of
from narrowgauge.fuse.rotary import Embedding, OfAttention, function_of, refuse
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.norm_act import Kind


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A function of a model that Linears read, or a rotary embedding: what became of it, in words.

    readers    the Linears that read it; of a rotary embedding none
    function   "rms-norm", "swiglu", "rotary", ...; '' where it is none of them
    backend    which kernel computes and casts it, and why no other; '' where it is not fused
    reason     why it is not fused, '' if it is
    unread     casts handed over that no layer took, as a share of all; None before the first
    """

    name: str
    readers: tuple[str, ...]
    function: str = ""
    backend: str = ""
    reason: str = ""
    unread: float | None = None

    def __str__(self) -> str:
        readers = f" -> {', '.join(self.readers)}" if self.readers else ""
        if self.reason:
            return f"{self.name}{readers}: not fused ({self.reason})"
        lost = f"; {self.unread:.0%} of its casts were read by nobody" if self.unread else ""
        return f"{self.name} ({self.function}){readers}: {self.backend}{lost}"


@dataclass(eq=False)
class _OfModule:
    """The forward of a norm or an activation."""

    module: nn.Module
    fused: FusedCast

    def __call__(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
        module = self.module
        own: Any = type(module).forward
        if more or options or torch.compiler.is_compiling():
            return own(module, x, *more, **options)
        parameters = tuple(p for name in ("weight", "bias") if (p := getattr(module, name, None)) is not None)
        return self.fused((x, *parameters), lambda: own(module, x))


@dataclass(eq=False)
class _OfMlp:
    """The forward of a gated MLP, of which gate, up and down are the Linears."""

    module: nn.Module
    fused: FusedCast
    names: tuple[str, str, str]

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            own: Any = type(self.module).forward
            return own(self.module, x)
        gate, up, down = (self.module.get_submodule(name) for name in self.names)
        g, u = gate(x), up(x)
        return down(self.fused((g, u), lambda: nn.functional.silu(g) * u))


def fuse(model: nn.Module) -> list[Fusion]:
    """Puts fused functions where the structure of the model and its recipes allow them; in place. Those of before are made anew."""
    unfuse(model)
    modules = dict(model.named_modules())
    refused: dict[str, str] = {}
    for place in places(model):
        # On the CPU and with numbers, whatever the default device is, or a mode that makes tensors fake.
        with torch.device("cpu"), _disable_current_modes():
            found = _tried(place, modules)
        if isinstance(found, str):
            refused[place.name] = found
            continue
        module = modules[place.name]
        if isinstance(found, Embedding):
            module.__dict__["forward"] = OfAttention(module, found)
            continue
        fused = FusedCast(
            found,
            tuple(modules[each] for each in place.readers),
            tuple(modules[each] for each in place.sources),
        )
        forward: Any = _OfModule(module, fused)
        if place.form == "gated":
            names = (*(each.rpartition(".")[2] for each in place.sources), place.readers[0].rpartition(".")[2])
            forward = _OfMlp(module, fused, names)  # type: ignore[arg-type]
        module.__dict__["forward"] = forward
    model.__dict__["_not_fused"] = refused
    return fusions(model)


def unfuse(model: nn.Module) -> None:
    """Gives every module its own forward back."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _OfModule | _OfMlp | OfAttention):
            del module.__dict__["forward"]
    model.__dict__.pop("_not_fused", None)


def fusions(model: nn.Module) -> list[Fusion]:
    """What `fuse` did, and what the recipes make of it now; empty for a model that was not fused."""
    if "_not_fused" not in model.__dict__:
        return []
    modules, refused = dict(model.named_modules()), model.__dict__["_not_fused"]
    found = []
    for place in places(model):
        forward = modules[place.name].__dict__.get("forward")
        if isinstance(forward, _OfModule | _OfMlp):
            found.append(_fusion(place, forward.fused))
        elif isinstance(forward, OfAttention):
            words = forward.embedding.backend_words(modules[place.name])
            found.append(Fusion(name=place.name, readers=(), function="rotary", backend=words))
        else:
            reason = refused.get(place.name, "it came after the model was fused")
            found.append(Fusion(name=place.name, readers=place.readers, reason=reason))
    return found


def _fusion(place: Place, fused: FusedCast) -> Fusion:
    reader = fused.reader()
    names = dict(name=place.name, readers=place.readers)
    if reader is None:
        reasons = [refuse_reader(each) for each in fused.readers if isinstance(each, QLinear)]
        return Fusion(**names, reason=next((each for each in reasons if each), "no reader was converted"))  # type: ignore[arg-type]
    takers = sum(isinstance(each, QLinear) and each.recipe == reader.recipe for each in fused.readers)
    stats = fused.stats
    unread = None if not stats.made else max(0.0, 1 - stats.taken / (stats.made * takers))
    return Fusion(
        **names, function=fused.kind.name, backend=fused.backend_words(reader), unread=unread  # type: ignore[arg-type]
    )  # fmt: skip


def _tried(place: Place, modules: dict[str, nn.Module]) -> Kind | Embedding | str:
    """What a place computes, or why it is not fused."""
    module, readers = modules[place.name], [modules[each] for each in place.readers]
    if place.form == "rotary":
        return _embedding(module)
    if not readers:
        return "no Linear is found that reads it"
    if "forward" in module.__dict__:
        return "its forward was replaced by somebody else"
    if not any(isinstance(each, QLinear) for each in readers):
        return f"{place.readers[0]} is {_article(type(readers[0]).__name__)}, which has no recipe"
    if place.form == "gated":
        names = [each.rpartition(".")[2] for each in (*place.sources, *place.readers)]
        return gated(module, *names)
    return kind_of(module)


def _embedding(module: nn.Module) -> Embedding | str:
    if "forward" in module.__dict__:
        return "its forward was replaced by somebody else"
    function = function_of(module)
    assert function is not None
    return refuse(function) or Embedding(function)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
