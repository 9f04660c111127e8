"""The one vocabulary of verdicts, and its translation from and to the words in files (exact)."""

from __future__ import annotations

import pytest

from narrowgauge.diagnose.verdict import (
    BETTER,
    CURVE,
    EQUIVALENT,
    GUARD,
    NOT_SENSITIVE,
    NOT_WORSE,
    REFERENCE_DIVERGED,
    SPIKE,
    STORED,
    STUDY,
    UNKNOWN,
    WORSE,
    Verdict,
    outcome_of,
    stored_word,
)

# Words that run folders and studies of earlier versions hold; none may become unreadable.
EARLIER = {
    STUDY: ["worse", "better", "equivalent", "diverged", "identical", "not worse", "unknown"],
    GUARD: ["worse", "within", "unknown", "reference"],
    CURVE: ["same", "small", "differs", "unknown"],
    SPIKE: ["data", "format", "unknown"],
}


def test_every_word_of_earlier_versions_is_written_and_read():
    assert {method: set(words) for method, words in EARLIER.items()} == {
        method: set(words) for method, words in STORED.items()
    }
    for method, words in STORED.items():
        for word, cases in words.items():
            assert {stored_word(method, *case) for case in cases} == {word}
            assert {outcome for outcome, _ in cases} <= {WORSE, BETTER, EQUIVALENT, UNKNOWN}


@pytest.mark.parametrize("method", [STUDY, GUARD, SPIKE])
def test_the_outcome_of_an_earlier_word_is_its_own(method):
    """A word has one outcome, so that an event without `outcome` is not read as another."""
    key = "cause" if method == SPIKE else "verdict"
    for word, cases in STORED[method].items():
        assert {outcome for outcome, _ in cases} == {outcome_of(method, {key: word})}


def test_a_new_event_names_its_outcome_and_a_strange_word_claims_nothing():
    assert outcome_of(GUARD, {"verdict": "worse", "outcome": EQUIVALENT}) == EQUIVALENT
    assert outcome_of(GUARD, {"verdict": "odd"}) == outcome_of(GUARD, {}) == UNKNOWN


def test_the_direction_of_an_alarm_is_no_word_of_its_own():
    assert stored_word(GUARD, WORSE, "lower") == "worse"
    assert stored_word(GUARD, UNKNOWN, REFERENCE_DIVERGED) == "reference"


def test_text_has_subject_heading_sentence_and_what_stands_beside():
    found = Verdict(
        outcome=UNKNOWN, detail=NOT_WORSE, heading="not worse", sentence="By 0.1.", beside="Nine."
    )
    assert found.text("int8") == "int8: not worse. By 0.1. Nine."
    assert Verdict(outcome=WORSE, sentence="It is worse.").text("step 3") == "step 3: It is worse."
    assert Verdict(outcome=WORSE, sentence="It is worse.").text() == "It is worse."
    assert not found.is_insensitive
    assert Verdict(outcome=UNKNOWN, detail=NOT_SENSITIVE).is_insensitive
