"""`narrowgauge evaluate`: scores of checkpoints in the run's recipe and in 16 bits.

The difference of both is computed too. For a score that is a mean over examples, it is paired: both
models saw the same examples. Its standard error is the standard error of the per-example
differences.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowgauge import storage
from narrowgauge.diagnose import forms
from narrowgauge.diagnose.format_text import duration, signed
from narrowgauge.diagnose.runs import encode, numbers
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.ops.rng import generators, set_generators
from narrowgauge.optim import precision as precisions
from narrowgauge.storage import reading
from narrowgauge.train.config.settings import GENERATING
from narrowgauge.train.console import tell
from narrowgauge.train.device import chosen_device, threads
from narrowgauge.train.evaluation.lm_tasks import LmTasks, Scores
from narrowgauge.train.evaluation.saved import NEWEST, SavedRun, versions
from narrowgauge.train.parallel.evaluation import readings
from narrowgauge.train.parallel.ranks import Ranks

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FILE = "evaluation.json"
_ROW = forms.record({"checkpoint": forms.text})
_RESULT = forms.record(
    {
        "tasks": forms.listed(forms.text),
        "dtype": forms.text,
        "limit": forms.number(0),
        "checkpoints": forms.listed(_ROW),
    }
)
SCORES = reading.Kind(
    most_bytes=256 * reading.MIB,
    step="Move it away, and evaluate again.",
    form=forms.record({"results": forms.listed(_RESULT)}),
)
VALIDATION = "validation"  # the run's own data, in place of a task name
FP16_WARNING = (
    "WARNING: float16 ends at 65,504, and these weights were trained where numbers reach 3e38 ({words}): activations may overflow, "
    "and scores may be wrong without a sign. Score, and deploy, in bfloat16."
)


@dataclass(frozen=True)
class Asked:
    """Options of an evaluation."""

    tasks: tuple[str, ...] = ()  # empty: the run's own validation data
    checkpoints: str = NEWEST
    dtype: str = ""  # '': the run's precision, or bfloat16 with tasks
    limit: int = 0
    batch_size: int = 8
    device: str = "auto"
    trust_task_code: bool = False


def evaluate(run: Path | str, asked: Asked = Asked()) -> dict[str, Any]:
    """Scores checkpoints of a run and stores the result in RUN/evaluation.json. Returns the result.

    The result consists of JSON types, and its key `text` holds the printed table. Damaged
    checkpoints are skipped and listed under `passed_over`. Raises ConfigError and DataError before
    anything is scored. Generators are restored.
    """
    held = generators()
    try:
        return _evaluated(Path(run), asked)
    finally:
        set_generators(held)


def _evaluated(run: Path, asked: Asked) -> dict[str, Any]:
    if asked.dtype not in ("", *DTYPES):
        raise ConfigError(
            f"dtype = {asked.dtype!r}: is not one of {', '.join(DTYPES)}. Choose one.",
            code="evaluate.dtype",
        )
    if asked.limit < 0 or asked.batch_size < 1:
        raise ConfigError(
            f"limit = {asked.limit}, batch_size = {asked.batch_size}: must be at least 0 and 1. Leave them out, or raise them.",
            code="evaluate.counts",
        )
    if asked.limit and not asked.tasks:
        raise ConfigError(
            f"limit = {asked.limit}: is of examples of lm-eval's tasks, and none is named. Leave it out.",
            code="evaluate.limit",
        )
    saved = SavedRun.open(run, chosen_device(asked.device))
    paths = saved.paths(asked.checkpoints)
    if asked.tasks and saved.config.task not in GENERATING:
        raise ConfigError(
            f"tasks: lm-eval scores language models, and this run's task is {saved.config.task!r}. "
            f"Leave --tasks out to score its own data.",
            code="evaluate.not-a-language-model",
        )
    dtype = asked.dtype or ("bfloat16" if asked.tasks else "")
    tasks = (
        LmTasks(asked.tasks, asked.limit, asked.batch_size, asked.trust_task_code)
        if asked.tasks
        else None
    )
    if dtype == "float16":
        tell(
            FP16_WARNING.format(
                words=f"recipe {saved.config.recipe}, precision {saved.config.precision}"
            )
        )
    rows, passed_over = list[dict[str, Any]](), dict[str, str]()
    started_at_s = time.monotonic()
    for number, path in enumerate(paths):
        name = f"{path.parent.name}/{path.name}"
        try:
            with threads(saved.config.threads):
                rows.append({"checkpoint": name, **_of_checkpoint(saved, path, dtype, tasks)})
        except CheckpointError as error:
            tell(f"WARNING: passed over: {error}")
            passed_over[name] = str(error)
            continue
        left_s = (time.monotonic() - started_at_s) / (number + 1) * (len(paths) - number - 1)
        tell(
            f"{name}: scored, {number + 1} of {len(paths)}{f', about {duration(left_s)} left' if left_s else ''}"
        )
    if not rows:
        one = f"checkpoint {asked.checkpoints!r} cannot be scored"
        words = one if len(paths) == 1 else f"none of {len(paths)} checkpoints can be scored"
        raise CheckpointError(
            f"{run}: {words}: {next(iter(passed_over.values()))} {_instead(saved, paths)}",
            code="evaluate.no-checkpoint",
        )
    result: dict[str, Any] = {
        "recipe": saved.config.recipe,
        "dtype": dtype or saved.config.precision,
        "tasks": [*tasks.loaded] if tasks else [VALIDATION],
        "limit": asked.limit,
        "checkpoints": rows,
        "passed_over": passed_over,
    }
    result["text"] = rendered(result, has_more=any(True for _ in saved.others(paths)))
    _keep(saved.folder.path / FILE, result)
    return result


def _instead(saved: SavedRun, damaged: Sequence[Path]) -> str:
    """A sentence that names the newest intact checkpoint to score instead."""
    for which, path in saved.others(damaged):
        try:
            saved.model(path)
        except CheckpointError:
            continue
        return f"That of {path.parent.name}/{path.name} is intact: score it with --checkpoints {which}."
    return (
        "No other checkpoint of the run is intact: restore one, or train anew in another --output."
    )


def _of_checkpoint(
    saved: SavedRun, path: Path, dtype: str, tasks: LmTasks | None
) -> dict[str, Any]:
    model, step, why = saved.model(path)
    if dtype:
        model.to(DTYPES[dtype])
    found = {}
    for version, ready in versions(model, why):
        if tasks is None:
            found[version] = {VALIDATION: _on_own_data(saved, ready, dtype)}
        else:
            # Both versions score the same loaded tasks from the same seed, so their examples pair
            # up.
            found[version] = tasks.scores(ready, saved.task.tokenizer)
    return {"step": step, "not_narrow": why, **joined(found)}


def _on_own_data(saved: SavedRun, model: Any, dtype: str) -> Scores:
    """Metrics of the run's own evaluations, in its precision or with all weights in `dtype`."""
    # With an explicit dtype all weights have it already, so autocast stays off.
    precision = precisions.get(saved.config.precision if not dtype else "fp32")
    objective = saved.task.objective(model, DTYPES[dtype] if dtype else precision.computes_in)

    @torch.no_grad()
    def score(batch: Any, compute: Any = objective.scored) -> Any:
        with precision.context(saved.device.type):
            return compute(batch, saved.device)

    found = saved.task.evaluate(model, partial(readings, score=score, share=(0, 1), ranks=Ranks()))
    values = {name: float(value) for name, value in found.items() if isinstance(value, float)}
    return Scores(values, {}, {})


