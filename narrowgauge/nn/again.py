"""What a Linear needs of its input in backward, made again there from what others keep anyway.

    attention's out   attention keeps it; the Linear that reads it keeps it too, in 16 bits, and casts it again      OF_ATTENTION
    a function's y    the function keeps what it was computed from; y and its casts are made again                   fuse.keeping

What is kept once is not kept twice: the Linear saves the very tensors that the other one saves, which autograd holds once. Costs
what making it takes, once for all layers that read it. The bits are those of forward: nothing is drawn on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Saved = tuple[Tensor | None, ...]

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Alias", "Slice", "Unsqueeze")
)


class Again:
    """How an operand is made again. One for each call of what it is made by; it holds no tensor of forward."""

    def use(self) -> None:
        """A layer keeps nothing but what it is made from."""

    def restore(self, operand: Any, saved: Saved, shape: tuple[int, int], after: Tensor) -> Any:
        """The Operand in backward, as its own `restore`. saved: (amax, *tensors), as forward kept them."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Origin:
    """What an operand is made from again: tensors that others keep too, and how."""

    tensors: tuple[Tensor | None, ...]
    again: Again


class _OfAttention(Again):
    """x itself, which attention keeps."""

    def restore(self, operand: Any, saved: Saved, shape: tuple[int, int], after: Tensor) -> Any:
        return operand.restore(saved, shape, after)


OF_ATTENTION = _OfAttention()


def attention_keeps(x: Tensor) -> bool:
    """Whether x is what one of torch's attention kernels computed, seen through views: each of them keeps it for its backward pass."""
    node = x.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("ScaledDotProduct")
