"""Registry of training tasks, by the `task` name in a run's configuration.

Tasks are language modelling on running text, or learning from the examples of a table or of an
image folder.
"""

from narrowgauge.train.tasks.choices import ChoicesTask
from narrowgauge.train.tasks.classification import ClassificationTask
from narrowgauge.train.tasks.images import ImageTask
from narrowgauge.train.tasks.questions import QuestionsTask
from narrowgauge.train.tasks.regression import RegressionTask
from narrowgauge.train.tasks.tagging import TaggingTask
from narrowgauge.train.tasks.task import StepBatch, TrainTask
from narrowgauge.train.tasks.writing import CausalTask, Seq2SeqTask, TextTask

__all__ = ["TASKS", "StepBatch", "TrainTask"]

TASKS: dict[str, type[TrainTask]] = {
    task.name: task
    for task in (
        TextTask, CausalTask, ClassificationTask, Seq2SeqTask,
        QuestionsTask, TaggingTask, ChoicesTask,
        RegressionTask, ImageTask,
    )
}  # fmt: skip
