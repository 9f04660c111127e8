"""Read and write the records of a run: `run.json` and `metrics.jsonl` (docs/architecture.md).

Both are strict JSON, which has no NaN or infinity: `encode` writes the strings "NaN", "Infinity"
and "-Infinity", and `decode` turns them back into floats, except under the keys in TEXT_KEYS.
Values are validated key by key against EVENTS and RUN. Other keys may have any value, since a newer
narrowgauge may write more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.diagnose.forms import (
    Form,
    anything,
    either,
    listed,
    number,
    one_of,
    record,
    refuse,
    table,
    text,
)
from narrowgauge.diagnose.metrics_table import SCORES, metric_of
from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# A text "NaN" under these keys stays text.
TEXT_KEYS = {
    "event", "module", "role", "format", "prompt", "text", "path", "skipped", "reason", "where", "switch", "before", "after",
    "words", "advice", "sentence", "verdict", "then", "why", "direction", "run", "from", "fingerprint", "changes", "carried", "cause",
}  # fmt: skip

COUNT = number(0, whole=True)
SIZE = number(0, finite=False)
SECONDS = number(0)
SHARE = number(0, 1, finite=False)
# Any number: policy gradients, such as those of GRPO, lower a loss below zero.
LOSS = number(finite=False)
NOTHING = one_of(None)
# Sizes of models: unknown for some, one per layer for others.
SIZES = either(COUNT, NOTHING, listed(anything))
JUDGEMENTS = ("guard", "blame", "spike")  # events on steps that a rewind replaced; they stay valid
HISTOGRAM = record({"lowest_exponent": number(-2000, 2000, whole=True), "counts": listed(COUNT)})

STEP = {
    "grad_norm": SIZE, "lr": SECONDS, "tokens": COUNT, "tokens_per_s": SIZE, "elapsed_s": SECONDS, "peak_bytes": COUNT,
    "compiled_graphs": COUNT, "epoch": SECONDS, "examples": COUNT, "inputs": COUNT, "positions": COUNT,
}  # fmt: skip


def score(name: str) -> Form:
    """Form of a score, which may be NaN and may exceed its range by rounding."""
    found, room = metric_of(name), 1.000001
    return number(found.least * room, found.largest * room, finite=False)


EVAL = {
    "tokens": COUNT, "elapsed_s": SECONDS, "perplexity": SIZE, **{name: score(name) for name in SCORES},
}  # fmt: skip
EVAL["wide"] = record({"loss": LOSS}, dict(EVAL))  # the same with all GEMMs of Linears in 16 bits
TENSOR = {
    "format": text, "amax": SIZE, "scale": SIZE, "underflow": either(SHARE, NOTHING), "saturated": either(SHARE, NOTHING),
    "nan": COUNT, "inf": COUNT, "zeros": COUNT, "histogram": either(HISTOGRAM, NOTHING),
}  # fmt: skip
ROWS = record({"count": COUNT, "effective": SHARE, "top": SHARE, "norms": HISTOGRAM})
CHANNELS = record(
    {
        "count": COUNT,
        "largest": SIZE,
        "outliers": COUNT,
        "rotated_largest": SIZE,
        "peaks": HISTOGRAM,
        "rotated_peaks": HISTOGRAM,
    }
)
LAUNCHES = {
    "words": text, "advice": listed(text), "idle": number(), "kernels": COUNT,
    **dict.fromkeys(("span_s", "launching_s", "waiting_s", "median_kernel_s"), number()),
}  # fmt: skip
PARENT = {
    "started_at": text, "fingerprint": text, "changes": table(listed(text)), "carried": listed(text),
}  # fmt: skip


GUARD = {
    **dict.fromkeys(("difference", "mean", "margin", "scale", "e_worse", "e_within"), number(finite=False)),
    **dict.fromkeys(("begun", "steps", "checks", "since", "lost"), COUNT), **dict.fromkeys(("direction", "then", "sentence"), text),
    **dict.fromkeys(("wide", "narrow", "loss"), LOSS), "usual": either(LOSS, NOTHING), "control": either(number(finite=False), NOTHING),
    "more_checks": either(COUNT, NOTHING), "spent_s": SECONDS,
    "unlike": table(listed(text)), "compared": COUNT, "unseen": text,
}  # fmt: skip

MAYBE = either(number(finite=False), NOTHING)
SPIKE = {
    **dict.fromkeys(("expected_loss", "loss_scales", "grad_norm", "expected_grad_norm", "grad_norm_scales", "wide"), MAYBE),
    **dict.fromkeys(("why", "sentence"), text), "loss": LOSS, "checkpoint": COUNT, "left_out": listed(COUNT),
    "examples": listed(COUNT),
}  # fmt: skip

# Event -> (required keys, optional keys).
_FORMS: dict[str, tuple[dict[str, Form], dict[str, Form]]] = {
    "step": ({"loss": LOSS}, STEP),
    "eval": ({"loss": LOSS}, EVAL),
    "tensor": ({"module": text, "role": text}, TENSOR),
    "spread": ({"module": text, "role": text}, {"rows": ROWS, "channels": CHANNELS}),
    "launches": ({}, LAUNCHES),
    "nonfinite_amax": ({"module": text, "role": text}, {"count": COUNT}),
    "nonfinite": ({"where": text}, {}),
    "blame": (
        {"suspects": listed(text), "errors": table(table(listed(anything)))},
        {
            "recipes": listed(text),
            "findings": listed(table(anything)),
            "confirmations": listed(table(anything)),
        },
    ),
    "sample": ({}, {"prompt": text, "text": text}),
    "checkpoint": ({"path": text}, {"save_s": SECONDS}),
    "switch": ({"switch": text}, {"layers": COUNT, "before": listed(text), "after": listed(text)}),
    "guard": ({"verdict": text}, GUARD),
    "spike": ({"cause": text}, SPIKE),
    "rewind": ({"steps": COUNT}, {"why": text}),
    "resume": ({}, {"path": text, "skipped": listed(text), "left_out": listed(COUNT)}),
    "branch": ({"run": text, "from": text}, PARENT),
    "done": ({"reason": text}, {"exit_code": number(0, 255, whole=True)}),
    # Written into the folder of a study.
    "study": ({"metric": text, "reference": text, "verdicts": listed(anything)}, {}),
}
EVENTS = {
    kind: record({"event": text, "step": COUNT, **required}, allowed)
    for kind, (required, allowed) in _FORMS.items()
}

MODEL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "vocab_size", "max_length"), SIZES),
    "name": text, "sequence_length": COUNT,
}  # fmt: skip
DATA = {
    **dict.fromkeys(("documents", "train_tokens", "validation_tokens", "rows", "train_examples", "validation_examples"), SIZES),
    "source": text, "unigram_entropy": either(SIZE, NOTHING),
}  # fmt: skip
RUN = record(
    {},
    {
        **dict.fromkeys(("narrowgauge", "torch", "python", "device", "device_type", "started_at", "recipe", "precision"), text),
        **dict.fromkeys(("task", "loss_unit", "f1_over", "best", "loss", "embedding_codes", "attention"), text),
        **dict.fromkeys(("command", "memory", "fused", "weight_casts", "unseen"), listed(text)),
        "resumed": listed(listed(text)), "recipes": table(text), "auto": table(text),
        **dict.fromkeys(("threads", "seed", "parameters", "tokens_per_step", "steps"), COUNT),
        "switches": listed(record({"step": COUNT, "switch": text})),
        "parent": record({"run": text, "from": text, "step": COUNT}, PARENT),
        "left_out": listed(COUNT),
        "coverage": record(
            {"sentence": text},
            {"operations": COUNT, "narrow": table(SHARE), "wide": table(table(SHARE)), "attention": text},
        ),
        "trivial": record({}, {"predictor": text, "loss": SIZE, "perplexity": SIZE, **{name: score(name) for name in SCORES}}),
        "model": record({}, MODEL), "data": record({}, DATA), "describe": listed(table(either(text, NOTHING))),
    },
)  # fmt: skip


METRICS = reading.Kind(
    most_bytes=4 * reading.GIB, step="Name a folder that narrowgauge train wrote."
)
RECORD = reading.Kind(
    most_bytes=64 * reading.MIB,
    step="Name a folder that narrowgauge train wrote. If it is one, restore a copy of the file; or remove it and continue the run with "
    '--resume, which writes it again without the facts of the first start and chooses again where recipe "auto" chose.',
)


def encode(entry: Mapping[str, Any], indent: int | None = None) -> str:
    """Encode a record as strict ASCII JSON, on one line unless indented."""
    return json.dumps(_named(entry), allow_nan=False, indent=indent)


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    return value


def decode(line: str | bytes) -> dict[str, Any]:
    """Decode a record written by `encode`.

    Raises ValueError if the line is not strict JSON, TypeError if it is not an object.
    """

    entry = reading.strict_json(line)
    if not isinstance(entry, dict):
        raise TypeError("not a JSON object")
    return dict(numbers(entry))


def numbers(value: Any) -> Any:
    """A value of strict JSON, with the strings that `encode` wrote turned back into floats."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: value if key in TEXT_KEYS else numbers(value) for key, value in value.items()}
    if isinstance(value, list):
        return [numbers(each) for each in value]
    return value


