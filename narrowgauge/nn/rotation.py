"""The rotation of a product's operands along the contracted axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.recipe import Hadamard

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
        if is_random and signs is not None:
            from narrowgauge.nn.tied_draws import tied

            signs = tied(signs, operand)
        return cls(hadamard, signs, is_random)

    def __call__(self, operand: Tensor) -> Tensor:
        if self.hadamard is None:
            return operand
        from narrowgauge.ops.hadamard import rotate

        return rotate(operand, self.hadamard, self.signs)


NONE = Rotation()
