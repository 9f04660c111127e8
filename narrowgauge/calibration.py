"""Where the largest magnitude that a scale is made from comes from: the part of a Cast that may need memory.

CURRENT       the tile itself
Window        earlier steps (delayed scaling)
ClippedRms    the spread of the tile
LearnedStep   a parameter of the layer (LSQ)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from narrowgauge.errors import ConfigError

LARGEST_MARGIN = 32  # beyond it every element of a narrow format would be zero, or saturate

Algorithm = Literal["max", "most_recent"]


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True)
class Current:
    """The scale comes from the tensor at hand."""

    def __str__(self) -> str:
        return "current"


@dataclass(frozen=True, kw_only=True)
class Window:
    """Delayed scaling: the scale comes from the largest magnitudes of earlier steps.

    length     steps remembered. 1024 is TransformerEngine's default; MS-AMP uses 16.
    margin     the scale is multiplied by 2**margin: head-room for growth between steps, paid in resolution
    algorithm  "max" of the window, or the "most_recent" entry

    The first step of a layer has no history and uses the tensor at hand.
    """

    length: int = 1024
    margin: int = 0
    algorithm: Algorithm = "max"

    def __post_init__(self) -> None:
        if not is_whole(self.length):
            raise ConfigError(f"Window: length is {self.length!r}; it must be a whole number of steps.")
        if not is_whole(self.margin) or abs(self.margin) > LARGEST_MARGIN:
            raise ConfigError(
                f"Window: margin is {self.margin!r}; it is an exponent of two, a whole number from "
                f"{-LARGEST_MARGIN} to {LARGEST_MARGIN}."
            )
        if self.length < 1:
            raise ConfigError(f"Window: length is {self.length}; it must be at least 1.")
        if self.algorithm not in ("max", "most_recent"):
            raise ConfigError(f"Window: algorithm is {self.algorithm!r}; choose 'max' or 'most_recent'.")

    def __str__(self) -> str:
        margin = f", margin {self.margin}" if self.margin else ""
        return f"delayed ({self.algorithm} of {self.length}{margin})"


@dataclass(frozen=True, kw_only=True)
class ClippedRms:
    """The scale comes from the spread of the tile, not from its largest element: amax = clip * sqrt(mean x**2).

    clip  in standard deviations; what lies beyond saturates. 2.475 is the best for a Gaussian in 15 levels (INT4): its mean
          squared error is 0.0129 of the variance, against 0.0303 with the first step that LSQ takes. A rotated operand is
          nearly Gaussian. One huge number makes the scale large and is itself clipped; see `quantize.reference.tile_rms` for
          what a sum of squares beyond float32 does. (For 16 levels, QuEST's constant is 2.514; for E2M1, Quartet's is 2.923.)
    """

    clip: float = 2.475

    def __post_init__(self) -> None:
        if not is_positive(self.clip):
            raise ConfigError(
                f"ClippedRms: clip is {self.clip!r}; it must be a positive number of standard deviations."
            )

    def __str__(self) -> str:
        return f"{self.clip:g} rms"


@dataclass(frozen=True, kw_only=True)
class LearnedStep:
    """LSQ (arXiv 1902.08153): the scale of a tensor is a parameter of the layer and has a gradient.

    cold_steps      optimizer steps, counted by `advance`, in which the step is not learned but set from the data:
                    2 mean|x| / sqrt(max), the rule of arXiv 2306.11987, appendix A.4. At least 1: it is also the first value.
    residual_every  the gradient of x's step needs the rounding errors of x. They are kept for one row in so many, drawn
                    anew each time, which leaves the gradient unbiased and costs 2 / residual_every bytes per element.
    """

    cold_steps: int = 16
    residual_every: int = 64

    def __post_init__(self) -> None:
        for name in ("cold_steps", "residual_every"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise ConfigError(f"LearnedStep: {name} is {value!r}; it must be a whole number of at least 1.")

    def __str__(self) -> str:
        return "learned step"


CURRENT = Current()

Calibrate = Current | Window | ClippedRms | LearnedStep
