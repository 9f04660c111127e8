"""Model folders of others: what would run their code, or read a pickle, is refused before transformers opens it.

transformers loads safetensors when told to, but takes file names from the folder itself: an index may name a pickle, the
configuration another file of weights, an adapter a pickle of its own, or attention a kernel that is downloaded and run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError

INDEX = "model.safetensors.index.json"
PLAIN = re.compile(r"[^/\\]+\.safetensors")
NEXT = "Pass a folder or hub name of a model whose weights are safetensors and whose code is part of transformers."


def refuse_foreign_code(where: str, sizes: Any) -> None:
    """ConfigError for a model `where`, a folder or hub name, that would run code. sizes: its configuration."""
    for part in _configurations(sizes):
        for key in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(part, key, None) or ""):
                raise _refusal(where, "config.json", f"asks for the kernel {getattr(part, key)!r}, code from the Hub")
    weights = getattr(sizes, "transformers_weights", None)
    if weights is not None and not PLAIN.fullmatch(str(weights).removesuffix(".index.json")):
        raise _refusal(where, "config.json", f"names the weights {weights!r}, which is no safetensors file beside it")
    for name in {INDEX, *([str(weights)] if str(weights).endswith(".index.json") else [])}:
        path = _file(where, name)
        if path is not None:
            _refuse_index(where, name, path)
    adapter = _file(where, "adapter_config.json")
    if adapter is not None and _file(where, "adapter_model.safetensors") is None:
        raise _refusal(where, "adapter_config.json", "belongs to an adapter without adapter_model.safetensors")


def _configurations(sizes: Any) -> Iterator[Any]:
    yield sizes
    for key in getattr(sizes, "sub_configs", {}):
        yield getattr(sizes, key, None)


def _refuse_index(where: str, name: str, path: Path) -> None:
    try:
        files = set(json.loads(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(where, name, f"is no index of weights: {type(error).__name__}: {error}") from error
    for file in sorted(map(str, files)):
        if not PLAIN.fullmatch(file):
            raise _refusal(where, name, f"names the weights {file!r}, which is no safetensors file beside it")


def _file(where: str, name: str) -> Path | None:
    """The file of a folder, or of a hub model, downloaded if need be; None if there is none."""
    if Path(where).is_dir():
        path = Path(where) / name
        return path if path.exists() or path.is_symlink() else None
    from transformers.utils import cached_file

    found = cached_file(
        where,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)


def _refusal(where: str, name: str, words: str) -> ConfigError:
    return ConfigError(f"model = {where!r}: {name} {words}. {NEXT}")
