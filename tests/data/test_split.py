"""The split, exactly where it can be stated, statistically where it is a draw."""

import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data.corpus import TRAIN, VALIDATION, Split, tail_cut, validates


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@pytest.mark.parametrize("fraction", [0.05, 0.5])
@pytest.mark.parametrize("seed", [0, 1, -7])
def test_the_share_of_validation_is_the_fraction(fraction, seed):
    """20,000 draws; |z| < 5 passes all but once in 1.7 million fair draws, and the seeds are fixed."""
    count = 20_000
    held_out = sum(validates(digest(str(n)), fraction=fraction, seed=seed) for n in range(count))
    assert abs(held_out - count * fraction) < 5 * math.sqrt(count * fraction * (1 - fraction))


def test_another_seed_holds_out_other_documents():
    sides = [
        [validates(digest(str(n)), fraction=0.5, seed=seed) for n in range(200)] for seed in (0, 1)
    ]
    assert 50 < sum(a != b for a, b in zip(*sides, strict=True)) < 150


@given(st.integers(), st.floats(0, 0.9), st.floats(0, 0.9), st.integers())
def test_a_larger_fraction_only_adds_to_validation(n, a, b, seed):
    low, high = sorted((a, b))
    if validates(digest(str(n)), fraction=low, seed=seed):
        assert validates(digest(str(n)), fraction=high, seed=seed)


@given(st.text("ab\n", max_size=400), st.floats(0, 0.999))
def test_the_tail_is_near_the_fraction_and_at_a_line_start_if_one_is_near(text, fraction):
    cut = tail_cut(text, fraction)
    share, tail = int(len(text) * fraction), len(text) - cut
    assert 0 < cut <= len(text) or not text  # never without training text
    assert share <= 2 * tail <= 4 * share or tail == share
    starts = [n for n in range(1, len(text)) if text[n - 1] == "\n"]
    near = [start for start in starts if share <= 2 * (len(text) - start) <= 4 * share]
    assert cut in starts or not near or share == 0


def test_the_tail_begins_with_a_line():
    text = "".join(f"line {n}\n" for n in range(100))
    assert text[tail_cut(text, 0.1) :].startswith("line 90\n")
    assert tail_cut("x" * 100, 0.1) == 90  # one long line: cut inside
    assert tail_cut("a\n" + "x" * 98, 0.1) == 90  # the only line start is far away
    assert tail_cut("", 0.5) == 0


def test_parts_by_document_and_by_tail():
    text = "one\ntwo\nthree\nfour\n"
    by_tail = Split(fraction=0.25, seed=0, by_document=False)
    assert list(by_tail.parts(text, digest(text))) == [
        (TRAIN, "one\ntwo\nthree\n"),
        (VALIDATION, "four\n"),
    ]
    by_document = Split(fraction=0.25, seed=0, by_document=True)
    [(side, whole)] = by_document.parts(text, digest(text))
    assert whole == text
    assert (side == VALIDATION) == validates(digest(text), fraction=0.25, seed=0)


def test_blank_parts_are_left_out():
    split = Split(fraction=0.5, seed=0, by_document=False)
    assert list(split.parts("ab\n\n\n\n", b"")) == [(TRAIN, "ab\n")]
