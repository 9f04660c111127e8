"""Runs in pairs: several recipes, several seeds, and what each recipe's final figure differs from its reference of the same seed.

A seed decides start and data order, so a recipe and the reference of one seed are twins; their difference holds less chance
than the figures themselves. `Experiment.results` runs what is missing, several runs at a time in processes of their own, and
keeps each finished run's figures in OUTPUT/RECIPE-seedN.json, so that an interrupted table goes on where it stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]  # of one run: "recipe", "seed", and a number per metric
Train = Callable[..., Mapping[str, float]]  # train(recipe, seed, **settings)


@dataclass(frozen=True)
class Experiment:
    """train(recipe, seed, **settings) -> metrics, for all pairs of `recipes` and `seeds`; finished runs are not repeated."""

    train: Train
    recipes: Sequence[str]
    seeds: Sequence[int]
    settings: Mapping[str, Any]
    output: Path

    def results(self, jobs: int) -> list[Figures]:
        self.output.mkdir(parents=True, exist_ok=True)
        wanted = [(recipe, seed) for seed in self.seeds for recipe in self.recipes]
        missing = [pair for pair in wanted if not self._file(*pair).exists()]
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            futures = {
                pool.submit(self.train, recipe, seed, **self.settings): (recipe, seed)
                for recipe, seed in missing
            }
            for future in as_completed(futures):
                recipe, seed = futures[future]
                figures = {"recipe": recipe, "seed": seed, **future.result()}
                self._file(recipe, seed).write_text(json.dumps(figures), encoding="utf-8")
                print(figures, flush=True)
        return self.finished()

    def finished(self) -> list[Figures]:
        """The figures that are there."""
        files = [self._file(recipe, seed) for seed in self.seeds for recipe in self.recipes]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]

    def _file(self, recipe: str, seed: int) -> Path:
        return self.output / f"{recipe.replace('/', '+')}-seed{seed}.json"


def summarize(results: Sequence[Figures], metrics: Sequence[str], reference: str) -> list[Figures]:
    """A row per recipe: for each metric the mean, the deviation between seeds, the values, and the paired differences."""
    by_recipe: dict[str, dict[int, Figures]] = {}
    for figures in results:
        by_recipe.setdefault(figures["recipe"], {})[figures["seed"]] = figures
    rows = []
    for recipe, by_seed in by_recipe.items():
        row: Figures = {"recipe": recipe, "reference": reference, "seeds": list(by_seed)}
        for metric in metrics:
            values = [figures[metric] for figures in by_seed.values()]
            differences = [
                figures[metric] - by_recipe[reference][seed][metric]
                for seed, figures in by_seed.items()
                if seed in by_recipe[reference]
            ]
            row[metric] = statistics.mean(values)
            row[f"{metric}_deviation"] = statistics.stdev(values) if len(values) > 1 else 0.0
            row[f"{metric}_values"] = values
            row[f"{metric}_difference"] = statistics.mean(differences) if differences else None
            row[f"{metric}_differences"] = differences
        rows.append(row)
    return rows


def markdown(rows: Sequence[Figures], metrics: Sequence[str], places: int = 4) -> str:
    """The rows as a table: mean ± deviation, and the mean paired difference."""
    titles = [title for metric in metrics for title in (metric, "difference")]
    lines = ["| recipe | " + " | ".join(titles) + " |", "|---" * (1 + len(titles)) + "|"]
    for row in rows:
        cells = [f"`{row['recipe']}`"]
        for metric in metrics:
            difference = row[f"{metric}_difference"]
            cells.append(f"{row[metric]:.{places}f} ± {row[f'{metric}_deviation']:.{places}f}")
            cells.append("-" if difference is None else f"{difference:+.{places}f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
