"""Report section on a guarded run: a figure of the guard's checks, and their results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose.format_text import count, percent, plural, signed, true_minus
from narrowgauge.diagnose.verdict import EQUIVALENT, GUARD, UNKNOWN, WORSE, Verdict, outcome_of
from narrowgauge.report import template
from narrowgauge.report.figures import (
    THEME,
    canvas,
    for_desk_and_phone,
    label_axes,
    note,
    plot,
    signed_values,
    step_limits,
    svg,
)

if TYPE_CHECKING:
    from narrowgauge.diagnose.compare import Event
    from narrowgauge.report.run_data import Recorded

WIDTH = 2.0  # in units of the noise scale, on either side: 95 % of normal noise
OUTLINE: dict[str, Any] = {
    "markersize": 7,
    "markeredgewidth": 1.8,
    "markerfacecolor": THEME["paper"],
    "zorder": 5,
}
OF_OUTCOME = {  # outcome -> (colour, marker, words)
    EQUIVALENT: ("run", "o", "within the margin"),
    UNKNOWN: ("muted", "o", "unknown"),
    WORSE: ("reference", "D", "worse"),
}


@for_desk_and_phone
def figure(events: Sequence[Event]) -> str:
    """Draw run minus BF16 at each check, with noise, same-weights difference and margin.

    Returns '' if no difference is finite.
    """
    finite = [event for event in events if math.isfinite(event.get("difference", math.nan))]
    if not finite:
        return ""
    with canvas(1000, 250) as (drawn, axes):
        steps = [event["step"] for event in finite]
        axes.set_xlim(*step_limits([*(event["begun"] for event in finite[:1]), *steps]))
        left, right = axes.get_xlim()
        # The margin of a check is drawn from halfway to the previous check to halfway to the next
        # one.
        edges = [left, *((a + b) / 2 for a, b in pairwise(steps)), right]
        margins = [event["margin"] for event in finite]
        lower = [-margin for margin in margins]
        for bound in (margins, lower):
            axes.stairs(
                bound,
                edges,
                baseline=None,
                color=THEME["ink"],
                linewidth=1.0,
                linestyle=(0, (3, 2)),
            )
        axes.stairs(
            margins, edges, baseline=lower, fill=True, color=THEME["run"], alpha=0.08, linewidth=0
        )
        axes.axhline(0.0, color=THEME["rule"], linewidth=1.2)
        for event in finite:
            place, scale = (event["step"], event["difference"]), event["scale"]
            colour, marker, _ = OF_OUTCOME[outcome_of(GUARD, event)]
            ends = [place[1] - WIDTH * scale, place[1] + WIDTH * scale]
            axes.plot([place[0]] * 2, ends, color=THEME[colour], linewidth=1.6, alpha=0.6)
            plot(axes, [place], color=THEME[colour], linewidth=0, marker=marker, **OUTLINE)
        same = [(event["step"], event["same"]) for event in finite if is_number(event.get("same"))]
        plot(
            axes,
            same,
            color=THEME["muted"],
            linewidth=0,
            marker="x",
            markersize=6,
            markeredgewidth=1.4,
            zorder=6,
        )
        means = [event["mean"] for event in finite]
        plot(axes, list(zip(steps, means, strict=True)), color=THEME["ink"], linewidth=1.2)
        levels = [
            0.0,
            *margins,
            *(-margin for margin in margins),
            *(event["difference"] for event in finite),
        ]
        levels += [value for _, value in same]
        room = 0.3 * (max(levels) - min(levels))
        axes.set_ylim(min(levels) - room, max(levels) + room)
        note(axes, "margin", (1, margins[-1]), (-4, 4), axes.get_yaxis_transform(), ha="right")
        signed_values(axes)
        label_axes(
            axes,
            "loss of the run minus that of BF16 from the same state, nats (x: of the first step, on the same weights)",
        )
        return svg(drawn, "guard", "Differences to BF16 at the checks of the guard")


def is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def legend(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    """(words, colour, shape) of the verdicts that occur."""
    found = {outcome_of(GUARD, event) for event in events}
    return [
        (words, colour, "square" if marker == "D" else "")
        for outcome, (colour, marker, words) in OF_OUTCOME.items()
        if outcome in found
    ]


def sentences(recorded: Recorded, events: Sequence[Event]) -> Iterator[str]:
    """Yield the newest verdict, the cost of the checks, and the guard's actions."""
    yield str(events[-1].get("sentence", ""))
    # After a rewind by the guard, the steps of the BF16 reference become the run's own.
    became = sum(event["steps"] for event in recorded.of("rewind") if event.get("why") == "guard")
    spent = (
        sum(event["steps"] * (1 + (event.get("control") is not None)) for event in events) - became
    )
    share = percent(spent / max(recorded.last_step, 1))
    yield f"{plural(len(events), 'check')} took {plural(spent, 'step')} that did not count, {share} of the run's."
    if line := first_steps(events):
        yield line
    if line := audited(events):
        yield line
    for event in events:
        if event["verdict"] == "reference":
            yield f"Step {count(event['step'])}: the BF16 reference itself was not finite."
    alarms = [event for event in events if outcome_of(GUARD, event) == WORSE]
    if alarms:
        first = alarms[0]
        on = (
            ""
            if first.get("seen_on", "stretch") == "stretch"
            else f", seen on the {first['seen_on']}"
        )
        yield f"First alarm at step {count(first['step'])}{on}; the check there differed by {signed(first['difference'])} nats."
    yield from map(blamed, recorded.of("blame"))
    if wide := wide_steps(recorded, events):
        yield f"In BF16 in place of the recipe: steps {', '.join(f'{count(first)} to {count(last)}' for first, last in wide)}."


