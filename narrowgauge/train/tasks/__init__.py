"""What a run can learn, by the name in its configuration: running text, or the examples of a table."""

from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.tasks.classification import ClassificationTask
from narrowgauge.train.tasks.task import Feed, TrainTask
from narrowgauge.train.tasks.text import TextTask
from narrowgauge.train.tasks.writing import CausalTask, Seq2SeqTask

__all__ = ["Feed", "TrainTask", "prepare"]

TASKS: dict[str, type[TrainTask]] = {
    task.name: task for task in (TextTask, CausalTask, ClassificationTask, Seq2SeqTask)
}


def prepare(config: TrainConfig) -> TrainTask:
    """Reads the data and encodes them, or finds them in the cache. Raises DataError and ConfigError for what is wrong."""
    return TASKS[config.task].prepare(config)
