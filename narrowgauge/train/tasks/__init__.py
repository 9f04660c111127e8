"""Training tasks: each file has a task's data, collation, loss, metrics and model.

A new task touches four files:

    train/tasks/NAME.py            its columns (a `Task`) and its `TrainTask`; read `regression` first
    train/config/data_settings.py  its entry in `TASKS`, and the settings that only it reads
    tests/train/tasks/test_NAME.py its tests, and `job(place)`, with which all tasks are tested
    docs/training.md               its row in the table of tasks

`task_class` finds a task by its name. `table`, `reading` and `feed` are the parts that
tasks on a table share; `classes` is shared by the tasks that predict a class.
"""

from narrowgauge.train.tasks.task import Shape, StepBatch, TrainTask, task_class

__all__ = ["Shape", "StepBatch", "TrainTask", "task_class"]
