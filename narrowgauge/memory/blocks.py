"""Find a model's blocks by structure, and wrap their forward.

Blocks are the layers of a Transformer: members of a numbered container (ModuleList, Sequential) of
two or more modules of one class that contain matrices. Containers inside a block, such as experts,
are ignored.

Checkpointing, compression and offloading replace `forward` on the instance. Class, parameters and
their names are unchanged, so state dicts, hooks, copies and pickles still work. A block has one
replacement for all techniques: recomputation inside, saved-tensor hooks outside. With both, the
hooks see the inputs of the recomputed block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from narrowgauge.errors import ConfigError, closest
from narrowgauge.structure import matches, outermost, require_module


class BlockForward:
    """Replacement for a block's forward; calls the original if gradients are disabled.

    block             the block
    original_forward  a forward set on the instance earlier, by another library or by compile_blocks
    recompute         recompute(block, forward, args, kwargs) runs the forward so that backward
                      recomputes it; None: plain forward
    saving            the `saved_tensors.SavedActivations` applied to the block, or None
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.original_forward: Callable[..., Any] | None = block.__dict__.get("forward")
        self.recompute: Callable[..., Any] | None = None
        self.saving: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Nothing is saved for backward, so no technique has anything to do.
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # Hooks outside, recomputation inside: the hooks then see only the tensors that the
        # recomputed block saves, its inputs.
        with self.saving.hooks(self.block, args, kwargs) if self.saving else nullcontext():
            if self.recompute is None:
                return self._forward(*args, **kwargs)
            return self.recompute(self.block, self._forward, args, kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.original_forward is not None:
            return self.original_forward(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)


def forward_of(block: nn.Module) -> BlockForward | None:
    """Return the BlockForward of the block, or None."""
    forward = block.__dict__.get("forward")
    return forward if isinstance(forward, BlockForward) else None


def set_technique(block: nn.Module, kind: str, technique: Any) -> None:
    """Set `recompute` or `saving` of a block; None removes it.

    The block's own forward is restored once no technique is left.
    """
    forward = forward_of(block)
    if forward is None:
        forward = block.forward = BlockForward(block)
    setattr(forward, kind, technique)
    if forward.recompute is None and forward.saving is None:
        del block.__dict__["forward"]
        if forward.original_forward is not None:
            block.forward = forward.original_forward


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Apply torch.compile to each block's own forward, in place, inside of other techniques.

    options  of torch.compile

    Needed for segments of blocks under compilation (`checkpoint(model, "sqrt")`): eager code calls
    the blocks, so that each can be recomputed separately. Compiled blocks are skipped.
    """
    for block in find_blocks(model, verb="compile_blocks").values():
        if is_compiled(block):
            continue
        replaced = forward_of(block)
        # Below the techniques: their hooks and recomputation stay in eager code.
        own = block.__dict__.get("forward") if replaced is None else replaced.original_forward
        compiled = torch.compile(own or type(block).forward.__get__(block), **options)
        if replaced is None:
            block.forward = compiled
        else:
            replaced.original_forward = compiled


def is_compiled(block: nn.Module) -> bool:
    """Return True if the block's own forward is compiled."""
    replaced = forward_of(block)
    forward = block.__dict__.get("forward") if replaced is None else replaced.original_forward
    return hasattr(forward, "_torchdynamo_orig_callable")


def find_blocks(
    model: nn.Module, names: str | Iterable[str] | None = None, verb: str = "blocks"
) -> dict[str, nn.Module]:
    """Return {dotted name: block} in the model's order.

    names  patterns of modules to use as blocks; None finds them by structure
    verb   name of the calling function, for error messages

    Raises ConfigError if there are no blocks, or if a pattern matches nothing.
    """
    require_module(model, verb)
    if names is not None:
        wanted = (
            [names]
            if isinstance(names, str)
            else list(names)
            if isinstance(names, Iterable)
            else []
        )
        if not wanted or not all(isinstance(each, str) for each in wanted):
            raise ConfigError(
                f"{verb}: blocks = {names!r}; it must be names of modules, or patterns of them, as ['encoder.layer.*']. Leave it out and "
                "they are found by structure.",
                code="blocks.names",
            )
        return _named(model, wanted, verb)
    found = {
        f"{stack}.{number}".lstrip("."): member
        for stack, members in outermost(model, _is_stack)
        for number, member in members.items()
    }
    if not found:
        raise ConfigError(
            f"{verb}: {type(model).__name__} has no numbered stack of two or more equal blocks (ModuleList or Sequential). "
            "Name the modules to treat as blocks, blocks=['encoder.layer_a', ...]; in a run take 2 or more --model.layers, or leave it "
            "out.",
            code="blocks.none",
        )
    return found


def _is_stack(container: nn.Module) -> bool:
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return False
    children = list(container.children())
    # One class only: a Sequential of different modules is no stack of layers.
    same_class = len(children) > 1 and len({type(child) for child in children}) == 1
    return same_class and all(_is_block(child) for child in children)


def _is_block(module: nn.Module) -> bool:
    """Return True for a module with children and a matrix.

    Plain Linears in a list are excluded: those are several heads.
    """
    has_matrix = any(parameter.ndim >= 2 for parameter in module.parameters())
    return has_matrix and next(module.children(), None) is not None


def _named(model: nn.Module, patterns: list[str], verb: str) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(matches(name, pattern) for name in modules):
            near = closest(pattern, modules) or repr(next(iter(modules), ""))
            raise ConfigError(
                f"{verb}: blocks={pattern!r} matched no module. Closest: {near}.",
                code="pattern.no-match",
            )
    found = {
        name: each
        for name, each in modules.items()
        if any(matches(name, pattern) for pattern in patterns)
    }
    # The inner block of a nested pair would be recomputed twice.
    nested = [name for name in found if any(name.startswith(f"{other}.") for other in found)]
    if nested:
        raise ConfigError(
            f"{verb}: block {nested[0]!r} lies inside another one that was named. Name one of the two.",
            code="blocks.nested",
        )
    return found