def blamed(event: Event) -> str:
    """Sentences on the GEMMs blamed for an alarm.

    They say if it was confirmed, and which setting runs them in 16 bits.
    """
    where, suspects = f"Step {count(event['step'])}", event.get("suspects") or []
    if not suspects:
        return f"{where}: every product is as accurate as its format allows; none is to blame."
    said = [f"{where}, inaccurate: {', '.join(suspects)}."]
    for each in event.get("confirmations") or []:
        hurts, products = each.get("hurts"), each.get("products")
        found = "Confirmed" if hurts is True else "Not confirmed" if hurts is False else "Not known"
        names = ", ".join(map(str, products)) if isinstance(products, list) else str(products)
        said.append(f"{found}, {names}: {each.get('words', '')}.")
    if recipes := event.get("recipes"):
        said.append(
            "In 16 bits: recipe.layers = [" + ", ".join(f'"{entry}"' for entry in recipes) + "]."
        )
    return " ".join(said)


def first_steps(events: Sequence[Event]) -> str:
    """Sentence on the first steps of the checks: loss and gradient differences on the same weights.

    Returns '' for runs of older versions, which did not record them.
    """
    same = [event["same"] for event in events if is_number(event.get("same"))]
    if not same:
        return ""
    said = f"At the first step of a check, on the same weights, the loss differed by {signed(min(same))} to {signed(max(same))} nats"
    ends = [event["slopes"] for event in events if event.get("slopes")]
    if not ends:
        return f"{said}; gradients were not compared."
    lowest, highest = (
        true_minus(f"{value:.2f}")
        for value in (min(low for low, _ in ends), max(high for _, high in ends))
    )
    most = max(event["weights"] for event in events)
    sick = dict.fromkeys(name for event in events for name in event.get("sick") or ())
    others = f"; another gradient: {', '.join(sick)}" if sick else ""
    return f"{said}, and the gradients of {plural(most, 'weight')} had slopes of {lowest} to {highest}{others}."


def audited(events: Sequence[Event]) -> str:
    """Sentence on the number of GEMMs compared with their recipe in the last steps of the checks.

    It also names what could not be compared. Returns '' for runs of older versions.
    """
    seen = [event for event in events if is_number(event.get("compared"))]
    if not seen:
        return ""
    unlike = dict.fromkeys(name for event in seen for name in event.get("unlike") or ())
    found = f"unlike it: {', '.join(unlike)}" if unlike else "all are as it says"
    most = max(event["compared"] for event in seen)
    unseen = f" {seen[-1]['unseen']}" if seen[-1].get("unseen") else ""
    return f"In the last steps of a check the numbers of up to {plural(most, 'product')} were compared with the recipe; {found}.{unseen}"


def wide_steps(recorded: Recorded, events: Sequence[Event]) -> list[tuple[int, int]]:
    """(first, last) of the step ranges that the guard trained in BF16.

    A range ends at the check that tried low precision again.
    """
    found: list[tuple[int, int]] = []
    begins = [*(event["begun"] for event in events[1:]), recorded.last_step]
    for event, following in zip(events, begins, strict=True):
        # The run stayed in low precision.
        if event.get("then") in ("", "warn", None):
            continue
        first, last = (
            event["begun"] + 1,
            following if event["then"] in ("stay", "bf16") else event["step"],
        )
        if found and found[-1][1] == first - 1:
            first = found.pop()[0]
        found.append((first, last))
    return found


def section(recorded: Recorded) -> dict[str, Any] | None:
    """Variables of the page's section; None if there was no check."""
    events = recorded.of("guard")
    if not events:
        return None
    said = list(sentences(recorded, events))
    newest = Verdict(outcome=outcome_of(GUARD, events[-1]), sentence=said[0])
    return {
        "notice": template.notice(newest),
        "figure": figure(events),
        "legend": legend(events),
        "sentences": said,
    }
