"""Recipes as data: the cast of each operand of a Linear's three GEMMs.

A Linear with x [T, K], w [N, K] and the gradient of its output gy [T, N] has three GEMMs, all of
the form lhs @ rhs.T:

    output        x @ w.T      lhs x    [T, K]   rhs w    [N, K]   contracted over K
    grad_input    gy @ w       lhs gy   [T, N]   rhs w.T  [K, N]   contracted over N
    grad_weight   gy.T @ x     lhs gy.T [N, T]   rhs x.T  [K, T]   contracted over T

A Cast describes the quantization of one operand; None leaves the operand in 16 bits. A Gemm has two
casts and optionally a rotation of both operands along the contracted axis, and a sampler of rows. A
Recipe has three Gemms. All classes are frozen, hashable and picklable; `dataclasses.replace` makes
a variant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NoReturn

from narrowgauge.errors import ConfigError
from narrowgauge.formats import E2M1, E4M3, E5M2, Format, IntFormat
from narrowgauge.scaling import (
    E4M3_FOUR_OVER_SIX,
    E4M3_FOUR_OVER_SIX_POW2,
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_POW2,
    FP32,
    POW2,
    WHOLE,
    ScaleRule,
    scale_shape,
)

__all__ = [
    "CURRENT",
    "GEMMS",
    "WHOLE",
    "Calibrate",
    "Cast",
    "ClippedRms",
    "CurrentScaling",
    "DelayedScaling",
    "Gemm",
    "Hadamard",
    "HighPrecisionBlocks",
    "LearnedStep",
    "LeverageScore",
    "Recipe",
]  # fmt: skip

GEMMS = ("output", "grad_input", "grad_weight")
SHARED_SCALES = "+shared-scales"  # end of the name of such a recipe (`Recipe.with_shared_scales`)

# 8/6: under E8M0_FLOOR a tile's amax can exceed e2m1's maximum by this factor.
LARGEST_HEADROOM = 4 / 3
LARGEST_BLOCK = 1024  # largest block of a rotation, which costs 2 * block operations per element

LARGEST_MARGIN = 32  # beyond it every element of a low-precision format would be zero or saturated

Algorithm = Literal["max", "most_recent"]

# Former name of a class -> its name. Pickles and users' code hold the former ones (`__getattr__`),
# and so do the codes of errors. By the version that renamed them.
_RENAMED_IN = {
    "0.1.0": {
        "Window": "DelayedScaling",
        "Current": "CurrentScaling",
        "WideBlocks": "HighPrecisionBlocks",
    }
}
_FORMER_NAMES = {former: now for names in _RENAMED_IN.values() for former, now in names.items()}
_CODES = {name: former.lower() for former, name in _FORMER_NAMES.items()}

MX_TILE, NV_TILE = 32, 16  # elements that share a scale of MX and of NVFP4


def __getattr__(name: str) -> Any:
    if name in _FORMER_NAMES:
        return globals()[_FORMER_NAMES[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require(owner: object, name: str, valid: bool, wanted: str) -> None:
    """Raise ConfigError unless `valid`.

    Example: "DelayedScaling: length is 0; it must be a whole number of steps, at least 1."
    The code is the class and the field, such as "cast.tile".
    """
    if not valid:
        kind = type(owner).__name__
        title = f"Recipe {owner.name!r}" if isinstance(owner, Recipe) else kind
        code = f"{_CODES.get(kind, kind.lower())}.{name}"
        raise ConfigError(f"{title}: {name} is {getattr(owner, name)!r}; {wanted}", code=code)


def is_whole(value: object, least: float = 1) -> bool:
    # bool is a subclass of int: True would pass as 1.
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_block(value: int) -> bool:
    """True for the block of a rotation: a power of two from 2 to LARGEST_BLOCK."""
    return is_whole(value, 2) and value <= LARGEST_BLOCK and not value & (value - 1)


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


# --- calibration: the source of the amax that sets a scale ---------------------------------------


@dataclass(frozen=True)
class CurrentScaling:
    """Current scaling: the scale comes from the tensor being quantized."""

    def __str__(self) -> str:
        return "current"


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """Delayed scaling: the scale comes from the amax history of earlier steps.

    length     steps in the amax history. 1024 is TransformerEngine's default; MS-AMP uses 16.
    margin     the scale is multiplied by 2**margin: headroom for growth between steps, at the cost
               of resolution
    algorithm  "max" of the history, or its "most_recent" entry

    The first step of a layer has no history and uses the current tensor.
    """

    length: int = 1024
    margin: int = 0
    algorithm: Algorithm = "max"

    def __post_init__(self) -> None:
        _require(
            self, "length", is_whole(self.length), "it must be a whole number of steps, at least 1."
        )
        exponent = is_whole(self.margin, -LARGEST_MARGIN) and self.margin <= LARGEST_MARGIN
        limits = f"from {-LARGEST_MARGIN} to {LARGEST_MARGIN}."
        _require(self, "margin", exponent, f"it is an exponent of two, a whole number {limits}")
        _require(
            self,
            "algorithm",
            self.algorithm in ("max", "most_recent"),
            "choose 'max' or 'most_recent'.",
        )

    def __str__(self) -> str:
        margin = f", margin {self.margin}" if self.margin else ""
        return f"delayed ({self.algorithm} of {self.length}{margin})"


@dataclass(frozen=True, kw_only=True)
class ClippedRms:
    """The scale comes from the root mean square of a tile, not from its largest element.

    amax = clip * sqrt(mean x**2)

    clip  in standard deviations; larger elements saturate. 2.475 is optimal for a Gaussian in 15
          levels (INT4, `scaling.least_error_clip`): the mean squared error is 0.0129 of the
          variance, against 0.0303 with LSQ's first step. (QuEST's constant for 16 levels is 2.514; Quartet's for E2M1 is 2.923.)

    A rotated operand is nearly Gaussian. One huge element makes the scale large and is itself
    clipped; `quantize.definition.tile_rms` describes sums of squares beyond float32.
    """

    clip: float = 2.475

    def __post_init__(self) -> None:
        _require(
            self,
            "clip",
            is_positive(self.clip),
            "it must be a positive number of standard deviations.",
        )

    def __str__(self) -> str:
        return f"{self.clip:g} rms"


@dataclass(frozen=True, kw_only=True)
class LearnedStep:
    """LSQ (arXiv 1902.08153): the scale of a tensor is a parameter of the layer and has a gradient.

    cold_steps      optimizer steps, counted by `advance`, in which the scale is set from the data
                    and not learned: the step with the least squared error of normal numbers
                    (`scaling.least_error_clip`), 0.354 rms in INT4. LSQ's own rule, 2 mean|x| /
                    sqrt(max) or 0.603 rms, has 2.35 times that error. At least 1, because the rule
                    also initialises the parameter. Activations grow fastest in the first hundreds
                    of steps, and a learned step moves by at most 0.1 % in one: after 16 steps it
                    stayed behind, at 0.13 of its optimum (decisions/four-bit.md).
    residual_every  the gradient of x's scale needs the rounding errors of x. They are saved for one
                    row in `residual_every`, drawn anew at each call. The gradient stays unbiased
                    and saving costs 2 / residual_every bytes per element.
    """

    cold_steps: int = 256
    residual_every: int = 64

    def __post_init__(self) -> None:
        for name in ("cold_steps", "residual_every"):
            _require(
                self,
                name,
                is_whole(getattr(self, name)),
                "it must be a whole number of at least 1.",
            )

    def __str__(self) -> str:
        return "learned step"


CURRENT = CurrentScaling()

Calibrate = CurrentScaling | DelayedScaling | ClippedRms | LearnedStep


# --- casts, GEMMs, recipes -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Quantization of one operand.

    format     number format of an element
    tile       elements that share a scale, along the (outer, contracted) axis; -1 is the whole axis
    scale      rule that turns a tile's amax into its scale
    calibrate  source of amax: CURRENT, DelayedScaling, ClippedRms or LearnedStep. DelayedScaling
               and LearnedStep need per-tensor tiles
    rounding   "nearest" (ties to even), "stochastic" (draws from torch's generator; unbiased
               where no element saturates), or "eden": to nearest, then the scales are corrected
               block by block, which is unbiased over the random signs of the GEMM's rotation
               (ops/quantize/eden.py)
    block      elements along the contracted axis that share a correction, the block of the GEMM's
               rotation; "eden" alone reads it
    draws      (derived) the cast needs a random number for each of its "elements" or "scales", in the
               shape of `noise_shape`; "": it needs none
    headroom   factor by which the tensor is scaled down before the cast and scaled up after
               decoding. Rules that may saturate the top of a tile need headroom for unbiased
               stochastic rounding: 4/3 with E8M0_FLOOR (arXiv 2502.20586), 17/16 with
               E4M3_TWO_LEVEL. Scales of tiles do not change. The factor is one number per tensor,
               and the GEMM multiplies its result by it.
    """

    format: Format
    tile: tuple[int, int] = (WHOLE, WHOLE)
    scale: ScaleRule = FP32
    calibrate: Calibrate = CURRENT
    rounding: Literal["nearest", "stochastic", "eden"] = "nearest"
    headroom: float = 1.0
    block: int = 128
    draws: Literal["", "elements", "scales"] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        wanted = "it must be a Format. Take a constant of narrowgauge.formats, or look a name up with formats.get."
        _require(self, "format", isinstance(self.format, Format), wanted)
        wanted = "it must be a ScaleRule. Take a constant of narrowgauge.scaling."
        _require(self, "scale", isinstance(self.scale, ScaleRule), wanted)
        wanted = "it must be CURRENT or a DelayedScaling(...), ClippedRms(...) or LearnedStep(...)."
        _require(self, "calibrate", isinstance(self.calibrate, Calibrate), wanted)
        is_pair = isinstance(self.tile, tuple) and all(
            is_whole(size, -math.inf) for size in self.tile
        )
        _require(
            self, "tile", is_pair, "it must be a tuple of two whole numbers, such as (1, 128)."
        )
        sizes = len(self.tile) == 2 and all(size == WHOLE or size >= 1 for size in self.tile)
        _require(self, "tile", sizes, "give two sizes of at least 1, or -1 for a whole axis.")
        if isinstance(self.calibrate, DelayedScaling) and not self.is_per_tensor:
            raise ConfigError(
                f"Cast: DelayedScaling keeps the history of one amax per tensor, but the tile is {self.tile}. "
                "Use tile=(-1, -1) or calibrate=CURRENT.",
                code="cast.window-tile",
            )
        one_step = self.is_per_tensor and self.scale == FP32 and isinstance(self.format, IntFormat)
        if isinstance(self.calibrate, LearnedStep) and not one_step:
            raise ConfigError(
                f"Cast: a LearnedStep is one float32 step per tensor between integers, but the cast is {self.format} with "
                f"tile {self.tile} and scale {self.scale}. Use an integer format, tile=(-1, -1) and scale=FP32.",
                code="cast.learned-step",
            )
        _require(
            self,
            "rounding",
            self.rounding in ("nearest", "stochastic", "eden"),
            "choose 'nearest', 'stochastic' or 'eden'.",
        )
        self._check_block()
        # An attribute and no property: every cast of every step reads it. Float32 scales take a
        # correction without another rounding.
        rounds_scales = self.rounding == "eden" and self.scale.two_level
        drawn_for = {"stochastic": "elements", "eden": "scales" if rounds_scales else ""}
        object.__setattr__(self, "draws", drawn_for.get(self.rounding, ""))
        if self.scale.reads_elements and (WHOLE in self.tile or self.headroom != 1):
            raise ConfigError(
                f"Cast: {self.scale} compares the errors of scales tile by tile, but the tile is {self.tile} with a headroom of "
                f"{self.headroom:g}. Use a tile of two sizes, such as (1, 16), without headroom.",
                code="cast.compared-scales",
            )
        headroom = is_positive(self.headroom) and 1 <= self.headroom <= LARGEST_HEADROOM
        wanted = f"it must be a number from 1 (none) to {LARGEST_HEADROOM}: more than the rules can saturate by would only"
        _require(self, "headroom", headroom, f"{wanted} waste resolution.")

    def _check_block(self) -> None:
        wanted = f"it must be a power of two from 2 to {LARGEST_BLOCK}, such as 128."
        _require(self, "block", _is_block(self.block), wanted)
        outer, inner = self.tile
        divides = outer == 1 and inner != WHOLE and self.block % inner == 0
        is_corrected = divides and self.headroom == 1 and not self.scale.power_of_two
        if self.rounding == "eden" and not is_corrected:
            raise ConfigError(
                f"Cast: rounding='eden' multiplies the scales within {self.block} elements of a row by one correction, but the "
                f"tile is {self.tile}, the scale {self.scale} and the headroom {self.headroom:g}. Use a tile (1, n) where n "
                "divides the block, a scale of float32 or E4M3, and no headroom.",
                code="cast.corrected-scales",
            )

    def noise_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the random numbers that a cast of a matrix [outer, inner] takes."""
        is_for_scales = self.draws == "scales"
        return scale_shape((shape[0], shape[1]), self.tile) if is_for_scales else shape

    @property
    def is_per_tensor(self) -> bool:
        return self.tile == (WHOLE, WHOLE)

    @property
    def has_global_scale(self) -> bool:
        """True if one number multiplies the scales of all tiles."""
        return self.scale.two_level or self.headroom != 1

    @property
    def mx_kind(self) -> str | None:
        """ "mxfp8", "mxfp4" or "nvfp4" if tensor cores multiply by these scales, else None."""
        if self.tile[0] not in (1, self.tile[1]) or self.format not in (E4M3, E5M2, E2M1):
            return None
        is_narrow = self.format == E2M1
        if self.tile[1] == MX_TILE and self.scale.power_of_two:
            return "mxfp4" if is_narrow else "mxfp8"
        return "nvfp4" if self.tile[1] == NV_TILE and self.scale.two_level and is_narrow else None

    @property
    def is_symmetric(self) -> bool:
        """True if the transposed tensor has the transposed tiles.

        One quantization then serves both orientations.
        """
        return self.tile[0] == self.tile[1] and self.rounding == "nearest"

    def __str__(self) -> str:
        outer, inner = ("all" if size == WHOLE else str(size) for size in self.tile)
        tile = (
            "tensor"
            if self.is_per_tensor
            else "row"
            if self.tile == (1, WHOLE)
            else f"{outer}x{inner}"
        )
        words = [str(self.format), tile, str(self.scale)]
        if self.calibrate != CURRENT:
            words.append(str(self.calibrate))
        if self.rounding != "nearest":
            words.append("eden " + str(self.block) if self.rounding == "eden" else self.rounding)
        if self.headroom != 1:
            words.append(f"headroom {Fraction(self.headroom).limit_denominator(64)}")
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Hadamard:
    """A rotation of both operands along the contracted axis.

    It spreads outliers over a block and leaves the GEMM's exact result unchanged:

        lhs @ rhs.T = (lhs diag(s) H) @ (rhs diag(s) H).T,    H = BlockDiag(H_block, ...)

    H_block is the orthonormal Sylvester matrix, so H is symmetric and its own inverse. An axis that
    the block does not divide is padded with zeros.

    block   size of a block of contiguous elements: a power of two
    signs   s: "none" (all +1), "fixed" (the same at every call), or "random" (drawn at every call,
            the same for both operands)
    rounds  rotations in a row, each with random signs of its own. One round spreads a block that
            one element dominates to numbers of one magnitude; the second makes these nearly normal,
            which casts by rounding="eden" need to be unbiased (docs/four-bit.md)
    """

    block: int = 32
    signs: Literal["none", "fixed", "random"] = "none"
    rounds: int = 1

    def __post_init__(self) -> None:
        power = _is_block(self.block)
        wanted = f"it must be a power of two from 2 to {LARGEST_BLOCK}. Gemm(rotate=None) does not rotate."
        _require(self, "block", power, wanted)
        _require(
            self,
            "signs",
            self.signs in ("none", "fixed", "random"),
            "choose 'none', 'fixed' or 'random'.",
        )
        # Without new signs H H is the identity.
        most = 2 if self.signs == "random" else 1
        rounds = is_whole(self.rounds) and self.rounds <= most
        _require(self, "rounds", rounds, "it must be 1, or 2 with signs='random'.")

    def __str__(self) -> str:
        signs = f", {self.signs} signs" if self.signs != "none" else ""
        return f"Hadamard {self.block}{signs}" + (" twice" if self.rounds == 2 else "")


@dataclass(frozen=True, kw_only=True)
class LeverageScore:
    """Leverage score sampling of the gradient's rows (arXiv 2306.11987, section 4.2).

    Rows are sampled with probabilities that follow their share of the GEMM's result.

    keep          share of the rows (tokens) that enter the GEMM. With a bit-split gradient, 0.5
                  costs as much in INT4 as one INT4 GEMM of all rows
    max_variance  limit on the variance that sampling adds, predicted from the probabilities,
                  relative to the squared norm of the result. Above it the layer uses all rows.
                  math.inf: always sample.
    """

    keep: float = 0.5
    max_variance: float = 0.02

    def __post_init__(self) -> None:
        share = is_positive(self.keep) and self.keep <= 1
        _require(self, "keep", share, "it is the share of rows kept, above 0 and at most 1.")
        limit = is_positive(self.max_variance) or self.max_variance == math.inf
        wanted = "it must be a positive number. math.inf samples always; Gemm(sample=None) never."
        _require(self, "max_variance", limit, wanted)

    def __str__(self) -> str:
        always = self.max_variance == math.inf
        limit = (
            "" if always else f" while it adds less than {self.max_variance:g} relative variance"
        )
        return f"{self.keep:.0%} of rows by leverage score{limit}"


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Casts of one GEMM lhs @ rhs.T; None is a 16-bit operand (bf16, or fp16 under fp16 autocast).

    rotate           rotates both operands along the contracted axis before they are cast
    sample           drops rows of the gradient: contracted rows in `grad_weight`, outer rows in
                     `grad_input`
    fast_accumulate  FP8 tensor cores may add in their own accumulator of about 14 bits (Hopper).
                     Peers allow this for `output` only, where errors do not compound over steps.
                     Gradients accumulate in float32.
    """

    lhs: Cast | None = None
    rhs: Cast | None = None
    rotate: Hadamard | None = None
    sample: LeverageScore | None = None
    fast_accumulate: bool = False

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs"):
            is_cast = isinstance(getattr(self, name), Cast | None)
            _require(self, name, is_cast, "it must be a Cast, or None for 16 bits.")
        wanted = "it must be a Hadamard(...), or None for no rotation."
        _require(self, "rotate", isinstance(self.rotate, Hadamard | None), wanted)
        wanted = "it must be a LeverageScore(...), or None for all rows."
        _require(self, "sample", isinstance(self.sample, LeverageScore | None), wanted)
        _require(
            self, "fast_accumulate", isinstance(self.fast_accumulate, bool), "choose True or False."
        )
        delayed = [
            cast
            for cast in (self.lhs, self.rhs)
            if cast is not None and isinstance(cast.calibrate, DelayedScaling)
        ]
        if self.rotate is not None and delayed:
            raise ConfigError(
                "Gemm: DelayedScaling keeps the amax history of the tensor itself, and the rotated one has another amax. "
                "Use calibrate=CURRENT or rotate=None.",
                code="gemm.rotated-window",
            )

    def __str__(self) -> str:
        wide = self.lhs is None and self.rhs is None
        words = "16-bit" if wide else f"{self.lhs or '16-bit'} x {self.rhs or '16-bit'}"
        return ", ".join(
            [words, *(str(part) for part in (self.rotate, self.sample) if part is not None)]
        )


