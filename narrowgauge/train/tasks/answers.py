"""Answers that stand in a text: the best span over all windows of a question, and SQuAD's exact match and F1.

    score of a span   first[i] + last[j],  i <= j < i + longest, both tokens of the context; the best over all windows
    no answer         first[0] + last[0] at the position that stands for it, the least over all windows
    exact match       1 if the normalized texts are equal
    F1                of the normalized words that both have, as often as both have them:  2 p r / (p + r)

Normalized: lower case, without ASCII punctuation, without the words a, an, the, and with single spaces. Of several known answers the
best counts; of none, the empty text is right and any other wrong. Rajpurkar et al. 2016 and 2018.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Scores = np.ndarray[Any, np.dtype[np.float32]]  # [2, tokens] of the first and of the last token of an answer
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Span(NamedTuple):
    """A span of tokens of a window, both ends included."""

    score: float
    first: int
    last: int


def best_span(scores: Scores, inside: Any, longest: int) -> Span | None:
    """The best span of at most `longest` tokens among those where `inside` [tokens] bool is true; the shortest, then first of equal ones.

    None without such a token, or if no score is a number. The tokens inside are one run, as a window has them.
    """
    places = np.flatnonzero(inside)
    best: Span | None = None
    for more in range(min(longest, len(places))):
        sums = scores[0, places[: len(places) - more]] + scores[1, places[more:]]
        place = int(np.argmax(sums))
        if best is None or sums[place] > best.score:
            best = Span(float(sums[place]), int(places[place]), int(places[place + more]))
    return None if best is None or np.isnan(best.score) else best


def normalized(text: str) -> str:
    """As SQuAD compares answers."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact_match(predicted: str, known: Sequence[str]) -> float:
    """1 or 0; `known` [] is a question without an answer."""
    return float(any(normalized(predicted) == normalized(each) for each in _right(known)))


def f1(predicted: str, known: Sequence[str]) -> float:
    """The best over the known answers."""
    return max(_f1_of(normalized(predicted).split(), normalized(each).split()) for each in _right(known))


def _right(known: Sequence[str]) -> Sequence[str]:
    """The answers that leave something when they are normalized; else the empty one alone, as in SQuAD 2."""
    return [each for each in known if normalized(each)] or [""]


def _f1_of(predicted: list[str], known: list[str]) -> float:
    if not predicted or not known:
        return float(predicted == known)
    common = sum((Counter(predicted) & Counter(known)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(known)
    return 2 * precision * recall / (precision + recall)
