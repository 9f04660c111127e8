"""The codes of an operand against a fresh cast of the tensor that they stand for, which sees a bias that rounding hides.

    slope        <q, x> / <x, x>          of the decoded codes q that a product read
    own slope    <r, x> / <x, x>          r: x cast again, by the scales of q and with the same random numbers
    apart        |q - r| / |x|
    scale off    largest |scale / own scale - 1| of a tile, own scale: that of x by its cast

In a sound cast q is r, so the slopes are equal and the rest is zero: measured on the healthy models of benchmarks/blame_faults.py.
A factor of 0.995 before the cast leaves |q - x| as it was, and moves the slope by 0.005.

The own slope is not exactly 1, so a cast is the reference: those models show 0.989 to 1.008 in FP8, 0.94 to 1.02 under nvfp4, and down to
0.73 with learned steps, which clip.
Where the random numbers of stochastic rounding are not known, r is the expected value of q, the slope has a standard deviation of
sqrt(sum x^2 (high - x) (x - low)) / <x, x>, and `apart` counts the elements of q that are none of their two neighbours.

A history of amax and a learned step give scales that depend on more than x: there the scale is not compared.
Cost: a cast, and a few float32 copies of the operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.ops.quantize import dequantize
from narrowgauge.ops.quantize.recast import own_scale, recast
from narrowgauge.qtensor import QTensor

BIAS = 1e-3  # of the slope
DEVIATIONS = 5.0  # of the slope, where random numbers are not known
APART = 1e-3  # of the tensor's norm
SCALE_OFF = 1e-3
_ALMOST_ONE = 1 - 2.0**-24


@dataclass
class Recast:
    """Sums over the casts of one operand.

    along, own   <q, x> and <r, x>
    size         <x, x>
    apart        |q - r|^2
    variance     of `along`, from random numbers that are not known
    scale_off    see the module
    differ       elements of q that are not r's; count: all of them
    """

    along: float = 0.0
    own: float = 0.0
    size: float = 0.0
    apart: float = 0.0
    variance: float = 0.0
    scale_off: float = 0.0
    differ: int = 0
    count: int = 0

    def take(self, other: Recast) -> None:
        """Adds the sums of another rank."""
        for each in ("along", "own", "size", "apart", "variance", "differ", "count"):
            setattr(self, each, getattr(self, each) + getattr(other, each))
        self.scale_off = max(self.scale_off, other.scale_off)

    def add(self, original: Tensor, codes: QTensor, noise: Tensor | None) -> None:
        """original [outer, inner], of which `codes` should be a cast; noise: that it was rounded with, if it is known."""
        if original.shape != codes.shape or not original.numel():
            return
        made, x = dequantize(codes), original.detach().to(torch.float32)
        if codes.cast.rounding == "stochastic" and noise is None:
            ends = (recast(original, codes, torch.full_like(x, end)) for end in (0.0, _ALMOST_ONE))
            low, high = torch.aminmax(torch.stack(tuple(ends)), dim=0)
            own = x.clamp(low, high)
            self.variance += _sum(x.square() * (high - own) * (own - low))
            away = made - made.clamp(low, high)
        else:
            own = recast(original, codes, noise)
            away = made - own
        self.along += _sum(made * x)
        self.own += _sum(own * x)
        self.size += _sum(x.square())
        self.apart += _sum(away.square())
        self.differ += int((away != 0).sum())
        self.count += away.numel()
        self.scale_off = max(self.scale_off, _scale_off(original, codes))

    @property
    def slope(self) -> float:
        return self.along / self.size if self.size > 0 else 1.0

    @property
    def own_slope(self) -> float:
        return self.own / self.size if self.size > 0 else 1.0

    @property
    def distance(self) -> float:
        """|q - r| / |x|; infinite of something in the place of nothing."""
        if self.size > 0 or math.isnan(self.size):
            return math.sqrt(self.apart / self.size)
        return math.inf if self.apart > 0 else 0.0

    @property
    def deviation(self) -> float:
        """Of the slope."""
        return math.sqrt(self.variance) / self.size if self.size > 0 else 0.0

    @property
    def over(self) -> float:
        """The largest of the measures over its limit: above 1 it is no cast of x."""
        bias = abs(self.slope - self.own_slope) / max(BIAS, DEVIATIONS * self.deviation)
        return max(bias, self.distance / APART, self.scale_off / SCALE_OFF)


def _scale_off(original: Tensor, codes: QTensor) -> float:
    wanted, used = own_scale(original, codes.cast), codes.full_scale()
    if wanted is None or wanted.shape != used.shape:
        return 0.0
    counts = wanted.isfinite() & (wanted > 0)
    off = torch.where(counts, (used / torch.where(counts, wanted, 1.0) - 1).abs(), 0.0)
    return float(off.max()) if off.numel() else 0.0


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))
