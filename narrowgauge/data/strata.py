"""Strata: groups of labels, each of which has the same share of every batch, though batches are made by length.

    share   (rank + 1/2) / size of the stratum; rank: of the example in its stratum, the widest class first
    order   by share, so that a run of n of N examples holds n size / N of each stratum, less than two more or less

Where length tells of the label (a short window holds no answer, a long text has more to find) batches of one length have other labels than
the data. The gradient then swings with the share of labels in the batch, and a model may stay long on a plateau where it knows that
share alone. Strata take the swing out; shuffled batches still have that of chance. It costs padding where strata differ in length, since
the examples of a batch have the same rank and not the same width.

Many classes are joined to MOST strata, neighbours by their mean length: what tells of the label is length, so little else swings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.batches import Indices

MOST = 4  # strata; a batch of 16 holds four of each, where they are equally large


def strata_of(labels: NDArray[Any], lengths: Indices) -> Indices:
    """[N] numbers from 0 on, MOST at most. labels [N]: classes (integers), or numbers of which each quarter is a stratum.

    lengths  tokens of each example [N]
    """
    if labels.dtype.kind == "f":
        return _parts(labels)
    classes, member = np.unique(labels, return_inverse=True)
    if len(classes) <= MOST:
        return np.asarray(member, dtype=np.int64)
    mean = np.bincount(member, weights=lengths) / np.bincount(member)
    return _parts(mean[member])


def _parts(values: NDArray[Any]) -> Indices:
    """Of each value which of MOST parts of about one size it is in; equal values are in one."""
    bounds = np.quantile(values, np.arange(1, MOST) / MOST) if len(values) else np.empty(0)
    return np.searchsorted(np.unique(bounds), values, side="left")


def stratified(classes: Indices, strata: Indices) -> Indices:
    """The order by share, [N] places: of one stratum that from the widest class to the narrowest, ties as given.

    classes  [N], the wider the larger
    """
    by = np.lexsort((-classes, strata))
    _, member, sizes = np.unique(strata[by], return_inverse=True, return_counts=True)
    rank = np.arange(len(by)) - (np.cumsum(sizes) - sizes)[member]
    share = np.empty(len(by))
    share[by] = (rank + 0.5) / sizes[member]
    return np.argsort(share, kind="stable")
