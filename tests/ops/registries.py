"""Every registry of the package, found by looking: what registers a kernel needs no line in a test."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import narrowgauge.ops
import narrowgauge.optim
from narrowgauge.ops.registry import Registry


def registries() -> list[Registry[Any]]:
    """Of the modules of ops and optim, in the order of their names; modules that hold Triton kernels alone are not imported."""
    found: dict[int, Registry[Any]] = {}
    for package in (narrowgauge.ops, narrowgauge.optim):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.rpartition(".")[2].startswith(
                ("triton_", "kernel", "moment_codes", "elements", "scales", "noise")
            ):
                values = vars(importlib.import_module(module.name)).values()
                found |= {id(value): value for value in values if isinstance(value, Registry)}
    return list(found.values())
