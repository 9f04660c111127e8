"""The verdict over seeds in words: its numbers, its claim, and its limits."""

from __future__ import annotations

import statistics

from narrowgauge.diagnose.format_text import PERCENT, decimals, plural, signed, true_minus
from narrowgauge.diagnose.left_out import words
from narrowgauge.diagnose.paired_tests import MOST, half_width
from narrowgauge.diagnose.seeds import NOT_FINITE, SeedComparison
from narrowgauge.diagnose.sensitivity import NOT_LEARNT, SHARE
from narrowgauge.diagnose.verdict import (
    BETTER,
    DIVERGED,
    EQUIVALENT,
    IDENTICAL,
    NOT_WORSE,
    UNKNOWN,
    WORSE,
    Verdict,
)


def verdict(found: SeedComparison) -> Verdict:
    """The verdict of a comparison, in words."""
    return Verdict(
        outcome=found.outcome,
        detail=found.detail,
        estimate=found.mean,
        interval=found.interval,
        margin=found.absolute_margin,
        evidence={
            "p_worse": found.p_worse,
            "p_better": found.p_better,
            "p_not_worse": found.p_not_worse,
            "p_equivalent": found.p_equivalent,
        },
        heading=heading(found),
        sentence=sentences(found),
        beside=about_own_interval(found),
    )


def heading(found: SeedComparison) -> str:
    """A few words for a badge."""
    if found.detail == DIVERGED:
        return f"diverged in {len(found.lost_by_divergence)} of {len(found.runs.values) + len(found.runs.failed)} runs"
    if found.is_insensitive:
        return f"unknown: {NOT_LEARNT}"
    if found.case == (UNKNOWN, ""):
        return f"unknown{needs(found, ': needs ')}"
    names = {
        (WORSE, ""): "worse by more than the margin",
        (BETTER, ""): "better by more than the margin",
        (EQUIVALENT, ""): "equivalent within the margin",
        (UNKNOWN, NOT_WORSE): "not worse by more than the margin",
        (EQUIVALENT, IDENTICAL): "the same values",
    }
    return names[found.case] + (", without a positive control" if found.lacks_control else "")


def needs(found: SeedComparison, before: str) -> str:
    """': needs 9 to 31 seeds', or '' if no number can be given."""
    if found.needed is None:
        return f"{before}more seeds" if len(found.differences) < 2 else ""
    # None means more than MOST.
    low, high = sorted(each or MOST + 1 for each in found.needed)
    if low > MOST:
        return f"{before}more than {MOST:,} seeds"
    # A lower number that is already reached says nothing: only the other one is given.
    if low <= len(found.differences) or low == high:
        return f"{before}about {high:,} seeds" if high <= MOST else f"{before}many more seeds"
    return (
        f"{before}{low:,} to {high:,} seeds"
        if high <= MOST
        else f"{before}{low:,} seeds or many more"
    )


def number(value: float, places: int) -> str:
    return true_minus(f"{value:.{places}f}")


def sentences(found: SeedComparison) -> str:
    """The verdict with its numbers and limits; `about_own_interval` is printed beside it."""
    parts = [
        *_about_failures(found),
        _about_difference(found),
        _about_batches(found),
        _about_margin(found),
        _about_control(found),
    ]
    return " ".join(filter(None, parts))


def _about_failures(found: SeedComparison) -> list[str]:
    words = []
    for runs in (found.reference, found.runs):
        for seed in sorted(set(runs.failed) | runs.diverged):
            why = runs.failed.get(seed, NOT_FINITE)
            ended = (
                "ended with numbers that are not finite"
                if why == NOT_FINITE
                else f"did not finish ({why})"
            )
            words.append(f"{runs.name} {ended} at seed {seed}.")
    if words and found.seeds:
        words.append(
            f"The rest is of the {plural(len(found.seeds), 'pair')} that finished, and says nothing of those that did not."
        )
    return words


def _about_difference(found: SeedComparison) -> str:
    ours, theirs, mean, half = (
        found.runs.name,
        found.reference.name,
        found.mean,
        found.half_width,
    )
    if mean is None:
        return f"{ours} and {theirs} have no finished pair of one seed, so nothing can be compared."
    pairs = plural(len(found.seeds), "pair")
    if found.detail == IDENTICAL:
        return f"In all {pairs} {ours} has the same {found.metric} as {theirs}."
    places = decimals(half or mean)
    said = f"Over {pairs} of one seed each, {ours} differs from {theirs} by {signed(mean, places)} in {found.metric} on average"
    if half is None:
        why = "one pair tells" if len(found.seeds) == 1 else "the same in each, they tell"
        return f"{said}; {why} no spread, so this is no more than an observation."
    low, high = (signed(mean + side * half, places) for side in (-1, 1))
    zero = "includes zero" if abs(mean) <= half else "does not include zero"
    return f"{said} (95{PERCENT} interval from {low} to {high}, which {zero})."


