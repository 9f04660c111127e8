"""Reads Hugging Face data sets by name: hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT (default split: train).

NAME may also be a local folder that `datasets` loads. `datasets` downloads once into its cache. Code in a repository is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from narrowgauge.data.tables import checked_text, choose_column
from narrowgauge.data.text import Document, reason
from narrowgauge.errors import ConfigError, DataError

PREFIX = "hf:"
COLON = r":(?![^\[]*\])"  # not the colon in a slice, as in hf:NAME:train[:10%]
BATCH_ROWS = 256


def parse(source: str) -> tuple[str, str | None, str]:
    """(name, config, split) of 'hf:NAME[[:CONFIG]:SPLIT]'. Raises ConfigError."""
    name, *rest = re.split(COLON, source.removeprefix(PREFIX))
    if len(rest) > 2 or not all([name, *rest]):
        raise ConfigError(f"{source}: not of the form hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT.")
    return name, (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else "train")


def hub_documents(source: str, *, column: str | None) -> Iterator[Document]:
    """One document per row. Origin: source and row, from 1. Needs `datasets`. Raises ConfigError for a malformed name."""
    return _documents(source, *parse(source), column)


def _documents(source: str, name: str, config: str | None, split: str, column: str | None) -> Iterator[Document]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{source}: this needs the package datasets. Run: pip install datasets.") from None
    try:
        found: Any = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises its own, the Hub's, Arrow's and the network's exceptions
        raise DataError(
            f"{source}: datasets cannot load it: {type(error).__name__}: {reason(error)} "
            "Check the name, the config, the split and the connection, or download the files and pass a glob."
        ) from error
    texts = [name for name, kind in found.features.items() if "string" in str(getattr(kind, "dtype", ""))]
    column = choose_column(column, list(found.features), texts, source)
    values = (value for batch in found.select_columns([column]).iter(BATCH_ROWS) for value in batch[column])
    for row, value in enumerate(values, 1):
        yield Document(checked_text(value, column, f"{source} row {row}"), f"{source} row {row}")
