"""Activation checkpointing: blocks keep little for backward, and backward computes the rest once more.

    policy            what is kept of a block
    None, "none"      everything: takes checkpointing off
    "full"            its inputs
    "every-N"         of every N-th block, from the first on, its inputs; of the others everything
    "selective"       its inputs and the outputs of matrix products and attention; what lies between is computed again
    "budget:512MiB"   as "full", in as many blocks, from the first on, as bring the bytes kept below the budget

Torch's non-reentrant checkpoint: no input needs a gradient, so frozen layers below need no hook that would drive backward through
them, and a block that needs no backward at all runs plainly. Generators are put back for the recomputation, so dropout and
stochastic rounding draw the same numbers; delayed scaling only takes maxima, so seeing an amax twice changes nothing.

The last block is left out by default: backward would begin by computing it again, so its activations would exist at that moment
anyway. Leaving it out costs memory only where something large lives between it and backward, such as whole logits.

Cost: about one more forward of the recomputed blocks in each step.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks, set_technique
from narrowgauge.memory.measure import note, saved_bytes

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_POLICY = re.compile(r"none|full|selective|every-([1-9]\d{0,3})|budget:(\d+(?:\.\d+)?) ?(B|[KMG]iB)?")
CACHES = ("past_key_values", "past_key_value", "layer_past")

# Outputs that "selective" keeps; a release of torch may lack some.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "_grouped_mm", "convolution")
_ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
_ATTENTION += ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")
KEPT_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name).default for name in (*_PRODUCTS, *_ATTENTION) if hasattr(torch.ops.aten, name)
)


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What `checkpoint` did; `print` it."""

    policy: str
    recomputed: tuple[str, ...]  # names of the blocks whose forward is repeated
    kept: tuple[str, ...]  # names of the others
    kept_bytes: int | None  # with a budget: bytes kept for backward now, measured
    notes: tuple[str, ...]  # what else changed

    def __str__(self) -> str:
        blocks = len(self.recomputed) + len(self.kept)
        head = f"checkpointing {self.policy}: {len(self.recomputed)} of {blocks} blocks are computed again in backward"
        size = "" if self.kept_bytes is None else f"; {self.kept_bytes / 2**20:.1f} MiB are kept for it"
        return "\n".join([head + size, *self.notes])


def _recomputed(
    selective: bool, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a block's forward so that backward repeats it: whole, or without the operations whose outputs are kept."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.requires_grad for tensor in (*tensors, *block.parameters())):
        return forward(*args, **kwargs)
    for name in CACHES:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"checkpoint: a block was given {name}; computing it again would append its keys and values a second "
                "time. Call the model with use_cache=False, or take checkpointing off with checkpoint(model, None)."
            )
    contexts: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
    return torch_checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **contexts, **kwargs)


