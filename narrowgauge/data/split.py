"""Splits text into training and validation, as a pure function of the seed and the text.

By document: a document validates if  hash(seed, text) / 2**64 < fraction.  Adding, removing or reordering documents moves no
other document, and copies of a document are on the same side.

By tail, if there are fewer than FEW_DOCUMENTS or a side would be empty: the last `fraction` of each document validates, cut at a
line end if one is near.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from narrowgauge.errors import ConfigError

FEW_DOCUMENTS = 20
TRAIN, VALIDATION = SIDES = ("train", "validation")


def check_fraction(fraction: float) -> None:
    if not (math.isfinite(fraction) and 0 <= fraction < 1):
        raise ConfigError(
            f"validation_fraction: {fraction} is not in [0, 1). Pass for example 0.05; 0 holds nothing out."
        )


def validates(digest: bytes, *, fraction: float, seed: int) -> bool:
    """True if the document with this SHA-256 validates in a split by document."""
    draw = hashlib.sha256(b"%d:" % seed + digest).digest()
    return int.from_bytes(draw[:8], "big") < fraction * 2**64


def tail_cut(text: str, fraction: float) -> int:
    """Index of the character where the validation part of `text` begins.

    The nearest line start that gives half to twice the fraction; if there is none, a cut inside a line.
    """
    share = int(len(text) * fraction)
    target = len(text) - share
    starts = text.rfind("\n", 0, target) + 1, text.find("\n", max(target - 1, 0)) + 1
    near = [start for start in starts if start > 0 and share <= 2 * (len(text) - start) <= 4 * share]
    return min(near, key=lambda start: abs(start - target), default=target)


@dataclass(frozen=True, kw_only=True)
class Split:
    """The rule for one corpus."""

    fraction: float
    seed: int
    by_document: bool

    @property
    def words(self) -> str:
        share = f"{self.fraction:.4g}"
        if self.fraction == 0:
            return "none: all text trains"
        if self.by_document:
            return "by document"
        return f"by tail: the last {share} of each document validates, because there are too few documents to split by"

    def parts(self, text: str, digest: bytes) -> Iterator[tuple[str, str]]:
        """(side, text) of each part that is not blank: one if split by document, else two."""
        if self.by_document:
            yield VALIDATION if validates(digest, fraction=self.fraction, seed=self.seed) else TRAIN, text
            return
        cut = tail_cut(text, self.fraction)
        for side, part in zip(SIDES, (text[:cut], text[cut:]), strict=True):
            if part and not part.isspace():
                yield side, part
