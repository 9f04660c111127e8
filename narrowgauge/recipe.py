"""Recipes as data: which operand of which matrix product is cast how.

A Linear with x [T, K], w [N, K] and the gradient of its output gy [T, N] has three products, all of them lhs @ rhs.T:

    output        x @ w.T      lhs x    [T, K]   rhs w    [N, K]   contracted over K
    grad_input    gy @ w       lhs gy   [T, N]   rhs w.T  [K, N]   contracted over N
    grad_weight   gy.T @ x     lhs gy.T [N, T]   rhs x.T  [K, T]   contracted over T

A Cast says what one operand becomes; None leaves it in 16 bits. A Gemm is two casts, a Recipe is three Gemms. Everything
here is frozen, hashable and picklable; a variant is made with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Literal

from narrowgauge.blocks import WideBlocks
from narrowgauge.errors import ConfigError
from narrowgauge.formats import DYNAMIC_UNSIGNED, E8M0, Format
from narrowgauge.scaling import FP32, ScaleRule
from narrowgauge.tiles import WHOLE

GEMMS = ("output", "grad_input", "grad_weight")

LARGEST_HEADROOM = 4 / 3  # 8/6: how far the top of a tile can pass e2m1's maximum under E8M0_FLOOR
LARGEST_MARGIN = 32  # beyond it every element of a narrow format would be zero, or saturate

Algorithm = Literal["max", "most_recent"]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
        if not _is_whole(self.length):
            raise ConfigError(f"Window: length is {self.length!r}; it must be a whole number of steps.")
        if not _is_whole(self.margin) or abs(self.margin) > LARGEST_MARGIN:
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


CURRENT = Current()

# What to do when a part of a Cast is of the wrong type.
_NEXT = {
    "format": "it must be a Format. Take a constant of narrowgauge.formats, or look a name up with formats.get.",
    "scale": "it must be a ScaleRule. Take a constant of narrowgauge.scaling.",
    "calibrate": "it must be CURRENT or a Window(...).",
}


@dataclass(frozen=True, kw_only=True)
class Cast:
    """What becomes of one operand.

    format     what an element can be
    tile       elements that share a scale, along (outer, contracted) axis; -1 takes the whole axis
    scale      the rule from a tile's amax to its scale
    calibrate  where amax comes from: CURRENT, or a Window of earlier steps (per-tensor tiles only)
    rounding   "nearest" (ties to even) or "stochastic" (draws from torch's generator; unbiased where nothing saturates)
    headroom   the tensor is scaled down by this factor before it is cast, and what is decoded is scaled up by it again.
               Rules that may saturate the top of a tile need it for stochastic rounding to be unbiased: 4/3 with
               E8M0_FLOOR (arXiv 2502.20586), 17/16 with E4M3_TWO_LEVEL. The scales of the tiles do not change; the
               factor is one number of the whole tensor, which a GEMM multiplies its result by.
    """

    format: Format
    tile: tuple[int, int] = (WHOLE, WHOLE)
    scale: ScaleRule = FP32
    calibrate: Current | Window = CURRENT
    rounding: Literal["nearest", "stochastic"] = "nearest"
    headroom: float = 1.0

    def __post_init__(self) -> None:
        for name, value, wanted in (
            ("format", self.format, Format),
            ("scale", self.scale, ScaleRule),
            ("calibrate", self.calibrate, Current | Window),
        ):
            if not isinstance(value, wanted):
                raise ConfigError(f"Cast: {name} is {value!r}; {_NEXT[name]}")
        if not isinstance(self.tile, tuple) or not all(_is_whole(size) for size in self.tile):
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
class Gemm:
    """The casts of one matrix product lhs @ rhs.T; None is a 16-bit operand (bf16, or fp16 under fp16 autocast).

    fast_accumulate  let FP8 tensor cores add in their own narrow accumulator (about 14 bits on Hopper). Peers do so for
                     `output` only, where errors do not compound over steps; gradients are accumulated in float32.
    """

    lhs: Cast | None = None
    rhs: Cast | None = None
    fast_accumulate: bool = False

    def __post_init__(self) -> None:
        for name, cast in (("lhs", self.lhs), ("rhs", self.rhs)):
            if cast is not None and not isinstance(cast, Cast):
                raise ConfigError(f"Gemm: {name} is {cast!r}; it must be a Cast, or None for 16 bits.")
        if not isinstance(self.fast_accumulate, bool):
            raise ConfigError(f"Gemm: fast_accumulate is {self.fast_accumulate!r}; choose True or False.")

    def __str__(self) -> str:
        if self.lhs is None and self.rhs is None:
            return "16-bit"
        return f"{self.lhs or '16-bit'} x {self.rhs or '16-bit'}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The three products of a Linear.

    name  how users call it
    save  what is kept of x for `grad_weight`: "original" (the tensor as it came, often kept alive by its producer anyway,
          cast again in backward) or "quantized" (its 8-bit codes: a quarter to half of the bytes, no second cast). Casts per
          tensor share the codes of `output`; others store codes tiled for `grad_weight`. The gradients are the same. Where
          a CPU emulates, the decoded values stand for the codes: encoding them takes longer than the product saves.
    wide_blocks  Transformer blocks that `convert` leaves in bf16, found by the model's structure; None: all are cast
    """

    name: str
    output: Gemm = Gemm()
    grad_input: Gemm = Gemm()
    grad_weight: Gemm = Gemm()
    save: Literal["original", "quantized"] = "original"
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
        for role, casts in self.roles().items():
            windows = {cast.calibrate for cast in casts if cast is not None and isinstance(cast.calibrate, Window)}
            formats = {cast.format for cast in casts if cast is not None and isinstance(cast.calibrate, Window)}
            if len(windows) > 1 or len(formats) > 1:
                raise ConfigError(
                    f"Recipe {self.name!r}: {role} is cast with two different windows. Delayed scaling keeps one amax "
                    "history per tensor; use the same Window and format in both products."
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

    def gemms(self) -> dict[str, Gemm]:
        return {name: getattr(self, name) for name in GEMMS}

    def with_gemm(self, **changes: Gemm) -> Recipe:
        """This recipe with some products replaced, named after them: `recipe.with_gemm(grad_weight=Gemm())`."""
        unknown = set(changes) - set(GEMMS)
        if unknown:
            raise ConfigError(f"with_gemm: {sorted(unknown)} are not products of a Linear; choose from {GEMMS}.")
        save = "original" if changes.get("grad_weight") == Gemm() else self.save
        suffix = "".join(f"+{name}:{'16-bit' if gemm == Gemm() else 'custom'}" for name, gemm in changes.items())
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name in GEMMS}
        return replace(self, **(kept | changes), name=self.name + suffix, save=save)
