"""Recipes as data: which operand of which matrix product is cast how.

A Linear with x [T, K], w [N, K] and the gradient of its output gy [T, N] has three products, all of them lhs @ rhs.T:

    output        x @ w.T      lhs x    [T, K]   rhs w    [N, K]   contracted over K
    grad_input    gy @ w       lhs gy   [T, N]   rhs w.T  [K, N]   contracted over N
    grad_weight   gy.T @ x     lhs gy.T [N, T]   rhs x.T  [K, T]   contracted over T

A Cast says what one operand becomes; None leaves it in 16 bits. A Gemm is two casts, and perhaps a rotation of both operands
along the contracted axis and a sampler of rows. A Recipe is three Gemms. Everything here is frozen, hashable and picklable; a
variant is made with `dataclasses.replace`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Literal

from narrowgauge.errors import ConfigError
from narrowgauge.formats import DYNAMIC_UNSIGNED, E8M0, Format, IntFormat
from narrowgauge.scaling import FP32, WHOLE, ScaleRule

__all__ = [
    "CURRENT", "GEMMS", "WHOLE", "Calibrate", "Cast", "ClippedRms", "Current", "Gemm", "Hadamard", "LearnedStep",
    "LeverageScore", "Recipe", "WideBlocks", "Window",
]  # fmt: skip

GEMMS = ("output", "grad_input", "grad_weight")

LARGEST_HEADROOM = 4 / 3  # 8/6: how far the top of a tile can pass e2m1's maximum under E8M0_FLOOR
LARGEST_BLOCK = 1024  # of a rotation: it costs 2 * block operations per element

LARGEST_MARGIN = 32  # beyond it every element of a narrow format would be zero, or saturate

Algorithm = Literal["max", "most_recent"]

# What to do when a part of a Cast is of the wrong type.
_NEXT = {
    "format": "it must be a Format. Take a constant of narrowgauge.formats, or look a name up with formats.get.",
    "scale": "it must be a ScaleRule. Take a constant of narrowgauge.scaling.",
    "calibrate": "it must be CURRENT or a Window(...), ClippedRms(...) or LearnedStep(...).",
}


# --- where the largest magnitude that a scale is made from comes from --------------------------------------------------------------


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
          nearly Gaussian. One huge number makes the scale large and is itself clipped; see `quantize.definition.tile_rms` for
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


# --- casts, products, recipes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cast:
    """What becomes of one operand.

    format     what an element can be
    tile       elements that share a scale, along (outer, contracted) axis; -1 takes the whole axis
    scale      the rule from a tile's amax to its scale
    calibrate  where amax comes from: CURRENT, a Window of earlier steps (per-tensor tiles only), ClippedRms, LearnedStep
               (per-tensor tiles only)
    rounding   "nearest" (ties to even) or "stochastic" (draws from torch's generator; unbiased where nothing saturates)
    headroom   the tensor is scaled down by this factor before it is cast, and what is decoded is scaled up by it again.
               Rules that may saturate the top of a tile need it for stochastic rounding to be unbiased: 4/3 with
               E8M0_FLOOR (arXiv 2502.20586), 17/16 with E4M3_TWO_LEVEL. The scales of the tiles do not change; the
               factor is one number of the whole tensor, which a GEMM multiplies its result by.
    """

    format: Format
    tile: tuple[int, int] = (WHOLE, WHOLE)
    scale: ScaleRule = FP32
    calibrate: Calibrate = CURRENT
    rounding: Literal["nearest", "stochastic"] = "nearest"
    headroom: float = 1.0

    def __post_init__(self) -> None:
        for name, value, wanted in (
            ("format", self.format, Format),
            ("scale", self.scale, ScaleRule),
            ("calibrate", self.calibrate, Calibrate),
        ):
            if not isinstance(value, wanted):
                raise ConfigError(f"Cast: {name} is {value!r}; {_NEXT[name]}")
        if not isinstance(self.tile, tuple) or not all(is_whole(size) for size in self.tile):
            raise ConfigError(
                f"Cast: tile is {self.tile!r}; it must be a tuple of two whole numbers, such as (1, 128)."
            )
        if len(self.tile) != 2 or any(size == 0 or size < WHOLE for size in self.tile):
            raise ConfigError(f"Cast: tile is {self.tile}; give two sizes of at least 1, or -1 for a whole axis.")
        if isinstance(self.calibrate, Window) and self.tile != (WHOLE, WHOLE):
            raise ConfigError(
                f"Cast: a Window remembers one amax per tensor, but the tile is {self.tile}. "
                "Use tile=(-1, -1) or calibrate=CURRENT."
            )
        if isinstance(self.calibrate, LearnedStep) and (
            self.tile != (WHOLE, WHOLE) or self.scale != FP32 or not isinstance(self.format, IntFormat)
        ):
            raise ConfigError(
                f"Cast: a LearnedStep is one float32 step per tensor between integers, but the cast is {self.format} with "
                f"tile {self.tile} and scale {self.scale}. Use an integer format, tile=(-1, -1) and scale=FP32."
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"Cast: rounding is {self.rounding!r}; choose 'nearest' or 'stochastic'.")
        number = isinstance(self.headroom, int | float) and not isinstance(self.headroom, bool)
        if not number or not 1 <= self.headroom <= LARGEST_HEADROOM:
            raise ConfigError(
                f"Cast: headroom is {self.headroom!r}; it must be a number from 1 (none) to {LARGEST_HEADROOM}: more "
                "than the rules can saturate by would only waste resolution."
            )

    @property
    def has_global_scale(self) -> bool:
        """Whether one number multiplies the scales of all tiles."""
        return self.scale.two_level or self.headroom != 1

    @property
    def is_symmetric(self) -> bool:
        """Whether the transposed tensor has the transposed tiles, so that one quantization serves both orientations."""
        return self.tile[0] == self.tile[1] and self.rounding == "nearest"

    def __str__(self) -> str:
        outer, inner = ("all" if size == WHOLE else str(size) for size in self.tile)
        tile = "tensor" if self.tile == (WHOLE, WHOLE) else "row" if self.tile == (1, WHOLE) else f"{outer}x{inner}"
        words = [str(self.format), tile, str(self.scale)]
        if self.calibrate != CURRENT:
            words.append(str(self.calibrate))
        if self.rounding != "nearest":
            words.append(self.rounding)
        if self.headroom != 1:
            words.append(f"headroom {Fraction(self.headroom).limit_denominator(64)}")
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Hadamard:
    """A rotation of both operands along the contracted axis, which spreads outliers over a block and changes no product.

        lhs @ rhs.T = (lhs diag(s) H) @ (rhs diag(s) H).T,    H = BlockDiag(H_block, ...)

    H_block is the orthonormal Sylvester matrix, so H is symmetric and its own inverse. An axis that the block does not
    divide is filled up with zeros.

    block  size of a block of contiguous elements: a power of two
    signs  s: "none" (all +1), "fixed" (the same at every call), or "random" (drawn at every call, the same for both operands)
    """

    block: int = 32
    signs: Literal["none", "fixed", "random"] = "none"

    def __post_init__(self) -> None:
        if not is_whole(self.block) or not 2 <= self.block <= LARGEST_BLOCK or self.block & (self.block - 1):
            raise ConfigError(
                f"Hadamard: block is {self.block!r}; it must be a power of two from 2 to {LARGEST_BLOCK}. "
                "Gemm(rotate=None) does not rotate."
            )
        if self.signs not in ("none", "fixed", "random"):
            raise ConfigError(f"Hadamard: signs is {self.signs!r}; choose 'none', 'fixed' or 'random'.")

    def __str__(self) -> str:
        return f"Hadamard {self.block}" + (f", {self.signs} signs" if self.signs != "none" else "")


@dataclass(frozen=True, kw_only=True)
class LeverageScore:
    """Rows of the gradient are sampled with probabilities that follow their weight in the product (arXiv 2306.11987, 4.2).

    keep          share of the rows (tokens) that enter the product; with a bit-split gradient, 0.5 costs as much in INT4 as
                  one INT4 product of all rows
    max_variance  the layer samples only while the variance that this adds, predicted from the probabilities and relative to
                  the squared norm of the product, stays below it; else it keeps all rows. math.inf: always sample.
    """

    keep: float = 0.5
    max_variance: float = 0.02

    def __post_init__(self) -> None:
        if not is_positive(self.keep) or self.keep > 1:
            raise ConfigError(
                f"LeverageScore: keep is {self.keep!r}; it is the share of rows kept, above 0 and at most 1."
            )
        if not is_positive(self.max_variance) and self.max_variance != math.inf:
            raise ConfigError(
                f"LeverageScore: max_variance is {self.max_variance!r}; it must be a positive number. "
                "math.inf samples always; Gemm(sample=None) never."
            )

    def __str__(self) -> str:
        limit = (
            "" if self.max_variance == math.inf else f" while it adds less than {self.max_variance:g} relative variance"
        )
        return f"{self.keep:.0%} of rows by leverage score{limit}"


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """The casts of one matrix product lhs @ rhs.T; None is a 16-bit operand (bf16, or fp16 under fp16 autocast).

    rotate           turns both operands along the contracted axis before they are cast
    sample           drops rows of the gradient, its contracted ones in `grad_weight`, its outer ones in `grad_input`
    fast_accumulate  let FP8 tensor cores add in their own narrow accumulator (about 14 bits on Hopper). Peers do so for
                     `output` only, where errors do not compound over steps; gradients are accumulated in float32.
    """

    lhs: Cast | None = None
    rhs: Cast | None = None
    rotate: Hadamard | None = None
    sample: LeverageScore | None = None
    fast_accumulate: bool = False

    def __post_init__(self) -> None:
        for name, cast in (("lhs", self.lhs), ("rhs", self.rhs)):
            if cast is not None and not isinstance(cast, Cast):
                raise ConfigError(f"Gemm: {name} is {cast!r}; it must be a Cast, or None for 16 bits.")
        if self.rotate is not None and not isinstance(self.rotate, Hadamard):
            raise ConfigError(f"Gemm: rotate is {self.rotate!r}; it must be a Hadamard(...), or None for no rotation.")
        if self.sample is not None and not isinstance(self.sample, LeverageScore):
            raise ConfigError(
                f"Gemm: sample is {self.sample!r}; it must be a LeverageScore(...), or None for all rows."
            )
        if self.rotate is not None and any(
            cast is not None and isinstance(cast.calibrate, Window) for cast in (self.lhs, self.rhs)
        ):
            raise ConfigError(
                "Gemm: a Window remembers amax of the tensor as it is, and the rotated one has another. "
                "Use calibrate=CURRENT or rotate=None."
            )
        if not isinstance(self.fast_accumulate, bool):
            raise ConfigError(f"Gemm: fast_accumulate is {self.fast_accumulate!r}; choose True or False.")

    def __str__(self) -> str:
        words = (
            "16-bit" if self.lhs is None and self.rhs is None else f"{self.lhs or '16-bit'} x {self.rhs or '16-bit'}"
        )
        return ", ".join([words, *(str(part) for part in (self.rotate, self.sample) if part is not None)])


@dataclass(frozen=True, kw_only=True)
class WideBlocks:
    """Which blocks of a stack stay in bf16. Of `count` blocks, ceil(share * count): the last ones, and of large stacks the first.

    "NVFP4 pre-training" (arXiv 2509.25149, section 4.1 and appendix E.2) finds that the last ones need more than a mantissa bit and
    keeps about 15 % of the Linears in bf16, in its 12B model of 62 blocks the first 2 and the last 8.

    share       of the blocks of a stack
    first       how many of these are taken from the start, in stacks of `first_from` blocks and more
    smallest    stacks of fewer blocks keep none: one block would be more than a quarter of the model
    """

    share: float = 0.15
    first: int = 2
    first_from: int = 40
    smallest: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < 1:
            raise ConfigError(
                f"WideBlocks: share is {self.share!r}; it must lie between 0 and 1. wide_blocks=None keeps none."
            )
        for name in ("first", "first_from", "smallest"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"WideBlocks: {name} is {value!r}; it must be a whole number of blocks, 0 or more.")

    def of(self, count: int) -> frozenset[int]:
        """The indices, from 0, of the blocks that stay wide in a stack of `count`."""
        if count < self.smallest:
            return frozenset()
        kept = math.ceil(self.share * count - 1e-9)  # 0.15 * 20 is 3
        first = min(self.first, kept) if count >= self.first_from else 0
        return frozenset((*range(first), *range(count - kept + first, count)))

    def __str__(self) -> str:
        return (
            f"last {self.share:.0%} of the blocks in bf16 (of {self.first_from} and more, {self.first} of them first)"
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The three products of a Linear.

    name  how users call it
    save  what is kept of x for `grad_weight`: "original" (the tensor as it came, often kept alive by its producer anyway,
          cast again in backward) or "quantized" (its 8-bit codes: a quarter to half of the bytes, no second cast). Casts per
          tensor share the codes of `output`; others store codes tiled for `grad_weight`. The gradients are the same. Where
          a CPU emulates, the decoded values stand for the codes: encoding them takes longer than the product saves.
    backward  "recast": the backward products cast x and w anew, from the originals and along their own contracted axis.
          "straight-through": they multiply by the very codes of `output`, in its rotated basis; elements that were clipped
          get no gradient, and the results are rotated back. Only then has a LearnedStep a gradient.
    wide_blocks  Transformer blocks that `convert` leaves in bf16, found by the model's structure; None: all are cast
    """

    name: str
    output: Gemm = Gemm()
    grad_input: Gemm = Gemm()
    grad_weight: Gemm = Gemm()
    save: Literal["original", "quantized"] = "original"
    backward: Literal["recast", "straight-through"] = "recast"
    wide_blocks: WideBlocks | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"Recipe: name is {self.name!r}; it must be a string.")
        for product, gemm in self.gemms().items():
            if not isinstance(gemm, Gemm):
                raise ConfigError(
                    f"Recipe {self.name!r}: {product} is {gemm!r}; it must be a Gemm. Gemm() leaves it in 16 bits."
                )
        for role, casts in self.roles().items():
            for cast in casts:
                if cast is not None and cast.format in (E8M0, DYNAMIC_UNSIGNED):
                    raise ConfigError(
                        f"Recipe {self.name!r}: {role} is cast to {cast.format}, which has no negative numbers. "
                        "Choose a signed format."
                    )
        if self.wide_blocks is not None and not isinstance(self.wide_blocks, WideBlocks):
            raise ConfigError(
                f"Recipe {self.name!r}: wide_blocks is {self.wide_blocks!r}; it must be a WideBlocks(...), or None."
            )
        if self.save not in ("original", "quantized"):
            raise ConfigError(f"Recipe {self.name!r}: save is {self.save!r}; choose 'original' or 'quantized'.")
        if self.save == "quantized" and self.grad_weight.rhs is None:
            raise ConfigError(
                f"Recipe {self.name!r}: save='quantized', but grad_weight.rhs is not cast. Cast it or save='original'."
            )
        self._check_calibration()
        self._check_straight_through()

    def _check_calibration(self) -> None:
        for role, casts in self.roles().items():
            windows = {cast.calibrate for cast in casts if cast is not None and isinstance(cast.calibrate, Window)}
            formats = {cast.format for cast in casts if cast is not None and isinstance(cast.calibrate, Window)}
            if len(windows) > 1 or len(formats) > 1:
                raise ConfigError(
                    f"Recipe {self.name!r}: {role} is cast with two different windows. Delayed scaling keeps one amax "
                    "history per tensor; use the same Window and format in both products."
                )
        if self.output.sample is not None:
            raise ConfigError(
                f"Recipe {self.name!r}: output samples rows. Only the products of the gradient can; use sample=None."
            )
        random = self.grad_weight.rotate is not None and self.grad_weight.rotate.signs == "random"
        if self.save == "quantized" and random:
            raise ConfigError(
                f"Recipe {self.name!r}: save='quantized' keeps x rotated with signs that the gradient will not meet again. "
                "Use signs='fixed' in grad_weight, or save='original'."
            )
        sampled = any(gemm.sample is not None for gemm in self.gemms().values())
        if sampled and self.backward != "straight-through":
            raise ConfigError(
                f"Recipe {self.name!r}: rows are sampled with backward='straight-through' only. Choose that, or sample=None."
            )
        learned = any(
            cast is not None and isinstance(cast.calibrate, LearnedStep)
            for casts in self.roles().values()
            for cast in casts
        )
        if learned and self.backward != "straight-through":
            raise ConfigError(
                f"Recipe {self.name!r}: a LearnedStep has a gradient with backward='straight-through' only. "
                "Choose that, or ClippedRms."
            )

    def _check_straight_through(self) -> None:
        """A backward product either uses the codes of `output` or, with rhs=None, leaves them for the original in 16 bits."""
        if self.backward not in ("recast", "straight-through"):
            raise ConfigError(
                f"Recipe {self.name!r}: backward is {self.backward!r}; choose 'recast' or 'straight-through'."
            )
        if self.backward == "recast":
            return
        for product, gemm, forward in (
            ("grad_input", self.grad_input, self.output.rhs),
            ("grad_weight", self.grad_weight, self.output.lhs),
        ):
            if gemm.rhs is not None and gemm.rhs != forward:
                raise ConfigError(
                    f"Recipe {self.name!r}: backward='straight-through' multiplies by the codes of output, but "
                    f"{product}.rhs is {gemm.rhs} and output has {forward or '16-bit'}. Make them equal, or rhs=None."
                )
            if gemm.rhs is not None and (
                gemm.rhs.tile != (WHOLE, WHOLE)
                or gemm.rhs.rounding != "nearest"
                or not isinstance(gemm.rhs.format, IntFormat)
                or isinstance(gemm.rhs.calibrate, Window)
            ):
                raise ConfigError(
                    f"Recipe {self.name!r}: {gemm.rhs} does not serve both orientations. backward='straight-through' needs "
                    "integers with one scale per tensor from the tensor at hand, rounded to nearest."
                )
            if gemm.rotate is not None:
                raise ConfigError(
                    f"Recipe {self.name!r}: {product} has a rotation of its own, but backward='straight-through' multiplies "
                    "in the basis of output. Use rotate=None there."
                )
        for cast in self.roles()["gy"]:
            if cast is not None and isinstance(cast.calibrate, LearnedStep | Window):
                raise ConfigError(
                    f"Recipe {self.name!r}: gy is cast with a {cast.calibrate}, which backward='straight-through' has no "
                    "place for. Use CURRENT or ClippedRms."
                )

    def roles(self) -> dict[str, tuple[Cast | None, Cast | None]]:
        """The two casts of each tensor: as it stands, and transposed."""
        return {
            "x": (self.output.lhs, self.grad_weight.rhs),
            "w": (self.output.rhs, self.grad_input.rhs),
            "gy": (self.grad_input.lhs, self.grad_weight.lhs),
        }

    def windows(self) -> dict[str, tuple[Window, Format]]:
        """Role -> the window and format of its delayed scaling; roles without one are absent."""
        found = {}
        for role, casts in self.roles().items():
            for cast in casts:
                if cast is not None and isinstance(cast.calibrate, Window):
                    found[role] = (cast.calibrate, cast.format)
        return found

    @property
    def has_memory(self) -> bool:
        """Whether a layer holds state for it from step to step."""
        return (
            len(self.windows()) + len(self.steps()) + len(self.samples()) > 0
        )  # bool of a dict: not traced before torch 2.13

    def steps(self) -> dict[str, LearnedStep]:
        """Role -> its learned step; roles without one are absent."""
        found = {}
        for role, cast in (("x", self.output.lhs), ("w", self.output.rhs)):
            if cast is not None and isinstance(cast.calibrate, LearnedStep):
                found[role] = cast.calibrate
        return found

    def samples(self) -> dict[str, LeverageScore]:
        """Product -> the sampler of its rows; products without one are absent."""
        return {name: gemm.sample for name, gemm in self.gemms().items() if gemm.sample is not None}

    def gemms(self) -> dict[str, Gemm]:
        return {name: getattr(self, name) for name in GEMMS}

    def with_gemm(self, **changes: Gemm) -> Recipe:
        """This recipe with some products replaced, named after them: `recipe.with_gemm(grad_weight=Gemm())`.

        Another `output` leaves a straight-through backward pass without its codes: it casts anew then, without a rotation or
        sampling, a learned step becoming a clipped one.
        """
        unknown = set(changes) - set(GEMMS)
        if unknown:
            raise ConfigError(f"with_gemm: {sorted(unknown)} are not products of a Linear; choose from {GEMMS}.")
        save = "original" if changes.get("grad_weight") == Gemm() else self.save
        suffix = "".join(f"+{name}:{'16-bit' if gemm == Gemm() else 'custom'}" for name, gemm in changes.items())
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name in GEMMS}
        gemms, backward = kept | changes, self.backward
        if backward == "straight-through" and gemms["output"] != self.output:
            backward = "recast"
            gemms |= {name: _recast(gemms[name]) for name in ("grad_input", "grad_weight") if name not in changes}
        return replace(self, **gemms, name=self.name + suffix, save=save, backward=backward)


def _recast(gemm: Gemm) -> Gemm:
    """A product of a straight-through recipe, able to stand without the codes of `output`."""
    rhs = gemm.rhs
    if rhs is not None and isinstance(rhs.calibrate, LearnedStep):
        rhs = replace(rhs, calibrate=ClippedRms())
    return replace(gemm, rhs=rhs, sample=None)