def _without_cache(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the model: while gradients are on, no KV cache is filled."""
    if not torch.is_grad_enabled():
        return None
    if kwargs.get("use_cache"):
        raise ConfigError(
            "checkpoint: use_cache=True, but recomputation would fill the KV cache twice. Pass use_cache=False, "
            "or take checkpointing off with checkpoint(model, None)."
        )
    return args, {**kwargs, "use_cache": False}


def checkpoint(
    model: nn.Module,
    policy: str | None,
    *,
    blocks: str | Iterable[str] | None = None,
    keep_last: bool = True,
    batch: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> CheckpointReport:
    """Sets the checkpointing of a model's blocks, in place; replaces what was set before. Policies: see the module.

    blocks      patterns of the modules to treat as blocks; None finds them by structure (see `find_blocks`)
    keep_last   whether the last block keeps everything, unless a budget needs it too
    batch,loss  for a budget: what `saved_bytes` needs to measure

    Parameter names, state dicts, copies and pickles stay as they are. Raises ConfigError for an unknown policy, a budget without
    a batch or below what "full" reaches, and a model that checkpoints already by transformers' own switch.
    """
    policy = policy or "none"
    parsed = _POLICY.fullmatch(policy)
    if not parsed:
        raise ConfigError(
            f"checkpoint: no policy {policy!r}. Choose 'none', 'full', 'every-2', 'selective', or 'budget:512MiB'."
        )
    found = find_blocks(model, blocks, "checkpoint")
    for name, block in found.items():
        if getattr(block, "gradient_checkpointing", False):
            raise ConfigError(
                f"checkpoint: {name} checkpoints already, by transformers' own switch, and would be computed three times. "
                "Call model.gradient_checkpointing_disable() first."
            )
    names = list(found)
    _recompute(model, found, [])
    kept_bytes = None
    if parsed[2]:
        budget_bytes = float(parsed[2]) * UNITS[parsed[3] or ""]
        chosen, kept_bytes = _within(model, found, budget_bytes, batch, loss)
    else:
        candidates = names[:-1] if keep_last and len(names) > 1 else names
        chosen = [] if policy == "none" else candidates[:: int(parsed[1] or 1)]
    cache_is_off = _recompute(model, found, chosen, selective=policy == "selective")
    notes = [_without_backward(model, chosen)]
    if cache_is_off:
        notes.append("KV cache: off while gradients are on, since computing a block again would fill it twice")
    return CheckpointReport(
        policy=policy,
        recomputed=tuple(chosen),
        kept=tuple(name for name in names if name not in chosen),
        kept_bytes=kept_bytes,
        notes=tuple(note for note in notes if note),
    )


def _recompute(model: nn.Module, found: dict[str, nn.Module], chosen: list[str], selective: bool = False) -> bool:
    """Sets the chosen blocks alone to be computed again, and the hook that keeps the KV cache off; -> whether there is one."""
    for name, block in found.items():
        set_technique(block, "recompute", partial(_recomputed, selective) if name in chosen else None)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _without_cache:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    if chosen and has_cache:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    return bool(chosen) and has_cache


def _within(
    model: nn.Module, found: dict[str, nn.Module], budget_bytes: float, batch: Any, loss: Callable[[Any], Tensor] | None
) -> tuple[list[str], int]:
    """(the first blocks, as few as bring the bytes below the budget, those bytes); the first keep theirs the longest."""
    if batch is None:
        raise ConfigError(
            "checkpoint: a budget is held by measuring, so it needs a sample batch. Pass batch=, shaped like the largest one."
        )

    @cache
    def kept(count: int) -> int:
        _recompute(model, found, names[:count])
        return saved_bytes(model, batch, loss).total

    names = list(found)
    least = kept(len(names))
    if least > budget_bytes:
        _recompute(model, found, [])
        raise ConfigError(
            f"checkpoint: with every block computed again {least:,} bytes are kept, above the budget of "
            f"{int(budget_bytes):,}. Raise the budget to {-(-least // 2**20)}MiB, or make the batch smaller."
        )
    count = bisect_left(range(len(names)), True, key=lambda count: kept(count) <= budget_bytes)
    return names[:count], kept(count)


def _without_backward(model: nn.Module, chosen: list[str]) -> str:
    """A sentence on the chosen blocks below everything that trains, in the model's order; they run plainly."""
    seen = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    lowest = next((place for place, (_, trains) in enumerate(seen) if trains), len(seen))
    below = [name for name in chosen if not any(each.startswith(f"{name}.") for each, _ in seen[lowest:])]
    if not below:
        return ""
    return f"{len(below)} of them, {below[0]} to {below[-1]}, lie below all that trains and need no backward: not computed again"


def _selective_contexts() -> Any:
    forward, recomputation = create_selective_checkpoint_contexts(_keep_products)
    return (forward if torch.compiler.is_compiling() else _counted(forward)), recomputation


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and attention are kept. Attention with dropout is not: kept, it would not draw, and all later draws differ."""
    keeps = operation in KEPT_OPERATIONS and not _draws(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _counted(forward: AbstractContextManager[Any]) -> Iterator[None]:
    """Also reports kept outputs to `measure.note`: they bypass the hooks for saved tensors."""
    with forward, _CountKept():
        yield


class _CountKept(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in KEPT_OPERATIONS and not _draws(func, args, kwargs):
            note(*(output for output in tree_leaves(found) if isinstance(output, Tensor)))
        return found


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return bool(kwargs.get("dropout_p", args[place] if place < len(args) else 0.0))
    return False
