"""The named recipes. A new recipe is one constant here, above ALL, with its name and its summary.

    get("fp8-current")             the recipe
    get("nvfp4+shared-scales")     the same with `Recipe.with_shared_scales`
    names()                        all names, in the order of the table in docs/recipes.md

If published implementations disagree, a comment gives the choice made here and its reason. The
other choice is one `dataclasses.replace` away.
"""

from __future__ import annotations

from dataclasses import replace

from narrowgauge.errors import ConfigError, closest
from narrowgauge.formats import E2M1, E2M3, E3M0, E3M2, E4M3, E5M2, INT4, INT4X2, INT8
from narrowgauge.recipe import (
    CURRENT,
    SHARED_SCALES,
    Cast,
    ClippedRms,
    CurrentScaling,
    DelayedScaling,
    Gemm,
    Hadamard,
    HighPrecisionBlocks,
    LearnedStep,
    LeverageScore,
    Recipe,
)
from narrowgauge.scaling import (
    E4M3_EDEN,
    E4M3_EDEN_FOUR_OVER_SIX,
    E4M3_FOUR_OVER_SIX,
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E8M0_CEIL,
    E8M0_FLOOR,
    POW2,
    WHOLE,
)

BF16 = Recipe(
    name="bf16",
    summary="every operand in bfloat16, of a float16 model in float16: the reference that the others are compared with",
)


def _per_tensor(name: str, summary: str, calibrate: CurrentScaling | DelayedScaling) -> Recipe:
    """E4M3 forward and E5M2 gradients ("hybrid"), one float32 scale per tensor.

    TransformerEngine, torchao, MS-AMP, Colossal-AI and COAT all use this split: with one scale for
    a whole tensor, gradients need E5M2's range more than E4M3's third mantissa bit. Fast
    accumulation in `output` alone (Colossal-AI uses it in all three).

    Like TransformerEngine, saves the codes of x for backward in place of casting x again. The
    gradients are bit-identical to the gradients with save="original". On a GPU no codes are saved of
    o_proj's input, which attention saves anyway.
    """
    forward, gradient = (
        Cast(format=E4M3, calibrate=calibrate),
        Cast(format=E5M2, calibrate=calibrate),
    )
    backward = Gemm(lhs=gradient, rhs=forward)
    output = Gemm(lhs=forward, rhs=forward, fast_accumulate=True)
    return Recipe(
        name=name,
        summary=summary,
        output=output,
        grad_input=backward,
        grad_weight=backward,
        save="quantized",
    )


def _uniform(name: str, summary: str, cast: Cast, fast_accumulate: bool = False) -> Recipe:
    """The same cast for all six operands.

    Each tensor is cast twice, along different axes, both times from the original. Backward saves
    the codes of x.T: half the bytes of bfloat16, and gradients bit-identical to save="original". A
    GPU reads x once for both casts.
    """
    gemm = Gemm(lhs=cast, rhs=cast)
    output = replace(gemm, fast_accumulate=fast_accumulate)
    return Recipe(
        name=name,
        summary=summary,
        output=output,
        grad_input=gemm,
        grad_weight=gemm,
        save="quantized",
    )


FP8_DELAYED = _per_tensor(
    "fp8-delayed",
    "one scale per tensor, from the largest magnitudes of earlier steps",
    DelayedScaling(),
)
FP8_CURRENT = _per_tensor("fp8-current", "one scale per tensor, from the tensor at hand", CURRENT)
# Colossal-AI's choice; on Hopper the two backward GEMMs become 1.1 to 1.2 times as fast (torchao
# issue 2377, published). docs/convergence.md compares its final loss with fp8-current's. The error
# of a GEMM grows with the length of the contracted axis, here also with the tokens of a step.
FP8_CURRENT_FAST = replace(
    FP8_CURRENT,
    name="fp8-current-fast",
    summary="as fp8-current, all three products added by FP8 tensor cores in 14 bits",
    grad_input=replace(FP8_CURRENT.grad_input, fast_accumulate=True),
    grad_weight=replace(FP8_CURRENT.grad_weight, fast_accumulate=True),
)
# One scale per row of each operand [outer, contracted], a power of two by default in torchao and
# here. E4M3 everywhere, as in torchao, since a row's range is small.
FP8_ROW = _uniform(
    "fp8-row",
    "one power-of-two scale per row of each operand",
    Cast(format=E4M3, tile=(1, WHOLE), scale=POW2),
    fast_accumulate=True,
)

