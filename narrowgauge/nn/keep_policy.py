"""Detect inputs of a Linear that autograd saves anyway, such as the output of attention or relu.

Saving codes of such an input would add memory beside the input itself. Backward recomputes the
codes instead, bit-identical: 1 byte per element less, for one more cast. Detection follows the
names of autograd nodes from the input back through views of the same memory. Saved tensors are not
read: hooks (checkpointing, offloading) would answer by recomputing or copying.

A CPU saves the input also where the codes of x.T need their own cast. Encoding and decoding those
codes takes longer on a CPU than casting x.T in backward (`LinearContext.keeps_x`).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Nodes whose output is a view of their input.
VIEWS = (
    "ViewBackward",
    "UnsafeViewBackward",
    "TransposeBackward",
    "ReshapeAliasBackward",
    "PermuteBackward",
    "AliasBackward",
)
# Nodes whose backward reads their own output.
KEEPERS = ("ScaledDotProduct", "ReluBackward", "TanhBackward", "SigmoidBackward", "SoftmaxBackward")
LONGEST = 8  # chain of views that is followed


def stays(x: Tensor) -> bool:
    """True if x is a view of a tensor that the function before it saves for backward.

    False while saved-tensor hooks are active, since they may not store tensors as they are.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    node = x.grad_fn
    for _ in range(LONGEST):
        if node is None:
            return False
        name = node.name()
        if name.startswith(KEEPERS):
            return True
        if not name.startswith(VIEWS):
            return False
        node = node.next_functions[0][0]
    return False
