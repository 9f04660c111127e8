"""Cuts a long text into parts, at line ends if possible.

The memory of a tokenizer grows with the text per call, and one text uses one core; parts of PIECE_CHARS bound the memory and use all
cores. A cut can change the tokens beside it: 30 cuts in 8 MB of the standard library added 30 tokens to 2,192,651.
"""

from __future__ import annotations

from collections.abc import Iterator

PIECE_CHARS = 2**18


def pieces(text: str, size: int = PIECE_CHARS) -> Iterator[str]:
    """Parts of at most `size` characters that concatenate to `text`; each but the last ends at a line end if it has one."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
