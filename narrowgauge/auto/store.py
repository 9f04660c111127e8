"""Measurements of `auto`, kept from run to run in $XDG_CACHE_HOME/narrowgauge/auto.json (~/.cache/narrowgauge).

    {"format": 1, "measured": {"device=... tokens=8192 ...": {"bf16": 0.0019, "fp8-row": 0.0012}}}

A file that cannot be read as this is ignored with a warning, and replaced by the next measurement. It is written under another name
and renamed, so that a reader sees a whole file; of two processes that write at once the later keeps what the earlier wrote, as far as
it had been written when it read. Nothing but speed depends on it: a run's decisions stand in its own folder.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.ops.cpp.build import cache_folder

FORMAT = 1


class Store:
    """One file of measurements."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_user(cls) -> Store:
        return cls(cache_folder() / "auto.json")

    def get(self, key: str, names: Sequence[str]) -> dict[str, float] | None:
        """The seconds of these candidates, or None if they were not all measured."""
        found = self._read().get(key)
        return None if found is None or set(found) != set(names) else found

    def put(self, key: str, seconds: dict[str, float]) -> None:
        """Keeps a measurement; warns if the folder cannot be written to, and measures again next time."""
        content = {"format": FORMAT, "measured": self._read(warn=False) | {key: seconds}}
        try:
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(name, self.path)
        except OSError as error:
            warnings.warn(f"{self.path}: measurements of recipe 'auto' are not kept: {error.strerror}.", stacklevel=2)

    def _read(self, warn: bool = True) -> dict[str, dict[str, float]]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError("no format 1")
            found = content["measured"]
            if not all(_is_measurement(key, value) for key, value in found.items()):
                raise ValueError("not a number of seconds")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
            if warn:
                warnings.warn(
                    f"{self.path}: is damaged ({type(error).__name__}) and was ignored; recipe 'auto' measures anew and "
                    "replaces it.",
                    stacklevel=2,
                )
            return {}
        return dict(found)


def _is_measurement(key: Any, value: Any) -> bool:
    return (
        isinstance(key, str)
        and isinstance(value, dict)
        and all(isinstance(s, float) and math.isfinite(s) and s > 0 for s in value.values())
    )
