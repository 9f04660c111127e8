"""What a run can learn, by the name in its configuration: running text, or the examples of a table."""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.tasks.causal_lm import CausalTask
from narrowgauge.train.tasks.classification import ClassificationTask
from narrowgauge.train.tasks.seq2seq import Seq2SeqTask
from narrowgauge.train.tasks.task import Drawn, Feed, Scorer, Task
from narrowgauge.train.tasks.text import TextTask

__all__ = ["Drawn", "Feed", "Scorer", "Task", "prepare"]

TASKS: dict[str, Callable[[TrainConfig], Task]] = {
    "text": TextTask.prepare,
    "causal-lm": CausalTask.prepare,
    "classification": ClassificationTask.prepare,
    "seq2seq": Seq2SeqTask.prepare,
}


def prepare(config: TrainConfig) -> Task:
    """Reads the data and encodes them, or finds them in the cache. Raises DataError and ConfigError for what is wrong."""
    return TASKS[config.task](config)
