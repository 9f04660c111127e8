"""Compare codes with a fresh cast of their tensor, which detects a bias that rounding hides.

    slope        <q, x> / <x, x>          for the decoded codes q that a GEMM read
    own slope    <r, x> / <x, x>          r: x cast again, with the scales and random numbers of q
    apart        |q - r| / |x|
    scale off    largest |scale / own scale - 1| of a tile; own scale: the cast's scale of x

For a correct cast q = r, so the slopes are equal and the rest is zero, as measured on the sound
models of benchmarks/blame_faults.py. A factor of 0.995 before the cast leaves |q - x| unchanged,
and moves the slope by 0.005.

The own slope is not exactly 1, so a fresh cast is the reference: those models have 0.989 to 1.008
in FP8, 0.94 to 1.02 under nvfp4, and down to 0.73 with learned steps, which clip.

If the random numbers of stochastic rounding are unknown, r is the expected value of q. The slope
then has a standard deviation of sqrt(sum x^2 (high - x) (x - low)) / <x, x>, and `apart` counts the
elements of q that are neither of their two neighbours, low and high.

Scales from an amax history and learned steps depend on more than x, so `scale off` skips them. Casts
with rounding="eden" are repeated with their random numbers; r has the slope 1 if these are unknown.
Costs a cast and a few float32 copies of the operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.ops.quantize import dequantize
from narrowgauge.ops.quantize.definition import (
    calibrated_amax,
    encoded,
    filled,
    quantize,
    scales_of,
)
from narrowgauge.recipe import Cast, DelayedScaling, LearnedStep
from narrowgauge.scaling import as_tiles, halved_sum, padded_to_tiles, times_scale

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key
    from narrowgauge.qtensor import QTensor

BIAS = 1e-3  # limit on the difference of the slopes
DEVIATIONS = 5.0  # limit in standard deviations of the slope, if the random numbers are unknown
APART = 1e-3  # limit, as a fraction of the tensor's norm
SCALE_OFF = 1e-3
_ALMOST_ONE = 1 - 2.0**-24


@dataclass
class Recast:
    """Sums over the casts of one operand.

    along, own   <q, x> and <r, x>
    size         <x, x>
    apart        |q - r|^2
    variance     variance of `along` from unknown random numbers
    scale_off    see the module docstring
    differ       elements where q is not r
    count        all elements
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
        """Add the sums of another rank."""
        for each in ("along", "own", "size", "apart", "variance", "differ", "count"):
            setattr(self, each, getattr(self, each) + getattr(other, each))
        self.scale_off = max(self.scale_off, other.scale_off)

    def add(self, original: Tensor, codes: QTensor, noise: Tensor | None) -> None:
        """Add one cast. original: [outer, inner].

        codes  codes that should be a cast of `original`
        noise  noise that they were rounded with, if it is known
        """
        if original.shape != codes.shape or not original.numel():
            return
        made, x = dequantize(codes), original.detach().to(torch.float32)
        if codes.cast.draws and noise is None:
            # Noise 0 rounds every fraction up and noise just below 1 rounds it down: the two
            # neighbours.
            shape = codes.cast.noise_shape(tuple(x.shape))
            ends = (recast(original, codes, x.new_full(shape, end)) for end in (0.0, _ALMOST_ONE))
            low, high = torch.aminmax(torch.stack(tuple(ends)), dim=0)
            if codes.cast.rounding == "eden":
                # The correction makes <r, x> = <x, x> (ops/quantize/eden.py). A tile has one random
                # number, whose variance is at most a quarter of its range squared.
                own = x
                steps = padded_to_tiles(x * (high - low), codes.cast.tile)
                self.variance += _sum(halved_sum(as_tiles(steps, codes.cast.tile)).square()) / 4
            else:
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
        self.scale_off = max(self.scale_off, _scale_off(original, codes, noise))

    @property
    def slope(self) -> float:
        return self.along / self.size if self.size > 0 else 1.0

    @property
    def own_slope(self) -> float:
        return self.own / self.size if self.size > 0 else 1.0

    @property
    def distance(self) -> float:
        """|q - r| / |x|; infinite if x is zero and q is not."""
        if self.size > 0 or math.isnan(self.size):
            return math.sqrt(self.apart / self.size)
        return math.inf if self.apart > 0 else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the slope."""
        return math.sqrt(self.variance) / self.size if self.size > 0 else 0.0

    @property
    def over(self) -> float:
        """Largest measure over its limit; above 1 the codes are not a cast of x."""
        bias = abs(self.slope - self.own_slope) / max(BIAS, DEVIATIONS * self.deviation)
        return max(bias, self.distance / APART, self.scale_off / SCALE_OFF)


def recast(x: Tensor, like: QTensor, noise: Tensor | Key | None = None) -> Tensor:
    """Cast x by the scales of `like` and decode: [outer, inner] float32.

    The result equals `dequantize(like)` if `like` was cast from x.

    x      [outer, inner], the shape of `like`
    noise  the noise that `like` was rounded with, if its cast rounds stochastically
    """
    # Operands of other libraries (nn.foreign_modules) round by the arithmetic of their library.
    if (cast_again := getattr(like, "cast_again", None)) is not None:
        return cast_again(x)
    cast = like.cast
    if cast.rounding == "eden":  # its scales were corrected after rounding: they round nothing
        return dequantize(quantize(x, cast, None, noise, torch.float32))
    data = encoded(
        filled(x, cast.tile), like.shape, like.scale, like.global_scale, cast, noise, torch.float32
    )
    return times_scale(data, like.full_scale(), cast.tile)


def own_scale(x: Tensor, cast: Cast, noise: Tensor | Key | None = None) -> Tensor | None:
    """Return the scale that `cast` gives x, in the form of `QTensor.full_scale`.

    None if the scale depends on more than x: an amax history, a learned step, unknown noise.
    """
    if isinstance(cast.calibrate, DelayedScaling | LearnedStep):
        return None
    if cast.rounding == "eden":
        is_known = noise is not None or not cast.draws
        return quantize(x, cast, None, noise, torch.float32).full_scale() if is_known else None
    scale, shared = scales_of(filled(x, cast.tile), calibrated_amax(x, cast), cast)
    return scale if shared is None else scale * shared


def _scale_off(original: Tensor, codes: QTensor, noise: Tensor | None) -> float:
    wanted, used = own_scale(original, codes.cast, noise), codes.full_scale()
    if wanted is None or wanted.shape != used.shape:
        return 0.0
    counts = wanted.isfinite() & (wanted > 0)
    off = torch.where(counts, (used / torch.where(counts, wanted, 1.0) - 1).abs(), 0.0)
    return float(off.max()) if off.numel() else 0.0


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))
