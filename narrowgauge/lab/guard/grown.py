"""Recipes with learned steps: weights adapt to the quantizer, so BF16 starts worse from there.

A loss that is LOWER than BF16's then shows that adaptation and no fault, so the guard does not act on it.
"""

from __future__ import annotations

from torch import nn

from narrowgauge.lab.guard.result import LOWER
from narrowgauge.nn.learned_step import LearnedSteps

GROWN = (
    "Weights grow into the learned steps of this recipe, and BF16 from such a state begins worse: the guard leaves the run as it is. "
    "Only a run in BF16 from the start tells which ends better: narrowgauge study."
)


def grows_into_steps(model: nn.Module, detail: str) -> bool:
    """True if a result may reflect nothing but weights that are adapted to learned steps.

    detail  detail of the result (`GuardResult.detail`)
    """
    return detail == LOWER and any(isinstance(each, LearnedSteps) for each in model.modules())
