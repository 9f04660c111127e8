"""Training tasks: each file has a task's data, collation, loss, metrics and model.

CONTRIBUTING.md lists the files of a new task; read `regression` first.

`task_class` finds a task by its name. `table`, `reading` and `feed` are the parts that
tasks on a table share; `classes` is shared by the tasks that predict a class.
"""

from narrowgauge.train.tasks.task import Shape, StepBatch, TrainTask, task_class

__all__ = ["Shape", "StepBatch", "TrainTask", "task_class"]
