"""Recompute the input of a Linear in backward instead of saving it.

A fused norm or activation (`fuse.saving`) already saves its own inputs. The Linears that read its
output save the same tensors, which autograd stores once, and recompute their operand in backward.
The recomputed operand is bit-identical to the operand of the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Saved = tuple[Tensor | None, ...]


class Recompute:
    """Recomputes the operand of one call of a fused function. Holds no tensor of the forward pass.

    readers   number of Linears that save these tensors and nothing else for the operand
    """

    readers: int = 0

    def restore(self, operand: Any, saved: Saved) -> None:
        """Set the tensor or the `cols` of an Operand in backward.

        operand  the Operand of the Linear, which has neither yet
        saved    (amax, *tensors), as the forward pass saved them
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RecomputeSource:
    """The inputs from which backward recomputes an operand, and the object that recomputes it.

    tensors    inputs of the fused function, which that function saves as well
    recompute  recomputes the operand from `tensors`
    """

    tensors: tuple[Tensor | None, ...]
    recompute: Recompute
