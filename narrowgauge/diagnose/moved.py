"""Former places of modules, by the version that moved them; they work with a DeprecationWarning.

No file stands where a module used to be. `serve` puts a finder at the end of `sys.meta_path`, which
answers for the names of this table alone. `narrowgauge.diagnose` and `narrowgauge.train`, the parents
of all former names, call it. Remove both with the table; CONTRIBUTING.md, "Former names", says when.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED_IN: dict[str, dict[str, str]] = {
    "0.1.0": {
        "narrowgauge.diagnose.blame": "narrowgauge.lab.blame",
        "narrowgauge.diagnose.guard.evidence": "narrowgauge.lab.guard.evidence",
        "narrowgauge.train.blame_checkpoint": "narrowgauge.lab.blame_checkpoint",
        "narrowgauge.train.blamed": "narrowgauge.lab.blamed",
        "narrowgauge.train.probe": "narrowgauge.lab.probe",
        "narrowgauge.train.study.plan": "narrowgauge.lab.study.plan",
        "narrowgauge.train.study.runner": "narrowgauge.lab.study.runner",
        "narrowgauge.train.transformers_trainer": "narrowgauge.lab.transformers_trainer",
    },
}
PLACES = {former: place for moved in MOVED_IN.values() for former, place in moved.items()}
PACKAGES = ("narrowgauge.diagnose.guard", "narrowgauge.train.study")  # had only modules that moved


class FormerPlaces:
    """Finder and loader of modules that read every name at their present place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PLACES and name not in PACKAGES:
            return None
        return ModuleSpec(name, self, is_package=name in PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """None: the import system makes an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        former = module.__name__
        if former in PACKAGES:
            return
        place = PLACES[former]

        def read(name: str) -> Any:
            # The import system asks every module for such names.
            if name.startswith("__"):
                raise AttributeError(f"module {former!r} has no attribute {name!r}")
            warnings.warn(f"{former} is now {place}.", DeprecationWarning, stacklevel=2)
            return getattr(import_module(place), name)

        module.__getattr__ = read  # type: ignore[method-assign]


def serve() -> None:
    """Make the former names importable."""
    if not any(isinstance(each, FormerPlaces) for each in sys.meta_path):
        sys.meta_path.append(FormerPlaces())
