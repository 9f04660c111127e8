"""Finds the class of a task by its name, and imports the file of that task alone."""

from importlib import import_module

from narrowgauge.errors import ConfigError, closest
from narrowgauge.train.config.data_settings import TASKS
from narrowgauge.train.tasks.task import CLASSES, TrainTask


def task_class(name: str) -> type[TrainTask]:
    """Class of a task that `TASKS` lists; its file has the same name, with underscores."""
    if name not in TASKS:
        near = closest(name, TASKS, limit=1)
        raise ConfigError(
            f"task {name!r}: is none of {', '.join(TASKS)}.{f' Closest: {near}.' if near else ''}",
            code="task.unknown",
        )
    if name not in CLASSES:
        import_module(f"narrowgauge.train.tasks.{name.replace('-', '_')}")
    return CLASSES[name]
