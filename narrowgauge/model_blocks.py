"""Transformer blocks: the numbered layer lists of a model, and which of their blocks a recipe leaves in 16 bits.

Four-bit pre-training keeps some blocks wide: "NVFP4 pre-training" (arXiv 2509.25149, section 4.1 and appendix E.2) finds that the
last ones need more than a mantissa bit and keeps about 15 % of the Linears in bf16, in its 12B model of 62 blocks the first 2
and the last 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from narrowgauge.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WideBlocks:
    """Which blocks of a stack stay in bf16. Of `count` blocks, ceil(share * count): the last ones, and of large stacks the first.

    share       of the blocks of a stack
    first       how many of these are taken from the start, in stacks of `first_from` blocks and more
    smallest    stacks of fewer blocks keep none: one block would be more than a quarter of the model
    """

    share: float = 0.15
    first: int = 2
    first_from: int = 40
    smallest: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < 1:
            raise ConfigError(
                f"WideBlocks: share is {self.share!r}; it must lie between 0 and 1. wide_blocks=None keeps none."
            )
        for name in ("first", "first_from", "smallest"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"WideBlocks: {name} is {value!r}; it must be a whole number of blocks, 0 or more.")

    def of(self, count: int) -> frozenset[int]:
        """The indices, from 0, of the blocks that stay wide in a stack of `count`."""
        if count < self.smallest:
            return frozenset()
        kept = math.ceil(self.share * count - 1e-9)  # 0.15 * 20 is 3
        first = min(self.first, kept) if count >= self.first_from else 0
        return frozenset((*range(first), *range(count - kept + first, count)))

    def __str__(self) -> str:
        return (
            f"last {self.share:.0%} of the blocks in bf16 (of {self.first_from} and more, {self.first} of them first)"
        )


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
