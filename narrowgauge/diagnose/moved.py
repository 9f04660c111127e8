"""Former places of modules, which work for one release with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(former: str, place: str) -> Callable[[str], Any]:
    """`__getattr__` of a module that has moved: reads every name at its present place."""

    def read(name: str) -> Any:
        # The import system asks every module for such names.
        if name.startswith("__"):
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        warnings.warn(f"{former} is now {place}.", DeprecationWarning, stacklevel=3)
        return getattr(import_module(place), name)

    return read
