"""Which inputs of a Linear are kept for backward whatever the Linear keeps: outputs of attention or relu, which their own gradients read.

Codes of such an input would be kept beside it. They are made again in backward instead, to the same bits: 1 byte per element less, for
one more cast of it. Told by the names of autograd's functions, from the input back through views of the same memory; nothing that is
saved is looked at, which hooks (checkpointing, offloading) would answer by computing or copying.

A CPU keeps the input as well where codes of x.T are a cast of their own: making and decoding them takes longer there than casting x.T in
backward (`LinearContext.keeps_x`).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Views, by what torch calls their functions: no copy lies between their input and output.
VIEWS = (
    "ViewBackward",
    "UnsafeViewBackward",
    "TransposeBackward",
    "ReshapeAliasBackward",
    "PermuteBackward",
    "AliasBackward",
)
KEEPERS = ("ScaledDotProduct", "ReluBackward", "TanhBackward", "SigmoidBackward", "SoftmaxBackward")
LONGEST = 8  # views in a row


def stays(x: Tensor) -> bool:
    """Whether x is a view of what its maker keeps. False while hooks take saved tensors, which may not keep them as they are."""
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
