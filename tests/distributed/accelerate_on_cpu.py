"""Runs a script with an Accelerate that shards on the CPU: accelerate_on_cpu.py SCRIPT [OPTIONS]

Accelerate makes shards of a model on accelerators alone; ranks on a CPU get copies, whatever was asked for. All that it asks is the kind
of its ranks, so here ranks on a CPU say that they are on GPUs.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

given = PartialState.__init__


def as_if_on_gpus(self: PartialState, *args: Any, **named: Any) -> None:
    given(self, *args, **named)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = as_if_on_gpus  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
