"""Seconds of one operation on a card, by what bounds it: its products, its bytes, the instructions of a cast, or its launch.

    product    FLOPs / (peak * card.reached * share of its type / slower by its sums) * waves + result / (copied * bandwidth)
    attention  FLOPs / (peak * share of the architecture)
    others     bytes / (copied * bandwidth)
    our casts  not less than elements / 16 * instructions / 32 / (issued * 4 * processors * clock)
    seconds    the larger of that and the operation's bytes, and the launch

waves   products are computed in tiles of 128 x 128, one on each processor at a time; the last wave is as long as a full one. DeepGEMM's
        table shows it (2,112 columns: 1,058 TFLOP/s, 4,096: 1,304), and that a result is written when its sums are done (K = 512: 590 for
        1,358 at 16,384). TransformerEngine's shapes are too large to show either.

The numbers of `Rates` are fitted to published ones by `python -m benchmarks.calibration`, which also says how wrong each of those would
have been predicted from the others; a test fails where they differ. What no publication tells is marked [assumed].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from narrowgauge.errors import ConfigError
from narrowgauge.ops.timing.cards import Card

TILE = 128  # rows and columns of a product that one processor computes at a time


class Operation(Protocol):
    """`Work`, or many of it."""

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
    """What kernels reach.

    narrow        share of `card.reached` that products in 8 bits reach
    fp4           that products in 4 bits reach (TransformerEngine's on a B300, against bfloat16's)
    split         how much longer sums take that leave the tensor core early: fast accumulation gains 1.1 to 1.2
                  (github.com/pytorch/ao/pull/2377) [the middle]
    blocks        how much longer where float32 scales of blocks multiply them
    mx            where the tensor core multiplies by scales of 1 x 32
    attention     share of the peak in 16 bits, forward and backward together, causal, heads of 128: cuDNN on Hopper and later, and
    attention_2   FlashAttention-2 before (arXiv 2407.08608 and 2307.08691) [read off their figures]
    copied        share of the bandwidth
    instructions  of our casts in both orientations, for 16 elements
    issued        share of the issue slots that a cast fills [assumed]
    launch        seconds from one kernel's end to the next one's (torchao, testing/training/roofline_utils.py)
    eager         how much longer published eager steps took than the sum of their operations
    compiled      compiled ones
    """

    narrow: float = 0.986
    fp4: float = 0.87
    split: float = 1.13
    blocks: float = 1.238
    mx: float = 1.084
    attention: float = 0.5
    attention_2: float = 0.6
    copied: float = 0.755
    instructions: int = 304
    issued: float = 0.8
    launch: float = 2e-6
    eager: float = 1.30
    compiled: float = 1.40

    def slower(self, sums: str) -> float:
        return {"fast": 1.0, "split": self.split, "blocks": self.blocks, "mx": self.mx}[sums]

    def share(self, operands: str) -> float:
        """Of `card.reached`."""
        return self.fp4 if operands == "fp4" else self.narrow if operands in ("fp8", "int8", "int4") else 1.0


RATES = Rates()
# By how much a published time was missed by a prediction from the others: two of three within these (benchmarks/results/calibration.jsonl).
ERROR: Mapping[str, float] = MappingProxyType({"product": 0.05, "layer": 0.04, "compiled": 0.09, "eager": 0.20})


def seconds(each: Operation, card: Card, rates: Rates = RATES) -> float:
    """Raises ConfigError for a product that the card has no unit for."""
    moved = each.nbytes / (rates.copied * card.bandwidth)
    return max(_computed(each, card, rates), _issued(each, card, rates), moved) + rates.launch


def _computed(each: Operation, card: Card, rates: Rates) -> float:
    if not each.flops:
        return 0.0
    if each.operands not in card.peak:
        raise ConfigError(
            f"plan: {card.name} has no unit for {each.operation} of {each.operands or 'such'} operands. "
            f"It multiplies {', '.join(card.peak)}; choose a recipe of those, or another card."
        )
    peak = card.peak[each.operands]
    if each.kind == "attention":
        is_late = card.device is not None and card.device.capability >= (9, 0)
        return each.flops / (peak * (rates.attention if is_late else rates.attention_2))
    rate = peak * card.reached * rates.share(each.operands) / rates.slower(each.sums)
    written = 2 * each.rows * each.columns / (rates.copied * card.bandwidth)
    return each.flops / rate * waves(each.rows, each.columns, card.processors) + written


def waves(rows: int, columns: int, processors: int) -> float:
    """How much longer than with all processors busy to the end; 1 where a shape is not known."""
    if not (rows and columns and processors):
        return 1.0
    tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
    return math.ceil(tiles / processors) * processors * TILE * TILE / (rows * columns)


def _issued(each: Operation, card: Card, rates: Rates) -> float:
    slots = rates.issued * 4 * card.processors * card.clock
    return each.elements / 16 * rates.instructions / 32 / slots if slots else 0.0
