"""What a study is: recipes, seeds, metric and margin over the settings of one run; and the folder that holds it.

    STUDY/
      config.toml          the settings that all runs share
      study.json           recipes (the first is the reference), seeds, metric, margin, threads of a run, fingerprints of the data
      cache/               tokenized data, of all runs
      positive-control-seedN/   runs that are bad on purpose (`diagnose.sensitivity`): the verdicts need to see that they are
      RECIPE-seedN/        a run folder (docs/architecture.md), with asked.toml, its settings, and console.txt, what it said
      metrics.jsonl        a `study` event for each time that a verdict was reached
      report.html          one page

A seed gives every recipe the same first weights and the same batches. The reference has its recipe everywhere; patterns of `recipes`,
`embedding_codes`, `switch`, `save` and `guard` are of the others. A folder may get more seeds and recipes, and never fewer: what was
seen is not left out.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrowgauge import storage
from narrowgauge.diagnose import study_file
from narrowgauge.diagnose.seeds import Margin
from narrowgauge.diagnose.sensitivity import POSITIVE_CONTROL
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import InvalidSettings, TrainConfig, key_of, resolved, shown
from narrowgauge.train.run_folder import MAY_CHANGE, RunFolder

MOST_RUNS = 10_000
OF_RUNS = {"recipe": "--recipes", "seed": "--seeds"}  # settings that the study gives each run
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
    """A validated study. ConfigError for what cannot be one.

    config    what all runs share; its recipe, seed and output are not looked at
    recipes   names, the reference first
    seeds     two at least
    metric    of the last evaluation; '': the one that chooses the best weights of this task, or the loss
    margin    '0.25%' of the reference's mean, or '0.003'; '': 0.25 % of a loss, 0.01 of a score, 0.5 of BLEU
    parallel  runs at a time; 0: as cores, GPUs and memory allow
    control   also trains the positive control (`recipes.POSITIVE_CONTROL`) once for each seed: one recipe's time more. Without
              it a verdict that a difference is absent says so
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
                f"recipes = {','.join(self.recipes)!r}: a study compares two at least. Write them as bf16,fp8-current."
            )
        if POSITIVE_CONTROL in self.recipes:
            raise ConfigError(
                f"recipes = {','.join(self.recipes)!r}: every study trains {POSITIVE_CONTROL!r} by itself (--no-control: it does "
                "not). Leave it out."
            )
        for name in self.recipes:
            if self.recipes.count(name) > 1:
                raise ConfigError(
                    f"recipes = {','.join(self.recipes)!r}: {name!r} is named twice. Name each recipe once."
                )
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            listed = ",".join(map(str, self.seeds))
            raise ConfigError(
                f"seeds = {listed!r}: a spread takes two seeds at least, each once. Write their number, as 5, or 0,1,2."
            )
        if len(self.seeds) * len(self.trained) > MOST_RUNS:
            raise ConfigError(
                f"seeds x recipes = {len(self.seeds) * len(self.trained)}: at most {MOST_RUNS:,} runs. Name fewer."
            )
        for key, why in NOT_OF_STUDIES.items():
            if value := getattr(self.config, key):
                raise ConfigError(
                    f"{key_of(TrainConfig.__dataclass_fields__[key])} = {shown(value)}: {why}. Remove it."
                )
        if self.margin:
            Margin.parse(self.margin)
        if self.metric:
            refuse_metric(self.config, self.metric)
        for job in self.jobs():
            self.settings_of(job)  # raises for a combination that cannot be

    @property
    def chosen_margin(self) -> Margin:
        return Margin.parse(self.margin) if self.margin else Margin.usual(self.metric)

    @property
    def trained(self) -> tuple[str, ...]:
        """The recipes, and the positive control behind them."""
        return (*self.recipes, POSITIVE_CONTROL) if self.control else self.recipes

    def jobs(self) -> list[Job]:
        """All runs, the pairs of a seed one after the other."""
        return [
            Job(recipe, seed, self.output / f"{recipe}-seed{seed}") for seed in self.seeds for recipe in self.trained
        ]

    def settings_of(self, job: Job, threads: int = 0, device: str = "") -> TrainConfig:
        """The configuration of one run."""
        config = replace(
            self.config, recipe=job.recipe, seed=job.seed, output=str(job.folder), resume=False,
            cache=self.config.cache or str(self.output / "cache"), threads=threads or self.config.threads,
            device=device or self.config.device,
        )  # fmt: skip
        if job.recipe in (self.recipes[0], POSITIVE_CONTROL):
            config = replace(config, layers_recipe={}, embedding_codes="", switch="", save="", guard="")
        return resolved(config)


