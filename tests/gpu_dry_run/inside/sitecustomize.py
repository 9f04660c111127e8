"""Runs at the start of every Python process over the empty CUDA runtime: lets `hooks` change modules once they are imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

from tests.gpu_dry_run.hooks import AFTER


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls AFTER[name](module) when the module has been imported."""

    def __init__(self):
        self.looking = set()  # names that find_spec below asks the other finders for

    def find_spec(self, name, path=None, target=None):
        if name not in AFTER or name in self.looking:
            return None
        self.looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking.discard(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                AFTER[name](module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterImport())