# Keys that identify an event. After a skip, the next batch may spike at the same step.
NAMES = {"spike": ("left_out",)}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Events of a run in order of time, as if never interrupted; [] if there is no file.

    A `resume` from step k, or a `rewind` to it, removes earlier events of later steps, except
    spikes whose batch stays skipped. Of several events that agree in (event, step, module, role,
    switch), the last one counts; spikes are identified by the batches that they skipped. A last
    line that a crash cut short is ignored. Raises ConfigError if any other line is not an event.
    """
    # os.devnull: the log of a process that only reads a run.
    if path == Path(os.devnull) or not os.path.lexists(path):
        return []
    # The piece after the last newline is empty, or an event that a crash cut short.
    lines = reading.bytes_of(path, METRICS).split(b"\n")[:-1]
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    reached = 0
    for place, line in enumerate(lines, start=1):
        try:
            event = decode(line)
            kind = event.get("event")
            if kind not in EVENTS:
                raise ValueError(f"event = {kind!r} is not one of {', '.join(EVENTS)}")
            if problem := refuse(event, EVENTS[kind]):
                raise ValueError(problem)
            step = event["step"]
            if kind == "step" and step <= reached:
                raise ValueError(
                    f"step = {step} comes after step {reached}, but only a resumption goes back"
                )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}:{place}: is not an event of a run: {error}. Remove the line.",
                code="run.event",
            ) from None
        if kind in ("resume", "rewind"):
            events = {
                key: each
                for key, each in events.items()
                if each["step"] <= step or _stays(each, event)
            }
            reached = step - 1
        elif kind in ("step", "branch"):
            reached = step
        key = (
            kind,
            step,
            *(str(event.get(name)) for name in NAMES.get(kind, ("module", "role", "switch"))),
        )  # str(): a value may be a list, which is not hashable
        # A dict keeps the position of a key's first insertion; popping moves the event to the end.
        events.pop(key, None)
        events[key] = event
    return list(events.values())


def _stays(earlier: Mapping[str, Any], back: Mapping[str, Any]) -> bool:
    """True if an event of a later step stays valid after `back`, a rewind or a resume.

    After a rewind judgements stay. After a resume spikes stay whose batches remain skipped.
    """
    if back["event"] == "rewind":
        return earlier["event"] in JUDGEMENTS
    left_out = earlier.get("left_out", []) if earlier["event"] == "spike" else []
    return bool(left_out) and set(left_out) <= set(back.get("left_out", []))


def read_run(path: Path) -> dict[str, Any]:
    """Contents of a run.json. Raises ConfigError if it is missing or damaged."""
    data = reading.bytes_of(path, RECORD)
    try:
        run = decode(data)
        problem = refuse(run, RUN)
    except (ValueError, TypeError) as error:
        problem = str(error)
    if problem:
        raise RECORD.refusal(path, f"is damaged: {problem}", "file.form")
    return run
