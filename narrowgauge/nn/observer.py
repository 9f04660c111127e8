"""Protocol of observers of a QLinear that also receive GEMM results.

For type checkers and readers only: nothing imports it at run time.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from narrowgauge.qtensor import QTensor


class ProductObserver(Protocol):
    """An observer that receives each GEMM's operands, then its result.

    result [M, N] = lhs [M, K] @ rhs [N, K].T + bias, as the kernel returned it. Results of
    straight-through GEMMs are in the rotated basis.

    Optional attributes:

    keeps_inputs   False: backward saves x as without an observer, so the step draws the same random
                   numbers. If only codes are saved, `original` of x in grad_weight is their
                   dequantized value. Without the attribute, x itself is saved
    drew           drew(gemm, role, noise) is called before an operand that rounds stochastically.
                   noise: [outer, inner] of the codes, float32 in [0, 1)
    """

    def __call__(
        self, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor
    ) -> None: ...
    def multiplied(self, gemm: str, bias: Tensor | None, result: Tensor) -> None: ...
