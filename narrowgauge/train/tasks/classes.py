"""Which classes there are, in what order, and what a run says of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from narrowgauge import data
from narrowgauge.errors import DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.model import ModelClass, own_configuration

SHOWN_CLASSES = 10
MOST_CLASSES = 1000  # more distinct labels than that are hardly classes, but texts or numbers
PROBLEM = "single_label_classification"  # as configurations of transformers call it
Classes = tuple[str, ...] | int  # names in the order of their ids, or how many where the data holds ids


def chosen_classes(config: TrainConfig, model_class: ModelClass, rows: Callable[[], Iterable[data.Record]]) -> Classes:
    """The classes as configured; else those of the training data, in the model's own order if it was trained on the same.

    rows  with the column of labels at least
    """
    given = config.classes.strip()
    if given.isdecimal():
        return int(given)
    if given:
        return tuple(name.strip() for name in given.split(","))
    found = classes_of(rows(), config.data, config.label_column)
    own = (getattr(own_configuration(config, model_class), "id2label", None) if config.model else None) or {}
    names = tuple(str(own[place]) for place in sorted(own))
    if isinstance(found, tuple) and all(isinstance(name, str) for name in found) and set(names) == set(found):
        return names
    return found


def classes_of(rows: Iterable[data.Record], source: str, column: str) -> Classes:
    """The distinct labels of a table: sorted names, or how many where they are the numbers 0, 1, ... without a gap."""
    labels: dict[Any, str] = {}  # to where it stands first
    for row in rows:
        label = row.values[column]
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise DataError(
                f"{row.origin}: label {label!r} in column {column!r} is neither text nor a whole number. Correct the row, or name "
                "another label_column."
            )
        if isinstance(label, str) and not label.strip():
            raise DataError(f"{row.origin}: the label in column {column!r} is empty. Correct the row, or remove it.")
        labels.setdefault(label, row.origin)
        if len(labels) > MOST_CLASSES:
            raise DataError(
                f"{source}: column {column!r} has more than {MOST_CLASSES:,} different labels up to {row.origin}. Name another "
                "label_column, or list the classes."
            )
    if not labels:
        raise DataError(f"{source}: has no rows. Pass a file with examples.")
    if len(labels) < 2:
        raise DataError(
            f"{source}: column {column!r} has one label, {next(iter(labels))!r}. Pass data with two at least."
        )
    for label, origin in labels.items():
        if isinstance(label, str) and label != label.strip() and label.strip() in labels:
            raise DataError(
                f"{origin}: label {label!r} in column {column!r} is {label.strip()!r} but for its spaces, and would be a class of its "
                "own. Correct the row."
            )
    numbers = {str(label) for label in labels}
    if numbers == set(map(str, range(len(numbers)))):
        return len(numbers)
    return tuple(sorted(labels, key=lambda label: (not isinstance(label, int), label)))


def names_of(classes: Classes) -> list[str]:
    return list(map(str, classes if isinstance(classes, tuple) else range(classes)))


def labelled(kind: ModelClass, names: Sequence[str], **options: Any) -> ModelClass:
    """Models of a kind that know the names of their classes."""
    own = {"id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)}}
    return replace(kind, options={"num_labels": len(names), **own, **options})


def class_notes(train: Iterable[int], validation: Iterable[int], names: list[str]) -> list[str]:
    """How many examples of each class there are, and what that makes of the metrics."""
    learnt, held_out = Counter(train), Counter(validation)
    shown = ", ".join(
        f"{name} {learnt[place]} and {held_out[place]}" for place, name in enumerate(names[:SHOWN_CLASSES])
    )
    more = f", and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
    notes = [f"Classes, with examples to train on and held out: {shown}{more}."]
    if len(held_out) == 1:
        notes.append(
            f"Every held-out example ({held_out.total()}) is of class {names[next(iter(held_out))]}, so mcc is 0 whatever the "
            "model says. Pass validation_data, or a larger validation_fraction."
        )
    return notes
