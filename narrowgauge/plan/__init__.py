"""What a run needs before it runs: memory, counted allocation by allocation under fake tensors on any machine, for any card.

    print(ng.plan(make_model, loss, optimizer, batch, card="h100"))     a training step given as functions (functions.py)

The module itself is that function, so that `import narrowgauge.ops.timing.cards` and `ng.plan(...)` go together. Below it:

step  a function that builds a `Step`: model, loss, update          count(step, device)   two optimizer steps of it
replay(trace)                                                       what torch's caching allocator reserves for them
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


sys.modules[__name__].__class__ = _Callable
