"""Tensors that a fused function saves for backward, and recomputation of its output from them.

    save     saved by an activation                   saved by a norm
    "exact"  its inputs                               x, and the statistics of each row
    "fp8"    its inputs in E4M3, 1 x 128 tiles with   codes of y.T that its readers save anyway
             power-of-two scales                      (one scale per tensor; else as "exact")
    "int8"   the same in INT8                         as "fp8"

Linears that read an activation, or a norm that saves x, save nothing of their own (`Recompute`). The
first backward among the readers recomputes y and its cast for all. From exact inputs the result is
bit-identical to forward; from codes it is y of the dequantized inputs.

Measured on a small Llama: E4M3 costs up to 3.0 dB of the gradient of `down`, INT8 at most 0.7 dB
(one seed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.nn.keep_policy import Recompute, Saved
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.ops.norm_act import FORWARD, CastRequest, Kind, NormActSpec
from narrowgauge.ops.norm_act.spec import Given, Statistics, StoredAsCodes
from narrowgauge.ops.quantize import quantize
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, DelayedScaling
from narrowgauge.scaling import from_exponents, to_exponents

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Kernel, Registry


def quantize_input(x: Tensor, cast: Cast) -> StoredAsCodes:
    """Quantize an input [rows, columns] of an activation to 8 bits."""
    return StoredAsCodes(quantize(x, cast), x.dtype)


@dataclass(frozen=True)
class _CodesInfo:
    """A `StoredAsCodes` without its tensors: cast, inner length, original dtype, transposed or not."""

    cast: Cast
    inner: int
    dtype: torch.dtype
    turned: bool


@dataclass(frozen=True)
class SavedLayout:
    """Layout of a function's saved tensors in the flat list given to save_for_backward.

    Each tensor takes one entry, or two if it is quantized (codes, scales); two row statistics
    follow.

    tensors  per tensor: None, or its _CodesInfo
    """

    tensors: tuple[_CodesInfo | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[Given]) -> SavedLayout:
        return cls(
            tuple(
                _CodesInfo(each.codes.cast, each.codes.inner, each.dtype, each.turned)
                if isinstance(each, StoredAsCodes)
                else None
                for each in tensors
            )
        )

    @staticmethod
    def flatten(tensors: Sequence[Given], statistics: Statistics) -> tuple[Tensor | None, ...]:
        parts = (
            (each.codes.data, _scale(each.codes, to_exponents))
            if isinstance(each, StoredAsCodes)
            else (each,)
            for each in tensors
        )
        return *(part for several in parts for part in several), *statistics

    def unflatten(self, flat: Sequence[Tensor | None]) -> tuple[list[Given], Statistics]:
        parts, found = iter(flat), []
        for each in self.tensors:
            data: Any = next(parts)
            if each is not None:
                scale: Any = next(parts)
                # The QTensor briefly has exponents as scales; `checked` skips the validation of
                # scales.
                codes = QTensor(
                    data=data, scale=scale, cast=each.cast, inner=each.inner, checked=True
                )
                codes = replace(codes, scale=_scale(codes, from_exponents), checked=True)
                data = StoredAsCodes(codes, each.dtype, each.turned)
            found.append(data)
        return found, (next(parts), next(parts))


def _scale(codes: QTensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Convert power-of-two scales by `convert` (to or from one-byte exponents); return others as is."""
    return convert(codes.scale) if codes.cast.scale.power_of_two else codes.scale


@dataclass(eq=False)
class RecomputedOutput(Recompute):
    """Recomputes y and its cast, for one call of a fused function.

    kind          the function
    choose        FusedForward.kernel, which returns the kernel
    layout        layout of the saved tensors; set once forward has saved them
    readers_left  readers whose backward is still to come
    recomputed    {plan: (y, casts)}, shared by the readers; cleared after the last reader's
                  backward, and by the function's own backward
    """

    kind: Kind
    choose: Callable[[Registry[NormActSpec], NormActSpec], Kernel[NormActSpec] | None]
    layout: SavedLayout | None = None
    readers_left: int = 0
    recomputed: dict[Any, tuple[Tensor | None, Casts]] = field(default_factory=dict)

    def clear(self) -> None:
        self.recomputed.clear()

    def restore(self, operand: Operand, saved: Saved) -> None:
        plan = operand.plan
        key = plan.rows, plan.cols, plan.cols_expand, operand.context.out_dtype
        if not self.recomputed:
            self.readers_left = self.readers
        if key not in self.recomputed:
            self.recomputed[key] = self._recompute(operand, saved[0], saved[1:])
        operand.tensor, casts = self.recomputed[key]  # type: ignore[assignment]
        # Casts with random numbers are not shared: each reader casts y by itself.
        operand.casts = casts if plan.serves_a_step[1] else Casts(amax=casts.amax)
        self.readers_left -= 1
        if self.readers_left <= 0:
            self.clear()

    def _recompute(
        self, operand: Operand, amax: Tensor | None, flat: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, Casts]:
        """Recompute (y [rows, columns], casts); (None, casts) if a kernel quantizes y.T directly."""
        assert self.layout is not None
        tensors, _ = self.layout.unflatten(flat)
        for request in _requests(operand, amax):
            kernel = self.choose(FORWARD, NormActSpec.of(self.kind, tensors, (request,)))
            if kernel is not None:
                outputs, _ = kernel.run(self.kind, tensors, request)
                if outputs.transposed is not None:
                    return None, Casts(cols=outputs.transposed, amax=amax)
                return outputs.value, Casts(amax=amax)
        # The request without a cast was accepted in forward, for the same tensors.
        raise AssertionError(f"{self.kind} was computed in forward and is refused in backward")


def _requests(operand: Operand, amax: Tensor | None) -> list[CastRequest | None]:
    """Return the casts to try in order: y.T in the same kernel if backward needs it, then none."""
    plan = operand.plan
    if not (operand.saves_codes and plan.pairs and plan.transposes) or plan.cols is None:
        return [None]
    live = None
    # The same scale as in forward: an amax state whose `in_use` entry is forward's amax.
    if isinstance(plan.cols.calibrate, DelayedScaling):
        assert amax is not None
        live = torch.nn.functional.pad(amax.reshape(1), (0, 2))
    return [CastRequest(plan.cols, live, records=False, transposed=True), None]
