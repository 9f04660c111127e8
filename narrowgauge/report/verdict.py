"""The notice and the colour of a verdict, the same on every page.

    worse         "bad"
    better        "below"
    equivalent    "same"; "open" if a claim of no difference has no positive control behind it
    unknown       "open"; "warn" if these runs could not have shown a difference

page.css names the colours.
"""

from __future__ import annotations

from narrowgauge.diagnose.verdict import (
    BETTER,
    EQUIVALENT,
    NOT_SENSITIVE,
    NOT_WORSE,
    UNKNOWN,
    WORSE,
    Verdict,
)

KINDS = {WORSE: "bad", BETTER: "below", EQUIVALENT: "same", UNKNOWN: "open"}
OF_DETAIL = {NOT_SENSITIVE: "warn", NOT_WORSE: "same"}


def kind(verdict: Verdict) -> str:
    """CSS class of the verdict's colour."""
    return OF_DETAIL.get(verdict.detail, KINDS[verdict.outcome])


def notice(verdict: Verdict, subject: str = "", *, is_checked: bool = True) -> dict[str, str]:
    """Variables of the notice in parts.html.jinja.

    subject     what is judged, such as the name of a recipe; '' if the page says so
    is_checked  False: no positive control backs a claim of no difference, so it is not green
    """
    return {
        "kind": kind(verdict) if is_checked else KINDS[UNKNOWN],
        "heading": ": ".join(filter(None, (subject, verdict.heading))),
        "text": verdict.sentence,
        "more": verdict.beside,
    }
