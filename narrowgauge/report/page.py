"""Write report.html of one run: its training, its quality, its reference, and its tensors' ranges.

The input is config.toml, run.json and metrics.jsonl of the run folder, and of a compare-* folder
inside it (docs/architecture.md). The page is one file, readable offline, and the same for the same
input. An unfinished or crashed run gets a page too; missing parts are omitted or named as missing.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

from narrowgauge.diagnose import compare, lineage
from narrowgauge.diagnose.format_text import count
from narrowgauge.diagnose.guard_settings import MARGIN
from narrowgauge.diagnose.time_to_loss import time_to_loss
from narrowgauge.errors import ConfigError
from narrowgauge.report.run_data import Recorded, last_done, read

try:
    from narrowgauge.report import cards, figures, guard, spread_table, tables, template
except ImportError as error:
    raise ConfigError(
        f"report: needs {error.name}. Install it: pip install jinja2 matplotlib",
        code="report.missing-package",
    ) from error


def write(run_folder: Path) -> Path:
    """Write report.html into the run folder and return its path. Takes about two seconds.

    Raises ConfigError if this is not a run folder, StorageError if the page cannot be written.
    """
    recorded = read(Path(run_folder))
    return template.write(recorded.folder / "report.html", "report/page.html.jinja", page(recorded))


def gain(run_folder: Path) -> str:
    """Say how fast a run came to the loss of its reference, in a sentence; '' without a reference."""
    recorded = read(Path(run_folder))
    if recorded.reference is None:
        return ""
    found = time_to_loss(recorded.events, recorded.reference.events)
    if found is None:
        return ""
    name = recorded.reference.name
    gained = f"{found.gain:.2f} times as fast as {name} to the same loss: {found.words()}."
    return f"{gained} {cards.OF_BOTH.format(name=name)}" if recorded.alone_fused else gained


def page(recorded: Recorded) -> dict[str, Any]:
    """Variables of the template."""
    reference = recorded.reference
    comparison = difference = None
    if reference is not None:
        member = lineage.Member(folder=reference.folder, run=reference.run, events=reference.events)
        # The guard's default margin is a share of this loss, the reference's last validation loss.
        last = next((loss for _, loss in reversed(compare.evaluations(reference.events))), 0.0)
        comparison = compare.compare(
            recorded.events, reference.events, recorded.name, reference.name, (recorded.left_out, reference.left_out),
            lineage.assay_of(member, MARGIN * abs(last), reference.name), cards.unit(recorded),
        )  # fmt: skip
        if len(comparison.curve) > 1 and not comparison.unpaired:
            difference = figures.difference(comparison.curve, comparison.loss_unit)
    watched, tensors = tables.tensors(recorded)
    # The layer table is shown on its own; run.json without it stays readable.
    without_layers = {key: value for key, value in recorded.run.items() if key != "describe"}
    return {
        "recorded": recorded,
        "comparison": comparison,
        "pair_notice": template.notice(comparison.verdict) if comparison else None,
        "status": status(recorded),
        "cards": cards.cards(recorded, comparison),
        "names": (recorded.name, reference.name if reference else None),
        "loss": loss_figure(recorded),
        "radius": smoothing_radius(recorded),
        "steep_start": figures.steep_start(len(recorded.of("step"))),
        "difference": difference,
        "metric_figure": metric_figure(recorded),
        "guard": guard.section(recorded),
        "samples": samples(recorded),
        "reference_sample": samples(reference)[-1:] if reference else [],
        "layers": tables.layers(recorded),
        "tensors": tensors,
        "watched": watched,
        "spreads": spread_table.table(recorded),
        "happenings": tables.happenings(recorded),
        "command": shlex.join(recorded.run.get("command") or []),
        "continued_by": [shlex.join(each) for each in recorded.run.get("resumed") or []],
        "run_json": json.dumps(without_layers, indent=1, ensure_ascii=False),
        "folder": recorded.folder.resolve().name,
    }


# --- How it ended ---


def status(recorded: Recorded) -> dict[str, str]:
    """State of the run: `kind` (colour), `word` (badge) and `text` (details)."""
    reached = f"step {count(recorded.last_step)} of {count(recorded.run.get('steps', '?'))}"
    done = last_done(recorded)
    kind = "warn"
    if done is None and not recorded.of("step"):
        word = "no step yet"
        text = "No step was recorded: the first step is still running, or the run ended before it finished."
    elif done is None:
        word = "unfinished"
        text = f"No end was recorded. The last step is {reached}: the run is still going, or it was killed or crashed."
    elif done["reason"] == "finished":
        kind, word, text = "good", "finished", ""
    elif done["reason"] == "nonfinite":
        kind, word, text = "bad", "stopped: not finite", nonfinite_words(recorded, done["step"])
    else:
        word = str(done["reason"])
        by = {"interrupted": "by Ctrl-C", "preempted": "from outside (SIGTERM)"}.get(
            word, f"({word})"
        )
        text = f"The run was stopped {by} after {reached}. Resume it to go on."
    return {"kind": kind, "word": word, "text": text}


def nonfinite_words(recorded: Recorded, ended: int) -> str:
    """Sentences on the non-finite number that stopped the run, and on its first sign."""
    steps = recorded.of("step")
    stopped, what = ended, "a number"
    for step in steps:
        if not math.isfinite(step["loss"]):
            stopped, what = step["step"], "the loss"
        elif not math.isfinite(step.get("grad_norm", 0.0)):
            stopped, what = step["step"], "the gradient norm"
    text = [f"The run was stopped at step {count(stopped)} because {what} was not finite."]
    before = [step for step in steps if step["step"] < stopped and compare.finite_loss(step)]
    if before:
        text.append(
            f"The last finite loss is {before[-1]['loss']:.4f}, at step {count(before[-1]['step'])}."
        )
    for event in recorded.of("nonfinite_amax")[:1]:
        where = f"{tables.role(event)} of {event.get('module', '?')}"
        text.append(f"The first amax that was not finite: {where}, at step {count(event['step'])}.")
    return " ".join(text)


# --- Curves and samples ---


def loss_figure(recorded: Recorded) -> str:
    """Draw the loss curves; '' if there are none."""
    if not recorded.of("step") and len(recorded.of("eval")) < 2:
        return ""  # one evaluation is a card
    broken = compare.first_nonfinite(recorded.events)
    marks = {
        "resumed": [event["step"] for event in recorded.of("resume")],
        "switched": [event["step"] for event in recorded.of("switch")],
        "spike": [event["step"] for event in recorded.of("spike")],
        "loss not finite": [] if broken is None else [broken],
    }
    curves = [
        figures.Curve(
            training=[(step["step"], step["loss"]) for step in each.of("step")],
            validation=compare.evaluations(each.events),
        )
        for each in (recorded.reference, recorded)
        if each is not None
    ]
    entropy, radius = recorded.data.get("unigram_entropy"), smoothing_radius(recorded)
    return figures.loss_curves(curves, entropy, marks, radius, cards.unit(recorded))


def metric_figure(recorded: Recorded) -> str:
    """Draw the scores over the steps, or else the perplexity; '' if only a loss was measured."""
    shown = cards.scores(recorded) or [
        metric for metric in ("perplexity",) if cards.points(recorded, metric)
    ]
    if not shown or cards.is_single(recorded):
        return ""
    curves, others = (
        {cards.title(each, metric): cards.points(each, metric) for metric in shown} if each else {}
        for each in (recorded, recorded.reference)
    )
    return figures.metric_curves(curves, others)


def smoothing_radius(recorded: Recorded) -> int:
    """Smoothing radius of the drawn curve in steps: a fortieth of the run, 1 to 100."""
    return min(max(len(recorded.of("step")) // 40, 1), 100)


def samples(recorded: Recorded) -> list[dict[str, Any]]:
    """Step, prompt and continuation of each sample, in order."""
    found = []
    for event in recorded.of("sample"):
        prompt = str(event.get("prompt", ""))
        found.append(
            {
                "step": event["step"],
                "prompt": prompt,
                "text": str(event.get("text", "")).removeprefix(prompt),
            }
        )
    return found
