"""What a Linear needs of its input in backward, made again there from what others keep anyway (`fuse.saving`).

The Linear keeps the tensors that the function before it keeps, which autograd holds once; the bits are those of forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Saved = tuple[Tensor | None, ...]


class Again:
    """How an operand is made again, in one call of what made it; holds no tensor of forward. readers: layers that keep nothing else."""

    readers: int = 0

    def restore(self, operand: Any, saved: Saved) -> None:
        """Gives the Operand, in backward, its tensor or its cols. saved: (amax, *tensors), as forward kept them."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Origin:
    """What an operand is made from again: tensors that others keep too, and how."""

    tensors: tuple[Tensor | None, ...]
    again: Again
