"""A shuffled order that depends on its key alone: not on library versions, the machine, or earlier draws.

Sorts element i by the i-th output of SplitMix64 (Steele, Lea, Flood 2014), seeded with the SHA-256 of the key. The outputs are
distinct, so there are no ties.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


def permutation(count: int, key: bytes) -> Indices:
    """0 ... count - 1, permuted by the key: 8 bytes per element, about 0.3 s per million."""
    start = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)))
