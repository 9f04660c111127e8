"""Every registry of the package, found by looking: what registers a kernel needs no line in a test."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

import narrowgauge.fuse
import narrowgauge.ops
import narrowgauge.optim
from narrowgauge.ops.registry import Registry


@cache
def registries() -> tuple[Registry[Any], ...]:
    """Of the modules of ops, optim and fuse, in the order of their names; where Triton is not installed, of those that do without."""
    found: dict[int, Registry[Any]] = {}
    for package in (narrowgauge.ops, narrowgauge.optim, narrowgauge.fuse):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                values = vars(importlib.import_module(module.name)).values()
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
            else:
                found |= {id(value): value for value in values if isinstance(value, Registry)}
    return tuple(found.values())
