"""AdamW, Lion, SGD with momentum and RAdam, with states of 32, 16, 8 or 4 bits.

rules.py contains the equations and the defaults, moments.py the formats. All classes share the
constructor of `base.LowPrecisionOptimizer`.
"""

from __future__ import annotations

from narrowgauge.optim import rules
from narrowgauge.optim.base import LowPrecisionOptimizer

__all__ = ["SGD", "AdamW", "Lion", "RAdam"]


class AdamW(LowPrecisionOptimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101). Numbers: lr, betas, eps, weight_decay."""

    rule = rules.ADAMW


class Lion(LowPrecisionOptimizer):
    """Lion (arXiv 2302.06675): steps by the sign of an interpolated momentum.

    It keeps one moment. Numbers: lr, betas, weight_decay.
    """

    rule = rules.LION


class SGD(LowPrecisionOptimizer):
    """SGD with momentum, coupled weight decay and torch's Nesterov form.

    Numbers: lr, momentum, weight_decay, nesterov.
    """

    rule = rules.SGD


class RAdam(LowPrecisionOptimizer):
    """RAdam (arXiv 1908.03265) with decoupled weight decay: its first steps need no warm-up.

    Plain torch computes it. Numbers: lr, betas, eps, weight_decay.
    """

    rule = rules.RADAM


# By the name of their rule, as in the setting `optimizer`.
OPTIMIZERS: dict[str, type[LowPrecisionOptimizer]] = {
    each.rule.name: each for each in (AdamW, Lion, SGD, RAdam)
}
