"""Model folders: refusal of folders that would run code.

transformers loads safetensors when told to, but takes file names from the folder itself. An index
may name a pickle, config.json may name another weights file, and an adapter may hold a pickle. An
attention implementation may name a kernel to download and run. All cases are refused before
transformers opens the folder (checked with 5.23).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import cached_file, logging

from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading

INDEX = "model.safetensors.index.json"
PLAIN = re.compile(r"[^/\\]+\.safetensors")
NEXT = "Pass a folder or hub name of a model whose weights are safetensors and whose code is part of transformers."
# Files in the Hub's cache are symbolic links
OF_MODELS = reading.Kind(most_bytes=reading.GIB, step=NEXT, follow_links=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Disables transformers' progress bars and its table of missing weights.

    `pretrained` reports missing weights itself.
    """
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def refuse_foreign_code(where: str, sizes: Any) -> None:
    """Raises ConfigError if loading the model would run code.

    where  folder or Hub name
    sizes  its configuration
    """
    for part in (sizes, *(getattr(sizes, key, None) for key in getattr(sizes, "sub_configs", {}))):
        for key in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(part, key, None) or ""):
                raise _refusal(
                    where,
                    "config.json",
                    f"asks for the kernel {getattr(part, key)!r}, code from the Hub",
                )
    weights = getattr(sizes, "transformers_weights", None)
    if weights is not None and not PLAIN.fullmatch(str(weights).removesuffix(".index.json")):
        raise _refusal(
            where,
            "config.json",
            f"names the weights {weights!r}, which is no safetensors file beside it",
        )
    for name in {INDEX, *([str(weights)] if str(weights).endswith(".index.json") else [])}:
        path = file_of(where, name)
        if path is not None:
            _refuse_index(where, name, path)
    if file_of(where, "adapter_config.json") and not file_of(where, "adapter_model.safetensors"):
        raise _refusal(
            where, "adapter_config.json", "belongs to an adapter without adapter_model.safetensors"
        )


def _refuse_index(where: str, name: str, path: Path) -> None:
    index = reading.json_of(path, OF_MODELS)
    try:
        files = set(index["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise _refusal(
            where, name, f"is no index of weights: {type(error).__name__}: {error}"
        ) from error
    for file in sorted(map(str, files)):
        if not PLAIN.fullmatch(file):
            raise _refusal(
                where, name, f"names the weights {file!r}, which is no safetensors file beside it"
            )


def file_of(where: str, name: str) -> Path | None:
    """Path of a file in a folder, or of a Hub model (downloaded if necessary), or None."""
    if Path(where).is_dir():
        path = Path(where) / name
        return path if os.path.lexists(path) else None
    reasons = ("missing_entries", "connection_errors", "gated_repo")
    found = cached_file(
        where, name, **{f"_raise_exceptions_for_{reason}": False for reason in reasons}
    )
    return None if found is None else Path(found)


def _refusal(where: str, name: str, words: str) -> ConfigError:
    return ConfigError(f"model = {where!r}: {name} {words}. {NEXT}", code="model.file")
