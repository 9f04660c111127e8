"""Curves on the page on several runs: losses, every metric, and paired differences."""

from __future__ import annotations

from collections.abc import Iterator

from narrowgauge.diagnose import compare
from narrowgauge.diagnose.format_text import PERCENT
from narrowgauge.diagnose.metrics_table import metric_of
from narrowgauge.report import cards, several_figures
from narrowgauge.report.groups import Gathered, metrics_of, seed_of
from narrowgauge.report.page import smoothing_radius

Figure = dict[str, str]  # heading, svg, caption


def figures(found: Gathered) -> Iterator[Figure]:
    yield from loss_figures(found)
    yield from metric_figures(found)
    yield from difference_figures(found)


def loss_figures(found: Gathered) -> Iterator[Figure]:
    lines, validation = [], []
    for place, group in enumerate(found.groups):
        smoothed = [
            compare.smooth(
                [(step["step"], step["loss"]) for step in each.of("step")], smoothing_radius(each)
            )
            for each in group.runs
        ]
        # A recipe whose run has no step yet has no mean curve.
        if all(smoothed):
            lines.append(several_figures.mean_line(place, smoothed))
        if all(evaluated := [compare.evaluations(each.events) for each in group.runs]):
            validation.append(several_figures.mean_line(place, evaluated, is_dotted=True))
    unit = cards.unit(found.runs[0]).replace("/", " per ")
    if lines:
        text = several_figures.curves(
            lines, "training", f"training loss, {unit}", "Training loss over the steps"
        )
        yield {
            "heading": "Training loss",
            "svg": text,
            "caption": "Smoothed; the mean over the runs of each recipe.",
        }
    if validation:
        text = several_figures.curves(
            validation, "validation", f"validation loss, {unit}", "Validation loss over the steps"
        )
        yield {
            "heading": "Validation loss",
            "svg": text,
            "caption": "On held-out data, the same for all runs. Seeds move all recipes together: bands overlap where pairs differ.",
        }


def metric_figures(found: Gathered) -> Iterator[Figure]:
    for metric in metrics_of(found.runs):
        if metric != "loss":
            lines = [
                several_figures.mean_line(
                    place, [cards.points(each, metric) for each in group.runs], is_dotted=True
                )
                for place, group in enumerate(found.groups)
            ]
            name = metric_of(metric).title
            text = several_figures.curves(
                lines,
                f"metric-{metric}",
                f"{name} on the validation data",
                f"{name} over the steps",
            )
            yield {"heading": name[:1].upper() + name[1:], "svg": text, "caption": ""}


def difference_figures(found: Gathered) -> Iterator[Figure]:
    """Yield the figure of paired differences, by seed, of the judged metric at each evaluation."""
    reference = {
        seed_of(each): dict(cards.points(each, found.metric)) for each in found.groups[0].runs
    }
    lines = []
    for place, group in enumerate(found.groups[1:], start=1):
        pairs = (
            []
            if group.reason
            else [
                (each, reference[seed_of(each)])
                for each in group.runs
                if seed_of(each) in reference
            ]
        )
        curves = [
            [
                (step, value - theirs[step])
                for step, value in cards.points(each, found.metric)
                if step in theirs
            ]
            for each, theirs in pairs
        ]
        # Only steps evaluated in both runs of a pair enter; a pair without one has no difference.
        if curves and all(curves):
            lines.append(several_figures.mean_line(place, curves, is_dotted=True))
    if lines:
        name = found.groups[0].name
        label = f"{metric_of(found.metric).title} minus the reference’s, mean of pairs"
        text = several_figures.curves(
            lines, "differences", label, "Paired differences over the steps", zero=True
        )
        caption = (
            f"Each run minus the run of {name} of the same seed, which saw {_batches(found)}; the band is the 95{PERCENT} interval of the "
            "mean over pairs at that step by itself. Of many steps some lie outside by chance: the verdict is on the last alone."
        )
        yield {"heading": f"Difference from {name}", "svg": text, "caption": caption}


def _batches(found: Gathered) -> str:
    """Clause that names the batches which the runs of a pair share."""
    seeds = sorted({seed for verdict in found.verdicts() for seed in verdict.other_batches})
    if not seeds:
        return "the same batches"
    listed = ", ".join(map(str, seeds))
    return f"the same batches but at seed{'s' * (len(seeds) > 1)} {listed}, where one of the two left some out (on_spike = skip)"