def refuse_metric(config: TrainConfig, metric: str) -> None:
    """ConfigError if a task does not measure it: what may choose the best weights of a run may be judged."""
    try:
        if metric in ("none", ""):
            raise ConfigError(f"metric = {metric!r}: is no metric. Leave it out for the task's own.")
        replace(config, best=metric)
    except InvalidSettings as error:
        raise ConfigError(str(error).replace("best = ", "metric = ")) from None


# The folder


class StudyFolder:
    """study.json and config.toml of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts, self.config = path / study_file.NAME, path / "config.toml"
        self.metrics, self.lock = path / "metrics.jsonl", path / "lock"

    def stored(self) -> dict[str, Any] | None:
        """What study.json says; None if there is none. ConfigError if it is damaged."""
        return study_file.read(self.path) if os.path.lexists(self.facts) else None

    def write(self, facts: dict[str, Any], config: TrainConfig) -> None:
        storage.replace_file(self.facts, json.dumps(facts, indent=1) + "\n")
        if not self.config.exists():
            storage.replace_file(self.config, toml.dump(config))

    def refuse(self, study: Study, stored: dict[str, Any] | None) -> None:
        """ConfigError if the folder holds another study, or a run."""
        path = study.output
        if os.path.lexists(RunFolder(path).run):
            raise ConfigError(f"output = '{path}': holds a run, not a study. Choose another --output.")
        if stored is None:
            return
        for key, own in (("recipes", study.recipes), ("seeds", study.seeds)):
            if missing := [each for each in stored[key] if each not in own]:
                raise ConfigError(
                    f"output = '{path}': holds runs of {key} {', '.join(map(str, stored[key]))}, and {', '.join(map(str, missing))} "
                    "would be left out of the verdict. Name all of them, and more if you like, or choose another --output."
                )
        if stored["recipes"][0] != study.recipes[0]:
            raise ConfigError(
                f"output = '{path}': its reference is {stored['recipes'][0]}, not {study.recipes[0]}. Name that first, or another --output."
            )
        if study.metric and stored["metric"] != study.metric:
            raise ConfigError(
                f"output = '{path}': is judged by {stored['metric']}, not {study.metric}. A metric that is chosen after the runs favours "
                "what it favours: leave --metric out, or choose another --output."
            )
        changes = [
            f"{key_of(each)} = {shown(getattr(study.config, each.name))}, but the study has {shown(getattr(before, each.name))}"
            for before in (toml.load_stored(self.config),)
            for each in fields(TrainConfig)
            if each.metadata["group"] != "run" and each.name not in MAY_CHANGE - {"steps", "epochs"} and each.name not in OF_RUNS
            and getattr(study.config, each.name) != getattr(before, each.name)
        ]  # fmt: skip
        if changes:
            raise ConfigError(
                f"output = '{path}': holds another study: {'; '.join(changes)}. Drop the change, or choose another --output."
            )

    def refuse_data(self, stored: dict[str, Any] | None, identity: dict[str, str]) -> None:
        """DataError if the data are not those that the first runs saw."""
        for key, own in identity.items():
            if stored is not None and stored["identity"].get(key, own) != own:
                raise DataError(
                    f"{self.path}: its runs saw another {key.replace('content_hash', 'data content')} than is there now, so seeds would "
                    "differ in data. Restore the data, or start anew in another --output."
                )
