"""Cards at the top of the report: loss, metrics, padding, speed and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import compare, format_text
from narrowgauge.diagnose.format_text import count
from narrowgauge.diagnose.metrics_table import SCORES, loss_unit_of, metric_of
from narrowgauge.diagnose.sensitivity import trivial_of

if TYPE_CHECKING:
    from narrowgauge.diagnose.compare import Comparison
    from narrowgauge.report.run_data import Recorded

WAYS = {
    "planned": "planned by length, first epoch",
    "shuffled": "in shuffled batches",
    "fixed": "in rows of one width",
}
# Runs before November 2026 do not record `f1_over`; a new task has no entry here.
OLD_F1_OVER = {
    "classification": "mean over classes",
    "image-classification": "mean over classes",
    "question-answering": "words of answers",
    "tagging": "spans",
}


# On a gain of a run whose reference has neither its recipe nor its kernels.
OF_BOTH = "That is the gain of the recipe and of fused kernels together: {name} has neither."


def cards(recorded: Recorded, comparison: Comparison | None) -> list[dict[str, str]]:
    return [
        *gain_cards(recorded, comparison),
        *loss_cards(recorded, comparison),
        *metric_cards(recorded),
        *coverage_cards(recorded),
        *cost_cards(recorded, comparison),
    ]


def card(label: str, value: str, unit: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "note": note}


def gain_cards(recorded: Recorded, comparison: Comparison | None) -> Iterator[dict[str, str]]:
    """Yield a card for the time to the same loss, if the reference was trained too."""
    found = comparison.time_to_loss if comparison else None
    if comparison and found:
        unit = f"times as fast as {comparison.reference_name}"
        note = f"{found.words()}; training steps alone"
        if recorded.alone_fused:
            note += f". {OF_BOTH.format(name=comparison.reference_name)}"
        yield card("Speed to the same loss", f"{found.gain:.2f}", unit, note)


def loss_cards(recorded: Recorded, comparison: Comparison | None) -> Iterator[dict[str, str]]:
    """Yield cards for the validation loss, the reference's loss, their difference, and the entropy.

    The last card gives the loss as a percentage of the loss that token frequencies alone reach.
    """
    evaluations = compare.evaluations(recorded.events)
    if not evaluations:
        yield card("Validation loss", "–", "", "no evaluation was recorded")
        return
    step, loss = evaluations[-1]
    loss_unit = unit(recorded)
    yield loss_card("Validation loss", step, loss, loss_unit)
    yield from wide_cards(recorded, loss_unit)
    pair = comparison.validation if comparison else None
    if comparison and pair:
        yield loss_card(
            f"Validation loss of {comparison.reference_name}", pair.step, pair.reference, loss_unit
        )
        percent = (
            f"{format_text.signed(100 * (pair.ratio - 1), 2)}{format_text.PERCENT}, "
            if pair.ratio
            else ""
        )
        yield card(
            "Difference",
            format_text.signed(pair.difference),
            loss_unit,
            f"{percent}at step {count(pair.step)}",
        )
    entropy, vocabulary = (
        recorded.data.get("unigram_entropy"),
        recorded.model.get("vocab_size") or 0,
    )
    if entropy and math.isfinite(loss):
        # On the validation tokens; older folders know it of the training tokens alone.
        trivial = trivial_of(recorded.run)["loss"]
        note = f"of {trivial:.2f}, which token frequencies alone reach"
        if vocabulary > 1:
            guess = math.log(vocabulary)
            share = f"{100 * loss / guess:.0f}{format_text.PERCENT}"
            note += f"; {share} of a blind guess, ln {count(vocabulary)} = {guess:.2f}"
        yield card(
            "Against token frequencies",
            f"{100 * loss / trivial:.0f}{format_text.PERCENT}",
            "",
            note,
        )


def wide_cards(recorded: Recorded, unit: str) -> Iterator[dict[str, str]]:
    """Yield a card for the loss of the same weights with 16-bit GEMMs.

    It shows the last loss and its difference from the run's own loss, last and over all
    evaluations.
    """
    # "wide" is the evaluation with all GEMMs in 16 bits; runs without one have no such key.
    both = [
        event
        for event in recorded.of("eval")
        if "wide" in event and math.isfinite(event["wide"]["loss"])
    ]
    if both and math.isfinite(both[-1]["loss"]):
        gaps = [event["wide"]["loss"] - event["loss"] for event in both]
        spread = f", from {format_text.signed(min(gaps))} to {format_text.signed(max(gaps))} over {count(len(gaps))} evaluations"
        step, last = count(both[-1]["step"]), format_text.signed(gaps[-1])
        note = f"at step {step}; {last} to the run's own products{spread if len(gaps) > 1 else ''}"
        yield card(
            "The same weights in 16 bits",
            format_text.loss_value(both[-1]["wide"]["loss"]),
            unit,
            note,
        )


def loss_card(label: str, step: int, loss: float, unit: str) -> dict[str, str]:
    perplexity = f"; perplexity {format_text.perplexity(loss)}" if unit == "nats/token" else ""
    return card(label, format_text.loss_value(loss), unit, f"at step {count(step)}{perplexity}")


def coverage_cards(recorded: Recorded) -> Iterator[dict[str, str]]:
    """Yield a card for the share of matrix-product operations in low precision."""
    share = recorded.narrow_share
    if share is not None:
        _, _, rest = recorded.run["coverage"]["sentence"].partition("; ")
        yield card(
            "Products in low precision",
            f"{100 * share:.0f}{format_text.PERCENT}",
            "",
            f"of all operations{'; ' * bool(rest)}{rest}",
        )


def cost_cards(recorded: Recorded, comparison: Comparison | None) -> Iterator[dict[str, str]]:
    """Yield cards for speed and memory, each with its ratio to the reference's."""

    def note(pair: compare.Pair | None, show: Callable[[float], str], alone: str) -> str:
        if not comparison or not pair or not pair.ratio:
            return alone
        return f"{pair.ratio:.2f} times {comparison.reference_name}’s {show(pair.reference)}"

    speed, peak = compare.tokens_per_s(recorded.events), compare.peak_bytes(recorded.events)
    if speed is not None:
        pair = comparison.tokens_per_s if comparison else None
        low, high = compare.speed_quartiles(recorded.events) or (speed, speed)
        words = note(pair, count, "median over the steps")
        words += (
            f"; half of the steps between {count(round(low))} and {count(round(high))}"
            if low < high
            else ""
        )
        yield card("Speed", count(speed), "tokens/s", words)
    if peak is not None:
        pair = comparison.peak_bytes if comparison else None
        size = format_text.size_parts(peak)
        apart = f"; that of {comparison.reference_name} was not measured" if comparison else ""
        words = note(pair, format_text.size, f"largest of all steps{apart}")
        # A CPU's peak is that of the whole process, which includes earlier allocations, so the
        # ratio of two runs in one process means nothing.
        if pair and pair.ratio and recorded.run.get("device_type") == "cpu":
            words = "largest of the process, which kept what came before: no ratio; `narrowgauge plan` counts each recipe"
        yield card("Peak memory", *size, words)


