"""Predict the seconds of one operation on a card from its compute, memory and issue times.

    GEMM       FLOPs / (peak * card.reached * share of its type / slowdown of its kernel) * waves
               + result bytes / (copied * bandwidth)
    our blocks at most `promoted` FLOPs per clock and processor
    attention  FLOPs / (peak * share of the architecture)
    others     bytes / (copied * bandwidth)
    our casts  at least elements / 16 * instructions / 32 / (issued * 4 * processors * clock)
    seconds    max(compute time, issue time, bytes / (copied * bandwidth)) + launch

waves: a GEMM is computed in tiles of 128 x 128, one on each processor at a time. The last wave
takes as long as a full one. DeepGEMM's table shows this effect (2,112 columns: 1,058 TFLOP/s,
4,096: 1,304). It also shows that a result is written after its sums are complete (K = 512: 590 for
1,358 at 16,384). The shapes of TransformerEngine are too large to show either.

`python -m benchmarks.calibration` fits the numbers of `Rates` to published times, and reports the
error of each prediction from the other times. A test fails if this file differs from its result.
Numbers without a published source are marked [assumed].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from narrowgauge.ops.timing.cards import Card

CUBLAS_HAS_ROWS = (12, 9)  # CUDA's version
TILE = 128  # rows and columns of a GEMM's tile that one processor computes at a time


class Operation(Protocol):
    """Interface of `Work`, and of a sum over many."""

    @property
    def kind(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def flops(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def operands(self) -> str: ...
    @property
    def sums(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def elements(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that kernels reach.

    narrow        share of `card.reached` that 8-bit GEMMs reach
    fp4           share of `card.reached` that 4-bit GEMMs reach, before `mx` (TransformerEngine
                  on a B300)
    split         slowdown where sums leave the tensor core early: fast accumulation gains 1.1 to
                  1.2 (github.com/pytorch/ao/issues/2377) [the middle]. Ada and Hopper alone: on
                  other GPUs CUBLASLT_MATMUL_DESC_FAST_ACCUM has no effect (cuBLAS' manual)
    blocks        slowdown where float32 scales multiply the sums of blocks, by cuBLAS
    mx            slowdown where the tensor core multiplies by scales of 1 x 32
    rows          slowdown where CUTLASS multiplies by row scales: torch takes cuBLAS on 9.0 with
                  CUDA 12.9 alone (ScaledBlas.cpp), and for the experts of a mixture nowhere. Fitted
                  to one published step of an H100
    rows_later    the same from 10.0 on, so that torchao's step by rows on B200 gains its 1.04;
                  by `rows` it would gain 1.19 (benchmarks/gains.py)
    promoted      FLOPs per clock and processor of our Triton kernel, which adds each sum of 128
                  products to float32: 383 TFLOP/s of a like kernel on an H100
                  (github.com/pytorch/ao/pull/2784, two shapes). [assumed] of 10.x, where
                  CUTLASS' blocks had 0.58 to 0.97 of float16 (github.com/flashinfer-ai/flashinfer/
                  issues/2146)
    triton        slowdown of Triton's FP8 GEMM against cuBLAS' (github.com/pytorch/ao/issues/574,
                  an RTX 4070 Ti SUPER). On an H20, where the units bind, it predicts 222 TFLOP/s
                  for 243 and 254 (github.com/vllm-project/vllm/pull/49932)
    triton_ada    the same on 8.9. Sources disagree: 1.25 there; slower than Triton's float16, so
                  2 at least, in github.com/triton-lang/triton/issues/5583. The slower one is taken
    attention     share of the 16-bit peak, forward and backward together, causal, head size 128,
                  for cuDNN on Hopper and later
    attention_2   the same for FlashAttention-2 before Hopper (arXiv 2407.08608 and 2307.08691)
                  [both read off their figures]
    copied        share of the bandwidth
    instructions  instructions of our casts in both orientations, for 16 elements
    issued        share of the issue slots that a cast fills [assumed]
    launch        seconds between the end of a kernel and the start of the next (torchao,
                  testing/training/roofline_utils.py)
    eager         ratio of published eager steps to the sum of their operations
    compiled      ratio of published compiled steps to the sum of their operations
    """

    narrow: float = 0.988
    fp4: float = 1.01
    split: float = 1.13
    blocks: float = 1.237
    mx: float = 1.085
    rows: float = 1.331
    rows_later: float = 1.665
    promoted: int = 1590
    triton: float = 1.25
    triton_ada: float = 2.0
    attention: float = 0.5
    attention_2: float = 0.6
    copied: float = 0.738
    instructions: int = 304
    issued: float = 0.8
    launch: float = 2e-6
    eager: float = 1.29
    compiled: float = 1.40

    def slower(self, sums: str, capability: tuple[int, int], cuda: tuple[int, int]) -> float:
        """Return the slowdown of the kernel that computes such sums (`Work.sums`) there."""
        split = self.split if capability < (10, 0) else 1.0
        rows = self.rows_later if capability >= (10, 0) else self.rows
        if capability == (9, 0) and cuda >= CUBLAS_HAS_ROWS:
            rows = 1.0
        grouped = self.rows
        triton = self.triton_ada if capability == (8, 9) else self.triton
        return {
            "fast": 1.0, "split": split, "rows": rows, "split rows": rows * split,
            "grouped rows": grouped, "split grouped rows": grouped * split,
            "blocks": self.blocks, "mx": self.mx, "triton": triton,
        }[sums]  # fmt: skip

    def share(self, operands: str) -> float:
        """Return the share of `card.reached` for GEMMs of this operand type."""
        return (
            self.fp4
            if operands == "fp4"
            else self.narrow
            if operands in ("fp8", "int8", "int4")
            else 1.0
        )


