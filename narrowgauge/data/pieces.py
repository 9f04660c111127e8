"""A long text in parts, cut at line ends where there are any.

A tokenizer takes memory in proportion to the text that it is handed at once, and one text keeps one core busy. Parts of
PIECE_CHARS bound the first and share out the second. A cut can change the tokens beside it, never the text, and the
same ones every time: 30 cuts in 8 MB of the standard library made 30 tokens more of 2,192,651.
"""

from __future__ import annotations

from collections.abc import Iterator

PIECE_CHARS = 2**18


def pieces(text: str, size: int = PIECE_CHARS) -> Iterator[str]:
    """Parts of at most `size` characters that join to `text`; each but the last ends behind a line end if it has one."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
