"""Progress of a rank, in memory shared with its sentinel. A write costs 10 µs.

    bytes 0 to 8    uint64, little-endian: number of progress reports
    bytes 8 to 256  description of the current step in UTF-8, padded with zeros: "step 3"

A reader may see half of a text during a write. Its next look sees the whole text.
"""

from __future__ import annotations

import mmap
import struct

SIZE = 256


class Page:
    """Shared memory of SIZE bytes behind a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._ticks = 0

    def write(self, place: str) -> None:
        self._ticks += 1
        # Cutting bytes may split a UTF-8 character: `read` decodes with errors="replace".
        text = place.encode()[: SIZE - 8].ljust(SIZE - 8, b"\0")
        self._memory[:] = struct.pack("<Q", self._ticks) + text

    def read(self) -> tuple[int, str]:
        """Returns (number of reports, description of the current step)."""
        (ticks,) = struct.unpack("<Q", self._memory[:8])
        return ticks, self._memory[8:].rstrip(b"\0").decode(errors="replace")
