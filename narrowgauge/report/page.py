"""Writes report.html of a run: what was trained, how well, against what, and how its numbers fit the format.

The input is config.toml, run.json and metrics.jsonl of the run folder and of a compare-* folder inside (docs/architecture.md). The
page is one file, readable offline, and the same for the same input. An unfinished or crashed run gives a page too: the page
leaves out what is missing, or says that it is missing.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from narrowgauge import storage
from narrowgauge.diagnose import compare, format_text
from narrowgauge.diagnose.compare import Comparison
from narrowgauge.errors import ConfigError
from narrowgauge.report.run_data import Recorded, last_done, read

try:
    import jinja2

    from narrowgauge.report import figures, metrics, tables
except ImportError as error:
    raise ConfigError(f"report: needs {error.name}. Install it: pip install jinja2 matplotlib") from error


def write(run_folder: Path) -> Path:
    """Writes report.html into the run folder and returns its path. Takes about two seconds.

    Raises ConfigError if this is not a run folder, StorageError if the page cannot be written.
    """
    text = render(read(Path(run_folder)))
    path = Path(run_folder) / "report.html"
    # errors="replace": a sample may hold a lone surrogate.
    storage.replace_file(path, text.encode("utf-8", errors="replace"), "make the folder writable")
    return path


def render(recorded: Recorded) -> str:
    source = importlib.resources.files("narrowgauge.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": format_text.count}
    return environment.from_string(source).render(page(recorded))


def page(recorded: Recorded) -> dict[str, Any]:
    """The variables of the template."""
    reference = recorded.reference
    comparison = (
        compare.compare(recorded.events, reference.events, recorded.name, reference.name) if reference else None
    )
    watched, tensors = tables.tensors(recorded)
    return {
        "recorded": recorded,
        "comparison": comparison,
        "title": " in ".join(filter(None, (recorded.model.get("name"), recorded.name))),
        "lead": lead(recorded),
        "progress": progress(recorded),
        "status": status(recorded),
        "finding": finding(comparison) if comparison else None,
        "cards": cards(recorded, comparison),
        "names": (recorded.name, reference.name if reference else None),
        "loss": loss_figure(recorded),
        "radius": smoothing_radius(recorded),
        "steep_start": figures.steep_start(len(recorded.of("step"))),
        "difference": figures.difference(comparison.curve)
        if comparison and len(comparison.curve) > 1 and not comparison.unpaired
        else "",
        "metric_figure": metrics.figure(recorded),
        "samples": samples(recorded),
        "reference_sample": samples(reference)[-1:] if reference else [],
        "layers": tables.layers(recorded),
        "tensors": tensors,
        "watched": watched,
        "happenings": tables.happenings(recorded),
        "environment": tables.environment(recorded),
        "command": shlex.join(str(part) for part in recorded.run.get("command") or []),
        "run": json.dumps(
            {key: value for key, value in recorded.run.items() if key != "describe"}, indent=1, ensure_ascii=False
        ),
        "folder": recorded.folder.resolve().name,
    }


# --- What was trained, and how it ended ---


def lead(recorded: Recorded) -> str:
    """One sentence that introduces the run."""
    run, model, data = recorded.run, recorded.model, recorded.data
    shape = [
        f"{model['layers']} layers" if model.get("layers") else "",
        f"hidden size {format_text.count(model['hidden_size'])}" if model.get("hidden_size") else "",
        f"a vocabulary of {format_text.count(model['vocab_size'])}" if model.get("vocab_size") else "",
    ]
    parts = [
        f"A model of {format_text.rounded(run['parameters'])} parameters" if run.get("parameters") else "A model",
        f" ({', '.join(filter(None, shape))})" if any(shape) else "",
        f", trained on {data['source']}" if data.get("source") else ", trained",
        f" ({format_text.rounded(data['train_tokens'])} tokens)" if data.get("train_tokens") else "",
        f" for {format_text.plural(run['steps'], 'step')}" if run.get("steps") else "",
        f" of {format_text.count(run['tokens_per_step'])} tokens"
        if run.get("steps") and run.get("tokens_per_step")
        else "",
        f" in the recipe {recorded.name}",
        *(
            f", then {each['switch']} from step {format_text.count(each['step'])} on"
            for each in run.get("switches", [])
        ),
        f" on {run['device']}" if run.get("device") else "",
    ]
    return "".join(parts) + "."


def progress(recorded: Recorded) -> list[str]:
    """Steps done, duration, start and seed."""
    run, steps = recorded.run, recorded.of("step")
    elapsed = steps[-1].get("elapsed_s") if steps else None
    started = str(run.get("started_at") or "").replace("T", " ").replace("Z", " UTC")
    parts = [
        f"{format_text.count(recorded.last_step)} of {format_text.count(run.get('steps', '?'))} steps done",
        f"{format_text.duration(elapsed)} of training" if elapsed is not None else "",
        f"started {started}" if started else "",
        f"seed {run['seed']}" if run.get("seed") is not None else "",
    ]
    return [part for part in parts if part]


def status(recorded: Recorded) -> dict[str, str]:
    """How the run ended: `kind` (colour), `word` (badge) and `text` (details)."""
    reached = f"step {format_text.count(recorded.last_step)} of {format_text.count(recorded.run.get('steps', '?'))}"
    done = last_done(recorded)
    if done is None and not recorded.of("step"):
        text = "No step was recorded: the first step is still running, or the run ended before it finished."
        return {"kind": "warn", "word": "no step yet", "text": text}
    if done is None:
        text = f"No end was recorded. The last step is {reached}: the run is still going, or it was killed or crashed."
        return {"kind": "warn", "word": "unfinished", "text": text}
    if done["reason"] == "finished":
        return {"kind": "good", "word": "finished", "text": ""}
    if done["reason"] == "nonfinite":
        return {"kind": "bad", "word": "stopped: not finite", "text": nonfinite_words(recorded, done["step"])}
    by = {"interrupted": "by Ctrl-C", "preempted": "from outside (SIGTERM)"}.get(done["reason"], f"({done['reason']})")
    text = f"The run was stopped {by} after {reached}. Resume it to go on."
    return {"kind": "warn", "word": str(done["reason"]), "text": text}


def nonfinite_words(recorded: Recorded, ended: int) -> str:
    """Where a non-finite number stopped the run, and where the first sign of it was."""
    steps = recorded.of("step")
    stopped, what = ended, "a number"
    for step in steps:
        if not math.isfinite(step["loss"]):
            stopped, what = step["step"], "the loss"
        elif not math.isfinite(step.get("grad_norm", 0.0)):
            stopped, what = step["step"], "the gradient norm"
    text = [f"The run was stopped at step {format_text.count(stopped)} because {what} was not finite."]
    before = [step for step in steps if step["step"] < stopped and compare.finite_loss(step)]
    if before:
        text.append(
            f"The last finite loss is {before[-1]['loss']:.4f}, at step {format_text.count(before[-1]['step'])}."
        )
    for event in recorded.of("nonfinite_amax")[:1]:
        where = f"{tables.role(event)} of {event.get('module', '?')}"
        text.append(f"The first amax that was not finite: {where}, at step {format_text.count(event['step'])}.")
    return " ".join(text)


def finding(comparison: Comparison) -> dict[str, str]:
    """The verdict with a heading and a kind (colour)."""
    reference = comparison.reference_name
    kind, heading = {
        "noise": ("same", f"No difference from {reference} beyond the noise"),
        "identical": ("same", f"The same losses as {reference}"),
        "higher": ("above", f"Training loss above that of {reference}"),
        "lower": ("below", f"Training loss below that of {reference}"),
        "unknown": ("open", f"Too little to compare with {reference}"),
        "unpaired": ("open", f"Not the same batches as {reference}"),
        "nonfinite": ("above", "A loss is not finite"),
    }[comparison.finding]
    return {"kind": kind, "heading": heading, "text": comparison.verdict}


# --- The numbers on top ---


def cards(recorded: Recorded, comparison: Comparison | None) -> list[dict[str, str]]:
    return [*loss_cards(recorded, comparison), *metrics.cards(recorded), *cost_cards(recorded, comparison)]


def card(label: str, value: str, unit: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "note": note}


def loss_cards(recorded: Recorded, comparison: Comparison | None) -> Iterator[dict[str, str]]:
    """The validation loss, the reference's, their difference, and the loss relative to the unigram entropy."""
    evaluations = compare.evaluations(recorded.events)
    if not evaluations:
        yield card("Validation loss", "–", "", "no evaluation was recorded")
        return
    step, loss = evaluations[-1]
    unit = metrics.unit(recorded)
    yield loss_card("Validation loss", step, loss, unit)
    pair = comparison.validation if comparison else None
    if comparison and pair:
        yield loss_card(f"Validation loss of {comparison.reference_name}", pair.step, pair.reference, unit)
        percent = f"{format_text.signed(100 * (pair.ratio - 1), 2)}{format_text.PERCENT}, " if pair.ratio else ""
        note = f"{percent}at step {format_text.count(pair.step)}"
        yield card("Difference", format_text.signed(pair.difference), unit, note)
    entropy, vocabulary = recorded.data.get("unigram_entropy"), recorded.model.get("vocab_size") or 0
    if entropy and math.isfinite(loss):
        note = f"of the unigram entropy, {entropy:.2f}"
        if vocabulary > 1:
            guess = math.log(vocabulary)
            share = f"{100 * loss / guess:.0f}{format_text.PERCENT}"
            note += f"; {share} of a blind guess, ln {format_text.count(vocabulary)} = {guess:.2f}"
        yield card("Against token frequencies", f"{100 * loss / entropy:.0f}{format_text.PERCENT}", "", note)


