"""Rotation of a GEMM's two operands along the contracted axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.ops.quantize.spec import Turn

if TYPE_CHECKING:
    from narrowgauge.ops.hadamard import Functions
    from narrowgauge.ops.random import Stream
    from narrowgauge.recipe import Hadamard


@dataclass(frozen=True)
class Rotation:
    """The rotation of one GEMM, by default none. Both operands use the same one, before their cast.

    hadamard   block size and kind of signs; None: no rotation
    signs      [padded inner] of +1 and -1, or None
    is_random  the signs are drawn at every GEMM, so casts under them cannot be reused
    kernel     kernel that rotates (`ops.hadamard.plan`); None: chosen at each call
    second     signs of a second round, after the first; None: one round
    """

    hadamard: Hadamard | None = None
    signs: Tensor | None = None
    is_random: bool = False
    kernel: Functions | None = None
    second: Tensor | None = None

    @classmethod
    def draw(
        cls,
        hadamard: Hadamard | None,
        operand: Tensor,
        stream: Stream | None = None,
        product: str = "",
        kernel: Functions | None = None,
    ) -> Rotation:
        """The rotation along the last axis of `operand`, with new signs if the recipe's are random.

        stream   source of random numbers on several ranks; None: torch's generator
        product  name of the GEMM, for the draw of a stream
        kernel   kernel of the plan; None: chosen at each call
        """
        if hadamard is None:
            return NONE
        if hadamard.signs == "none":
            return cls(hadamard, kernel=kernel)
        from narrowgauge.ops.hadamard import draw_signs

        is_random = hadamard.signs == "random"
        of = operand.shape[1], operand.device, stream
        signs, second = draw_signs(hadamard, *of, product), None
        if is_random and signs is not None:
            from narrowgauge.nn.noise import tied

            # Under torch.compile an untied draw gave the two operands of
            # grad_weight different signs.
            signs = tied(signs, operand)
            if hadamard.rounds == 2:
                again = draw_signs(hadamard, *of, f"{product}, second round")
                assert again is not None
                second = tied(again, operand)
        return cls(hadamard, signs, is_random, kernel, second)

    @property
    def turn(self) -> Turn:
        """The rotation, as kernels that cast take it."""
        assert self.hadamard is not None
        return Turn(self.hadamard.block, self.signs, self.second)

    def __call__(self, operand: Tensor) -> Tensor:
        if self.hadamard is None:
            return operand
        # A loop and no method: each call of a layer counts its Python calls.
        for signs in (self.signs,) if self.second is None else (self.signs, self.second):
            if self.kernel is not None:
                operand = self.kernel.rotate(operand, self.hadamard.block, signs)
                continue
            from narrowgauge.ops.hadamard import rotate

            operand = rotate(operand, self.hadamard, signs)
        return operand


NONE = Rotation()