RATES = Rates()
# Relative error of a published time when it is predicted from the others: two of three errors are
# below these (benchmarks/results/calibration.jsonl).
ERROR: Mapping[str, float] = MappingProxyType(
    {"product": 0.04, "layer": 0.04, "compiled": 0.09, "eager": 0.20}
)
# Published gain over bfloat16 divided by the predicted one: the least and the most of
# benchmarks/results/gains.jsonl. Layers are products with their casts. Gains of steps are predicted too high.
LIKELY_GAIN: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"layer": (0.95, 1.05), "step": (0.87, 1.01)}
)


def likely_gain(gain: float, of: str) -> tuple[float, float]:
    """Return the range of what a predicted gain may measure as; `of`: a key of LIKELY_GAIN."""
    low, high = LIKELY_GAIN[of]
    return gain * low, gain * high


def seconds(each: Operation, card: Card, rates: Rates = RATES) -> float:
    """Predict the seconds of an operation.

    Raises ConfigError for a GEMM that the card has no unit for.
    """
    moved = each.nbytes / (rates.copied * card.bandwidth)
    return max(_computed(each, card, rates), _issued(each, card, rates), moved) + rates.launch


def _computed(each: Operation, card: Card, rates: Rates) -> float:
    if not each.flops:
        return 0.0
    if each.operands not in card.peak:
        raise ConfigError(
            f"plan: {card.name} has no unit for {each.operation} of {each.operands or 'such'} operands. "
            f"It multiplies {', '.join(card.peak)}; choose a recipe of those, or another card.",
            code="card.no-unit",
        )
    peak = card.peak[each.operands]
    if each.kind == "attention":
        is_late = card.device is not None and card.device.capability >= (9, 0)
        return each.flops / (peak * (rates.attention if is_late else rates.attention_2))
    # The write time is added, not overlapped: with max(FLOPs, bytes) the K = 512 row of DeepGEMM's
    # table was off by a factor of 2.3, with the sum by a quarter (decisions/gpu.md).
    capability, cuda = (
        ((0, 0), (0, 0)) if card.device is None else (card.device.capability, card.device.cuda)
    )
    slower = rates.slower(each.sums, capability, cuda)
    rate = peak * card.reached * rates.share(each.operands) / slower
    if each.sums == "triton" and card.processors:
        rate = min(rate, rates.promoted * card.processors * card.clock)
    written = 2 * each.rows * each.columns / (rates.copied * card.bandwidth)
    return each.flops / rate * waves(each.rows, each.columns, card.processors) + written


def waves(rows: int, columns: int, processors: int) -> float:
    """Return the slowdown by a partial last wave; 1 if the shape is unknown."""
    if not (rows and columns and processors):
        return 1.0
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
    return math.ceil(tiles / processors) * processors * TILE * TILE / (rows * columns)


def _issued(each: Operation, card: Card, rates: Rates) -> float:
    # `instructions` covers 16 elements of a thread. A warp has 32 threads, and a processor four
    # schedulers.
    slots = rates.issued * 4 * card.processors * card.clock
    return each.elements / 16 * rates.instructions / 32 / slots if slots else 0.0