def joined(found: Mapping[str, Mapping[str, Scores]]) -> dict[str, Any]:
    """Scores as JSON: version -> task -> scores, plus the differences "narrow" minus "16 bits"."""
    versions = {
        version.replace(" ", "_"): {
            task: {"values": each.values, "stderr": each.stderr} for task, each in scores.items()
        }
        for version, scores in found.items()
    }
    if "narrow" not in found:
        return versions
    pairs = {task: (scores, found["16 bits"][task]) for task, scores in found["narrow"].items()}
    return versions | {"difference": {task: _differences(*pair) for task, pair in pairs.items()}}


def _differences(narrow: Scores, wide: Scores) -> dict[str, dict[str, Any]]:
    """Metric -> {`mean`: narrow minus 16 bits}.

    A metric that is a mean over examples also has `stderr`, `changed` (examples with different
    values) and `examples` (their number).
    """
    result: dict[str, dict[str, Any]] = {}
    for metric in narrow.values.keys() & wide.values.keys():
        result[metric] = {"mean": narrow.values[metric] - wide.values[metric]}
        ours, theirs = narrow.examples.get(metric, {}), wide.examples.get(metric, {})
        gaps = [ours[number] - theirs[number] for number in sorted(ours.keys() & theirs.keys())]
        if len(gaps) > 1:
            error = statistics.stdev(gaps) / math.sqrt(len(gaps))
            result[metric] |= {
                "stderr": error,
                "changed": sum(map(bool, gaps)),
                "examples": len(gaps),
            }
    return dict(sorted(result.items()))


