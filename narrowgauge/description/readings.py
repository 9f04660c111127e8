"""Readings in the notes of `describe`: layers alike but for them share a line, which shows their span.

A reading is what a layer measured, not what it is: how much relative variance sampling would add to one of its products.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_READING = re.compile(r"(?<= adds )\S+(?= relative variance)")


def variance_note(variance: float) -> str:
    """The words that hold a reading."""
    return f" (sampling adds {variance:.2g} relative variance)"


def without(note: str) -> str:
    """The note with every reading masked: equal for layers that differ in readings alone."""
    return _READING.sub("*", note)


def spanned(notes: Sequence[str]) -> str:
    """One note for notes that are equal but for their readings: "adds 0.1 to 0.4 relative variance"."""
    columns = list(zip(*(_READING.findall(note) for note in notes), strict=True))
    spans = [sorted(set(column), key=float) for column in columns]
    words = iter(span[0] if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)
    return _READING.sub(lambda _: next(words), notes[0])
