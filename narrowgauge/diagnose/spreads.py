"""Row norms of gradients and channel peaks of activations: reasons to sample rows and to rotate.

    rows      of gy [T, N]: their norms. In fine-tuning and at heads a few large rows carry the
              gradient, and leverage score sampling drops most of the others at little variance. If
              all norms are similar, as in pre-training, sampling costs more than it saves (arXiv
              2306.11987, section 4.2).
    channels  of x [T, K]: their largest magnitudes, before and after the block Hadamard rotation.
              One channel far above the others sets the scale of a whole tensor; the rotation
              spreads it over its block (section 3.3).

Computed in float32; non-finite values count as zero. Each function makes a few passes over its
tensor and synchronizes with the device once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from narrowgauge.diagnose.statistics import Histogram, floor_log2
from narrowgauge.ops.hadamard import draw_signs, rotate
from narrowgauge.recipe import Hadamard

BLOCK = 32  # default block of a rotation
OUTLIER = 8.0  # times the median channel: all other channels then lose three of INT4's four bits


class RowStatistics(TypedDict):
    """Statistics of the non-zero rows."""

    count: int  # includes zero rows
    # (sum n)^2 / (number of norms * sum n^2): 1 if all norms n are equal, else the share of rows
    # with most energy.
    effective: float
    top: float  # share of sum n^2 in the tenth of the rows with the largest norms
    norms: Histogram  # n divided by the root mean square, in octaves


class Channels(TypedDict):
    """Peak of each channel divided by the median peak, for the tensor itself and after rotation."""

    count: int
    largest: float
    outliers: int  # channels above OUTLIER
    rotated_largest: float
    peaks: Histogram  # in octaves
    rotated_peaks: Histogram


def row_spread(gy: Tensor) -> RowStatistics:
    """Row statistics of gy [T, N], any float dtype."""
    wide = _finite(gy)
    largest = wide.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    norms = (wide / largest).square().sum(1).sqrt().double() * largest[
        :, 0
    ].double()  # avoids overflow of squares in float32
    norms = norms.cpu()
    norms, count = norms[norms > 0], len(norms)
    if not len(norms):
        return RowStatistics(
            count=count, effective=1.0, top=0.1, norms=Histogram(lowest_exponent=0, counts=[])
        )
    energy = norms.square()
    tenth = energy.sort(descending=True).values[: -(-len(norms) // 10)]
    return RowStatistics(
        count=count,
        effective=float(norms.sum() ** 2 / (len(norms) * energy.sum())),
        top=float(tenth.sum() / energy.sum()),
        norms=_octaves(norms / energy.mean().sqrt()),
    )


def channel_spread(x: Tensor, rotation: Hadamard | None = None) -> Channels:
    """Channel statistics of x [T, K], any float dtype.

    rotation  the recipe's rotation; None: blocks of 32. Random signs are replaced by the fixed ones,
              in one round
    """
    wide, rotation = _finite(x), rotation or Hadamard(block=BLOCK)
    known = (
        replace(rotation, signs="fixed", rounds=1) if rotation.signs == "random" else rotation
    )  # leaves the run's generator untouched
    before = _over_median(wide.abs().amax(0).cpu())
    # A rotation can enlarge the ratio: down_proj's input has a mean, which the first Hadamard
    # column sums (2.5 and 4.2 became 14 and 31 in a two-layer Llama, decisions/four-bit.md).
    after = _over_median(
        rotate(wide, known, draw_signs(known, x.shape[1], wide.device)).abs().amax(0).cpu()
    )
    return Channels(
        count=x.shape[1],
        largest=float(before.max()),
        outliers=int((before > OUTLIER).sum()),
        rotated_largest=float(after.max()),
        peaks=_octaves(before),
        rotated_peaks=_octaves(after),
    )


def _finite(x: Tensor) -> Tensor:
    return x.detach().float().nan_to_num(0.0, 0.0, 0.0)


def _over_median(peaks: Tensor) -> Tensor:
    """Peaks divided by the median of the non-zero peaks; ones for a tensor of zeros."""
    present = peaks[peaks > 0]
    return peaks / present.median() if len(present) else torch.ones_like(peaks)


def _octaves(values: Tensor) -> Histogram:
    exponents = floor_log2(values[values > 0].double())
    lowest = int(exponents.min()) if len(exponents) else 0
    return Histogram(lowest_exponent=lowest, counts=torch.bincount(exponents - lowest).tolist())