def unit(recorded: Recorded) -> str:
    """Unit of the loss."""
    return loss_unit_of(recorded.run)


def title(recorded: Recorded, metric: str) -> str:
    """Name of a score for display."""
    old = OLD_F1_OVER.get(recorded.run.get("task", ""), "")
    if metric == "f1" and (items := recorded.run.get("f1_over") or old):
        return f"F1, {items}"
    return metric_of(metric).title


def points(recorded: Recorded, metric: str) -> list[tuple[int, float]]:
    return [
        (event["step"], float(event[metric])) for event in recorded.of("eval") if metric in event
    ]


def scores(recorded: Recorded) -> list[str]:
    """Names of the scores that evaluations measured."""
    return [metric for metric in SCORES if points(recorded, metric)]


def best(recorded: Recorded) -> tuple[str, int, float] | None:
    """(metric, step, value) of the evaluation whose weights were saved as best, or None.

    Ties go to the lower loss, as in the run itself.
    """
    metric = recorded.run.get("best") or ""
    sign = -1 if metric == "loss" else 1
    found = [
        event for event in recorded.of("eval") if metric in event and math.isfinite(event[metric])
    ]
    if not found:
        return None
    # The run keeps the evaluation with the lowest loss among equal scores; the report must name the
    # same.
    kept = max(found, key=lambda event: (sign * event[metric], -event["loss"], -event["step"]))
    return metric, kept["step"], kept[metric]


def is_single(recorded: Recorded) -> bool:
    """True if the run was evaluated once: numbers then, and no curve of one point."""
    return len(recorded.of("eval")) == 1


def metric_cards(recorded: Recorded) -> Iterator[dict[str, str]]:
    """Yield cards for the last and best value of one score, and for padding.

    The score is the one that chooses the best weights, or else the first that was measured.
    """
    kept, shown = best(recorded), scores(recorded)
    if is_single(recorded):  # no curve shows the others
        for metric in shown:
            [(step, value)] = points(recorded, metric)
            yield card(title(recorded, metric), f"{value:.4f}", "", f"at step {count(step)}")
        yield from padding(recorded)
        return
    metric = kept[0] if kept and kept[0] != "loss" else next(iter(shown), "")
    found = points(recorded, metric)
    if found:
        step, value = found[-1]
        note = f"at step {count(step)}"
        if kept and kept[0] == metric:
            note += f"; best {kept[2]:.4f} at step {count(kept[1])}, whose weights are kept"
        yield card(title(recorded, metric), f"{value:.4f}", "", note)
    yield from padding(recorded)


def padding(recorded: Recorded) -> Iterator[dict[str, str]]:
    """Yield a card for the share of padded positions, with this run's batching and others."""
    planned: dict[str, dict[str, Any]] = recorded.data.get("padding") or {}
    shares = {way: waste(each["tokens"], each["positions"]) for way, each in planned.items()}
    steps = [event for event in recorded.of("step") if "positions" in event and "inputs" in event]
    if shares and steps:
        share = waste(
            sum(event["inputs"] for event in steps), sum(event["positions"] for event in steps)
        )
        others = ", ".join(
            f"{format_text.percent(shares[way])} {text}"
            for way, text in WAYS.items()
            if way in shares
        )
        yield card("Padding", format_text.percent(share), "", f"of all positions; {others}")


def waste(tokens: int, positions: int) -> float:
    return (positions - tokens) / positions if positions else 0.0