def _about_batches(found: SeedComparison) -> str:
    """Sentence on pairs of one seed that did not see the same batches, or ''."""
    names = found.runs.name, found.reference.name
    apart = [
        f"seed {seed}: {' and '.join(words(name, each) for name, each in zip(names, both, strict=True))}"
        for seed, both in found.other_batches.items()
    ]
    if not apart:
        return ""
    return (
        f"{plural(len(apart), 'pair')} of them did not see the same batches to the end (on_spike = skip; {'; '.join(apart)}), so what "
        "these batches are worth is in the difference as well."
    )


def _about_control(found: SeedComparison) -> str:
    """Sentence on the positive control, for verdicts that claim no difference; '' for others."""
    control = found.assay.control
    if found.lacks_control:
        return "No positive control was trained, so it is not shown that these runs would have seen a recipe that is bad."
    if control is None or control.harm is None or found.outcome == WORSE or found.is_insensitive:
        return ""
    pairs = plural(control.seeds, "pair")
    return f"The positive control, which is bad on purpose, was seen: worse by {number(control.harm, decimals(control.harm))} over {pairs}."


def _about_margin(found: SeedComparison) -> str:
    if found.is_insensitive:
        return found.assay.sentence
    margin = found.absolute_margin
    if margin is None or found.half_width is None:
        return ""
    share = _about_share(found)
    size = f"the margin of {number(margin, decimals(margin))}{share}"
    chance = f"p = {found.p:.2g}" if found.p is not None else ""
    together = (
        ""
        if found.holds_together in (None, True)
        else " With Holm’s correction for several recipes it is not shown."
    )
    texts = {
        (WORSE, ""): f"It is worse by more than {size}: one-sided t test at 5{PERCENT}, {chance}.",
        (
            BETTER,
            "",
        ): f"It is better by more than {size}: one-sided t test at 5{PERCENT}, {chance}.",
        (
            EQUIVALENT,
            "",
        ): f"It is equivalent within {size}: two one-sided t tests at 5{PERCENT}, {chance}; the 90{PERCENT} interval, "
        f"{_interval_of_both_tests(found)}, lies within it.",
        (
            UNKNOWN,
            NOT_WORSE,
        ): f"It is not worse by more than {size}: one-sided t test at 5{PERCENT}, {chance}. "
        "Whether it is better by more is not known.",
        (WORSE, DIVERGED): "",
    }
    if found.case in texts:
        return texts[found.case] + (together if texts[found.case] else "")
    return (
        f"Neither a difference above {size} is shown, nor that there is none.{_about_need(found)}"
    )


def _about_share(found: SeedComparison) -> str:
    """Bracketed words on the share that defines the margin, or ''."""
    name, assay = found.reference.name, found.assay
    if found.limit < assay.asked:
        asked = number(assay.asked, decimals(assay.asked))
        return f" ({100 * SHARE:g}{PERCENT} of what {name} learnt; {asked} was asked for)"
    return (
        f" ({100 * found.margin.value:g}{PERCENT} of {name}’s mean)"
        if found.margin.is_share
        else ""
    )


def _interval_of_both_tests(found: SeedComparison) -> str:
    """The 90 % interval, which is equivalent to two one-sided tests at 5 %."""
    mean, half = found.mean or 0.0, half_width(found.differences, 0.9) or 0.0
    return f"{signed(mean - half, decimals(half))} to {signed(mean + half, decimals(half))}"


def _about_need(found: SeedComparison) -> str:
    if found.needed is None or found.mean is None:
        return ""
    none, observed = (
        f"more than {MOST:,}" if each is None else f"about {each:,}" for each in found.needed
    )
    if none == observed:
        said = f"{none} seeds tell with 80{PERCENT} power if there is no true difference, or the one that was seen"
    else:
        said = f"{none} seeds tell with 80{PERCENT} power if there is no true difference, and {observed} if it is the one that was seen"
    return f" At this spread, which {plural(len(found.seeds), 'pair')} know only roughly, {said}."


def about_own_interval(found: SeedComparison) -> str:
    own, values = found.own_interval, list(found.runs.finite.values())
    if own is None or own.half_width is None or not values:
        return ""
    places = decimals(own.half_width)
    low, high = (number(own.mean + side * own.half_width, places) for side in (-1, 1))
    mean, side = number(statistics.fmean(values), places), "inside" if found.inside else "outside"
    single = f"{found.inside_count} of its {plural(len(values), 'run')}"
    return (
        f"One more seed of {own.name} would fall between {low} and {high} (95{PERCENT} prediction interval from "
        f"{plural(len(own.values), 'seed')}). The mean of {found.runs.name}, {mean}, is {side}; {single} lie inside."
    )
