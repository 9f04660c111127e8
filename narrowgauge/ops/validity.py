"""The one key by which casts of a tensor are kept: of weights, inputs and gradients, and those that an optimizer's step leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import identity

Key = tuple[Any, ...]


def validity(tensor: Tensor) -> Key | None:
    """Differs from an earlier one if the tensor was written, moved or replaced since; None: it has no version to go by.

    What is made in inference mode cannot be saved for backward, so the mode is a part of it. It does not see what is written through a
    raw pointer or `.data`; and memory that was freed may come back, so whoever compares keys holds the tensor.
    """
    if tensor.is_inference():
        return None
    place = tensor.device, identity(tensor), tensor.dtype, tensor.shape, tensor.stride()
    return (tensor._version, *place, torch.is_inference_mode_enabled())
