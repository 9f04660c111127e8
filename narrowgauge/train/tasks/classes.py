"""Class names and their order, and notes on class frequencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import DataError
from narrowgauge.train.pretrained import ModelClass, own_configuration

if TYPE_CHECKING:
    from narrowgauge import data
    from narrowgauge.train.config.settings import TrainConfig

SHOWN_CLASSES = 10
MOST_CLASSES = 1000  # a column with more distinct labels probably holds texts or numbers
PROBLEM = "single_label_classification"  # `problem_type` of a transformers configuration
Classes = tuple[str, ...] | int  # names in id order, or the number of classes if labels are ids


def chosen_classes(
    config: TrainConfig, model_class: ModelClass, rows: Callable[[], Iterable[data.Record]]
) -> Classes:
    """Classes from the configuration, else from the training data.

    If a pretrained model has the same set of class names, the classes keep its order.

    rows  returns the rows of the table; the label column is enough
    """
    given = config.classes.strip()
    if given.isdecimal():
        return int(given)
    if given:
        return tuple(name.strip() for name in given.split(","))
    found = classes_of(rows(), config.data, config.column_of("label"))
    own = (
        getattr(own_configuration(config, model_class), "id2label", None) if config.model else None
    ) or {}
    names = tuple(str(own[place]) for place in sorted(own))
    # With another order, the trained classifier head would map each logit to a wrong class.
    if (
        isinstance(found, tuple)
        and all(isinstance(name, str) for name in found)
        and set(names) == set(found)
    ):
        return names
    return found


def classes_of(rows: Iterable[data.Record], source: str, column: str) -> Classes:
    """Distinct labels of a table: sorted names, or their number if they are 0, 1, ..., n - 1.

    Raises DataError for labels that are neither str nor int, empty, too many, fewer than two, or
    different only by spaces.
    """
    labels: dict[Any, str] = {}  # label -> row of its first occurrence
    for row in rows:
        label = row.values[column]
        # bool is a subclass of int: True would otherwise pass as label 1.
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise DataError(
                f"{row.origin}: label {label!r} in column {column!r} is neither text nor a whole number. Correct the row, or name "
                "another data.columns.label.",
                code="classes.label-type",
            )
        if isinstance(label, str) and not label.strip():
            raise DataError(
                f"{row.origin}: the label in column {column!r} is empty. Correct the row, or remove it.",
                code="classes.empty-label",
            )
        labels.setdefault(label, row.origin)
        if len(labels) > MOST_CLASSES:
            raise DataError(
                f"{source}: column {column!r} has more than {MOST_CLASSES:,} different labels up to {row.origin}. Name another "
                "data.columns.label, or list the classes.",
                code="classes.too-many",
            )
    if not labels:
        raise DataError(
            f"{source}: has no rows. Pass a file with examples.", code="classes.no-rows"
        )
    if len(labels) < 2:
        raise DataError(
            f"{source}: column {column!r} has one label, {next(iter(labels))!r}. Pass data with two at least.",
            code="classes.one-label",
        )
    for label, origin in labels.items():
        if isinstance(label, str) and label != label.strip() and label.strip() in labels:
            raise DataError(
                f"{origin}: label {label!r} in column {column!r} is {label.strip()!r} but for its spaces, and would be a class of its "
                "own. Correct the row.",
                code="classes.spaces",
            )
    numbers = {str(label) for label in labels}
    if numbers == set(map(str, range(len(numbers)))):
        return len(numbers)
    return tuple(sorted(labels, key=lambda label: (not isinstance(label, int), label)))


def names_of(classes: Classes) -> list[str]:
    """Class names as strings, in the order of the logits."""
    return list(map(str, classes if isinstance(classes, tuple) else range(classes)))


def with_labels(kind: ModelClass, names: Sequence[str], **options: Any) -> ModelClass:
    """Returns `kind` with num_labels, id2label and label2id set for these class names."""
    own = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: place for place, name in enumerate(names)},
    }
    return replace(kind, options={"num_labels": len(names), **own, **options})


def class_notes(train: Iterable[int], validation: Iterable[int], names: list[str]) -> list[str]:
    """Notes on the number of examples of each class.

    One note warns if all validation examples are of one class, because mcc is then always 0.
    """
    learnt, held_out = Counter(train), Counter(validation)
    shown = ", ".join(
        f"{name} {learnt[place]} and {held_out[place]}"
        for place, name in enumerate(names[:SHOWN_CLASSES])
    )
    more = f", and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
    notes = [f"Classes, with examples to train on and held out: {shown}{more}."]
    if len(held_out) == 1:
        notes.append(
            f"Every held-out example ({held_out.total()}) is of class {names[next(iter(held_out))]}, so mcc is 0 whatever the "
            "model says. Pass data.validation_data, or a larger data.validation_fraction."
        )
    return notes


def padding_id(config: TrainConfig, tokenizer: Any) -> int:
    """Token id by which a decoder finds the end of a text; DataError if there is none."""
    # Decoders of transformers classify the last token that is not pad_token_id.
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise DataError(
            f"{config.tokenizer or config.model}: the tokenizer has neither a padding nor an end-of-text token, and a decoder "
            "finds the end of a text by it. Set pad_token in its tokenizer_config.json.",
            code="classification.no-padding",
        )
    return int(found)
