"""One HTML page that tells a run: what was trained, how well, against what, and how its numbers met the format.

`write(run_folder)` reads the files that docs/architecture.md lists (config.toml, run.json, metrics.jsonl, and those of
a compare-* folder inside) and writes report.html beside them: one file, readable offline, the same for the same input.
This module says in words what the run was and how it went; `tables` lists its parts, `pictures` draws, and
report.html.jinja lays out.

A run that is unfinished, crashed, or recorded little gives a page too: what is missing is left out or said to be.
"""

from __future__ import annotations

import importlib.resources
import math
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from narrowgauge.diagnose import compare, words
from narrowgauge.diagnose.compare import Comparison
from narrowgauge.diagnose.recorded import Recorded, last_done, read
from narrowgauge.errors import ConfigError, StorageError

try:
    import jinja2

    from narrowgauge.diagnose import measured, pictures, tables
except ImportError as error:
    raise ConfigError(f"report: needs {error.name}. Install it: pip install jinja2 matplotlib") from error


def write(run_folder: Path) -> Path:
    """Writes report.html into the run folder, over an older one, and returns its path.

    Raises ConfigError if this is no run folder, StorageError if the page cannot be written. Takes two seconds or so.
    """
    text = render(read(Path(run_folder)))
    path = Path(run_folder) / "report.html"
    partial = path.with_suffix(".html.partial")
    try:
        partial.write_bytes(
            text.encode("utf-8", errors="replace")
        )  # a lone surrogate in a sample must not cost the page
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        step = "Free space or make the folder writable."
        raise StorageError(f"report: cannot write {path}: {error.strerror}. {step}") from error
    return path


def render(recorded: Recorded) -> str:
    """The page as text."""
    source = importlib.resources.files("narrowgauge.diagnose").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": words.count, "percent": words.percent, "magnitude": words.magnitude}
    return environment.from_string(source).render(page(recorded))


def page(recorded: Recorded) -> dict[str, Any]:
    """Everything that the template shows."""
    reference = recorded.reference
    comparison = compare_with(recorded, reference) if reference else None
    return {
        "title": title(recorded),
        "lead": lead(recorded),
        "facts": facts(recorded),
        "status": status(recorded),
        "finding": finding(comparison) if comparison else None,
        "comparison": comparison,
        "broken_reference": recorded.broken_reference if reference is None else None,
        "cards": cards(recorded, comparison),
        "names": (recorded.name, reference.name if reference else None),
        "loss": loss_figure(recorded),
        "radius": smoothing_radius(recorded),
        "steep_start": pictures.steep_start(len(recorded.of("step"))),
        "has_entropy": recorded.data.get("unigram_entropy") is not None,
        "difference": difference_figure(comparison) if comparison else "",
        "side_by_side": list(side_by_side(recorded, comparison)) if comparison else [],
        "metrics": [measured.label(metric) for metric in measured.metrics(recorded)]
        if recorded.run.get("best")
        else [],
        "metric_figure": measured.figure(recorded),
        "evaluations": measured.rows(recorded),
        "padding": measured.padding(recorded),
        "samples": samples(recorded),
        "reference_sample": samples(reference)[-1:] if reference else [],
        "describe": tables.layers(recorded),
        "switches": tables.switches(recorded),
        "tensors": tables.tensors(recorded),
        "shown_tensors": tables.SHOWN_TENSORS,
        "nonfinite": tables.nonfinite_readings(recorded),
        "resumptions": recorded.of("resume"),
        "launches": [event for event in recorded.of("launches") if {"words", "advice"} <= event.keys()],
        "checkpoints": recorded.of("checkpoint"),
        "environment": tables.environment(recorded),
        "command": shlex.join(str(part) for part in recorded.run.get("command") or []),
        "config": recorded.config,
        "folder": recorded.folder.resolve().name,
    }


def compare_with(recorded: Recorded, reference: Recorded) -> Comparison:
    return compare.compare(recorded.events, reference.events, recorded.name, reference.name)


# --- What was trained, and how it ended ---


def title(recorded: Recorded) -> str:
    name = recorded.model.get("name")
    return f"{name} in {recorded.name}" if name else recorded.name


