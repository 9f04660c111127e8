"""Optimizers of rules for tests that compare backends: every part of a rule counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from narrowgauge.optim import rules
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.optimizers import OPTIMIZERS


def build(name: str, parameters: Any, **options: Any) -> LowPrecisionOptimizer:
    """The optimizer of a rule at ten times its learning rate, with weight decay and all its flags."""
    rule = rules.RULES[name]
    flags = {each: True for each, value in rule.options.items() if isinstance(value, bool)}
    numbers = {"lr": 10 * rule.lr, "weight_decay": 0.1, **flags}
    return OPTIMIZERS[name](parameters, **(numbers | options))


# Rules that a kernel computes, and the backend that compares it.
NATIVE: dict[str, Callable[..., LowPrecisionOptimizer]] = {
    name: partial(build, name) for name, rule in rules.BUILT_IN.items() if "native" in rule.backends
}
TRITON: dict[str, Callable[..., LowPrecisionOptimizer]] = {
    name: partial(build, name) for name, rule in rules.BUILT_IN.items() if "triton" in rule.backends
}
