"""Experiment trackers that receive the curves of a run: wandb, mlflow and trackio, by `log.to`.

    narrowgauge train settings.toml --log-to wandb,mlflow

A tracker gets the scalars of `metrics.CURVES`, under TensorBoard's names (`step/loss`,
`eval/accuracy`), and the resolved settings when its run begins. metrics.jsonl stays the record that
every command of narrowgauge reads. Each package is imported when a run asks for it, and takes its
destination from its own settings:

    wandb    project WANDB_PROJECT or "narrowgauge"; files in RUN/wandb; WANDB_MODE=offline sends nothing
    mlflow   MLFLOW_TRACKING_URI, experiment MLFLOW_EXPERIMENT_NAME or "narrowgauge"
    trackio  TRACKIO_DIR or a space; project TRACKIO_PROJECT or "narrowgauge"

A resumed run goes on in the same run of a tracker, whose id stands in RUN/trackers.json. Steps that
metrics.jsonl had at the start are not sent again, so that no step is there twice: a resumed run
repeats the steps after its checkpoint. A tracker that joins a run later gets the whole log first.

A tracker that cannot begin ends the command, before anything is trained. One that fails later is
dropped for the rest of the process, with one line on standard error, and training goes on. The next
resumption tries it again; steps of the time between are missing there and not in metrics.jsonl.

Cost: mlflow writes in the step, a few milliseconds on a local disk; the others in a thread or process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from narrowgauge import storage
from narrowgauge.diagnose import forms
from narrowgauge.diagnose.runs import encode, read_metrics
from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading
from narrowgauge.train.config.rules import path_of
from narrowgauge.train.console import tell
from narrowgauge.train.metrics import CURVES

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

PROJECT = "narrowgauge"
FILE = "trackers.json"
STATE = reading.Kind(
    most_bytes=reading.MIB,
    step="Remove it: the trackers of log.to then begin runs of their own.",
    form=forms.table(forms.text),
)
MOST_PARAMETERS = 100  # in one request of mlflow


class Tracker(Protocol):
    """One run in a tracker. `id` is that run's, by which a resumed run finds it."""

    id: str

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, has_failed: bool) -> None: ...


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, name: str, run: str, settings: Mapping[str, Any], folder: Path) -> None:
        wandb = import_module("wandb")
        self.id = run or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), id=self.id, name=name, dir=str(folder), resume="allow",
            # Capturing the console would send progress bars.
            config=dict(settings), settings=wandb.Settings(console="off"),
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class Mlflow:
    """A run of MLflow, written by its client: the caller's own active run is left alone."""

    def __init__(self, name: str, run: str, settings: Mapping[str, Any], folder: Path) -> None:
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        if run:
            self._client.update_run(run, status="RUNNING")
        else:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(experiment)
            where = found.experiment_id if found else self._client.create_experiment(experiment)
            run = self._client.create_run(where, run_name=name).info.run_id
            # Parameters never change in MLflow, so that a resumed run does not send its own.
            parameters = [
                self._entities.Param(key, str(each)[:500]) for key, each in settings.items()
            ]
            for start in range(0, len(parameters), MOST_PARAMETERS):
                part = parameters[start : start + MOST_PARAMETERS]
                self._client.log_batch(run, params=part)
        self.id = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(key, float(each), now_ms, step) for key, each in values.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self, has_failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if has_failed else "FINISHED")


class Trackio:
    """A run of Trackio, found by its name, which is therefore unique."""

    def __init__(self, name: str, run: str, settings: Mapping[str, Any], folder: Path) -> None:
        trackio = import_module("trackio")
        self.id = run or f"{name}-{uuid.uuid4().hex[:8]}"
        # trackio prints, and standard output belongs to the command.
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=self.id, config=dict(settings), resume="allow", embed=False
            )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, has_failed: bool) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


Opening = Callable[[str, str, Mapping[str, Any], Path], Tracker]
KINDS: dict[str, Opening] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


