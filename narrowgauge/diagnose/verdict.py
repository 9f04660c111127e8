"""Verdict: the answer to "is this run, or recipe, worse than its reference?".

Every method that compares a run with a reference gives its answer as a `Verdict`:

    method                            evidence                             file
    seeds of a study                  t tests on paired differences        seeds.py
    checks of a guard                 e-values and audits                  guard/result.py
    two curves with a control         drift of a control run               same_curve.py
    two curves without a control      95 % band of the mean difference     compare.py
    a loss spike                      BF16 on the same batches             spike watch of a run

All methods share the four outcomes:

    worse         the run is shown to differ to its disadvantage
    better        the run is shown to differ to its advantage
    equivalent    no difference above the margin is shown to exist
    unknown       nothing is shown: too little evidence, or a reference that cannot judge

`detail` names the case within an outcome, such as "diverged" within "worse".

Files written by earlier versions hold one word per method in place of (outcome, detail), and
readers of run folders still find this word under its old key. `STORED` alone translates between the
two.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORSE, BETTER, EQUIVALENT, UNKNOWN = "worse", "better", "equivalent", "unknown"

# Details of several methods.
DIVERGED = "diverged"  # worse: a loss of the run is not finite, and the reference's is
IDENTICAL = "identical"  # equivalent: equal values, bit for bit
NOT_WORSE = "not worse"  # unknown: worse is excluded, better and equivalent stay open
REFERENCE_DIVERGED = "reference diverged"  # unknown: nothing can be judged
NOT_SENSITIVE = "not sensitive"  # unknown: these runs could not have shown a difference
WITHIN_CONTROL = "within control"  # equivalent: no further apart than rounding alone drives curves
WITHIN_MARGIN = "within margin"  # equivalent: apart, by less than the margin
FORMAT, DATA = "format", "data"  # worse, equivalent: cause of a spike; BF16 has it too, or not


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judgement on one run or recipe.

    outcome   worse, better, equivalent or unknown
    detail    case within the outcome, or ''
    estimate  mean difference, run minus reference, in units of the metric; None: not known
    interval  its 95 % interval; None: not known
    margin    largest difference that does not matter; None: not known
    evidence  name -> p-value, e-value or size of a control, from which the outcome follows
    heading   the verdict in a few words, or '' if the sentence is short
    sentence  the verdict with its numbers, in words
    beside    sentence on numbers that do not decide, or ''
    """

    outcome: str
    detail: str = ""
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    margin: float | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)
    heading: str = ""
    sentence: str = ""
    beside: str = ""

    @property
    def is_insensitive(self) -> bool:
        """True if these runs could not have shown a difference. More seeds would not help."""
        return self.detail == NOT_SENSITIVE

    def text(self, subject: str = "") -> str:
        """The verdict on one line: "SUBJECT: heading. sentence beside"."""
        heading = ": ".join(filter(None, (subject, self.heading)))
        stop = "." if self.heading else ":"
        return " ".join(filter(None, (heading and heading + stop, self.sentence, self.beside)))


Case = tuple[str, str]  # (outcome, detail)
STUDY, GUARD, CURVE, SPIKE = "study", "guard", "curve", "spike"

# Method -> word in files -> its cases. A word with several cases is as exact as files ever were:
# the guard calls a departure in either direction "worse", and a curve that "differs" has a sign.
# "spike" words stand under the key `cause`, all others under `verdict`.
STORED: Mapping[str, Mapping[str, tuple[Case, ...]]] = {
    STUDY: {
        "worse": ((WORSE, ""),),
        "diverged": ((WORSE, DIVERGED),),
        "better": ((BETTER, ""),),
        "equivalent": ((EQUIVALENT, ""),),
        "identical": ((EQUIVALENT, IDENTICAL),),
        "not worse": ((UNKNOWN, NOT_WORSE),),
        "unknown": ((UNKNOWN, ""), (UNKNOWN, NOT_SENSITIVE)),
    },
    GUARD: {
        "worse": ((WORSE, ""),),
        "within": ((EQUIVALENT, ""),),
        "unknown": ((UNKNOWN, ""), (UNKNOWN, NOT_SENSITIVE)),
        "reference": ((UNKNOWN, REFERENCE_DIVERGED),),
    },
    CURVE: {
        # Both losses stop being finite: lost with BF16 too, so the format is not the cause.
        "same": ((EQUIVALENT, WITHIN_CONTROL), (EQUIVALENT, DIVERGED)),
        "small": ((EQUIVALENT, WITHIN_MARGIN),),
        "differs": ((WORSE, ""), (WORSE, DIVERGED), (BETTER, ""), (BETTER, REFERENCE_DIVERGED)),
        "unknown": ((UNKNOWN, ""), (UNKNOWN, NOT_SENSITIVE)),
    },
    SPIKE: {
        "format": ((WORSE, FORMAT),),
        "data": ((EQUIVALENT, DATA),),
        "unknown": ((UNKNOWN, ""),),
    },
}


def stored_word(method: str, outcome: str, detail: str = "") -> str:
    """Word of a case in files."""
    words = STORED[method]
    for word, cases in words.items():
        if (outcome, detail) in cases:
            return word
    # A detail that files never had, such as the direction of a guard's alarm.
    return next(word for word, cases in words.items() if cases[0][0] == outcome)


def outcome_of(method: str, event: Mapping[str, Any]) -> str:
    """Outcome of an event of metrics.jsonl; "unknown" for a word that this version does not have."""
    # Runs of earlier versions have no key `outcome`.
    word = str(event.get("cause" if method == SPIKE else "verdict", ""))
    cases = STORED[method].get(word, ((UNKNOWN, ""),))
    return str(event.get("outcome", cases[0][0]))
