"""Observers of a QLinear, and the object that passes operands and results on to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

# Called with (gemm, role, original tensor, operand as it enters the GEMM)
# for each operand of each GEMM. Eager mode only.
Observer = Callable[[str, str, Tensor, "QTensor | Tensor"], None]


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


def needs_x(observer: Observer | None) -> bool:
    """True if backward saves x itself for this observer; see `ProductObserver`."""
    return hasattr(observer, "multiplied") and bool(getattr(observer, "keeps_inputs", True))


@dataclass(frozen=True)
class Observation:
    """An observer during one call.

    observer  an Observer, or a ProductObserver
    """

    observer: Any

    def operand(self, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
        self.observer(gemm, role, original, operand)

    def result(self, gemm: str, bias: Tensor | None, result: Tensor) -> None:
        if hasattr(self.observer, "multiplied"):
            self.observer.multiplied(gemm, bias, result)

    @property
    def receives_noise(self) -> bool:
        return hasattr(self.observer, "drew")

    def noise(self, gemm: str, role: str, noise: Tensor) -> None:
        self.observer.drew(gemm, role, noise)
