"""Definition of a study (recipes, seeds, metric, margin over one run's settings) and its folder.

    STUDY/
      config.toml          settings that all runs share
      study.json           recipes (the first is the reference), seeds, metric, margin, threads of
                           a run, fingerprints of the data
      cache/               tokenized data of all runs
      positive-control-seedN/
                           runs with a planted fault (`diagnose.sensitivity`), which the verdicts
                           must detect
      RECIPE-seedN/        run folder (docs/architecture.md), with its settings (asked.toml) and its
                           console output (console.txt)
      metrics.jsonl        one `study` event for each verdict
      report.html          the report

A seed gives every recipe the same initial weights and batches. The reference uses its recipe
everywhere. The settings `recipes`, `embedding_codes`, `attention`, `switch`, `save` and `guard` apply to the
other recipes only. Seeds and recipes may be added to a folder later but not removed: a verdict must
not leave out runs whose results are known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge import storage
from narrowgauge.diagnose import study_file
from narrowgauge.diagnose.seeds import Margin
from narrowgauge.diagnose.sensitivity import POSITIVE_CONTROL
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.storage import reading
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import (
    InvalidSettings,
    TrainConfig,
    differences,
    key_of,
    resolved,
    shown,
)
from narrowgauge.train.run_folder import LOCK, MAY_CHANGE, RunFolder, hold, refuse_model

MOST_RUNS = 10_000
OF_RUNS = {"recipe": "--recipes", "seed": "--seeds"}  # settings that the study sets for each run
# Settings that a study rejects, with the reason.
NOT_OF_STUDIES = {
    "compare": "a study compares its recipes itself",
    "parallel": "each run of a study has one process",
    "parent": "a study's runs begin at their first step, with the weights of their seed",
}


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    recipe: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.recipe}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A validated study; raises ConfigError for an invalid one.

    config    settings of all runs; recipe, seed and output are ignored
    recipes   names; the reference first
    seeds     at least two
    metric    metric of the last evaluation; '': the task's metric for best weights, or the loss
    margin    '0.25%' of the reference's mean, or '0.003'; '': 0.25 % for a loss, 0.01 for a score,
              0.5 for BLEU
    parallel  concurrent runs; 0: as many as cores, GPUs and memory allow
    control   also train the positive control (`recipes.POSITIVE_CONTROL`) for each seed, which
              costs as much as one more recipe. Without it, a verdict of no difference says so
    """

    config: TrainConfig
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    output: Path
    metric: str = ""
    margin: str = ""
    parallel: int = 0
    control: bool = True

    def __post_init__(self) -> None:
        if len(self.recipes) < 2:
            raise ConfigError(
                f"recipes = {','.join(self.recipes)!r}: a study compares two at least. Write them as bf16,fp8-current.",
                code="study.recipe-count",
            )
        if POSITIVE_CONTROL in self.recipes:
            raise ConfigError(
                f"recipes = {','.join(self.recipes)!r}: every study trains {POSITIVE_CONTROL!r} by itself (--no-control: it does "
                "not). Leave it out.",
                code="study.control",
            )
        for name in self.recipes:
            if self.recipes.count(name) > 1:
                raise ConfigError(
                    f"recipes = {','.join(self.recipes)!r}: {name!r} is named twice. Name each recipe once.",
                    code="study.recipe-twice",
                )
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            listed = ",".join(map(str, self.seeds))
            raise ConfigError(
                f"seeds = {listed!r}: a spread takes two seeds at least, each once. Write their number, as 5, or 0,1,2.",
                code="study.seed-count",
            )
        if len(self.seeds) * len(self.trained) > MOST_RUNS:
            raise ConfigError(
                f"seeds x recipes = {len(self.seeds) * len(self.trained)}: at most {MOST_RUNS:,} runs. Name fewer.",
                code="study.run-count",
            )
        for key, why in NOT_OF_STUDIES.items():
            if value := getattr(self.config, key):
                raise ConfigError(
                    f"{key_of(TrainConfig.__dataclass_fields__[key])} = {shown(value)}: {why}. Remove it.",
                    code="study.setting",
                )
        if self.margin:
            Margin.parse(self.margin)
        if self.metric:
            refuse_metric(self.config, self.metric)
        for job in self.jobs():
            self.settings_of(job)  # raises ConfigError for an invalid combination

    @property
    def chosen_margin(self) -> Margin:
        """The margin as configured, else the metric's default."""
        return Margin.parse(self.margin) if self.margin else Margin.usual(self.metric)

    @property
    def trained(self) -> tuple[str, ...]:
        """All recipes to train, with the positive control last."""
        return (*self.recipes, POSITIVE_CONTROL) if self.control else self.recipes

    def jobs(self) -> list[Job]:
        """All runs, grouped by seed."""
        # By seed, not by recipe: an interrupted study then has complete pairs to compare.
        return [
            Job(recipe, seed, self.output / f"{recipe}-seed{seed}")
            for seed in self.seeds
            for recipe in self.trained
        ]

    def settings_of(self, job: Job, threads: int = 0, device: str = "") -> TrainConfig:
        """Configuration of one run."""
        config = replace(
            self.config, recipe=job.recipe, seed=job.seed, output=str(job.folder), resume=False,
            cache=self.config.cache or str(self.output / "cache"), threads=threads or self.config.threads,
            device=device or self.config.device,
        )  # fmt: skip
        # The reference and the control use one recipe everywhere, without per-layer exceptions.
        if job.recipe in (self.recipes[0], POSITIVE_CONTROL):
            config = replace(
                config,
                layers_recipe={},
                embedding_codes="",
                attention="",
                switch="",
                save="",
                guard="",
            )
        return resolved(config)


