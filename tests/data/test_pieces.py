"""Pieces, exactly: they join to the text, none is too long, and each ends at a line end where it can."""

from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data.text import pieces


@given(st.text("ab\n"), st.integers(1, 12))
def test_pieces_join_to_the_text(text, size):
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)
    assert all(part.endswith("\n") or (len(part) == size and "\n" not in part) for part in parts[:-1])
