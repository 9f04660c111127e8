"""Transformer blocks: the numbered layer lists of a model. A recipe may leave some of them in 16 bits (`recipe.WideBlocks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Block:
    """Where a layer stands: block `index` (from 0) of `count` in the list called `stack`."""

    stack: str
    index: int
    count: int

    def __str__(self) -> str:
        return f"block {self.index + 1} of {self.count} in {self.stack or 'the model'}"


def blocks(model: nn.Module) -> dict[str, Block]:
    """Name of each Linear that stands in a block -> its block.

    A stack is a ModuleList, or a Sequential of modules of one class, whose members all hold Linears without being one. Of
    nested ones the outermost counts: the experts inside a block are no blocks.
    """
    found: dict[str, Block] = {}
    for stack, members in outermost(model, _is_stack):
        for index, (child, member) in enumerate(members.items()):
            for name, module in member.named_modules():
                if isinstance(module, nn.Linear):
                    found[".".join(filter(None, (stack, child, name)))] = Block(stack, index, len(members))
    return found


def outermost(model: nn.Module, is_stack: Callable[[nn.Module], bool]) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """(name, members by their own names) of each stack that stands in no other; a shared one once, under its first name."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(not stack or f"{name}.".startswith(f"{stack}.") for stack in found)
        if not inside and is_stack(module):
            found.append(name)
            yield name, dict(module.named_children())


def _is_stack(module: nn.Module) -> bool:
    members = list(module.children())
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not members:
        return False
    if isinstance(module, nn.Sequential) and len({type(member) for member in members}) > 1:
        return False
    return all(not isinstance(member, nn.Linear) and _holds_linear(member) for member in members)


def _holds_linear(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())
