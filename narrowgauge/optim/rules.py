"""The update rules, as pure functions of float32 tensors: (weight, gradient, moments) -> (weight, moments).

    AdamW (arXiv 1711.05101)   m <- m + (1 - b1)(g - m);  v <- b2 v + (1 - b2) g^2
                               w <- (1 - lr wd) w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    Lion (arXiv 2302.06675)    c = m + (1 - b1)(g - m);  w <- (1 - lr wd) w - lr sign(c);  m <- m + (1 - b2)(g - m)
    SGD, as torch.optim.SGD    d = g + wd w;  m <- mu m + d;  w <- w - lr (d + mu m if nesterov else m)

With narrow states m is held to what the rule of AdamW can reach. By Cauchy-Schwarz, over the gradients of steps 1 ... t,

    m_t^2 <= B_t^2 v_t    with    B_t^2 = (1 - b1)^2 / (1 - b2) sum_{i < t} (b1^2 / b2)^i

(1.17 at b1 = 0.9, b2 = 0.95 and 7.3 at b2 = 0.999 for large t; it grows without end where b1^2 >= b2). A larger |m| beside sqrt(v) is the
error of their codes: m becomes B_t sqrt(v), so that no step is larger than a gradient could make it. An exact m is never changed,
whatever eps and weight decay are; betas that change during a run give the bound of the present ones.

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
SLACK, MOST = 1 + 2.0**-8, 2.0**120  # of a bound: roundings of m and v; what float32 holds beside a root


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a rule multiplies by; kernel.cpp takes the same numbers.

    rest1, rest2   1 - beta1, 1 - beta2
    decay          1 - lr wd; the coupled weight decay in SGD
    step_size      negative
    correction     1 / sqrt(1 - beta2^t)
    bound          B_t, see the module
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
    bound: float = 0.0
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
    return Constants(
        **common, eps=group["eps"], step_size=-lr / (1 - beta1**step), correction=1 / math.sqrt(1 - beta2**step),
        bound=bound(beta1, beta2, step),
    )  # fmt: skip


def bound(beta1: float, beta2: float, step: int) -> float:
    """B_t with SLACK for roundings, at most MOST: the largest |m| / sqrt(v) of AdamW after so many steps."""
    if beta1 == 0 or step == 1:
        total = 1.0
    elif beta2 == 0:
        return MOST
    else:
        ratio = beta1**2 / beta2
        powers = math.expm1(min(step * math.log(ratio), 300.0))  # ratio^step - 1, no larger than MOST needs
        total = float(step) if ratio == 1 else powers / (ratio - 1)
    return min((1 - beta1) * math.sqrt(total / (1 - beta2)) * SLACK, MOST)


def update(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants, holds: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of the rule; all float32 and of one shape -> (weight, first moment, second moment, where the first only decays).

    holds  whether m is held to its bound, as it is where the moments are narrow
    Rules without a second moment return v as it is.
    """
    decays = only_decays(g, m)
    if c.rule == "adamw":
        m = m + (g - m) * c.rest1
        v = v * c.beta2 + g * c.rest2 * g
        root = square_root(v)
        if holds:
            limit = root * c.bound
            held = m.abs() > limit  # neither of a NaN
            m, decays = torch.where(held, torch.copysign(limit, m), m), decays | held
        return w * c.decay + m * c.step_size / (root * c.correction + c.eps), m, v, decays
    if c.rule == "lion":
        direction = m + (g - m) * c.rest1
        sign = torch.where(
            direction > 0, 1.0, torch.where(direction < 0, -1.0, direction)
        )  # NaN stays, unlike torch.sign
        return w * c.decay + sign * c.step_size, m + (g - m) * c.rest2, v, decays
    d = g + w * c.decay
    m = m * c.beta1 + d
    return w + (d + m * c.beta1 if c.nesterov else m) * c.step_size, m, v, decays


def only_decays(g: Tensor, m: Tensor) -> Tensor:
    """Where a gradient is nothing beside the moment that it comes to: |g| <= |m| / 16."""
    return g.abs() * 16.0 <= m.abs()
