"""Precisions of a training run: dtypes of weights, activations and updates.

Every precision combines with every recipe. The recipe casts the operands of the Linears, the
precision decides everything else. `table` prints the list for docs/recipes.md.

"O1", "O2" and "O3" are names from Apex (nvidia.github.io/apex/amp.html), also used in Colossal-AI.
Apex's O2, "almost FP16", casts the weights of all modules except batch norms, embeddings too, and
keeps float32 master weights. O3 casts all and keeps none. Transformers have other norms than batch
norms, so all norms and attention's softmax stay in float32 here. O3 here rounds updates
stochastically, because 16 bits would lose them. FP8 training in Colossal-AI is O1 over O2:
`bf16-o2` with an fp8 recipe.

Users can name the modules that stay in float32, by kinds and patterns (`to_16_bits`), see
`nn.float32_modules`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from narrowgauge.errors import ConfigError, closest
from narrowgauge.nn.float32_modules import NORMS, SOFTMAX, to_16_bits


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One precision.

    weights       dtype of the model's parameters
    autocast      dtype for `torch.autocast`, or None for none
    update        "plain", "master" (float32 copies) or "stochastic" (stochastic rounding
                  without a copy); see `optim.masters`
    scales_loss   True if a GradScaler protects float16 gradients from underflow
    keeps         modules of a 16-bit model with float32 weights and arithmetic, see
                  `nn.float32_modules`
    """

    name: str
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    update: Literal["plain", "master", "stochastic"] = "plain"
    scales_loss: bool = False
    keeps: tuple[str, ...] = ()

    def context(self, device_type: str) -> AbstractContextManager[object]:
        """The autocast context of a forward pass on `device_type`."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)

    @property
    def computes_in(self) -> torch.dtype:
        """dtype of the activations."""
        return self.autocast or self.weights

    @property
    def bytes_per_parameter(self) -> int:
        """With AdamW: weight, gradient, master, two float32 moments."""
        return 2 * self.weights.itemsize + (4 if self.update == "master" else 0) + 8

    def keep_list(self, named: str = "") -> tuple[str, ...]:
        """Parse `named`, comma-separated; '' gives the precision's list, "none" an empty one."""
        if not named:
            return self.keeps
        return () if named == "none" else tuple(entry.strip() for entry in named.split(","))

    def prepare(self, model: nn.Module, named: str = "") -> tuple[str, ...]:
        """Cast the weights of `model`, in place; return the names of modules that stay in float32.

        Call it before `convert`. named: as in `keep_list`. Raises ConfigError for an entry that
        matches nothing.
        """
        return (
            ()
            if self.weights == torch.float32
            else to_16_bits(model, self.weights, self.keep_list(named))
        )


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32"),
        Precision(name="amp-bf16", autocast=torch.bfloat16),
        Precision(name="amp-fp16", autocast=torch.float16, scales_loss=True),
        Precision(name="bf16-o2", weights=torch.bfloat16, update="master", keeps=(NORMS, SOFTMAX)),
        Precision(name="bf16-o3", weights=torch.bfloat16, update="stochastic"),
    )
}


def get(name: str) -> Precision:
    """Return the precision called `name`. Raises ConfigError with the closest names."""
    if name not in PRECISIONS:
        near = closest(name, PRECISIONS) or ", ".join(PRECISIONS)
        raise ConfigError(
            f"precision.get: no precision {name!r}. Closest: {near}.", code="precision.unknown"
        )
    return PRECISIONS[name]


UPDATES = {
    "plain": "float32",
    "master": "float32 master weights, rounded after",
    "stochastic": "float32 arithmetic, stochastic rounding",
}


def table() -> str:
    """Table of all precisions in Markdown."""
    header = (
        "`--recipe.precision`",
        "weights",
        "kept in float32",
        "activations",
        "update",
        "bytes per parameter with AdamW",
    )
    rows = [header, ("---",) * len(header)]
    for each in PRECISIONS.values():
        weights, activations = (
            str(dtype).removeprefix("torch.") for dtype in (each.weights, each.computes_in)
        )
        kept = " and ".join(each.keeps) or (
            "nothing" if each.weights != torch.float32 else "all weights"
        )
        autocast = " autocast (O1)" if each.autocast is not None else ""
        update = UPDATES[each.update] + (", scaled gradients" if each.scales_loss else "")
        rows.append(
            (
                f"`{each.name}`",
                weights,
                kept,
                activations + autocast,
                update,
                str(each.bytes_per_parameter),
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
