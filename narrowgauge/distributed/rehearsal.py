"""Forward passes of a pipeline's stage that are no micro-batch.

Before its first step, and when training and evaluation change places, a PipelineStage that was not told the shapes of its messages finds
them by running its module: torch 2.13 forward and backward on the first micro-batch, and behind the first stage on memory that nobody has
written; older ones on zeros. Windows would take their largest numbers from it, and random numbers would be those of another micro-batch.

torch says nowhere public which of its calls is a rehearsal. A stage calls its module for a micro-batch in the methods TRAINING alone, so
the caller is looked up (checked on torch 2.13).
"""

from __future__ import annotations

import inspect
import sys

from narrowgauge.errors import BackendError

STAGES = "torch.distributed.pipelining.stage"
TRAINING = ("forward_maybe_with_nosync", "forward_one_chunk")


def is_rehearsal() -> bool:
    """Whether a PipelineStage called the module that is running, and not for a micro-batch. False where none called it."""
    module = sys.modules.get(STAGES)
    if module is None:
        return False
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals is not module.__dict__:
        frame = frame.f_back
    if frame is None:
        return False
    if not any(hasattr(module.PipelineStage, name) for name in TRAINING):
        raise BackendError(
            f"distribute: PipelineStage of this torch has none of the methods {', '.join(TRAINING)}, so a micro-batch cannot be told "
            "from the pass that finds shapes. Use torch 2.13."
        )
    return frame.f_code.co_name not in TRAINING
