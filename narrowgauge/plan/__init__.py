"""What a run needs before it runs: memory, counted allocation by allocation under fake tensors on any machine, for any card.

step  a function that builds a `Step`: model, loss, update          count(step, device)   two optimizer steps of it
replay(trace)                                                       what torch's caching allocator reserves for them
"""

from narrowgauge.plan.allocator import CachingAllocator, OutOfMemory, replay
from narrowgauge.plan.count import PARTS, Count, Step, count
from narrowgauge.plan.trace import Allocation, Trace

__all__ = ["PARTS", "Allocation", "CachingAllocator", "Count", "OutOfMemory", "Step", "Trace", "count", "replay"]
