"""Detect optimizer settings that train without an error but lose updates in low precision.

    second moment in bfloat16, beta2 >= 0.99   v changes by less than half a unit per step and never
                                               decays; with beta2 = 0.999 a rising v stops at about
                                               a quarter of its value
    bfloat16 weights without a master          updates below 1/512 of a weight are lost
    float16 weights or moments                 g^2 below 6e-8 is zero, and so is eps = 1e-8

The checks accept any torch optimizer and run before the first step. Optimizers of narrowgauge
refuse such settings in their constructor, or round stochastically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError
from narrowgauge.optim.base import LowPrecisionOptimizer

_LARGEST_BETA2 = 0.99


def silent_failures(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return one sentence for each kind of failure; the list is empty if none was found.

    Only dtypes and betas are inspected, never values.
    """
    if isinstance(optimizer, LowPrecisionOptimizer):
        return []
    # Option name in torchao's optimizers.
    option = "bf16_stochastic_round"
    stochastic = getattr(optimizer, option, False) or optimizer.defaults.get(option, False)
    found: dict[str, None] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found |= dict.fromkeys(
                _of_parameter(parameter, group, optimizer.state.get(parameter, {}), stochastic)
            )
    return list(found)


def refuse_silent_failures(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError with all reasons of `silent_failures`."""
    if reasons := silent_failures(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__}: {' '.join(reasons)} Use narrowgauge.optim.AdamW with master='bf16-remainder' or "
            "'stochastic', or keep the weights in float32.",
            code="optim.unfit",
        )


def _of_parameter(
    parameter: Tensor, group: dict[str, Any], state: dict[str, Any], stochastic: bool
) -> list[str]:
    reasons = []
    name = str(parameter.dtype).removeprefix("torch.")
    if parameter.dtype in (torch.bfloat16, torch.float16) and not stochastic:
        part = 512 if parameter.dtype == torch.bfloat16 else 4096
        reasons.append(
            f"Weights in {name} without a master lose every update below 1/{part} of the weight."
        )
    beta2 = group["betas"][1] if "betas" in group and len(group["betas"]) > 1 else None
    second = state.get("exp_avg_sq")
    # torch allocates states in the dtype of the parameter.
    kept = second.dtype if isinstance(second, Tensor) else parameter.dtype
    if (
        beta2 is not None
        and ("eps" in group)
        and kept == torch.bfloat16
        and beta2 >= _LARGEST_BETA2
    ):
        reasons.append(
            f"A second moment in bfloat16 with beta2 = {beta2} does not decay: a step changes it by {1 - beta2:.2g}, half a "
            "unit of bfloat16 is 0.002 to 0.004."
        )
    if kept == torch.float16 and "eps" in group and group["eps"] < 6e-8:
        reasons.append(
            f"In float16 eps = {group['eps']} is zero, and so is the square of a gradient below 2.4e-4."
        )
    return reasons
