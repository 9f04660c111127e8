"""Disk cache of plan answers in the user's cache folder.

A repeated question needs no trace and no import of torch. An entry's key covers the question, the
versions of narrowgauge, torch, transformers and Python, and the size and modification time of
narrowgauge's sources. A damaged or unwritable entry counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import StorageError
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

KEPT = 500  # entries at most; the oldest are removed first
TELLING = ("config.json", "tokenizer.json", "tokenizer_config.json")  # files that affect a trace
# only_own: an entry that another user could write is ignored.
ENTRY = reading.Kind(
    most_bytes=16 * reading.MIB, error=StorageError, step="Remove it.", only_own=True
)
TELLS = reading.Kind(
    most_bytes=reading.GIB, error=StorageError, step="Name another model.", follow_links=True
)
# Tables whose settings cannot affect memory.
WITHOUT_MEMORY = ("", "evaluation", "checkpoint", "log", "guard")


def load(question: Any) -> Any:
    """Cached answer to an equal question, or None."""
    path = _path(question)
    try:
        if path is None:
            return None
        entry = reading.json_of(path, ENTRY)
        # The digest detects entries that were cut short or edited.
        return entry["answer"] if entry["digest"] == _digest(entry["answer"]) else None
    except (StorageError, KeyError, TypeError):
        return None


def store(question: Any, answer: Any) -> None:
    """Caches a JSON answer. If two processes write one entry, the last one wins."""
    path = _path(question)
    if path is None:
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_text(
            json.dumps({"answer": answer, "digest": _digest(answer)}), encoding="utf-8"
        )
        # Regardless of the umask: `load` rejects files that others can write.
        draft.chmod(0o600)
        # Atomic: a concurrent `load` sees the old entry or the new one.
        os.replace(draft, path)
        for old in sorted(path.parent.glob("*.json"), key=lambda each: -each.stat().st_mtime)[
            KEPT:
        ]:
            old.unlink(missing_ok=True)
    except OSError:
        draft.unlink(missing_ok=True)


def question_of(config: TrainConfig) -> dict[str, Any]:
    """Settings that can affect memory, as JSON, with digests of the model's files."""
    kept = {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.metadata["table"] not in WITHOUT_MEMORY
    }
    return kept | {
        "layers_recipe": dict(config.layers_recipe),
        "folders": [_of_folder(config.model), _of_folder(config.tokenizer)],
    }


def _of_folder(name: str) -> list[str]:
    """Digests of the files in a model's or tokenizer's folder that affect a trace.

    '' stands for a missing file, as for a model named on the Hub.
    """
    return [_of_file(Path(name).expanduser() / each) for each in TELLING] if name else []


def _of_file(path: Path) -> str:
    try:
        return hashlib.sha256(reading.bytes_of(path, TELLS)).hexdigest()
    except StorageError:
        return ""


def folder() -> Path | None:
    """$XDG_CACHE_HOME/narrowgauge/plans; None for a user without a home folder."""
    try:
        return (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "narrowgauge"
            / "plans"
        )
    except RuntimeError:
        return None


def _path(question: Any) -> Path | None:
    own = folder()
    return None if own is None else own / f"{_digest([question, _library()])}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def _library() -> list[Any]:
    """Versions and source files that a trace depends on."""
    sources = Path(__file__).parents[2]
    files = sorted(path for path in sources.rglob("*.py") if "__pycache__" not in path.parts)
    # Size and mtime instead of contents, so that a lookup reads no source file.
    states = [
        (str(path.relative_to(sources)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
    ]
    return [
        platform.python_version(),
        *map(_version, ("narrowgauge", "torch", "transformers")),
        _digest(states),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
