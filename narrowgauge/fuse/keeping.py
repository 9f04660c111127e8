"""What a fused function keeps for its backward pass, and what is made again from it.

    save      an activation keeps                          a norm keeps
    "exact"   its inputs                                   x, and the numbers of each row
    "fp8"     codes of its inputs: E4M3, a power of two    the codes of y.T that the Linears behind it keep anyway
              for 128 elements                             (recipes with one scale per tensor; else as "exact")
    "int8"    the same in INT8                             as "fp8"

The Linears that read an activation, or a norm that keeps x, keep nothing of their own (nn.again): their backward pass computes y and
its cast again, once for all of them. Exact: the bits of forward. From codes: y of the decoded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge.nn.again import Again, Saved
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.ops.norm_act import FORWARD, CastRequest, Kind, NormActSpec
from narrowgauge.ops.norm_act.spec import Given, Kept, Statistics
from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.registry import Kernel, Registry
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Window
from narrowgauge.scaling import from_exponents, to_exponents

# "both": the function keeps its inputs, the Linears what they read. Else one of them is kept, and the other made from it again.
Keeps = Literal["inputs", "outputs", "both"]


def narrow(x: Tensor, cast: Cast) -> Kept:
    """An input of an activation, [rows, columns], in 8 bits."""
    return Kept(quantize(x, cast), x.dtype)


@dataclass(frozen=True)
class _Codes:
    """A `Kept` without its tensors."""

    cast: Cast
    inner: int
    dtype: torch.dtype
    turned: bool


@dataclass(frozen=True)
class Form:
    """How the tensors of a function lie in the flat list that autograd holds: one each, two where it is codes, then two statistics."""

    tensors: tuple[_Codes | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[Given]) -> Form:
        return cls(
            tuple(
                _Codes(each.codes.cast, each.codes.inner, each.dtype, each.turned) if isinstance(each, Kept) else None
                for each in tensors
            )
        )

    @staticmethod
    def flat(tensors: Sequence[Given], statistics: Statistics) -> tuple[Tensor | None, ...]:
        parts = (
            (each.codes.data, _scale(each.codes, to_exponents)) if isinstance(each, Kept) else (each,)
            for each in tensors
        )
        return *(part for several in parts for part in several), *statistics

    def read(self, flat: Sequence[Tensor | None]) -> tuple[list[Given], Statistics]:
        parts, found = iter(flat), []
        for each in self.tensors:
            data: Any = next(parts)
            if each is not None:
                scale: Any = next(parts)
                codes = QTensor(data=data, scale=scale, cast=each.cast, inner=each.inner, checked=True)
                codes = replace(codes, scale=_scale(codes, from_exponents), checked=True)
                data = Kept(codes, each.dtype, each.turned)
            found.append(data)
        return found, (next(parts), next(parts))


def _scale(codes: QTensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Powers of two are kept as their exponents, a byte each."""
    return convert(codes.scale) if codes.cast.scale.power_of_two else codes.scale


@dataclass(eq=False)
class Remade(Again):
    """y, and its cast, of one call of a fused function.

    kind     the function
    choose   finds the kernel that computes it, of its call in forward (FusedForward.kernel)
    form     of what it is computed from, known when forward has kept it
    left     readers whose backward pass is still to come
    made     what was made again for them, by how it is cast; gone with the last of them, and with the function's own backward pass
    """

    kind: Kind
    choose: Callable[[Registry[NormActSpec], NormActSpec], Kernel[NormActSpec] | None]
    form: Form | None = None
    left: int = 0
    made: dict[Any, tuple[Tensor | None, Casts]] = field(default_factory=dict)

    def clear(self) -> None:
        self.made.clear()

    def restore(self, operand: Operand, saved: Saved) -> None:
        plan = operand.plan
        key = plan.rows, plan.cols, plan.cols_expand, operand.context.out_dtype
        if not self.made:
            self.left = self.readers
        if key not in self.made:
            self.made[key] = self._make(operand, saved[0], saved[1:])
        operand.tensor, casts = self.made[key]  # type: ignore[assignment]
        operand.casts = casts if plan.serves_a_step[1] else Casts(amax=casts.amax)
        self.left -= 1
        if self.left <= 0:
            self.clear()

    def _make(
        self, operand: Operand, amax: Tensor | None, flat: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, Casts]:
        """(y [rows, columns], what is known of its casts), or where a kernel casts y.T as it computes y (None, that cast)."""
        assert self.form is not None
        tensors, _ = self.form.read(flat)
        for request in _requests(operand, amax):
            kernel = self.choose(FORWARD, NormActSpec.of(self.kind, tensors, (request,)))
            if kernel is not None:
                made, _ = kernel.run(self.kind, tensors, request)
                if made.transposed is not None:
                    return None, Casts(cols=made.transposed, amax=amax)
                return made.value, Casts(amax=amax)
        raise AssertionError(f"{self.kind} was computed in forward and is refused in backward")


def _requests(operand: Operand, amax: Tensor | None) -> list[CastRequest | None]:
    """The cast of y.T that backward reads, if it is that of y turned and codes are multiplied; and none."""
    plan = operand.plan
    if not (operand.keeps_codes and plan.pairs and plan.transposes) or plan.cols is None:
        return [None]
    live = None
    if isinstance(plan.cols.calibrate, Window):  # a window in which the amax of forward is in use
        assert amax is not None
        live = torch.nn.functional.pad(amax.reshape(1), (0, 2))
    return [CastRequest(plan.cols, live, records=False, transposed=True), None]
