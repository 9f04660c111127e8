"""Memory planner: predict the memory of a training step on any card.

The step is traced under fake tensors, on any machine.

    print(ng.plan(make_model, loss, optimizer, batch, card="h100"))     # see functions.py

The module itself is callable as that function, so that `import narrowgauge.ops.timing.cards` and
`ng.plan(...)` work together. The lower level:

    count(step, device)   trace two optimizer steps; `step` is a function that builds a `Step`:
                          model, loss, update
    replay(trace)         replay torch's caching allocator, for the memory that it reserves
"""

import sys
from types import ModuleType
from typing import Any

from narrowgauge.plan.allocator import CachingAllocator, OutOfMemory, replay
from narrowgauge.plan.count import PARTS, Count, Step, count
from narrowgauge.plan.functions import Plan, plan
from narrowgauge.plan.trace import Allocation, Trace

__all__ = [
    "PARTS", "Allocation", "CachingAllocator", "Count", "OutOfMemory", "Plan", "Step", "Trace", "count", "plan", "replay",
]  # fmt: skip


class _Callable(ModuleType):
    def __call__(self, *given: Any, **named: Any) -> Plan:
        return plan(*given, **named)


# A function named `plan` in the package would be replaced by this submodule at its first import.
sys.modules[__name__].__class__ = _Callable
