"""The attributes that a recipe adds to an nn.Linear: `QLinear.state`.

`converted_state` says how fields are copied, restored and removed. A new field is declared here and
nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from narrowgauge.nn.converted_state import (
    ATTACHED,
    CACHE,
    LASTING,
    OBSERVED,
    SETTING,
    ConvertedState,
)

if TYPE_CHECKING:
    import torch

    from narrowgauge.nn.bypassed_weights import Watch
    from narrowgauge.nn.cast_sources import SharedInputs
    from narrowgauge.nn.keep_policy import WeightCodes
    from narrowgauge.nn.observer import Observer
    from narrowgauge.nn.plan import LinearPlan
    from narrowgauge.nn.step_watch import StepWatch
    from narrowgauge.nn.weight_cache import WeightCache
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight
    from narrowgauge.recipe import Recipe


@dataclass(eq=False, kw_only=True)
class LinearState(ConvertedState):
    """The state of a QLinear.

    recipe              see `QLinear`
    plans               (device, wrapper class, wide) -> plan of the recipe
    reason, decision    see `QLinear`
    weight_codes        see `QLinear`
    observer            see `QLinear`
    shared_inputs       cache of x's casts, one for all layers of a model
    precast             casts of the weight that the optimizer's step leaves, or None
    gathered            (distributed.weights.GatheredWeight) codes from other ranks, or None
    cache               casts of the weight in this step; None before the first `advance`
    step_watch          detects training without `advance`
    is_last_reader      the layer was the last one to read its previous input (nn.cast_sources)
    was_called          the layer was called in this step (nn.bypassed_weights)
    steps_without_call  optimizer steps in a row without a call
    is_bypassed         the weight is multiplied without calling the layer
    weight_watch        counts the GEMMs that read the weight
    float16_steps       steps of a float16 weight with float16 gradients
    warned_of_*         the warning was given
    """

    recipe: Recipe | None = field(default=None, metadata=SETTING)
    plans: dict[tuple[torch.device, str, bool], LinearPlan] = field(
        default_factory=dict, metadata=CACHE
    )
    reason: str = field(default="", metadata=SETTING)
    decision: object | None = field(default=None, metadata=SETTING)
    weight_codes: WeightCodes = field(default="auto", metadata=SETTING)
    observer: Observer | None = field(default=None, metadata=ATTACHED)
    shared_inputs: SharedInputs | None = field(default=None, metadata=LASTING)
    precast: PrecastWeight | None = field(default=None, metadata=ATTACHED)
    gathered: Any = field(default=None, metadata=ATTACHED)
    cache: WeightCache | None = field(default=None, metadata=CACHE)
    step_watch: StepWatch | None = field(default=None, metadata=CACHE)
    is_last_reader: bool = field(default=False, metadata=OBSERVED)
    was_called: bool = field(default=False, metadata=OBSERVED)
    steps_without_call: int = field(default=0, metadata=OBSERVED)
    is_bypassed: bool = field(default=False, metadata=OBSERVED)
    weight_watch: Watch | None = field(default=None, metadata=ATTACHED)
    float16_steps: int = field(default=0, metadata=OBSERVED)
    warned_of_eval: bool = field(default=False, metadata=LASTING)
    warned_of_float16: bool = field(default=False, metadata=LASTING)
