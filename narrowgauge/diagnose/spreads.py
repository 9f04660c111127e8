"""Why 4-bit recipes sample rows and rotate channels: how the rows of a gradient, and the channels of an activation, differ in size.

    rows      of gy [T, N]: their norms. A few large ones carry the gradient in fine-tuning and at heads, and leverage-score sampling
              then drops most of the others with little variance; where all are alike, as in pre-training, sampling costs more than it
              saves (arXiv 2306.11987, section 4.2).
    channels  of x [T, K]: their largest magnitudes, before and after the block Hadamard rotation. One channel far above the others
              sets the scale of a whole tensor; the rotation spreads it over its block (section 3.3).

In float32; values that are not finite are left out. Each costs a few passes over its tensor, and waits for the device once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from narrowgauge.diagnose.statistics import Histogram, floor_log2
from narrowgauge.ops.hadamard import draw_signs, rotate
from narrowgauge.recipe import Hadamard

BLOCK = 32  # of recipes that rotate
OUTLIER = 8.0  # times the median channel: three of INT4's four bits are lost by all others


class Rows(TypedDict):
    """Of the rows that are not zero."""

    count: int  # zero ones too
    effective: float  # (sum n)^2 / (count of them * sum n^2): 1 where all norms n are equal, the share of rows that carries most where not
    top: float  # share of sum n^2 in the largest tenth of the rows
    norms: Histogram  # of n over their root mean square, in octaves


class Channels(TypedDict):
    """The largest magnitude of each channel over the median of these, as the tensor is and rotated."""

    count: int
    largest: float
    outliers: int  # channels above OUTLIER
    rotated_largest: float
    peaks: Histogram  # in octaves
    rotated_peaks: Histogram


def row_spread(gy: Tensor) -> Rows:
    """gy [T, N], any float dtype."""
    wide = _finite(gy)
    largest = wide.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    norms = (wide / largest).square().sum(1).sqrt().double() * largest[
        :, 0
    ].double()  # no square leaves float32's range
    norms = norms.cpu()
    norms, count = norms[norms > 0], len(norms)
    if not len(norms):
        return Rows(count=count, effective=1.0, top=0.1, norms=Histogram(lowest_exponent=0, counts=[]))
    energy = norms.square()
    tenth = energy.sort(descending=True).values[: -(-len(norms) // 10)]
    return Rows(
        count=count,
        effective=float(norms.sum() ** 2 / (len(norms) * energy.sum())),
        top=float(tenth.sum() / energy.sum()),
        norms=_octaves(norms / energy.mean().sqrt()),
    )


def channel_spread(x: Tensor, rotation: Hadamard | None = None) -> Channels:
    """x [T, K], any float dtype. rotation: the recipe's; None: blocks of 32. For signs drawn at every call the fixed ones stand."""
    wide, rotation = _finite(x), rotation or Hadamard(block=BLOCK)
    known = (
        replace(rotation, signs="fixed") if rotation.signs == "random" else rotation
    )  # no number of the run's generator is drawn
    before = _over_median(wide.abs().amax(0).cpu())
    after = _over_median(rotate(wide, known, draw_signs(known, x.shape[1], wide.device)).abs().amax(0).cpu())
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
    """Channels that are all zeros are left out of the median; a tensor of zeros has peaks of 1."""
    present = peaks[peaks > 0]
    return peaks / present.median() if len(present) else torch.ones_like(peaks)


def _octaves(values: Tensor) -> Histogram:
    exponents = floor_log2(values[values > 0].double())
    lowest = int(exponents.min()) if len(exponents) else 0
    return Histogram(lowest_exponent=lowest, counts=torch.bincount(exponents - lowest).tolist())
