"""Fuse norms and activations with the quantization of their output: `convert(..., fuse=True)`.

    unfused  the norm writes y; the first of q, k and v quantizes it, the others reuse the cast
    fused    the kernel that computes y also quantizes it and returns the codes along with y

Fused functions, found by the module names and structure of transformers' blocks (patterns.py):

    RMSNorm, LayerNorm  before q, k, v; before gate and up; before the first Linear of an MLP
    silu(gate) * up     before down; its backward returns quantized gradients of gate and up
    GELU, tanh GELU     before an MLP's second Linear; backward: quantized gradient of the first
    rotary embedding    queries and keys in one kernel, forward and backward; nothing is quantized
    cross-entropy       on a CPU, the loss of transformers' causal language models (loss.py)
    attention           in bfloat16 on a CPU with AVX512-BF16 (attention.py); nothing is quantized

A name is only a hint. A module is fused only if it computes the kernel's function on random inputs
(probe.py). A Linear uses the codes only if it reads exactly that tensor and its recipe requires
exactly that cast (`nn.cast_sources`). Otherwise it quantizes its input itself.

Fusing therefore changes only the rounding of the fused functions: a kernel rounds once where
PyTorch rounds between operations. On a CPU the kernels compute values alone, for every recipe, and
readers cast them (values.py). Without a kernel (under torch.compile, without a compiler, on a GPU for
recipes with rotations) the module's own code runs, bit-identical to the unfused model.

Under delayed scaling all readers of one tensor get the first reader's amax history, since they read
the same values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.errors import ConfigError, Reason
from narrowgauge.fuse.forward import FusedForward, Fusion, Save
from narrowgauge.fuse.loss import fuse_loss, loss_fusions, unfuse_loss
from narrowgauge.fuse.patterns import FusionCandidate, candidates
from narrowgauge.fuse.precast import FusedMlp, FusedModule
from narrowgauge.fuse.probe import gated_kind_of, kind_of, refuse_rotary
from narrowgauge.fuse.rotary import FusedAttention, function_of
from narrowgauge.nn.float32_modules import Float32Forward
from narrowgauge.nn.linear import QLinear

__all__ = ["Fusion", "Save", "fuse", "fusions", "unfuse"]


def check_save(save: Save | None) -> None:
    """Raise ConfigError for an unknown value of `save`."""
    if save not in (None, *get_args(Save)):
        names = ", ".join(map(repr, get_args(Save)))
        raise ConfigError(
            f"fuse: save = {save!r}; it is one of {names}, or None for what a kernel does by itself.",
            code="fuse.save",
        )


def fuse(model: nn.Module, save: Save | None = None) -> list[Fusion]:
    """Replace forwards by fused functions where the model's structure and recipes permit, in place.

    save  form of the tensors saved for backward (saving.py): "exact", or "fp8" or "int8" with
          approximate gradients; without a kernel, the plain torch definition runs. None: "exact"
          with a kernel, and the module's own code elsewhere

    Earlier fusions are replaced. Returns the same as `fusions`.
    """
    check_save(save)
    unfuse(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    holders = Counter(child for module in model.modules() for child in module.children())
    refused: dict[str, str] = {}
    for candidate in candidates(model):
        # The probe needs real data on the CPU, even under another default device or FakeTensorMode.
        with torch.device("cpu"), _disable_current_modes():
            found = _fused_forward(candidate, modules, holders, save)
        if isinstance(found, str):
            refused[candidate.key] = found
        else:
            # On the instance: class, state dict and parameter names stay unchanged.
            modules[candidate.name].__dict__["forward"] = found
    with torch.device("cpu"), _disable_current_modes():
        fuse_loss(model)
    model.__dict__["_not_fused"] = refused
    return fusions(model)


def unfuse(model: nn.Module) -> None:
    """Restore every module's own forward, and the model's loss."""
    unfuse_loss(model)
    for module in model.modules():
        fused = module.__dict__.get("forward")
        if isinstance(fused, FusedForward):
            del module.__dict__["forward"]
            # The module computed in float32 before it was fused.
            if fused.replaced_forward is not None:
                module.__dict__["forward"] = fused.replaced_forward
    model.__dict__.pop("_not_fused", None)


def fusions(model: nn.Module) -> list[Fusion]:
    """Return the state of each place that `fuse` looked at; [] for a model that was not fused.

    Backends are chosen for the present recipes, which may have changed since.
    """
    if "_not_fused" not in model.__dict__:
        return []
    found = []
    for candidate in candidates(model):
        forward = model.get_submodule(candidate.name).__dict__.get("forward")
        if isinstance(forward, FusedAttention) and candidate.form == "attention":
            if forward.attends:
                found.append(forward.attention_fusion(candidate.name))
                continue
        elif (
            isinstance(forward, FusedForward) and candidate.key not in model.__dict__["_not_fused"]
        ):
            # Computed at each call: the recipes may have changed since `fuse`.
            found.append(forward.fusion(candidate.name, candidate.readers))
            continue
        reason = model.__dict__["_not_fused"].get(
            candidate.key, "it came after the model was fused"
        )
        found.append(Fusion(name=candidate.name, readers=candidate.readers, reason=reason))
    return found + loss_fusions(model)


def _fused_forward(
    candidate: FusionCandidate,
    modules: dict[str, nn.Module],
    holders: Counter[nn.Module],
    save: Save | None,
) -> FusedForward | str:
    """Return the replacement for a module's forward, or the reason against it.

    holders  module -> number of modules that contain it
    """
    module = modules[candidate.name]
    if candidate.form not in ("rotary", "attention") and not candidate.readers:
        return Reason("no-reader", "no attention or MLP is known to read it")
    if (
        candidate.dropout_between is not None
        and getattr(modules[candidate.dropout_between], "p", 0.0) > 0
    ):
        return f"{candidate.dropout_between} lies between it and its reader"
    replaced_forward = module.__dict__.get("forward")
    if candidate.form == "attention" and (
        replaced_forward is None or isinstance(replaced_forward, FusedAttention)
    ):
        # The rotary embedding of the same module came before.
        function = None if replaced_forward is None else replaced_forward.function
        return FusedAttention(module, function, attends=True, save=save)
    if replaced_forward is not None and not (
        isinstance(replaced_forward, Float32Forward) and candidate.form == "module"
    ):
        return Reason("replaced-forward", "its forward was replaced by somebody else")
    if candidate.form == "rotary":
        function = function_of(module)
        assert function is not None
        return refuse_rotary(function) or FusedAttention(module, function, save=save)
    shared = [
        name
        for name in (candidate.name, *candidate.readers, *candidate.sources)
        if holders[modules[name]] > 1
    ]
    # A shared module has several callers, so its output would have readers that were not checked.
    if shared:
        return f"several modules share {shared[0]}"
    readers, sources = (
        tuple(modules[name] for name in names) for names in (candidate.readers, candidate.sources)
    )
    if not any(isinstance(each, QLinear) for each in readers):
        kind = type(readers[0]).__name__
        return f"{candidate.readers[0]} is {'an' if kind[0] in 'AEIOU' else 'a'} {kind}, which has no recipe"
    if candidate.form == "module":
        found = kind_of(module)
        if isinstance(found, str):
            return found
        kind = replace(found, wide=replaced_forward is not None)
        return FusedModule(
            module,
            kind,
            readers,
            sources,
            save=save,
            replaced_forward=replaced_forward,
            private=candidate.is_private,
        )
    # T5 converts the input of its float32 output Linear.
    if len({each.weight.dtype for each in (*readers, *sources)}) > 1:
        return "its Linears have weights of several types"
    names = [name.rpartition(".")[2] for name in (*candidate.sources, *candidate.readers)]
    found = gated_kind_of(module, *names)
    return (
        found
        if isinstance(found, str)
        else FusedMlp(module, found, readers, sources, names=tuple(names), save=save)
    )
