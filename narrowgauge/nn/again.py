"""What a Linear needs of its input in backward, made again there from what others keep anyway.

A function that computed y keeps what it computed it from; the Linears that read y keep the same tensors, which autograd holds once,
instead of y or its codes, and y and its casts are made again from them (`fuse.keeping`). Costs what making it takes, once for all
layers that read it. The bits are those of forward: nothing is drawn on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Saved = tuple[Tensor | None, ...]


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
