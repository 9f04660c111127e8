"""Recipes that learn their steps: weights are trained for their quantizer and grow into it, so BF16 from such a state begins worse.

A guard that then says *lower* has seen that and no harm, so it does not act on it.
"""

from __future__ import annotations

from torch import nn

from narrowgauge.diagnose.guard.verdict import Verdict
from narrowgauge.nn.learned_step import LearnedSteps

GROWN = (
    "Weights grow into the learned steps of this recipe, and BF16 from such a state begins worse: the guard leaves the run as it is. "
    "Only a run in BF16 from the start tells which ends better: narrowgauge study."
)


def grows_into_steps(model: nn.Module, verdict: Verdict) -> bool:
    """Whether the verdict may say no more than that the weights are used to learned steps."""
    return verdict.direction == "lower" and any(isinstance(each, LearnedSteps) for each in model.modules())