# DeepSeek-V3's tiles: 1x128 along the contracted axis, 128x128 for weights so that one copy serves
# both GEMMs. E4M3 for gradients too: tiles this small do not need the range of E5M2 (DeepSeek-V3,
# MX papers). A user of TransformerEngine saw the hybrid match bfloat16 better (its issue 2754); to
# try it, replace the format of the two `lhs` casts of grad_input and grad_weight by E5M2.
# Power-of-two scales make decoding exact in bfloat16. Split accumulation in all three GEMMs, as in
# TransformerEngine and DeepGEMM.
_VECTOR = Cast(format=E4M3, tile=(1, 128), scale=POW2)
_SQUARE = Cast(format=E4M3, tile=(128, 128), scale=POW2)
FP8_BLOCK = Recipe(
    name="fp8-block",
    summary="1x128 tiles for activations and gradients, 128x128 for weights",
    output=Gemm(lhs=_VECTOR, rhs=_SQUARE),
    grad_input=Gemm(lhs=_VECTOR, rhs=_SQUARE),
    grad_weight=Gemm(lhs=_VECTOR, rhs=_VECTOR),
    save="quantized",
)

# OCP MX: 1x32 tiles along the contracted axis. E8M0 scales are rounded up ("RCEIL"), not down as in
# the OCP text: rounding down saturates the top of a tile and was seen to diverge in training (arXiv
# 2506.08027). E4M3 for all six operands, as in TransformerEngine and torchao.
MXFP8 = _uniform(
    "mxfp8",
    "1x32 tiles with 8-bit exponents as scales (OCP MX)",
    Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL),
)
# OCP MXFP6: the same tiles and scales, all six operands in 6 bits. x and w in E2M3: in tiles of 32 its
# third mantissa bit counts for more than range, and normal numbers come within 0.6 dB of MXFP8's
# E4M3 (31.0 and 31.5 dB). Gradients in E3M2 (25.6 dB) for its range: an element below 1/448 of its
# tile's largest may become zero, in E2M3 one below 1/60.
#
# Scales are rounded up, as in mxfp8. Rounded down as in the OCP text, what lies above 7.5 of 8 or 28
# of 32 saturates: of normal numbers E2M3 has the same error within 0.1 dB, E3M2 0.2 dB more, and
# shrinks them by 0.5 % in place of 0.3 %. A code of 6 bits takes a byte, so as much is kept for
# backward as in mxfp8. No kernel multiplies them natively yet.
_MX6_FORWARD = Cast(format=E2M3, tile=(1, 32), scale=E8M0_CEIL)
_MX6_GRADIENT = Cast(format=E3M2, tile=(1, 32), scale=E8M0_CEIL)
_MX6_BACKWARD = Gemm(lhs=_MX6_GRADIENT, rhs=_MX6_FORWARD)
MXFP6 = Recipe(
    name="mxfp6",
    summary="6-bit floats in 1x32 tiles with 8-bit exponents as scales (OCP MX): E2M3, gradients E3M2",
    output=Gemm(lhs=_MX6_FORWARD, rhs=_MX6_FORWARD),
    grad_input=_MX6_BACKWARD,
    grad_weight=_MX6_BACKWARD,
    save="quantized",
)
INT8_ROW = _uniform(
    "int8", "8-bit integers, one scale per row of each operand", Cast(format=INT8, tile=(1, WHOLE))
)