@dataclass(frozen=True, kw_only=True)
class HighPrecisionBlocks:
    """Transformer blocks of a stack that stay in bf16.

    Of `count` blocks, ceil(share * count) stay in bf16: the last ones, and in large stacks the
    first ones. "NVFP4 pre-training" (arXiv 2509.25149, section 4.1 and appendix E.2) finds that the
    last blocks need more than one mantissa bit. It keeps about 15 % of the Linears in bf16: the
    first 2 and the last 8 of 62 blocks in its 12B model.

    share       share of the blocks of a stack
    first       how many are taken from the start, in stacks of at least `first_from` blocks
    smallest    stacks with fewer blocks keep none: one block would be more than a quarter of the
                model
    """

    share: float = 0.15
    first: int = 2
    first_from: int = 40
    smallest: int = 4

    def __post_init__(self) -> None:
        share = is_positive(self.share) and self.share < 1
        _require(self, "share", share, "it must lie between 0 and 1. wide_blocks=None keeps none.")
        for name in ("first", "first_from", "smallest"):
            _require(
                self,
                name,
                is_whole(getattr(self, name), 0),
                "it must be a whole number of blocks, 0 or more.",
            )

    def indices(self, count: int) -> frozenset[int]:
        """Indices, from 0, of the blocks that stay in bf16 in a stack of `count`."""
        if count < self.smallest:
            return frozenset()
        # The epsilon absorbs float error: 0.07 * 100 is 7.000000000000001.
        kept = math.ceil(self.share * count - 1e-9)
        first = min(self.first, kept) if count >= self.first_from else 0
        return frozenset((*range(first), *range(count - kept + first, count)))

    def __str__(self) -> str:
        where = f"of {self.first_from} and more, {self.first} of them first"
        return f"last {self.share:.0%} of the blocks in bf16 ({where})"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The three GEMMs of a Linear.

    name         name that users pass
    summary      one line for lists of recipes. Two recipes that differ in it alone are equal
    save         form in which x is saved for `grad_weight`, unless backward="recast-codes". The
                 gradients are bit-identical.
                 "original": the tensor itself, which its producer often saves anyway; cast again in
                 backward. "quantized": its codes of 8 or 4 bits, a quarter to half of the bytes,
                 without a second cast
    backward     "recast": the backward GEMMs cast x and w again, from the originals and along their
                 own contracted axis. "recast-codes": they cast the decoded x and w of `output` again,
                 so x is saved as its codes (nn/recast_codes.py). "straight-through": they use the codes of `output` in its
                 rotated basis; clipped elements get no gradient, and results are rotated back. A
                 LearnedStep has a gradient only then
    wide_blocks  Transformer blocks that `convert` leaves in bf16, found by the model's structure;
                 None: all blocks are cast

    Details of save="quantized": per-tensor casts share the codes of `output`, other casts store
    codes tiled for `grad_weight`. If backward recasts weights, as a GPU does by default, x is saved
    in place of codes where its producer saves it anyway (nn/keep_policy.py). If a CPU emulates the GEMM,
    decoded values are saved for per-tensor casts and x for others, because encoding costs more there
    than the GEMM gains.
    """

    name: str
    summary: str = field(default="", compare=False, repr=False)
    output: Gemm = Gemm()
    grad_input: Gemm = Gemm()
    grad_weight: Gemm = Gemm()
    save: Literal["original", "quantized"] = "original"
    backward: Literal["recast", "recast-codes", "straight-through"] = "recast"
    wide_blocks: HighPrecisionBlocks | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(
                f"Recipe: name is {self.name!r}; it must be a string.", code="recipe.name"
            )
        for product, gemm in self.gemms().items():
            _require(
                self,
                product,
                isinstance(gemm, Gemm),
                "it must be a Gemm. Gemm() leaves it in 16 bits.",
            )
        wide = isinstance(self.wide_blocks, HighPrecisionBlocks | None)
        _require(self, "wide_blocks", wide, "it must be a HighPrecisionBlocks(...), or None.")
        _require(
            self,
            "save",
            self.save in ("original", "quantized"),
            "choose 'original' or 'quantized'.",
        )
        choices = ("recast", "recast-codes", "straight-through")
        wanted = "choose 'recast', 'recast-codes' or 'straight-through'."
        _require(self, "backward", self.backward in choices, wanted)
        self._check_operands()
        if self.backward == "straight-through":
            self._check_straight_through()
        elif self.samplers():
            self._refuse(
                "recipe.sampled-recast",
                "rows are sampled with backward='straight-through' only. Choose that, or sample=None.",
            )
        elif any(isinstance(cast.calibrate, LearnedStep) for _, cast in self._casts()):
            self._refuse(
                "recipe.learned-step-recast",
                "a LearnedStep has a gradient with backward='straight-through' only. Choose that, or ClippedRms.",
            )
        if self.backward == "recast-codes":
            self._check_recast_codes()

    def _refuse(self, code: str, why: str) -> NoReturn:
        raise ConfigError(f"Recipe {self.name!r}: {why}", code=code)

    def _check_operands(self) -> None:
        for role, cast in self._casts():
            if not cast.format.is_signed:
                self._refuse(
                    "recipe.unsigned-format",
                    f"{role} is cast to {cast.format}, which has no negative numbers. Choose a signed format.",
                )
        for product, gemm in self.gemms().items():
            rotate = gemm.rotate
            for operand in (gemm.lhs, gemm.rhs):
                if operand is None or operand.rounding != "eden":
                    continue
                # Rounded to nearest as they stand, operands are biased: the expectation is over signs.
                if rotate is None or rotate.signs != "random" or rotate.block != operand.block:
                    self._refuse(
                        "recipe.unrotated-correction",
                        f"{product} casts with rounding='eden', which is unbiased over random signs of a rotation of "
                        f"{operand.block}, but rotates by {rotate}. Use rotate=Hadamard(block={operand.block}, signs='random').",
                    )
        if self.save == "quantized" and self.grad_weight.rhs is None:
            self._refuse(
                "recipe.quantized-uncast",
                "save='quantized', but grad_weight.rhs is not cast. Cast it or save='original'.",
            )
        # Saved codes of x carry the signs of the forward pass; the gradient would be rotated with
        # others.
        rotate = self.grad_weight.rotate
        if self.save == "quantized" and rotate is not None and rotate.signs == "random":
            self._refuse(
                "recipe.quantized-random-signs",
                "save='quantized' keeps x rotated with signs that the gradient will not meet again. "
                "Use signs='fixed' in grad_weight, or save='original'.",
            )
        for role, casts in self.roles().items():
            delayed = {
                (c.calibrate, c.format)
                for c in casts
                if c is not None and isinstance(c.calibrate, DelayedScaling)
            }
            if len(delayed) > 1:
                self._refuse(
                    "recipe.two-windows",
                    f"{role} is cast with two kinds of delayed scaling. There is one amax history per tensor; use the same "
                    "DelayedScaling and format in both products.",
                )
        if self.output.sample is not None:
            self._refuse(
                "recipe.sampled-output",
                "output samples rows. Only the products of the gradient can; use sample=None.",
            )
        if self.output.rotate is not None and self.output.rotate.rounds > 1:
            self._refuse(
                "recipe.rotated-twice",
                f"output rotates by {self.output.rotate}. Results are rotated back by one round; use rounds=1 there.",
            )

    def _check_straight_through(self) -> None:
        """Check the backward GEMMs of a straight-through recipe.

        Each uses the codes of `output` or, with rhs=None, the original in 16 bits.
        """
        for product, forward in (("grad_input", self.output.rhs), ("grad_weight", self.output.lhs)):
            gemm: Gemm = getattr(self, product)
            rhs = gemm.rhs
            if rhs is not None and rhs != forward:
                self._refuse(
                    "recipe.straight-through-codes",
                    f"backward='straight-through' multiplies by the codes of output, but {product}.rhs is {rhs} and output has "
                    f"{forward or '16-bit'}. Make them equal, or rhs=None.",
                )
            if rhs is not None and (
                not rhs.is_per_tensor
                or rhs.rounding != "nearest"
                or not isinstance(rhs.format, IntFormat)
                or isinstance(rhs.calibrate, DelayedScaling)
            ):
                self._refuse(
                    "recipe.straight-through-cast",
                    f"{rhs} does not serve both orientations. backward='straight-through' needs integers with one scale per tensor "
                    "from the tensor at hand, rounded to nearest.",
                )
            if gemm.rotate is not None:
                self._refuse(
                    "recipe.straight-through-rotation",
                    f"{product} has a rotation of its own, but backward='straight-through' multiplies in the basis of output. "
                    "Use rotate=None there.",
                )
        for role, cast in self._casts():
            if isinstance(
                cast.calibrate, LearnedStep | DelayedScaling if role == "gy" else DelayedScaling
            ):
                self._refuse(
                    "recipe.straight-through-calibration",
                    f"{role} is calibrated by '{cast.calibrate}', for which backward='straight-through' has no place. "
                    "Use CURRENT or ClippedRms.",
                )

    def _check_recast_codes(self) -> None:
        """Check that `output` has the same codes in a repeated pass, and that backward casts anew."""
        output, casts = self.output, (self.output.lhs, self.output.rhs)
        is_repeatable = all(
            cast is not None
            and cast.rounding == "nearest"
            and not isinstance(cast.calibrate, DelayedScaling)
            for cast in casts
        )
        if not is_repeatable or (output.rotate is not None and output.rotate.signs == "random"):
            self._refuse(
                "recipe.recast-codes-output",
                f"backward='recast-codes' decodes x and w of output, which is {output}. Cast both to nearest by their own "
                "magnitudes, without random signs, or choose backward='recast'.",
            )
        if self.grad_input.rotate is None or self.grad_weight.rotate is None:
            self._refuse(
                "recipe.recast-codes-rotation",
                "backward='recast-codes' casts decoded operands again for products that rotate them. Rotate grad_input and "
                "grad_weight, or choose backward='recast'.",
            )
        if self.save == "quantized":
            self._refuse(
                "recipe.recast-codes-save",
                "save='quantized' keeps codes of x.T, and backward='recast-codes' those of output. Leave save at 'original'.",
            )

    @property
    def saves_codes(self) -> bool:
        """True if backward has codes of x, and not x."""
        return self.save == "quantized" or self.backward == "recast-codes"

    def _casts(self) -> list[tuple[str, Cast]]:
        """(role, cast) of all operands that are cast."""
        return [
            (role, cast)
            for role, casts in self.roles().items()
            for cast in casts
            if cast is not None
        ]

    def roles(self) -> dict[str, tuple[Cast | None, Cast | None]]:
        """The two casts of each tensor: as it is, and transposed."""
        return {
            "x": (self.output.lhs, self.grad_weight.rhs),
            "w": (self.output.rhs, self.grad_input.rhs),
            "gy": (self.grad_input.lhs, self.grad_weight.lhs),
        }

    def delayed_scaling(self) -> dict[str, tuple[DelayedScaling, Format]]:
        """Role -> (DelayedScaling, format).

        Roles without delayed scaling are absent.
        """
        return {
            role: (c.calibrate, c.format)
            for role, c in self._casts()
            if isinstance(c.calibrate, DelayedScaling)
        }

    @property
    def has_state(self) -> bool:
        """True if a layer needs state that persists from step to step."""
        # Plain loops: `linear` reads this at every call.
        for gemm in (self.output, self.grad_input, self.grad_weight):
            if gemm.sample is not None:
                return True
            for cast in (gemm.lhs, gemm.rhs):
                if cast is not None and isinstance(cast.calibrate, (DelayedScaling, LearnedStep)):
                    return True
        return False

    def learned_steps(self) -> dict[str, LearnedStep]:
        """Role -> its LearnedStep; roles without one are absent."""
        found = {}
        for role, cast in (("x", self.output.lhs), ("w", self.output.rhs)):
            if cast is not None and isinstance(cast.calibrate, LearnedStep):
                found[role] = cast.calibrate
        return found

    def samplers(self) -> dict[str, LeverageScore]:
        """GEMM name -> sampler of its rows; GEMMs without one are absent."""
        return {name: gemm.sample for name, gemm in self.gemms().items() if gemm.sample is not None}

    def gemms(self) -> dict[str, Gemm]:
        return {name: getattr(self, name) for name in GEMMS}

    def with_shared_scales(self) -> Recipe:
        """Copy whose casts of the weight have powers of two as float32 scales, where files need them.

        Two-level casts: weights can then share the largest scale of the whole tensor without a
        rounding, as servers need of q, k and v. 8-bit integers: GGUF's Q8_0 holds scales of 16
        bits. Other recipes are returned as they are.

        An integer's step grows by up to 2, and the rounding error of the weight by 1.26 to 1.48
        (decisions/other-software.md). That of two-level casts stays within 0.5 %.
        """

        def shared(gemm: Gemm, rules: dict[ScaleRule, ScaleRule]) -> Gemm:
            if gemm.rhs is None or gemm.rhs.scale not in rules:
                return gemm
            return replace(gemm, rhs=replace(gemm.rhs, scale=rules[gemm.rhs.scale]))

        two_level = {
            E4M3_TWO_LEVEL: E4M3_TWO_LEVEL_POW2,
            E4M3_FOUR_OVER_SIX: E4M3_FOUR_OVER_SIX_POW2,
        }
        cast = self.output.rhs
        is_int8 = cast is not None and cast.format.name == "int8" and cast.calibrate == CURRENT
        found = replace(
            self,
            output=shared(self.output, two_level | ({FP32: POW2} if is_int8 else {})),
            # The codes of grad_input are the same in square tiles, and others in rows.
            grad_input=shared(self.grad_input, two_level),
        )
        return self if found == self else replace(found, name=self.name + SHARED_SCALES)

    def with_gemm(self, **changes: Gemm) -> Recipe:
        """Copy of this recipe with some GEMMs replaced: `recipe.with_gemm(grad_weight=Gemm())`.

        Replacing any of a "recast-codes" recipe makes it a "recast" recipe. Replacing `output` of a
        straight-through recipe makes it one too, because the codes for backward are gone: rotation
        and sampling are dropped, and a LearnedStep becomes ClippedRms.
        """
        unknown = set(changes) - set(GEMMS)
        if unknown:
            raise ConfigError(
                f"with_gemm: {sorted(unknown)} are not products of a Linear; choose from {GEMMS}.",
                code="recipe.gemm-name",
            )
        # A 16-bit grad_weight reads x itself, so there are no codes to save.
        save = "original" if changes.get("grad_weight") == Gemm() else self.save
        suffix = "".join(
            f"+{name}:{'16-bit' if gemm == Gemm() else 'custom'}" for name, gemm in changes.items()
        )
        gemms: dict[str, Any] = self.gemms() | changes
        # The decoded operands of forward serve two products with rotations, and no other one.
        backward = "recast" if self.backward == "recast-codes" and changes else self.backward
        if backward == "straight-through" and gemms["output"] != self.output:
            backward = "recast"
            gemms |= {
                name: _recast(gemms[name])
                for name in ("grad_input", "grad_weight")
                if name not in changes
            }
        # The summary describes the recipe without the changes.
        return replace(
            self, name=self.name + suffix, summary="", save=save, backward=backward, **gemms
        )


def _recast(gemm: Gemm) -> Gemm:
    """A straight-through recipe's backward GEMM, changed to work without the codes of `output`."""
    rhs = gemm.rhs
    if rhs is not None and isinstance(rhs.calibrate, LearnedStep):
        rhs = replace(rhs, calibrate=ClippedRms())
    return replace(gemm, rhs=rhs, sample=None)
