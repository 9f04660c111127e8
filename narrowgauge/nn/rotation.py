"""The rotation of a product's operands along the contracted axis, and a cast of what it makes.

A rotated matrix is float32, four bytes for each element of a bfloat16 one. On a GPU rows are rotated and cast in pieces where a cast
looks at rows apart, so that it is never there as a whole; the codes are the same, noise included, which is a function of the element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.nn.autograd_rules import tied
from narrowgauge.ops.pieces import cuts
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Current, Hadamard

if TYPE_CHECKING:
    from narrowgauge.ops.random import Stream


@dataclass(frozen=True)
class Rotation:
    """The rotation of one product, by default none: both operands pass through it before they are cast."""

    hadamard: Hadamard | None = None
    signs: Tensor | None = None
    is_random: bool = False

    @classmethod
    def draw(
        cls, hadamard: Hadamard | None, operand: Tensor, stream: Stream | None = None, product: str = ""
    ) -> Rotation:
        """Along the last axis of `operand`, with new signs where they are random."""
        if hadamard is None:
            return NONE
        from narrowgauge.ops.hadamard import draw_signs

        is_random = hadamard.signs == "random"
        signs = draw_signs(hadamard, operand.shape[1], operand.device, stream, product)
        return cls(hadamard, tied(signs, operand) if is_random and signs is not None else signs, is_random)

    def __call__(self, operand: Tensor) -> Tensor:
        if self.hadamard is None:
            return operand
        from narrowgauge.ops.hadamard import rotate

        return rotate(operand, self.hadamard, self.signs)


NONE = Rotation()


def casts_apart(cast: Cast | None, x: Tensor, rotation: Rotation) -> bool:
    """Whether `cast_in_pieces` casts x, [outer, inner], as the whole of it would be."""
    if cast is None or rotation is NONE or len(cuts(x)) == 1:
        return False
    if cast.rounding == "stochastic":
        from narrowgauge.ops.random import draws_keys

        if not draws_keys(x.device):
            return False
    return cast.tile[0] == 1 and not cast.scale.two_level and isinstance(cast.calibrate, Current)


def cast_in_pieces(x: Tensor, cast: Cast, rotation: Rotation, noise: Any, run: Callable[..., QTensor]) -> QTensor:
    """noise: the Key of all of it, or None; run(rows, cast, its noise) casts rotated rows."""
    parts = []
    for each in cuts(x):
        rows = rotation(x[each])
        parts.append(run(rows, cast, None if noise is None else noise.after(each.start * rows.shape[1])))
        del rows  # before the next ones are made
    data, scale = torch.cat([part.data for part in parts]), torch.cat([part.scale for part in parts])
    first = parts[0]
    return QTensor.of_parts(data, scale, cast, first.inner, first.global_scale)