def _int4(
    name: str,
    summary: str,
    forward: Cast,
    rotate: Hadamard | None,
    grad_input: Cast,
    grad_weight: Cast,
    sample: LeverageScore | None = None,
) -> Recipe:
    """INT4 recipes after arXiv 2306.11987: x and w in INT4, straight-through backward.

    The paper is "Training Transformers with 4-bit Integers".

    HQ   both operands of `output` are rotated by a Hadamard matrix in blocks of 32, the block that
         the paper finds most often (`calibrate_blocks` in benchmarks/hadamard_blocks.py chooses it
         per layer)
    BS   bit splitting: the gradient in two INT4 digits, 197 levels
    LSS  leverage score sampling

    Differences from the paper:

    - Levels are -7 ... 7 as printed; the paper's code has -8.
    - Digits are not clipped. Clipping biases the gradients of the paper's code by up to 8 %.
    - The split gradient has a scale per row of each GEMM, applied in the epilogue, instead of one
      scale.
    - Rows are sampled before the split (reason in `nn.leverage_score`).

    "int4-hq-bs" sets its steps from the root mean square of the tensor. That has 2.4 times less
    error than LSQ's first step, needs no state, and is the better default for language models.
    Sampling pays where gradients are heavy-tailed, as in fine-tuning, so "int4-hq-lss" decides per
    layer.
    """
    return Recipe(
        name=name,
        summary=summary,
        output=Gemm(lhs=forward, rhs=forward, rotate=rotate),
        grad_input=Gemm(lhs=grad_input, rhs=forward, sample=sample),
        grad_weight=Gemm(lhs=grad_weight, rhs=forward, sample=sample),
        save="quantized",
        backward="straight-through",
    )


_RMS = Cast(format=INT4, calibrate=ClippedRms())
_LSQ = Cast(format=INT4, calibrate=LearnedStep())
_SPLIT = Cast(format=INT4X2, tile=(1, WHOLE), rounding="stochastic")
# LUQ (arXiv 2112.10769), without the natural logarithm in its official code, which makes gradients
# 10 % too small (decisions/four-bit.md). Stochastic rounding between powers of two is linear in the value, so
# LUQ equals stochastic rounding to a format with three exponent bits and no mantissa; alpha is
# max / 2**6, and nothing clips.
_LUQ = Cast(format=E3M0, rounding="stochastic")
_SR = Cast(format=INT4, rounding="stochastic")
_TOKENS = Cast(format=INT4, tile=(1, WHOLE), rounding="stochastic")
_TOKENS_TRANSPOSED = Cast(format=INT4, tile=(WHOLE, 1), rounding="stochastic")
INT4_HQ_BS = _int4(
    "int4-hq-bs",
    "4-bit integers after a Hadamard rotation, gradients split into two 4-bit digits",
    _RMS,
    Hadamard(),
    _SPLIT,
    _SPLIT,
)
INT4_HQ_LSS = _int4(
    "int4-hq-lss",
    "the same with learned steps and rows of the gradient sampled by leverage score",
    _LSQ,
    Hadamard(),
    _SPLIT,
    _SPLIT,
    LeverageScore(),
)
INT4_LSQ_LUQ = _int4(
    "int4-lsq-luq",
    "4-bit integers with learned steps, gradients in powers of two (the paper's baseline)",
    _LSQ,
    None,
    _LUQ,
    _LUQ,
)
INT4_MINMAX_SR = _int4(
    "int4-minmax-sr",
    "as int4-hq-bs, gradients rounded stochastically to 4 bits, one scale per tensor",
    _RMS,
    Hadamard(),
    _SR,
    _SR,
)
INT4_ROW_SR = _int4(
    "int4-row-sr",
    "as int4-hq-bs, gradients rounded stochastically to 4 bits, one scale per token",
    _RMS,
    Hadamard(),
    _TOKENS,
    _TOKENS_TRANSPOSED,
)