def rendered(result: Mapping[str, Any], has_more: bool = False) -> str:
    """Formats the result as a table with a line per checkpoint, task and metric, plus sentences.

    has_more  True if the run has checkpoints that were not scored
    """
    head = (
        "checkpoint",
        "task",
        "metric",
        f"narrow ({result['recipe']})",
        "16 bits",
        "narrow − 16 bits",
    )
    lines = [head, *_lines(result)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join(
        [f"Scored in {result['dtype']}.", "", *table, "", *_sentences(result, has_more)]
    )


def _lines(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    lines = list[tuple[str, ...]]()
    for row in result["checkpoints"]:
        for task, wide in row["16_bits"].items():
            for metric in wide["values"]:
                narrow = row.get("narrow", {}).get(task)
                gap = row.get("difference", {}).get(task, {}).get(metric)
                lines.append((
                    row["checkpoint"], task, metric, _value(narrow, metric), _value(wide, metric), _gap(gap),
                ))  # fmt: skip
    return lines


def _value(scores: Mapping[str, Any] | None, metric: str) -> str:
    if scores is None:
        return "–"
    error = scores["stderr"].get(metric)
    return f"{scores['values'][metric]:.4f}" + (f" ± {error:.4f}" if error else "")


def _gap(gap: Mapping[str, Any] | None) -> str:
    if gap is None:
        return ""
    if "stderr" not in gap:
        return signed(gap["mean"])
    error = f" ± {gap['stderr']:.4f}" if gap["changed"] else ""
    return f"{signed(gap['mean'])}{error}; {gap['changed']} of {gap['examples']} examples change"


def _sentences(result: Mapping[str, Any], has_more: bool) -> Sequence[str]:
    """Sentences that interpret the table."""
    rows, said = result["checkpoints"], []
    if any("±" in cell for line in _lines(result) for cell in line):
        said.append(
            "± is one standard error over the examples; that of a difference is of the same examples scored twice."
        )
    said += [
        f"{row['checkpoint']} has no narrow score: {row['not_narrow']}."
        for row in rows
        if row["not_narrow"]
    ]
    if not any(row["not_narrow"] or "narrow" in row for row in rows):
        said.append(
            f"The forward products of {result['recipe']} are not narrow, so there is one score."
        )
    several = {
        (task, metric)
        for row in rows
        for task, gaps in row.get("difference", {}).items()
        for metric in gaps
    }
    if len(rows) > 1:
        for task, metric in sorted(several):
            gaps = [row["difference"][task][metric]["mean"] for row in rows if "difference" in row]
            said.append(
                f"{task}, {metric}: over {len(gaps)} checkpoints narrow lies {signed(statistics.mean(gaps))} from 16 bits on average, "
                f"from {signed(min(gaps))} to {signed(max(gaps))}."
            )
    elif several:
        other = ", --checkpoints all scores every one that is kept" if has_more else ""
        said.append(f"One checkpoint: single scores are noisy{other}.")
    return said


def _keep(path: Path, result: Mapping[str, Any]) -> None:
    """Adds the result to the file.

    Replaces an earlier result for the same tasks, dtype, limit and checkpoints.
    """

    def question(each: Mapping[str, Any]) -> tuple[Any, ...]:
        names = [row["checkpoint"] for row in each["checkpoints"]]
        return each["tasks"], each["dtype"], each["limit"], names

    earlier: list[dict[str, Any]] = []
    if os.path.lexists(path):
        try:
            earlier = numbers(reading.json_of(path, SCORES))["results"]
        except ConfigError as error:
            # The message holds the scores, which took long to compute.
            raise ConfigError(
                f"These scores were not kept: {encode(result)}. {error}", code="evaluate.not-kept"
            ) from None
        earlier = [each for each in earlier if question(each) != question(result)]
    with storage.refusals("keep the scores in", path.parent):
        storage.replace_file(path, encode({"results": [*earlier, result]}, indent=1) + "\n")
