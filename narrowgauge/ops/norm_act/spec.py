"""What a kernel of `produce` is chosen by. Kind, Order and Made: what is produced, the cast wanted of it, what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.ops.norm_act.triton_orders import KINDS, Kind, Made, Name, Order
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Cast

__all__ = ["KINDS", "Kind", "Made", "Name", "Order", "ProduceSpec"]


@dataclass(frozen=True)
class ProduceSpec:
    """What a kernel is chosen by: everything but the numbers.

    dtypes   of the tensors
    shape    of y
    casts    the casts that are wanted, with whether they are turned too
    """

    kind: Kind
    device: Device
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, int]
    casts: tuple[tuple[Cast, bool], ...] = ()