# "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149): E2M1 in tiles of 16, e4m3 scales, one float32 above them.
#
# As in the paper: weights in 16x16, so that forward and backward use the same values; activations
# in 1x16; both rounded to nearest, since stochastic rounding of them diverges (appendix E.3).
# Gradients are rounded stochastically in both GEMMs that read them. A Hadamard rotation of 16 with
# TransformerEngine's fixed signs is in grad_weight alone: elsewhere it degrades the loss (E.4.1).
# The last 15 % of the blocks stay in bf16 (E.2), and so do the heads.
#
# Changed here: the scales of stochastic casts are rounded up, not to nearest. Rounding to nearest
# lets 3 % of the elements exceed 6, saturate, and bias the gradient. A headroom of 17/16 would cure
# that for ordinary tiles only, at a larger variance. Scales rounded up are valid NVFP4 scales.
# On a GPU x is saved as the 4-bit codes that grad_weight reads, rotated and tiled along tokens: forward
# casts both ways from one read. The signs are fixed, so gradients are those of save="original".
_NV_VECTOR = Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL)
_NV_SQUARE = Cast(format=E2M1, tile=(16, 16), scale=E4M3_TWO_LEVEL)
_NV_GRADIENT = Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL_CEIL, rounding="stochastic")
NVFP4 = Recipe(
    name="nvfp4",
    summary="4-bit floats in 1x16 tiles, weights 16x16, e4m3 scales; gradients rounded stochastically",
    output=Gemm(lhs=_NV_VECTOR, rhs=_NV_SQUARE),
    grad_input=Gemm(lhs=_NV_GRADIENT, rhs=_NV_SQUARE),
    grad_weight=Gemm(lhs=_NV_GRADIENT, rhs=_NV_VECTOR, rotate=Hadamard(block=16, signs="fixed")),
    save="quantized",
    wide_blocks=HighPrecisionBlocks(),
)

# The same with four over six ("Four Over Six", arXiv 2512.02010) wherever operands are rounded to
# nearest: each tile's largest element goes to 6 or to 4, whichever leaves the smaller error. Of a
# normal operand in 1x16 the squared error falls from 0.0092 to 0.0076 of its square, of a sparse
# one further; of a weight in 16x16, where one of 256 elements decides, it hardly falls. Gradients
# are rounded stochastically by scales rounded up, as above.
_NV46_VECTOR = replace(_NV_VECTOR, scale=E4M3_FOUR_OVER_SIX)
_NV46_SQUARE = replace(_NV_SQUARE, scale=E4M3_FOUR_OVER_SIX)
NVFP4_46 = replace(
    NVFP4,
    name="nvfp4-46",
    summary="as nvfp4, weights and activations in the better of two scales a tile (four over six)",
    output=Gemm(lhs=_NV46_VECTOR, rhs=_NV46_SQUARE),
    grad_input=replace(NVFP4.grad_input, rhs=_NV46_SQUARE),
    grad_weight=replace(NVFP4.grad_weight, rhs=_NV46_VECTOR),
)

# "Quartet II" (arXiv 2601.22813). Forward: x and w in 1x16, the
# better of two scales, not rotated. Backward: both operands of each product are rotated in blocks of
# 128 with new signs, and cast by EDEN (ops/quantize/eden.py), so that nothing of their rounding is
# left on average. No block stays in bf16, as published.
#
# "quartet2" is the paper's. "quartet2-46" tries two scales inside EDEN too, which is not published: of
# a normal operand the squared error of its backward cast is 0.0082 of the operand's square, 0.0098
# under quartet2 and 0.0222 under nvfp4 (benchmarks.closed frontier). Heavy tails and zeros leave a bias,
# which Hadamard(rounds=2) removes; the gradient of a small Llama gained nothing by it, so one round.
# Both cast the decoded x and w of the forward pass again, so backward keeps 4.5 bits of x. From the
# 16-bit originals the gradient is more accurate: `replace(QUARTET2_46, backward="recast")`.
_EDEN_ROTATION = Hadamard(block=128, signs="random")
_FP4_EDEN = Cast(format=E2M1, tile=(1, 16), scale=E4M3_EDEN, rounding="eden")
_FP4_EDEN_46 = replace(_FP4_EDEN, scale=E4M3_EDEN_FOUR_OVER_SIX)
_FP4_GRADIENT = Gemm(lhs=_FP4_EDEN, rhs=_FP4_EDEN, rotate=_EDEN_ROTATION)
_FP4_GRADIENT_46 = Gemm(lhs=_FP4_EDEN_46, rhs=_FP4_EDEN_46, rotate=_EDEN_ROTATION)
QUARTET2 = Recipe(
    name="quartet2",
    summary="4-bit floats in 1x16 tiles, x kept in 4 bits; backward rotated at random and corrected (MS-EDEN)",
    output=Gemm(lhs=_NV46_VECTOR, rhs=_NV46_VECTOR),
    grad_input=_FP4_GRADIENT,
    grad_weight=_FP4_GRADIENT,
    backward="recast-codes",
)
QUARTET2_46 = replace(
    QUARTET2,
    name="quartet2-46",
    summary="as quartet2, backward in the better of two scales a tile as well",
    grad_input=_FP4_GRADIENT_46,
    grad_weight=_FP4_GRADIENT_46,
)