def refuse_metric(config: TrainConfig, metric: str) -> None:
    """Raises ConfigError if the task does not measure `metric`.

    Every metric that can select the best weights can be judged.
    """
    try:
        if metric in ("none", ""):
            raise ConfigError(
                f"metric = {metric!r}: is no metric. Leave it out for the task's own.",
                code="study.metric",
            )
        replace(config, best=metric)
    except InvalidSettings as error:
        raise ConfigError(
            str(error).replace("task.best = ", "metric = "), code="study.best"
        ) from None


# The folder


class StudyFolder:
    """Files of a study's folder: study.json, config.toml, metrics.jsonl and the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts, self.config = path / study_file.NAME, path / "config.toml"
        self.metrics, self.lock = path / "metrics.jsonl", path / "lock"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Creates the folder if necessary, and locks it. Raises ConfigError if it holds a model."""
        if not os.path.lexists(self.facts):
            refuse_model(self.path)
        with storage.refusals("use the study's folder", self.path):
            storage.make_folder(self.path)
            lock = reading.opened_to_append(self.lock, LOCK)
        with lock:
            hold(lock, self.path)
            storage.probe(self.path)
            yield

    def stored(self) -> dict[str, Any] | None:
        """Contents of study.json, or None without the file. Raises ConfigError if it is damaged."""
        # lexists: a dangling link must not count as an absent file.
        return study_file.read(self.path) if os.path.lexists(self.facts) else None

    def write(self, facts: dict[str, Any], config: TrainConfig) -> None:
        """Writes study.json, and config.toml once."""
        storage.replace_file(self.facts, json.dumps(facts, indent=1) + "\n")
        if not self.config.exists():
            storage.replace_file(self.config, toml.dump(config))

    def refuse(self, study: Study, stored: dict[str, Any] | None) -> None:
        """Raises ConfigError if the folder holds another study, or a run."""
        path = study.output
        if os.path.lexists(RunFolder(path).run):
            raise ConfigError(
                f"output = '{path}': holds a run, not a study. Choose another --output.",
                code="study.holds-run",
            )
        if stored is None:
            return
        for key, own in (("recipes", study.recipes), ("seeds", study.seeds)):
            if missing := [each for each in stored[key] if each not in own]:
                raise ConfigError(
                    f"output = '{path}': holds runs of {key} {', '.join(map(str, stored[key]))}, and {', '.join(map(str, missing))} "
                    "would be left out of the verdict. Name all of them, and more if you like, or choose another --output.",
                    code="study.left-out",
                )
        if stored["recipes"][0] != study.recipes[0]:
            raise ConfigError(
                f"output = '{path}': its reference is {stored['recipes'][0]}, not {study.recipes[0]}. Name "
                f"that first, or another --output.",
                code="study.reference",
            )
        # Selecting the metric after seeing the runs would bias the verdict.
        if study.metric and stored["metric"] != study.metric:
            raise ConfigError(
                f"output = '{path}': is judged by {stored['metric']}, not {study.metric}. A metric that is chosen after the runs favours "
                "what it favours: leave --metric out, or choose another --output.",
                code="study.other-metric",
            )
        # Settings that affect no number (declared free, MAY_CHANGE) may differ, except the length of
        # training.
        may_change = {*OF_RUNS, *MAY_CHANGE} - {"steps", "epochs"}
        changes = differences(
            resolved(study.config),
            resolved(toml.load_stored(self.config)),
            "the study",
            lambda each: not each.metadata["free"] and each.name not in may_change,
        )
        if changes:
            raise ConfigError(
                f"output = '{path}': holds another study: {'; '.join(changes)}. Drop the change, or choose another --output.",
                code="study.other-study",
            )

    def refuse_data(self, stored: dict[str, Any] | None, identity: dict[str, str]) -> None:
        """Raises DataError if the data differ from the data of the first runs."""
        for key, own in identity.items():
            if stored is not None and stored["identity"].get(key, own) != own:
                raise DataError(
                    f"{self.path}: its runs saw another {key.replace('content_hash', 'data content')} than is there now, so seeds would "
                    "differ in data. Restore the data, or start anew in another --output.",
                    code="study.other-data",
                )
