"""The precision ladder: in which type weights are kept, activations computed, and updates made.

    name       weights   activations        update                                      bytes per parameter with AdamW
    fp32       float32   float32            float32                                     16
    amp-bf16   float32   bfloat16 (O1)      float32                                     16
    amp-fp16   float32   float16 (O1)       float32, gradients scaled by a GradScaler   16
    bf16-o2    bfloat16  bfloat16           float32 master weights, rounded after       16 (2 + 2 gradient + 4 + 8)
    bf16-o3    bfloat16  bfloat16           in float32, rounded stochastically          12 (2 + 2 gradient + 8)

Every precision combines with every recipe: the recipe decides the operands of the Linears, the precision all else. "O1" and "O2" are the
names of Apex and Colossal-AI. FP8 training there is O1 over O2: `bf16-o2` with an fp8 recipe.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.errors import ConfigError, closest


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One precision.

    weights       dtype that the model's parameters are kept in
    autocast      dtype for `torch.autocast`, or None for none
    update        "plain", "master" (float32 copies) or "stochastic" (rounded so, without a copy); see `optim.masters`
    scales_loss   whether a GradScaler keeps float16 gradients from underflowing
    """

    name: str
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    update: Literal["plain", "master", "stochastic"] = "plain"
    scales_loss: bool = False

    def context(self, device_type: str) -> AbstractContextManager[object]:
        """The autocast context of a forward pass on `device_type`."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)

    @property
    def computes_in(self) -> torch.dtype:
        """dtype of the activations."""
        return self.autocast or self.weights


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32"),
        Precision(name="amp-bf16", autocast=torch.bfloat16),
        Precision(name="amp-fp16", autocast=torch.float16, scales_loss=True),
        Precision(name="bf16-o2", weights=torch.bfloat16, update="master"),
        Precision(name="bf16-o3", weights=torch.bfloat16, update="stochastic"),
    )
}


def get(name: str) -> Precision:
    """The precision called `name`. Raises ConfigError with the closest names."""
    if name not in PRECISIONS:
        near = closest(name, PRECISIONS) or ", ".join(PRECISIONS)
        raise ConfigError(f"precision.get: no precision {name!r}. Closest: {near}.")
    return PRECISIONS[name]