# "TetraJet-v2" (arXiv 2510.27527). Forward: x and w in 1x16, to nearest, not rotated. Backward casts
# the decoded x and w again: both operands of each product are rotated in blocks of 16 with new signs
# and rounded stochastically, so that each product is an unbiased estimate of the decoded operands'.
#
# Changed here: the paper has a float32 scale for each 128 elements above the scales of 16; here it is
# one for the tensor, as in the other NVFP4 recipes. Scales are rounded up where rounding is
# stochastic, as in nvfp4, so nothing saturates. Left out: the channels of x in 8 bits (OutControl)
# and the reset of weights that oscillate (OsciReset).
_TETRAJET_GRADIENT = Gemm(
    lhs=_NV_GRADIENT, rhs=_NV_GRADIENT, rotate=Hadamard(block=16, signs="random")
)
TETRAJET2 = Recipe(
    name="tetrajet2",
    summary="4-bit floats in 1x16 tiles, x kept in 4 bits; backward rotated at random, all of it rounded stochastically",
    output=Gemm(lhs=_NV_VECTOR, rhs=_NV_VECTOR),
    grad_input=_TETRAJET_GRADIENT,
    grad_weight=_TETRAJET_GRADIENT,
    backward="recast-codes",
)

# The forward pass of int4-hq-bs with the same backward pass in integers: one 4-bit digit for each
# operand, a float32 scale for each rotated block. A scale per row would be biased where blocks differ
# in size, and has 1.5 times the error. It gains speed where INT4 units exist (compute capability 8.0
# to 8.9); elsewhere the two digits of int4-hq-bs are one INT8 product as well.
_INT4_EDEN = Cast(format=INT4, tile=(1, 128), rounding="eden")
_INT4_EDEN_GRADIENT = Gemm(lhs=_INT4_EDEN, rhs=_INT4_EDEN, rotate=_EDEN_ROTATION)
INT4_EDEN = Recipe(
    name="int4-eden",
    summary="forward as int4-hq-bs; backward in one 4-bit digit, rotated at random and corrected (EDEN)",
    output=INT4_HQ_BS.output,
    grad_input=_INT4_EDEN_GRADIENT,
    grad_weight=_INT4_EDEN_GRADIENT,
    backward="recast-codes",
)

# OCP MXFP4: E2M1 in 1x32 tiles with power-of-two scales, all six operands, after Hadamard
# rotations.
#
# Backward follows "Training LLMs with MXFP4" (arXiv 2502.20586): blocks of 64 with new random signs
# at every GEMM, so that outliers spread; stochastic rounding of both operands with a headroom of
# 4/3 (the paper's 3/4 before, 16/9 after). Headroom is needed because scales rounded down saturate
# up to a quarter of the range and so bias the gradient. E8M0_CEIL without headroom is as good:
# relative to amax its scales have the same distribution, and its error is the same.
#
# Forward is in 4 bits too, hence the name without a qualifier; the paper leaves it in 8 or 16. It
# is rounded to nearest after a fixed rotation of 32, as in Quartet (arXiv 2505.14669), but with
# scales rounded up. In a language model of 0.1 M parameters (one seed, 200 steps, noise of 0.02)
# the loss was 0.000 nats from that of an MXFP8 forward; with scales rounded down 0.018, and with
# Quartet's clipped-RMS scale, without its clip masks, 0.044. The paper's forward is
# `MXFP4.with_gemm(output=MXFP8.output)`.
_MX_FORWARD = Cast(format=E2M1, tile=(1, 32), scale=E8M0_CEIL)
_MX_BACKWARD = Cast(
    format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, rounding="stochastic", headroom=4 / 3
)
_MX_GRADIENT = Gemm(lhs=_MX_BACKWARD, rhs=_MX_BACKWARD, rotate=Hadamard(block=64, signs="random"))
MXFP4 = Recipe(
    name="mxfp4",
    summary="4-bit floats in 1x32 tiles, powers of two; Hadamard; backward rounded stochastically",
    output=Gemm(lhs=_MX_FORWARD, rhs=_MX_FORWARD, rotate=Hadamard(block=32)),
    grad_input=_MX_GRADIENT,
    grad_weight=_MX_GRADIENT,
)

