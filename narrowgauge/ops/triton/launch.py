"""Starting a kernel: on the device of its tensors, and without contraction of products and sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import refuse_wrappers


def launch(kernel: Any, programs: int, *arguments: Any, warps: int, **constants: Any) -> None:
    """Runs `kernel` by so many programs of so many warps; nothing where there are none."""
    if programs == 0:
        return
    tensors = list(_tensors(arguments))
    refuse_wrappers(*tensors)
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Those among them, and in tuples among them."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from _tensors(each)
