"""Names of tensors in the checkpoints of a class of transformers, where the model has others.

transformers 5 holds the experts of a layer in one parameter, and writes a tensor for each expert.
These functions call its own conversion, and know no layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def expert_names(model: nn.Module, stack: str) -> dict[str, tuple[int, int]]:
    """Names of a stack's matrices in checkpoints of the class -> (expert, part of its rows).

    stack  name of a parameter [E, N, K]; empty if checkpoints hold it as one tensor

    transformers converts a small tensor of that name, whose numbers mark the places.
    """
    count = model.get_parameter(stack).shape[0]
    parts = 2 if "gate_up" in stack else 1
    # A plan has fake tensors, and the numbers are read here.
    with torch.device("cpu"), _disable_current_modes():
        marked = torch.arange(count * parts, dtype=torch.float32).reshape(count, parts, 1)
        found = reverted(model, {stack: marked})
        if stack in found or any(each.numel() != 1 for each in found.values()):
            return {}
        return {name: divmod(int(each), parts) for name, each in found.items()}


def reverted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names, and in the layouts, of the class's checkpoints."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 loads every weight as it is stored
        return tensors
    return dict(revert_weight_conversion(model, tensors))
