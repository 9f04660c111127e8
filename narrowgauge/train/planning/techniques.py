"""Techniques that reduce memory: their settings, their cost in time, and their effect on numerics.

Times are fractions of a step from docs/limited-memory.md. The texts say if a cost was not measured
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.errors import ConfigError
from narrowgauge.train.config.parallel_syntax import named
from narrowgauge.train.config.settings import NO_RECIPE, TrainConfig, key_of, shown

Changed = Callable[[TrainConfig], Mapping[str, Any]]


@dataclass(frozen=True)
class Technique:
    """A memory-saving technique of one or more settings.

    name     short name
    changes  returns the settings to change in a configuration; {} if the technique is on
             already
    words    costs and effects, for the user
    numbers  effect on numerics. 0: bit-identical or another order of summation; 1: errors below
             the standard deviation over seeds; 2: measurable errors
    time     approximate cost as a fraction of a step
    parts    parts of `plan.count.PARTS` that it can reduce; () for any
    """

    name: str
    changes: Changed = field(repr=False)
    words: str
    numbers: int
    time: float
    parts: tuple[str, ...] = ()

    def applied(self, config: TrainConfig) -> TrainConfig | None:
        """Configuration with the technique; None if it is on already or incompatible."""
        changes = {
            key: value
            for key, value in self.changes(config).items()
            if getattr(config, key, value) != value
        }
        try:
            return replace(config, **changes) if changes else None
        except (ConfigError, TypeError):  # TypeError: `replace` with a setting that does not exist
            return None


def lines(before: TrainConfig, after: TrainConfig) -> list[str]:
    """Lines for the settings file that change `before` into `after`."""
    found = []
    for name, each in before.__dataclass_fields__.items():
        if getattr(before, name) != getattr(after, name):
            found.append(f"{key_of(each)} = {shown(getattr(after, name))}")
    return found


def _halved(config: TrainConfig) -> Mapping[str, Any]:
    """Doubles micro_batches if the rows remain divisible."""
    parts = 2 * config.micro_batches
    divides = (
        bool(config.token_budget) or config.batch_size % (parts * named(config.parallel).data) == 0
    )
    return {"micro_batches": parts} if divides else {}


def _in_backward(config: TrainConfig) -> Mapping[str, Any]:
    """Steps in backward, unless gradients are held in FP8."""
    if config.held_gradients != "16bit":
        return {}
    return {"held_gradients": "none", "clip_by": "previous" if config.clip else ""}


def _rows(config: TrainConfig) -> Mapping[str, Any]:
    """One row for each micro-batch."""
    return (
        {}
        if config.token_budget
        else {"micro_batches": max(1, config.batch_size // named(config.parallel).data)}
    )


def _fused(config: TrainConfig) -> Mapping[str, Any]:
    return {"fuse": True} if config.recipe != NO_RECIPE else {}


def _states(kind: str) -> Changed:
    def changes(config: TrainConfig) -> Mapping[str, Any]:
        # Do not replace states that are small already.
        return (
            {}
            if kind == "8bit" and config.states in ("4bit", "fp8", "fp8-lm")
            else {"states": kind}
        )

    return changes


def _stochastic(config: TrainConfig) -> Mapping[str, Any]:
    return {} if config.master == "stochastic" else {"precision": "bf16-o3", "master": ""}


def _small_embeddings(config: TrainConfig) -> Mapping[str, Any]:
    return {} if config.states == "fp32" else {"embedding_states": "same"}


KEPT = ("saved", "codes", "head", "transient")
ROWWISE = (*KEPT, "batch")
OWN = ("states", "transient")
FUSE = Technique("fuse", _fused, "fewer passes over memory; the same numbers", 0, -0.05, KEPT)
HALVE = Technique(
    "half micro-batches",
    _halved,
    "smaller products, a few percent slower; sums in another order",
    0,
    0.03,
    ROWWISE,
)
ROWS = Technique(
    "micro-batches of one row",
    _rows,
    "small products, slower where rows are short; sums in another order",
    0,
    0.06,
    ROWWISE,
)
SELECTIVE = Technique(
    "selective checkpointing", lambda config: {"checkpointing": "selective"} if config.checkpointing == "none" else {},
    "what lies between products is computed again, about 6 % more time; the same bits", 0, 0.06, KEPT,
)  # fmt: skip
FULL = Technique(
    "full checkpointing", lambda config: {"checkpointing": "full"} if config.checkpointing in ("none", "selective") else {},
    "blocks are computed again, about a quarter more time; the same bits", 0, 0.25, KEPT,
)  # fmt: skip
SQRT = Technique(
    "checkpointing in segments", lambda config: {"checkpointing": "sqrt"},
    "most blocks are computed again twice, about half more time; the same bits", 0, 0.45, KEPT,
)  # fmt: skip
EIGHT = Technique(
    "8-bit states",
    _states("8bit"),
    "no slower; moments rounded to 8 bits (docs/optimizers.md)",
    1,
    0.0,
    OWN,
)
IN_BACKWARD = Technique(
    "step in backward", _in_backward,
    "no slower; clipped by the norm of the step before, and no gradient is kept", 1, 0.0, ("gradients", "transient"),
)  # fmt: skip
EMBEDDINGS = Technique(
    "embeddings' states too",
    _small_embeddings,
    "no slower; rare words have rounded moments too",
    1,
    0.0,
    OWN,
)
STOCHASTIC = Technique(
    "stochastic rounding",
    _stochastic,
    "no slower; 16-bit weights without a float32 copy, rounded stochastically",
    1,
    0.0,
)
FOUR = Technique(
    "4-bit states",
    _states("4bit"),
    "no slower; moments rounded to 4 bits (docs/optimizers.md)",
    2,
    0.0,
    OWN,
)
FP8_SAVES = Technique(
    "FP8 saves",
    lambda config: {"save": "fp8", "fuse": True},
    "no slower; what layers keep is rounded to FP8",
    1,
    0.0,
    KEPT,
)
SLICES = Technique(
    "loss over slices", lambda config: {} if config.loss == "whole" else {"loss": "slices"},
    "one product with the head more; sums in another order", 0, 0.02, ("head", "gradients", "transient"),
)  # fmt: skip
COMPRESS = Technique(
    "compressed activations", lambda config: {"compress_activations": True},
    "slower; what blocks keep is rounded to E4M3, gradients agree to about 34 dB", 2, 0.3, KEPT,
)  # fmt: skip

# Cheapest first: no numeric effect at up to 6 % of a step, then errors below the standard
# deviation over seeds (numbers = 1) at no cost in time, then full recomputation, then measurable
# errors (numbers = 2).
CHEAPEST_FIRST = (
    FUSE, SLICES, HALVE, ROWS, SELECTIVE, EIGHT, EMBEDDINGS, STOCHASTIC, FP8_SAVES, IN_BACKWARD, FULL, SQRT, FOUR, COMPRESS,
)  # fmt: skip
# Cumulative order of `narrowgauge plan --table`, from large cards to small ones
# (docs/limited-memory.md).
ROAD = (
    FUSE,
    FP8_SAVES,
    EIGHT,
    EMBEDDINGS,
    STOCHASTIC,
    SLICES,
    IN_BACKWARD,
    FULL,
    FOUR,
    HALVE,
    ROWS,
    SQRT,
)
