"""Extractive answers: the best span over all windows of a question, and SQuAD's exact match and F1.

    score of a span   first[i] + last[j],  i <= j < i + longest, both context tokens; maximum
                      over all windows
    no answer         first[0] + last[0] at the no-answer position; minimum over all windows
    exact match       1 if the normalized texts are equal
    F1                2 p r / (p + r) over the multiset of normalized words that both texts contain

Normalization: lower case, no ASCII punctuation, no articles (a, an, the), single spaces. Of several
reference answers the best score counts. A question without a reference answer scores 1 for the
empty text and 0 for any other. Sources: Rajpurkar et al. 2016 and 2018.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Scores = np.ndarray[Any, np.dtype[np.float32]]  # [2, tokens]: start scores, end scores
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Span(NamedTuple):
    """A span of tokens in one window; `first` and `last` are both included."""

    score: float
    first: int
    last: int


def best_span(scores: Scores, inside: Any, longest: int) -> Span | None:
    """Returns the highest-scoring span of at most `longest` tokens, or None.

    scores   [2, tokens] float32, start and end scores
    inside   [tokens] bool, True for tokens of the context, which form one contiguous run
    longest  most tokens of a span

    Ties go to the shorter span, then to the earlier one. The result is None if no token is inside
    or a score is NaN.
    """
    places = np.flatnonzero(inside)
    best: Span | None = None
    # Loop over span lengths rather than start positions: each iteration is one vectorized sum, and
    # a strict > keeps the shortest span on ties.
    for more in range(min(longest, len(places))):
        sums = scores[0, places[: len(places) - more]] + scores[1, places[more:]]
        place = int(np.argmax(sums))
        if best is None or sums[place] > best.score:
            best = Span(float(sums[place]), int(places[place]), int(places[place + more]))
    return None if best is None or np.isnan(best.score) else best


def normalized(text: str) -> str:
    """Normalizes a text as the SQuAD evaluation script does."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact_match(predicted: str, known: Sequence[str]) -> float:
    """Returns 1.0 or 0.0. An empty `known` means a question without an answer."""
    return float(any(normalized(predicted) == normalized(each) for each in _right(known)))


def f1(predicted: str, known: Sequence[str]) -> float:
    """Best word F1 over the reference answers."""
    return max(
        _f1_of(normalized(predicted).split(), normalized(each).split()) for each in _right(known)
    )


def _right(known: Sequence[str]) -> Sequence[str]:
    """Reference answers that normalization leaves non-empty; else [""], as in SQuAD 2.0."""
    return [each for each in known if normalized(each)] or [""]


def _f1_of(predicted: list[str], known: list[str]) -> float:
    if not predicted or not known:
        return float(predicted == known)
    common = sum((Counter(predicted) & Counter(known)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(known)
    return 2 * precision * recall / (precision + recall)
