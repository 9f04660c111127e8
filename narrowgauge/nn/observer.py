"""What may be set as `QLinear.observer` beside a function: an object that sees results too. For type checkers and readers alone."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from narrowgauge.qtensor import QTensor


class ProductObserver(Protocol):
    """An observer of results too: after its operands, each product.

    result [M, N] of lhs [M, K] @ rhs [N, K].T + bias, as its kernel gave it: of a straight-through product in the rotated basis.

    Two more attributes are optional:

    keeps_inputs   False: backward saves x as it does without an observer, so that the step draws the same random numbers; where
                   codes alone are saved, `original` of x in grad_weight is their decoded value. Without it x itself is saved
    drew           drew(gemm, role, noise) is called before the operand is shown, if its cast rounds stochastically.
                   noise: [outer, inner] of the codes, float32 in [0, 1)
    """

    def __call__(self, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None: ...
    def multiplied(self, gemm: str, bias: Tensor | None, result: Tensor) -> None: ...
