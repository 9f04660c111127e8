"""Tasks of lm-eval, from local task files or by name, scored on a model in memory.

Paths in a task file (`dataset_kwargs: data_files`, `!function`) are relative to the file, or to the
current folder.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError, DataError, closest
from narrowgauge.ops.rng import seed_all

INSTALL = "narrowgauge evaluate --tasks needs the packages 'lm-eval' and 'pyyaml'. Run: pip install 'narrowgauge[evaluate]'."
SEED = 1234  # lm-eval's default; it selects the few-shot examples
Values = dict[str, dict[int, float]]  # metric -> index of the example -> value


@dataclass(frozen=True)
class Scores:
    """Scores of one task.

    values    metric -> value
    stderr    metric -> standard error of the mean, for metrics that are means over examples; None
              for a single example
    examples  metric -> index of the example -> value, for the same metrics
    """

    values: dict[str, float]
    stderr: dict[str, float | None]
    examples: Values


class LmTasks:
    """Tasks of lm-eval, loaded once and scored on any number of models."""

    def __init__(
        self, names: Sequence[str], limit: int, batch_size: int, trust_code: bool = False
    ) -> None:
        """Loads the tasks and their data.

        names       paths of task files, or names of tasks that are part of lm-eval
        limit       number of examples per task, 0 for all
        trust_code  load task files that run code; False: raise ConfigError for them
        """
        try:
            from lm_eval import tasks as lm_eval_tasks

            from narrowgauge.train.evaluation import task_code  # needs pyyaml
        except ImportError as error:
            raise ConfigError(
                f"{INSTALL} (Missing: {error.name}.)", code="lm-eval.missing-package"
            ) from error
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.limit, self.batch_size = limit, batch_size
        files = [
            Path(name) for name in names if name.endswith((".yaml", ".yml")) or Path(name).exists()
        ]
        self.trust_code = trust_code
        for file in files:
            _refuse_no_task(file)
            if not trust_code:
                task_code.refuse_code(file, _own_metrics())
        others = [name for name in names if Path(name) not in files]
        manager = lm_eval_tasks.TaskManager(include_defaults=bool(others))
        for name in others:
            if name not in manager.task_index:
                near = closest(name, manager.all_tasks, limit=1)
                raise ConfigError(
                    f"tasks = {name!r}: no such file, and lm-eval has no task of that name. "
                    f"{f'Closest: {near}. ' if near else ''}Name a task file (.yaml).",
                    code="lm-eval.unknown-task",
                )
        self.loaded: dict[str, Any] = {}
        for name in names:
            folder = Path(name).parent if Path(name) in files else Path()
            with self._templates():
                self.loaded |= _load(
                    manager, Path(name).name if Path(name) in files else name, folder
                )
        for task in self.loaded.values():
            # As lm-eval's own command does: a task without this key has no few-shot examples.
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)

    def _templates(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.trust_code else _sandboxed(list(self.loaded))

    def scores(self, model: Any, tokenizer: Any) -> dict[str, Scores]:
        """Task -> scores of `model`, in evaluation mode and on its device. Seeds all generators."""
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        # lm-eval's default is the model's dtype. A bfloat16 log probability has eight significant
        # bits, which would hide differences between formats.
        options = {
            "batch_size": self.batch_size,
            "device": str(model.device),
            "softmax_dtype": "float32",
        }
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, **options)
        seed_all(SEED)
        tasks = {"tasks": self.loaded, "groups": {}, "group_map": {}}
        with self._templates():
            found = evaluate(wrapped, tasks, limit=self.limit or None, bootstrap_iters=0)
        assert found is not None
        return {
            name: _read(values, found["samples"][name])
            for name, values in found["results"].items()
            if name in found["samples"]
        }


@contextlib.contextmanager
def _sandboxed(names: list[str]) -> Iterator[None]:
    """Runs the body under `task_code.sandboxed_templates`.

    Converts the sandbox's refusal to a ConfigError.
    """
    from jinja2.exceptions import SecurityError

    from narrowgauge.train.evaluation import task_code

    try:
        with task_code.sandboxed_templates():
            yield
    except SecurityError as error:
        raise ConfigError(
            f"tasks: a template of {', '.join(names)} reaches for Python itself: {error}. {task_code.TRUST}",
            code="lm-eval.template",
        ) from error


def _own_metrics() -> frozenset[str]:
    """Names of the metrics that lm-eval computes itself."""
    from lm_eval.api import metrics, registry  # importing `metrics` registers them

    assert metrics
    return frozenset(registry.METRIC_REGISTRY)


def _refuse_no_task(file: Path) -> None:
    """Raises ConfigError unless the file can be read and names a task."""
    from narrowgauge.train.evaluation import task_code

    names = [
        node.value
        for node, _ in getattr(task_code.compose(file), "value", ())
        if isinstance(node.value, str)
    ]
    if not {"task", "group"} & set(names):
        raise ConfigError(
            f"tasks = '{file}': is no task file of lm-eval: it has no key 'task'. Add one, or name another file.",
            code="lm-eval.no-task-key",
        )


def _load(manager: Any, name: str, folder: Path) -> dict[str, Any]:
    """Loads the tasks of a file or name with their data."""
    errors: list[Exception] = []
    # lm-eval resolves relative data paths against the current folder: try the folder of the task
    # file first.
    for place in dict.fromkeys((folder, Path())):
        try:
            with contextlib.chdir(place):
                return dict(
                    manager.load([name if place == folder else str(folder / name)])["tasks"]
                )
        except Exception as error:  # lm-eval and datasets raise many exception types
            errors.append(error)
    words = " ".join(f"{type(errors[0]).__name__}: {errors[0]}".split())
    raise DataError(
        f"tasks = '{folder / name}': lm-eval cannot load it: {words}. Mend the task file, or its data.",
        code="lm-eval.unloadable",
    ) from errors[0]


def _read(values: dict[str, Any], samples: list[dict[str, Any]]) -> Scores:
    """Reads the scores of one task from lm-eval's result, whose keys look like "acc,none"."""
    numbers = {
        key.partition(",")[0]: float(value) for key, value in values.items() if _is_number(value)
    }
    numbers = {
        key: value
        for key, value in numbers.items()
        if key != "sample_len" and not key.endswith("_stderr")
    }
    examples = {
        key: {
            int(sample["doc_id"]): float(sample[key])
            for sample in samples
            if _is_number(sample.get(key))
        }
        for key in numbers
    }
    of_means = {  # corpus BLEU and perplexity are no means of their per-example values
        key: found
        for key, found in examples.items()
        if found and math.isclose(statistics.mean(found.values()), numbers[key], abs_tol=1e-9)
    }
    return Scores(
        numbers,
        {key: _standard_error([*found.values()]) for key, found in of_means.items()},
        of_means,
    )


def _standard_error(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
