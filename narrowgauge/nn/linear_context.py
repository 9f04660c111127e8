"""LinearContext: what one call of a Linear asks for, besides its tensors.

Backward reads it too, so the context lives as long as the autograd graph. `keep_policy` decides what
backward saves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from narrowgauge.nn.keep_policy import KeepPolicy
    from narrowgauge.nn.observer import Observation
    from narrowgauge.nn.plan import LinearPlan
    from narrowgauge.ops.random import Stream


@dataclass(eq=False, kw_only=True)
class CastSources:
    """Existing casts that the operands of a call may use.

    by_role        role -> caches of the operand (cast_sources.py), in the order in which they are searched
    weight_cache   cache of the weight's casts, also for backward
    x_history_key  equal for layers whose amax histories of x are equal; None: unknown
    saved_for_w    (eager code) weight casts that forward leaves for backward; None: backward casts
    """

    by_role: dict[str, Sequence[Any]] = field(default_factory=dict)
    weight_cache: Any = None
    x_history_key: Hashable | None = None
    saved_for_w: Any = None


@dataclass(frozen=True, kw_only=True)
class RecipeProgress:
    """Progress of a recipe's state that a call depends on.

    is_cold          learned steps are in their cold start
    sampled          GEMMs whose rows are sampled in this step
    steps_version    changes whenever the learned steps change
    """

    is_cold: bool = False
    sampled: tuple[str, ...] = ()
    steps_version: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What a call does on several ranks.

    stream       source of random numbers; None: torch's generator
    sums_by_row  sum the squares of a weight row by row, which ranks with some of its rows can repeat
    """

    stream: Stream | None = None
    sums_by_row: bool = False


NO_PROGRESS, ONE_RANK = RecipeProgress(), RankOptions()


@dataclass(eq=False, kw_only=True)
class LinearContext:
    """The options of one call of a Linear, besides its tensors.

    out_dtype    dtype of the result
    records      True in training: delayed scaling records amax
    keep         what is saved for backward
    sources      existing casts
    progress     state of learned steps and samplers
    ranks        random numbers and sums on several ranks
    observation  receives operands and results; None without an observer
    """

    plan: LinearPlan
    out_dtype: torch.dtype
    keep: KeepPolicy
    records: bool = True
    sources: CastSources = field(default_factory=CastSources)
    progress: RecipeProgress = NO_PROGRESS
    ranks: RankOptions = ONE_RANK
    observation: Observation | None = None