def lead(recorded: Recorded) -> str:
    """One sentence for a reader who knows nothing of the run."""
    run, model, data = recorded.run, recorded.model, recorded.data
    shape = [
        f"{model['layers']} layers" if "layers" in model else "",
        f"hidden size {words.count(model['hidden_size'])}" if "hidden_size" in model else "",
        f"a vocabulary of {words.count(model['vocab_size'])}" if "vocab_size" in model else "",
    ]
    parts = [
        f"A model of {words.rounded(run['parameters'])} parameters" if run.get("parameters") else "A model",
        f" ({', '.join(filter(None, shape))})" if any(shape) else "",
        f", trained on {data['source']}" if data.get("source") else ", trained",
        f" ({words.rounded(data['train_tokens'])} tokens)" if data.get("train_tokens") else "",
        f" for {words.plural(run['steps'], 'step')}" if run.get("steps") else "",
        f" of {words.count(run['tokens_per_step'])} tokens" if run.get("steps") and run.get("tokens_per_step") else "",
        f" in the recipe {recorded.name}",
        *(f", then {each['switch']} from step {words.count(each['step'])} on" for each in run.get("switches", [])),
        f" on {run['device']}" if run.get("device") else "",
    ]
    return "".join(parts) + "."


def facts(recorded: Recorded) -> list[str]:
    """The line under the lead: how far, how long, when."""
    run, steps = recorded.run, recorded.of("step")
    elapsed = steps[-1].get("elapsed_s") if steps else None
    return [
        f"{words.count(recorded.last_step)} of {words.count(run.get('steps', '?'))} steps done",
        *([f"{words.duration(elapsed)} of training"] if elapsed is not None else []),
        *(
            [f"started {str(run['started_at']).replace('T', ' ').replace('Z', ' UTC')}"]
            if run.get("started_at")
            else []
        ),
        *([f"seed {run['seed']}"] if run.get("seed") is not None else []),
    ]


def status(recorded: Recorded) -> dict[str, str]:
    """How the run ended: `kind` for the colour, `word` for the badge, `text` where there is more to say."""
    reached = f"step {words.count(recorded.last_step)} of {words.count(recorded.run.get('steps', '?'))}"
    done = last_done(recorded)
    if done is None and not recorded.of("step"):
        text = "No step was recorded: the first step is not finished, or the run ended before it was."
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
    """Where a run that was stopped by a number that is not finite met it, and where the first sign was."""
    steps = recorded.of("step")
    broken = [step for step in steps if not all(math.isfinite(step.get(key, 0.0)) for key in ("loss", "grad_norm"))]
    stopped, what = ended, "a number"
    if broken:
        stopped, what = broken[-1]["step"], "gradient norm" if math.isfinite(broken[-1]["loss"]) else "loss"
        what = f"the {what}"
    text = [f"The run was stopped at step {words.count(stopped)} because {what} was not finite."]
    before = [step for step in steps if step["step"] < stopped and compare.finite_loss(step)]
    if before:
        text.append(f"The last finite loss is {before[-1]['loss']:.4f}, at step {words.count(before[-1]['step'])}.")
    readings = recorded.of("nonfinite_amax")
    if readings:
        where = f"{tables.role(readings[0])} of {readings[0].get('module', '?')}"
        text.append(f"The first amax that was not finite: {where}, at step {words.count(readings[0]['step'])}.")
    return " ".join(text)


def finding(comparison: Comparison) -> dict[str, str]:
    """The verdict with a heading and a kind for its colour."""
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
    """Label, value, unit and note of each card."""
    return [*loss_cards(recorded, comparison), *measured.cards(recorded), *cost_cards(recorded, comparison)]


def loss_cards(recorded: Recorded, comparison: Comparison | None) -> Iterator[dict[str, str]]:
    """The validation loss, the reference's, their difference, and the loss against knowing only the frequencies."""
    evaluations = compare.evaluations(recorded.events)
    if not evaluations:
        yield card("Validation loss", "–", "", "no evaluation was recorded")
        return
    step, loss = evaluations[-1]
    unit = measured.unit(recorded)
    yield loss_card("Validation loss", step, loss, unit)
    pair = comparison.validation if comparison else None
    if comparison and pair:
        yield loss_card(f"Validation loss of {comparison.reference_name}", pair.step, pair.reference, unit)
        yield card("Difference", words.signed(pair.difference), unit, difference_note(pair, step))
    entropy = recorded.data.get("unigram_entropy")
    if entropy and math.isfinite(loss):
        yield card(
            "Against token frequencies",
            f"{100 * loss / entropy:.0f}{words.PERCENT}",
            "",
            frequency_note(recorded, loss, entropy),
        )


def cost_cards(recorded: Recorded, comparison: Comparison | None) -> Iterator[dict[str, str]]:
    """Speed and memory, each against the reference's."""
    name = comparison.reference_name if comparison else ""
    speed, peak = compare.tokens_per_s(recorded.events), compare.peak_bytes(recorded.events)
    if speed is not None:
        note = ratio_note(comparison.tokens_per_s if comparison else None, name, words.count)
        yield card("Speed", words.count(speed), "tokens/s", note or "median over the steps")
    if peak is not None:
        value, unit = words.size(peak).split()
        note = ratio_note(comparison.peak_bytes if comparison else None, name, words.size)
        yield card("Peak memory", value, unit, note or "largest of all steps")