class Trackers:
    """The trackers of a run, for `MetricsLog`, which calls `write` and `close`.

    names     keys of KINDS
    folder    the run folder
    settings  setting -> value, for the trackers whose run begins now

    Raises ConfigError if a package is missing or its tracker cannot begin.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        path = folder / FILE
        known = dict(reading.json_of(path, STATE)) if os.path.lexists(path) else {}
        metrics = folder / "metrics.jsonl"
        past = read_metrics(metrics) if os.path.lexists(metrics) else []
        # Steps that were sent before: the newest of each event.
        self._sent = {kind: 0 for kind in CURVES}
        for event in past:
            if event["event"] in CURVES:
                self._sent[event["event"]] = max(self._sent[event["event"]], event["step"])
        self._open: dict[str, Tracker] = {}
        try:
            for name in names:
                self._open[name] = _opened(name, known.get(name, ""), folder, settings)
                if name in known:
                    continue
                for event in past:
                    if values := scalars(event["event"], event):
                        self._send(name, values, event["step"])
            runs = known | {name: tracker.id for name, tracker in self._open.items()}
            storage.replace_file(path, encode(runs, indent=1) + "\n")
        except BaseException:
            self.close(has_failed=True)
            raise

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Sends the scalars of an event to all trackers that have not failed."""
        found = scalars(event, values)
        if not found or step <= self._sent[event]:
            return
        self._sent[event] = step
        for name in [*self._open]:
            self._send(name, found, step)

    def close(self, has_failed: bool) -> None:
        """Ends the runs; has_failed: the command ends by an error."""
        for name, tracker in self._open.items():
            try:
                tracker.close(has_failed)
            except Exception as error:
                tell(f"log.to = {name!r}: the tracker did not end its run ({_words(error)}).")
        self._open = {}

    def _send(self, name: str, values: Mapping[str, float], step: int) -> None:
        if name not in self._open:
            return
        try:
            self._open[name].log(values, step)
        # Anything at all: a tracker must not end a training.
        except Exception as error:
            # Its run would look alive for ever; that it cannot be ended either is no news.
            with contextlib.suppress(Exception):
                self._open.pop(name).close(has_failed=True)
            tell(
                f"log.to = {name!r}: the tracker failed at step {step} and gets nothing more from this process ({_words(error)}). "
                "Training goes on, and metrics.jsonl has everything."
            )


def scalars(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Name -> value of the curves in an event."""
    return {f"{event}/{key}": values[key] for key in CURVES.get(event, ()) if key in values}


def names_of(text: str) -> tuple[str, ...]:
    """Names of trackers in `log.to`."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def of_run(config: TrainConfig, folder: Path) -> Trackers | None:
    """The trackers that the settings ask for; None without any."""
    if not config.log_to:
        return None
    settings = {path_of(each): getattr(config, each.name) for each in fields(config)}
    shown = {
        key: each if isinstance(each, bool | int | float | str) else str(each)
        for key, each in settings.items()
    }
    return Trackers(names_of(config.log_to), folder, shown)


def _opened(name: str, run: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    # The folder of a reference stands in that of its run, and is called like every other reference.
    path = folder.resolve()
    title = f"{path.parent.name}-{path.name}" if path.name.startswith("compare-") else path.name
    try:
        return KINDS[name](title, run, settings, folder)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f"log.to = {name!r}: the package is not installed. Run: pip install {name}.",
            code="trackers.missing-package",
        ) from None
    except Exception as error:
        goes_on = f" the run {run} that {folder / FILE} names" if run else " a run"
        raise ConfigError(
            f"log.to = {name!r}: {name} could not begin{goes_on} ({_words(error)}). Mend that (sign in, or set where it writes), leave "
            f"the tracker out, or remove its entry in {FILE} to begin another run there.",
            code="trackers.not-begun",
        ) from error


def _words(error: Exception) -> str:
    """Class and first line of an error, at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
