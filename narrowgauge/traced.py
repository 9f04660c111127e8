"""What the forward of an autograd function hands out while torch.compile traces it.

Dynamo of torch 2.11 passes zero to the backward of a function whose forward wrote in place into the very tensor that it returns, and
says nothing: every gradient behind it is zero. 2.13 does not. A view of that tensor is another one for it, and costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def handed_out(y: Tensor) -> Tensor:
    """y, as a view while torch.compile traces. In eager mode y itself: a view may not be changed in place by who receives it."""
    return y.view(y.shape) if torch.compiler.is_compiling() else y
