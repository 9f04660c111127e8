"""act_cast in plain torch: the definition, by torch's own activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.ops.norm_act.spec import CastRequest, CastResult, Kind, cast


def value(kind: Kind, tensors: Sequence[Tensor]) -> Tensor:
    """y [rows, columns], in the dtype that torch's promotion gives it."""
    if kind.name == "swiglu":
        return torch.nn.functional.silu(tensors[0]) * tensors[1]
    return torch.nn.functional.gelu(tensors[0], approximate="tanh" if kind.name == "gelu-tanh" else "none")


def act_cast(kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None) -> tuple[CastResult, tuple[()]]:
    """See `ops.norm_act`."""
    return cast(value(kind, tensors), request), ()
