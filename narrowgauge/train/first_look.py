"""Checks of model and data that need no torch, before it is imported.

torch and transformers take seconds to import; a mistyped name of a file, a column or a model is
found in a tenth of a second by the first row of the data. The reading of the whole checks all of it
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.data import hub, row_forms, sources
from narrowgauge.data.tables import TABLES
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.config.settings import TASKS

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

LARGEST_JSON = 2**24  # bytes of a .json file, which is read whole


def refuse(config: TrainConfig) -> None:
    """Raise the error of a run whose model or data are not there, or lack a column."""
    refuse_model(config)
    for key, source in (("data", config.data), ("data.validation_data", config.validation_data)):
        if source:
            _refuse_data(config, key, source)


def refuse_model(config: TrainConfig) -> None:
    """Raise ConfigError or DataError for a model or a tokenizer that is in no place."""
    for key, where in (("model", config.model), ("data.tokenizer", config.tokenizer)):
        if where:
            refuse_place(key, where)
            hub.options(where, key)


def refuse_place(key: str, where: str) -> None:
    """Raise ConfigError for a path where no folder is, and for an adapter without its model."""
    if where.startswith((".", "/", "~")) and not Path(where).expanduser().is_dir():
        raise ConfigError(
            f"{key} = {where!r}: no such folder. Pass a folder with config.json, or a model's name on the Hub.",
            code="model.no-folder",
        )
    if (Path(where) / "adapter_config.json").exists() and not (
        Path(where) / "config.json"
    ).exists():
        raise ConfigError(
            f"{key} = {where!r}: holds an adapter and no model. Train it with merge, which writes the whole model to merged/, and "
            "name that.",
            code="model.adapter",
        )


def form_of_data(config: TrainConfig) -> row_forms.RowForm | None:
    """The form of the first row, unless the table has the columns that the task reads by default."""
    found = [] if config.header else sources.columns_in(config.data)
    columns = TASKS[config.task].columns_read(config)
    return None if {*columns.values()} <= {*found} else row_forms.form_of(found)


def _refuse_data(config: TrainConfig, key: str, source: str) -> None:
    entry = TASKS[config.task]
    if source == sources.STDLIB or (entry.source == "images" and not Path(source).is_file()):
        return  # a folder of pictures, or the name of a data set
    if source.startswith(sources.HUB):
        name, *_ = sources.parse_hub_name(source)
        return hub.refuse_data_set(f"{key} = {source!r}", name)
    try:
        first = sources.files_of(source)[0]
    except DataError as error:
        raise of_setting(key, source, error) from None
    if not _is_table(first) or (entry.source == "table" and _has_other_form(config)):
        return
    for setting, column in _columns(config):
        try:
            next(_rows(config, first, column), None)
        except DataError as error:
            raise (
                error
                if error.code != "table.no-column"
                else of_setting(setting, column, error, f"no column {column!r}")
            ) from None


def _columns(config: TrainConfig) -> list[tuple[str, str]]:
    """(setting, column) of the columns that are read; ("data.column", "") if none is named."""
    entry = TASKS[config.task]
    if entry.source == "text":
        return [("data.column", config.column)]
    return [
        (f"data.columns.{name.partition(' ')[0]}", column)
        for name, column in entry.columns_read(config).items()
    ]


def _rows(config: TrainConfig, path: Path, column: str) -> Iterator[object]:
    if TASKS[config.task].source == "text":
        return sources.documents(path, column=column or None)
    header = [name.strip() for name in config.header.split(",")] if config.header else None
    return sources.records(path, [column], header=header)


def _is_table(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix == ".json":
        return path.stat().st_size <= LARGEST_JSON
    # pyarrow takes longer to import than it saves here.
    return suffix in TABLES and suffix != ".parquet"


def _has_other_form(config: TrainConfig) -> bool:
    return (
        config.task == "causal-lm" and not config.names_columns and form_of_data(config) is not None
    )


def of_setting(key: str, value: str, error: DataError, doubled: str = "") -> DataError:
    """The same error, which names the setting to change and the value once."""
    words = str(error).removeprefix(f"{value}: ")
    if doubled:
        words = words.replace(doubled, "no such column")
    return DataError(f"{key} = {value!r}: {words}", code=error.code)
