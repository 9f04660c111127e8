"""The blocks of a model, found by structure, and what the techniques of this package put around their forward.

A block is a member of a numbered container (ModuleList, Sequential) of two or more modules of one class that hold matrices: the
layers of a Transformer, whatever it calls them. A container inside a block (experts, say) does not count.

A technique replaces `forward` on the instance and leaves module, class, parameters and their names alone, so state dicts, hooks,
copies and pickles stay what they are. Techniques share one replacement per block: recomputation inside, hooks on what autograd
saves outside, so that with both the hooks get the inputs of the recomputed block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from narrowgauge.errors import ConfigError, closest
from narrowgauge.structure import matches, outermost


class Recompute(Protocol):
    """Runs a block's forward so that backward repeats it."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Saving(Protocol):
    """Decides how the tensors are kept that a block saves for backward."""

    name: str

    def around(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[object]: ...


class BlockForward:
    """The replacement for the forward of one block; it calls the original while gradients are off."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.before: Callable[..., Any] | None = block.__dict__.get("forward")  # another library's replacement
        self.recompute: Recompute | None = None
        self.saving: Saving | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with self.saving.around(self.block, args, kwargs) if self.saving else nullcontext():
            if self.recompute is None:
                return self._forward(*args, **kwargs)
            return self.recompute.run(self._forward, args, kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)


def find_blocks(
    model: nn.Module, names: str | Iterable[str] | None = None, verb: str = "blocks"
) -> dict[str, nn.Module]:
    """Dotted name -> block, in the model's order.

    names  patterns of modules to take instead of those found by structure

    Raises ConfigError if there are none, or if a pattern matches nothing.
    """
    if names is not None:
        return _named(model, [names] if isinstance(names, str) else list(names), verb)
    found = {
        f"{stack}.{number}".lstrip("."): member
        for stack, members in outermost(model, _is_stack)
        for number, member in members.items()
    }
    if not found:
        raise ConfigError(
            f"{verb}: {type(model).__name__} has no numbered stack of equal blocks (ModuleList or Sequential). "
            "Name the modules to treat as blocks: blocks=['encoder.layer_a', ...]."
        )
    return found


def _is_stack(container: nn.Module) -> bool:
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return False
    children = list(container.children())
    alike = len(children) > 1 and len({type(child) for child in children}) == 1
    return alike and all(_is_block(child) for child in children)


def _is_block(module: nn.Module) -> bool:
    """Modules with children and matrices: not a list of plain Linears, which is several heads."""
    has_matrix = any(parameter.ndim >= 2 for parameter in module.parameters())
    return has_matrix and next(module.children(), None) is not None


def _named(model: nn.Module, patterns: list[str], verb: str) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(matches(name, pattern) for name in modules):
            near = closest(pattern, modules) or repr(next(iter(modules), ""))
            raise ConfigError(f"{verb}: blocks={pattern!r} matched no module. Closest: {near}.")
    found = {name: each for name, each in modules.items() if any(matches(name, pattern) for pattern in patterns)}
    nested = [name for name in found if any(name.startswith(f"{other}.") for other in found)]
    if nested:
        raise ConfigError(f"{verb}: block {nested[0]!r} lies inside another one that was named. Name one of the two.")
    return found


def set_recompute(block: nn.Module, recompute: Recompute | None) -> None:
    _set(block, "recompute", recompute)


def set_saving(block: nn.Module, saving: Saving | None) -> None:
    _set(block, "saving", saving)


def _set(block: nn.Module, name: str, technique: Recompute | Saving | None) -> None:
    """Replaces the block's forward if needed, and restores it when no technique is left."""
    forward = block.__dict__.get("forward")
    if not isinstance(forward, BlockForward):
        forward = block.forward = BlockForward(block)
    setattr(forward, name, technique)
    if forward.recompute is None and forward.saving is None:
        del block.__dict__["forward"]
        if forward.before is not None:
            block.forward = forward.before


def refuse_other_saving(blocks: dict[str, nn.Module], kind: type) -> None:
    """ConfigError if a block's saved tensors are already kept in another way: only one kind of hook can have them."""
    for name, block in blocks.items():
        forward = block.__dict__.get("forward")
        if isinstance(forward, BlockForward) and forward.saving is not None and not isinstance(forward.saving, kind):
            raise ConfigError(
                f"{name}: its saved activations are under {forward.saving.name} already. Take that off first, "
                f"{forward.saving.name}(model, None), or give each a part of the model with blocks=."
            )
