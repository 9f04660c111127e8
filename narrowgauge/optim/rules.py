"""The update rules, as pure functions of float32 tensors: (weight, gradient, moments) -> (weight, moments).

    AdamW (arXiv 1711.05101)   m <- m + (1 - b1)(g - m);  v <- b2 v + (1 - b2) g^2
                               w <- (1 - lr wd) w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    Lion (arXiv 2302.06675)    c = m + (1 - b1)(g - m);  w <- (1 - lr wd) w - lr sign(c);  m <- m + (1 - b2)(g - m)
    SGD, as torch.optim.SGD    d = g + wd w;  m <- mu m + d;  w <- w - lr (d + mu m if nesterov else m)

Scalars are computed in double precision and rounded once to float32. The order of operations is torch's, except that the
square root of v is multiplied by the reciprocal of its correction: half a unit in the last place of the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge.optim.moments import square_root

Name = Literal["adamw", "lion", "sgd"]
KINDS: dict[Name, int] = {"adamw": 0, "lion": 1, "sgd": 2}


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a rule multiplies by; step.cpp takes the same numbers.

    rest1, rest2   1 - beta1, 1 - beta2
    decay          1 - lr wd; the coupled weight decay in SGD
    step_size      negative
    correction     1 / sqrt(1 - beta2^t)
    """

    rule: Name
    beta1: float = 0.0
    rest1: float = 0.0
    beta2: float = 0.0
    rest2: float = 0.0
    eps: float = 0.0
    decay: float = 1.0
    step_size: float = 0.0
    correction: float = 1.0
    nesterov: bool = False


def constants(rule: Name, group: Mapping[str, Any], step: int) -> Constants:
    """The constants of a parameter group at `step`, which counts from 1."""
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    if rule == "sgd":
        return Constants(
            rule=rule, beta1=group["momentum"], decay=weight_decay, step_size=-lr, nesterov=group["nesterov"]
        )
    beta1, beta2 = group["betas"]
    common: dict[str, Any] = {
        "rule": rule, "beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2, "decay": 1 - lr * weight_decay,
    }  # fmt: skip
    if rule == "lion":
        return Constants(**common, step_size=-lr)
    correction = 1 / math.sqrt(1 - beta2**step)
    return Constants(**common, eps=group["eps"], step_size=-lr / (1 - beta1**step), correction=correction)


def update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the rule; all float32 and of one shape. Rules without a second moment return v as it is."""
    if c.rule == "adamw":
        m = m + (g - m) * c.rest1
        v = v * c.beta2 + g * c.rest2 * g
        return w * c.decay + m * c.step_size / (square_root(v) * c.correction + c.eps), m, v
    if c.rule == "lion":
        direction = m + (g - m) * c.rest1
        sign = torch.where(
            direction > 0, 1.0, torch.where(direction < 0, -1.0, direction)
        )  # NaN stays, unlike torch.sign
        return w * c.decay + sign * c.step_size, m + (g - m) * c.rest2, v
    d = g + w * c.decay
    m = m * c.beta1 + d
    return w + (d + m * c.beta1 if c.nesterov else m) * c.step_size, m, v
