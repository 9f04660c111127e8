"""The metrics of an evaluation: one table for a run's records, its best weights, and its pages.

A metric that is not in the table counts as a score from -1 to 1, and its name is its title. It can
select the best weights, but no page draws it: a task with a new metric adds a row here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of an evaluation.

    title            its name in a heading
    least, largest   range of its values, without rounding
    lower_is_better  False for scores
    """

    title: str
    least: float = 0.0
    largest: float = 1.0
    lower_is_better: bool = False


METRICS = {
    "loss": Metric(title="loss", largest=math.inf, lower_is_better=True),
    "perplexity": Metric(title="perplexity", largest=math.inf, lower_is_better=True),
    "accuracy": Metric(title="accuracy"),
    "mcc": Metric(title="MCC", least=-1.0),
    "f1": Metric(title="f1"),
    "f1_binary": Metric(title="F1 of the second class"),
    "exact_match": Metric(title="exact match"),
    "precision": Metric(title="precision"),
    "recall": Metric(title="recall"),
    "pearson": Metric(title="Pearson’s correlation", least=-1.0),
    "spearman": Metric(title="Spearman’s correlation", least=-1.0),
    "bleu": Metric(title="BLEU", largest=100.0),
    "chrf": Metric(title="chrF", largest=100.0),
}
# In the order in which pages show them.
SCORES = tuple(name for name, metric in METRICS.items() if not metric.lower_is_better)


def metric_of(name: str) -> Metric:
    """The metric of that name, in the table or not."""
    return METRICS.get(name) or Metric(title=name, least=-1.0)


# Runs before November 2026 record no `loss_unit`; a new task has no entry here.
OLD_LOSS_UNITS = {
    "classification": "nats/example", "question-answering": "nats/border", "tagging": "nats/word", "multiple-choice": "nats/question",
    "image-classification": "nats/example", "regression": "squared error",
}  # fmt: skip


def loss_unit_of(run: Mapping[str, Any]) -> str:
    """The unit of a run's loss, as "nats/token"; `run` is its run.json."""
    return str(run.get("loss_unit") or OLD_LOSS_UNITS.get(run.get("task", ""), "nats/token"))