def card(label: str, value: str, unit: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "note": note}


def loss_card(label: str, step: int, loss: float, unit: str) -> dict[str, str]:
    perplexity = f"; perplexity {words.perplexity(loss)}" if unit == "nats/token" else ""
    return card(label, words.loss_value(loss), unit, f"at step {words.count(step)}{perplexity}")


def difference_note(pair: compare.Pair, last: int) -> str:
    if not pair.ratio:
        return ""
    side = "above" if pair.difference > 0 else "below"
    at = "" if pair.step == last else f", at step {words.count(pair.step)}"
    return (
        f"{abs(100 * pair.difference / pair.reference):.2f}{words.PERCENT} {side} the reference{at}"
        if pair.difference
        else "none at all"
    )


def frequency_note(recorded: Recorded, loss: float, entropy: float) -> str:
    """What the share of the unigram entropy means, and the share of a blind guess's loss."""
    note = f"of the unigram entropy, {entropy:.2f}"
    vocabulary = recorded.model.get("vocab_size") or 0
    if vocabulary > 1:
        guess = math.log(vocabulary)
        note += (
            f"; {100 * loss / guess:.0f}{words.PERCENT} of a blind guess, ln {words.count(vocabulary)} = {guess:.2f}"
        )
    return note


def ratio_note(pair: compare.Pair | None, name: str, show: Callable[[float], str]) -> str:
    return f"{pair.ratio:.2f} times {name}’s {show(pair.reference)}" if pair and pair.ratio else ""


def side_by_side(recorded: Recorded, comparison: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """Rows: what, the run's, the reference's, how they compare."""
    steps = words.plural(comparison.tail.count, "common step") if comparison.tail else ""
    tail = f"Training loss, mean of the last {steps}"
    at = f"Validation loss at step {words.count(comparison.validation.step)}" if comparison.validation else ""
    for what, pair in ((at, comparison.validation), (tail, comparison.tail_losses)):
        if pair is not None:
            yield what, words.loss_value(pair.run), words.loss_value(pair.reference), words.signed(pair.difference)
    until = comparison.elapsed_s.step if comparison.elapsed_s else 0
    measured: list[tuple[str, compare.Pair | None, Callable[[float], str]]] = [
        ("Tokens per second, median", comparison.tokens_per_s, words.count),
        ("Peak memory", comparison.peak_bytes, words.size),
        (f"Training time to step {words.count(until)}", comparison.elapsed_s, words.duration),
    ]
    for what, pair, show in measured:
        if pair is not None:
            yield what, show(pair.run), show(pair.reference), f"× {pair.ratio:.2f}" if pair.ratio else "–"


# --- Curves and samples ---


def loss_figure(recorded: Recorded) -> str:
    """The loss curves; '' where there is nothing to draw."""
    if not recorded.of("step") and not recorded.of("eval"):
        return ""
    marks = pictures.Marks(
        switched=[event["step"] for event in recorded.of("switch")],
        resumed=[event["step"] for event in recorded.of("resume")],
        nonfinite=compare.first_nonfinite(recorded.events),
    )
    reference = curve(recorded.reference) if recorded.reference else None
    entropy = recorded.data.get("unigram_entropy")
    return pictures.loss_curves(
        curve(recorded), reference, entropy, marks, smoothing_radius(recorded), measured.unit(recorded)
    )


def curve(recorded: Recorded) -> pictures.Curve:
    steps = recorded.of("step")
    return pictures.Curve(
        steps=[step["step"] for step in steps],
        losses=[step["loss"] for step in steps],
        evaluations=compare.evaluations(recorded.events),
    )


def smoothing_radius(recorded: Recorded) -> int:
    """Of the drawn smoothing: a fortieth of the run, from 1 to 100 steps on either side."""
    return min(max(len(recorded.of("step")) // 40, 1), 100)


def difference_figure(comparison: Comparison) -> str:
    """The paired difference; '' where there is no curve to draw or the batches were not the same."""
    return pictures.difference(comparison.curve) if len(comparison.curve) > 1 and not comparison.unpaired else ""


def samples(recorded: Recorded) -> list[dict[str, Any]]:
    """Step, prompt and continuation of each sample, in order; a text that repeats its prompt is cut behind it."""
    found = []
    for event in recorded.of("sample"):
        prompt = str(event.get("prompt", ""))
        found.append({"step": event["step"], "prompt": prompt, "text": str(event.get("text", "")).removeprefix(prompt)})
    return found