# All recipes above in definition order, which is the order of the README's table: the registry that
# the CLI, reports, self-checks and tests use.
ALL: tuple[Recipe, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Recipe)
)

# A recipe that is bad on purpose (a positive control, `diagnose.sensitivity`). A study trains it
# beside the others and gives no verdict unless it detects that this recipe is worse. grad_output
# takes the values -1, 0 and 1 times its amax; nearest rounding drops every element below half of
# amax, so most of the learning signal is gone. The forward pass is bf16's, so a model that learns
# nothing has bf16's losses and is distinguishable from no other recipe. With a broken forward pass,
# rounding alone would give the control away before any learning. Below ALL, hence not in it: nobody
# should train with it. Its codes are stored in int8, so every integer kernel works.
_TERNARY = Cast(format=replace(INT8, name="ternary", max=1))
POSITIVE_CONTROL = replace(
    BF16,
    name="positive-control",
    summary="bad on purpose: grad_output in {-1, 0, 1} times its amax",
    grad_input=replace(BF16.grad_input, lhs=_TERNARY),
    grad_weight=replace(BF16.grad_weight, lhs=_TERNARY),
)


def names() -> tuple[str, ...]:
    """Names of all recipes that are meant for training."""
    return tuple(recipe.name for recipe in ALL)


# Shorthand -> (recommended recipe for the format, reason). The same on all hardware: only the
# backend differs.
SHORTHANDS: dict[str, tuple[str, str]] = {
    "fp8": (
        "fp8-current",
        "native from compute capability 8.9 on, needs no state, emulated exactly elsewhere",
    ),
    "int4": (
        "int4-hq-bs",
        "needs no state and no learning of steps; 4-bit codes run on INT8 units, or emulated exactly",
    ),
    "4bit": (
        "int4-hq-bs",
        "least noise of the gradient in 4 bits, and on any hardware; docs/four-bit.md says when another one is better",
    ),
}


# Accepted by `convert` in place of a recipe: picks for each Linear the fastest of bf16 and the FP8
# recipes at its sizes (conversion/auto.py).
AUTO = "auto"
AUTO_SUMMARY = "for each Linear the fastest of bf16, fp8-block, fp8-row and fp8-current at its sizes, by a measurement"


def get(name: str) -> Recipe:
    """The recipe called `name`, or the recipe behind a shorthand ("fp8", "int4", "4bit").

    A name may end in "+shared-scales": `Recipe.with_shared_scales` of the recipe before it. Also
    finds POSITIVE_CONTROL, which `names` omits. Raises ConfigError with the closest name.
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"recipes.get: {name!r} is no name. Pass one of {', '.join(names())}.",
            code="recipes.not-a-name",
        )
    if name.endswith(SHARED_SCALES):
        return _with_shared_scales(name.removesuffix(SHARED_SCALES))
    name = SHORTHANDS[name][0] if name in SHORTHANDS else name
    if name == AUTO:
        raise ConfigError(
            "recipes.get: 'auto' is no recipe but a choice among them for each layer. Give it to convert(), or to train as --recipe.",
            code="recipes.auto",
        )
    for recipe in (*ALL, POSITIVE_CONTROL):
        if recipe.name == name:
            return recipe
    raise ConfigError(
        f"recipes.get: no recipe {name!r}. Closest: {closest(name, names()) or ', '.join(names())}.",
        code="recipes.unknown",
    )


def _with_shared_scales(name: str) -> Recipe:
    recipe = get(name)
    found = recipe.with_shared_scales()
    if found is recipe:
        there = ", ".join(each.name for each in ALL if each.with_shared_scales() is not each)
        raise ConfigError(
            f"recipes.get: {recipe.name!r} has no scale of a weight that {SHARED_SCALES!r} would make a power of two; {there} have one. "
            f"Write {recipe.name!r}.",
            code="recipes.no-shared-scales",
        )
    return found
