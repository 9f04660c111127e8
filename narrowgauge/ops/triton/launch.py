"""Starting a kernel: on the device of its tensors, and without contraction of products and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import refuse_wrappers


def launch(kernel: Any, programs: int, *arguments: Any, warps: int, **constants: Any) -> None:
    """Runs `kernel` by so many programs of so many warps; nothing where there are none."""
    if programs == 0:
        return
    refuse_wrappers(*arguments)
    first = next(argument for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device_of(first):
        kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
