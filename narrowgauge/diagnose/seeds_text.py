"""Sentences on a verdict over seeds: its numbers, its claim, and its limits."""

from __future__ import annotations

import statistics

from narrowgauge.diagnose.format_text import PERCENT, decimals, plural, signed, true_minus
from narrowgauge.diagnose.left_out import words
from narrowgauge.diagnose.paired_tests import MOST, half_width
from narrowgauge.diagnose.seeds import (
    BETTER,
    DIVERGED,
    EQUIVALENT,
    IDENTICAL,
    NOT_FINITE,
    NOT_WORSE,
    UNKNOWN,
    WORSE,
    Verdict,
)
from narrowgauge.diagnose.sensitivity import NOT_LEARNT, SHARE


def heading(verdict: Verdict) -> str:
    """A few words for a badge."""
    if verdict.name == DIVERGED:
        return f"diverged in {len(verdict.lost_by_divergence)} of {len(verdict.runs.values) + len(verdict.runs.failed)} runs"
    if verdict.cannot_tell:
        return f"unknown: {NOT_LEARNT}"
    if verdict.name == UNKNOWN:
        return f"unknown{needs(verdict, ': needs ')}"
    names = {
        WORSE: "worse by more than the margin", BETTER: "better by more than the margin", EQUIVALENT: "equivalent within the margin",
        NOT_WORSE: "not worse by more than the margin", IDENTICAL: "the same values",
    }  # fmt: skip
    return names[verdict.name] + (", without a positive control" if verdict.lacks_control else "")


def needs(verdict: Verdict, before: str) -> str:
    """': needs 9 to 31 seeds', or '' if no number can be given."""
    if verdict.needed is None:
        return f"{before}more seeds" if len(verdict.differences) < 2 else ""
    # None means more than MOST.
    low, high = sorted(each or MOST + 1 for each in verdict.needed)
    if low > MOST:
        return f"{before}more than {MOST:,} seeds"
    # A lower number that is already reached says nothing: only the other one is given.
    if low <= len(verdict.differences) or low == high:
        return f"{before}about {high:,} seeds" if high <= MOST else f"{before}many more seeds"
    return (
        f"{before}{low:,} to {high:,} seeds"
        if high <= MOST
        else f"{before}{low:,} seeds or many more"
    )


def number(value: float, places: int) -> str:
    return true_minus(f"{value:.{places}f}")


def sentences(verdict: Verdict) -> str:
    """The verdict with its numbers and limits; `about_own_interval` is printed beside it."""
    parts = [
        *_about_failures(verdict),
        _about_difference(verdict),
        _about_batches(verdict),
        _about_margin(verdict),
        _about_control(verdict),
    ]
    return " ".join(filter(None, parts))


def _about_failures(verdict: Verdict) -> list[str]:
    words = []
    for runs in (verdict.reference, verdict.runs):
        for seed in sorted(set(runs.failed) | runs.diverged):
            why = runs.failed.get(seed, NOT_FINITE)
            ended = (
                "ended with numbers that are not finite"
                if why == NOT_FINITE
                else f"did not finish ({why})"
            )
            words.append(f"{runs.name} {ended} at seed {seed}.")
    if words and verdict.seeds:
        words.append(
            f"The rest is of the {plural(len(verdict.seeds), 'pair')} that finished, and says nothing of those that did not."
        )
    return words


def _about_difference(verdict: Verdict) -> str:
    ours, theirs, mean, half = (
        verdict.runs.name,
        verdict.reference.name,
        verdict.mean,
        verdict.half_width,
    )
    if mean is None:
        return f"{ours} and {theirs} have no finished pair of one seed, so nothing can be compared."
    pairs = plural(len(verdict.seeds), "pair")
    if verdict.name == IDENTICAL:
        return f"In all {pairs} {ours} has the same {verdict.metric} as {theirs}."
    places = decimals(half or mean)
    said = f"Over {pairs} of one seed each, {ours} differs from {theirs} by {signed(mean, places)} in {verdict.metric} on average"
    if half is None:
        why = "one pair tells" if len(verdict.seeds) == 1 else "the same in each, they tell"
        return f"{said}; {why} no spread, so this is no more than an observation."
    low, high = (signed(mean + side * half, places) for side in (-1, 1))
    zero = "includes zero" if abs(mean) <= half else "does not include zero"
    return f"{said} (95{PERCENT} interval from {low} to {high}, which {zero})."


