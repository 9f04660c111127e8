"""Strata: label groups that every batch contains in the data's proportions.

    share   (rank + 1/2) / size of the stratum; rank: position of the example in its stratum,
            sorted from the widest class to the narrowest
    order   by share: a run of n of N examples then holds n size / N of each stratum, within two

Length can predict the label: a short window holds no answer, a long text has more to find. Batches
of one length then have other label frequencies than the data. The gradient swings with the
frequency, and a model may stay for long on a plateau where it predicts that frequency alone. Strata
remove the swing; shuffled batches still swing by chance. The price is padding where strata differ
in length, since examples of a batch then have equal ranks but not equal widths.

Many classes are merged into MOST strata, neighbours by mean length. Length causes the swing, so
little swing remains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices

MOST = 4  # strata; a batch of 16 then has four examples of each, if they are equally large


def strata_of(labels: NDArray[Any], lengths: Indices) -> Indices:
    """Stratum of each example, [N] integers from 0 to MOST - 1.

    labels   [N] classes (integers), or numbers, whose quartiles are the strata
    lengths  [N] tokens of each example
    """
    if labels.dtype.kind == "f":
        return _parts(labels)
    classes, member = np.unique(labels, return_inverse=True)
    if len(classes) <= MOST:
        return np.asarray(member, dtype=np.int64)
    mean = np.bincount(member, weights=lengths) / np.bincount(member)
    return _parts(mean[member])


def _parts(values: NDArray[Any]) -> Indices:
    """Quantile number (0 to MOST - 1) of each value; equal values share one."""
    # unique: with many equal values, several quantiles coincide.
    bounds = np.quantile(values, np.arange(1, MOST) / MOST) if len(values) else np.empty(0)
    return np.searchsorted(np.unique(bounds), values, side="left")


def stratified(classes: Indices, strata: Indices) -> Indices:
    """Order by share, [N] indices; within a stratum from the widest class to the narrowest.

    classes  [N] width classes; larger is wider

    Ties keep the given order.
    """
    # lexsort's last key is the primary one, and it is stable.
    by = np.lexsort((-classes, strata))
    _, member, sizes = np.unique(strata[by], return_inverse=True, return_counts=True)
    rank = np.arange(len(by)) - (np.cumsum(sizes) - sizes)[member]
    share = np.empty(len(by))
    share[by] = (rank + 0.5) / sizes[member]
    return np.argsort(share, kind="stable")