def loss_card(label: str, step: int, loss: float, unit: str) -> dict[str, str]:
    perplexity = f"; perplexity {format_text.perplexity(loss)}" if unit == "nats/token" else ""
    return card(label, format_text.loss_value(loss), unit, f"at step {format_text.count(step)}{perplexity}")


def cost_cards(recorded: Recorded, comparison: Comparison | None) -> Iterator[dict[str, str]]:
    """Speed and memory, each against the reference's."""
    speed, peak = compare.tokens_per_s(recorded.events), compare.peak_bytes(recorded.events)
    if speed is not None:
        against = ratio_note(comparison, comparison.tokens_per_s, format_text.count) if comparison else ""
        yield card("Speed", format_text.count(speed), "tokens/s", against or "median over the steps")
    if peak is not None:
        against = ratio_note(comparison, comparison.peak_bytes, format_text.size) if comparison else ""
        yield card("Peak memory", *format_text.size_parts(peak), against or "largest of all steps")


def ratio_note(comparison: Comparison, pair: compare.Pair | None, show: Callable[[float], str]) -> str:
    if not pair or not pair.ratio:
        return ""
    return f"{pair.ratio:.2f} times {comparison.reference_name}’s {show(pair.reference)}"


# --- Curves and samples ---


def loss_figure(recorded: Recorded) -> str:
    """The loss curves; '' if there are none."""
    if not recorded.of("step") and not recorded.of("eval"):
        return ""
    broken = compare.first_nonfinite(recorded.events)
    marks = {
        "resumed": [event["step"] for event in recorded.of("resume")],
        "switched": [event["step"] for event in recorded.of("switch")],
        "loss not finite": [] if broken is None else [broken],
    }
    reference = curve(recorded.reference) if recorded.reference else None
    entropy, radius = recorded.data.get("unigram_entropy"), smoothing_radius(recorded)
    return figures.loss_curves(curve(recorded), reference, entropy, marks, radius, metrics.unit(recorded))


def curve(recorded: Recorded) -> figures.Curve:
    training = [(step["step"], step["loss"]) for step in recorded.of("step")]
    return figures.Curve(training=training, validation=compare.evaluations(recorded.events))


def smoothing_radius(recorded: Recorded) -> int:
    """Steps on either side that the drawn curve is smoothed over: a fortieth of the run, 1 to 100."""
    return min(max(len(recorded.of("step")) // 40, 1), 100)


def samples(recorded: Recorded) -> list[dict[str, Any]]:
    """Step, prompt and continuation of each sample, in order."""
    found = []
    for event in recorded.of("sample"):
        prompt = str(event.get("prompt", ""))
        found.append({"step": event["step"], "prompt": prompt, "text": str(event.get("text", "")).removeprefix(prompt)})
    return found