def _about_batches(verdict: Verdict) -> str:
    """Sentence on pairs of one seed that did not see the same batches, or ''."""
    names = verdict.runs.name, verdict.reference.name
    found = [
        f"seed {seed}: {' and '.join(words(name, each) for name, each in zip(names, both, strict=True))}"
        for seed, both in verdict.other_batches.items()
    ]
    if not found:
        return ""
    return (
        f"{plural(len(found), 'pair')} of them did not see the same batches to the end (on_spike = skip; {'; '.join(found)}), so what "
        "these batches are worth is in the difference as well."
    )


def _about_control(verdict: Verdict) -> str:
    """Sentence on the positive control, for verdicts that claim no difference; '' for others."""
    control = verdict.assay.control
    if verdict.lacks_control:
        return "No positive control was trained, so it is not shown that these runs would have seen a recipe that is bad."
    if (
        control is None
        or control.harm is None
        or verdict.name in (WORSE, DIVERGED)
        or verdict.cannot_tell
    ):
        return ""
    pairs = plural(control.seeds, "pair")
    return f"The positive control, which is bad on purpose, was seen: worse by {number(control.harm, decimals(control.harm))} over {pairs}."


def _about_margin(verdict: Verdict) -> str:
    if verdict.cannot_tell:
        return verdict.assay.sentence
    margin = verdict.absolute_margin
    if margin is None or verdict.half_width is None:
        return ""
    share = _about_share(verdict)
    size = f"the margin of {number(margin, decimals(margin))}{share}"
    chance = f"p = {verdict.p:.2g}" if verdict.p is not None else ""
    together = (
        ""
        if verdict.holds_together in (None, True)
        else " With Holm’s correction for several recipes it is not shown."
    )
    texts = {
        WORSE: f"It is worse by more than {size}: one-sided t test at 5{PERCENT}, {chance}.",
        BETTER: f"It is better by more than {size}: one-sided t test at 5{PERCENT}, {chance}.",
        EQUIVALENT: f"It is equivalent within {size}: two one-sided t tests at 5{PERCENT}, {chance}; the 90{PERCENT} interval, "
        f"{_interval_of_both_tests(verdict)}, lies within it.",
        NOT_WORSE: f"It is not worse by more than {size}: one-sided t test at 5{PERCENT}, {chance}. "
        "Whether it is better by more is not known.",
        DIVERGED: "",
    }
    if verdict.name in texts:
        return texts[verdict.name] + (together if texts[verdict.name] else "")
    return (
        f"Neither a difference above {size} is shown, nor that there is none.{_about_need(verdict)}"
    )


def _about_share(verdict: Verdict) -> str:
    """Bracketed words on the share that defines the margin, or ''."""
    name, assay = verdict.reference.name, verdict.assay
    if verdict.limit < assay.asked:
        asked = number(assay.asked, decimals(assay.asked))
        return f" ({100 * SHARE:g}{PERCENT} of what {name} learnt; {asked} was asked for)"
    return (
        f" ({100 * verdict.margin.value:g}{PERCENT} of {name}’s mean)"
        if verdict.margin.is_share
        else ""
    )


def _interval_of_both_tests(verdict: Verdict) -> str:
    """The 90 % interval, which is equivalent to two one-sided tests at 5 %."""
    mean, half = verdict.mean or 0.0, half_width(verdict.differences, 0.9) or 0.0
    return f"{signed(mean - half, decimals(half))} to {signed(mean + half, decimals(half))}"


def _about_need(verdict: Verdict) -> str:
    if verdict.needed is None or verdict.mean is None:
        return ""
    none, observed = (
        f"more than {MOST:,}" if each is None else f"about {each:,}" for each in verdict.needed
    )
    if none == observed:
        said = f"{none} seeds tell with 80{PERCENT} power if there is no true difference, or the one that was seen"
    else:
        said = f"{none} seeds tell with 80{PERCENT} power if there is no true difference, and {observed} if it is the one that was seen"
    return f" At this spread, which {plural(len(verdict.seeds), 'pair')} know only roughly, {said}."


def about_own_interval(verdict: Verdict) -> str:
    own, values = verdict.own_interval, list(verdict.runs.finite.values())
    if own is None or own.half_width is None or not values:
        return ""
    places = decimals(own.half_width)
    low, high = (number(own.mean + side * own.half_width, places) for side in (-1, 1))
    mean, side = number(statistics.fmean(values), places), "inside" if verdict.inside else "outside"
    single = f"{verdict.inside_count} of its {plural(len(values), 'run')}"
    return (
        f"One more seed of {own.name} would fall between {low} and {high} (95{PERCENT} prediction interval from "
        f"{plural(len(own.values), 'seed')}). The mean of {verdict.runs.name}, {mean}, is {side}; {single} lie inside."
    )
