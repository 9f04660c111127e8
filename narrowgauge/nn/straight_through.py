"""The three products with backward="straight-through": backward multiplies by the very codes of the forward pass.

    T tokens, K in_features, N out_features; H the rotation of `output`, K filled up to whole blocks; q whole numbers, s steps

    forward      q_x = round(clip(x H / s_x)), q_w = round(clip(w H / s_w)),  clip to -max ... max
                 y = s_x s_w q_x @ q_w.T + bias                                                 [T, N]
    backward     d_x = s_w gy @ q_w,  d_w = s_x gy.T @ q_x          gradients of the decoded operands
                 grad_input  = (d_x where x H was not clipped) H                                [T, K]
                 grad_weight = (d_w where w H was not clipped) H                                [N, K]
                 grad_step   = sum d * (q - x H / s where not clipped, else q) / sqrt(numel max)    of x, and so of w

Equations 2 to 4 and appendix A.3 of "Training Transformers with 4-bit Integers" (arXiv 2306.11987), the mask in the rotated
basis, where the clipping happened. gy is cast as the recipe says. Its rows may be sampled (see `sampling`): outer ones in
grad_input, contracted ones in grad_weight; they are weighed before they are cast. A product whose rhs is None takes the original
instead of the codes, in 16 bits, with no mask and no gradient of a step.

Kept for backward: q_x, two codes to a byte, and one bit per element that says what was not clipped: 0.625 bytes per element; 2 /
residual_every more for a learned step. Layers that read the same x keep the same tensors (`sharing`). q_w is made again from the
weight.

What is left out: second derivatives (asking for them raises; `suspended` has them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.autograd_rules import first_order_only
from narrowgauge.nn import leverage_score
from narrowgauge.nn.learned_step import UNREAD, LearnedSteps
from narrowgauge.nn.operands import Turn, is_shareable, operand, seen, serves_a_step, show, turned
from narrowgauge.nn.plan import Plans, Settings
from narrowgauge.ops.hadamard import rotated_length, unrotate
from narrowgauge.ops.hadamard.codes import decode, encode, unclipped, unpack_bits
from narrowgauge.ops.hadamard.encoding import in_one_pass, rotate_and_encode
from narrowgauge.ops.mm import Plan
from narrowgauge.ops.quantize import calibrated_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, Hadamard, LearnedStep, Recipe
from narrowgauge.tiles import WHOLE
from narrowgauge.traced import handed_out


@dataclass(frozen=True)
class Coded:
    """An operand of the forward product, as backward needs it.

    codes     [outer, K] int8; None where nobody asks
    scale     [1, 1] float32
    bits      uint8 [outer, ceil(K / 8)], what was not clipped (see `ops.hadamard.codes`); None where nobody asks
    residual  [n, K] codes - x H / scale of the n `rows`, zero where clipped; of all rows if `rows` is None
    packed    the codes two to a byte, as they are kept
    """

    cast: Cast
    codes: Tensor | None
    scale: Tensor
    bits: Tensor | None = None
    residual: Tensor | None = None
    rows: Tensor | None = None
    packed: Tensor | None = None

    def decoded(self) -> Tensor:
        """[outer, K] float32."""
        assert self.codes is not None
        return self.codes * self.scale

    def operand(self, how: Plan, rows: Tensor | None = None) -> QTensor:
        """The codes, or some rows of them, for a kernel that wants decoded values or, `how.expand` being None, codes."""
        assert self.codes is not None
        codes = self.codes if rows is None else self.codes[rows]
        data = codes if how.expand is None else codes.to(how.expand)
        return QTensor(data=data, scale=self.scale, cast=self.cast, inner=codes.shape[1])

    def gradient(self, d: Tensor, turn: Turn, inner: int) -> Tensor:
        """d, the gradient of the decoded operand, where it was not clipped, turned back: [outer, inner] float32."""
        assert self.bits is not None
        if turn.hadamard is None:
            return unclipped(d, self.bits)
        return unrotate(d, turn.hadamard, inner, turn.signs, self.bits)

    def step_gradient(self, d: Tensor) -> Tensor | None:
        """LSQ's gradient of the step, [1]: sum d * delta / sqrt(numel max). Rounding errors of some rows stand for all."""
        if self.residual is None or self.bits is None or self.codes is None:
            return None
        clipped = torch.where(unpack_bits(self.bits, d.shape[1]), 0.0, d * self.codes).sum()
        some = d if self.rows is None else d[self.rows]
        share = 1.0 if self.rows is None else max(len(self.rows), 1) / max(len(d), 1)
        rounded = (some * self.residual.to(torch.float32)).sum() / share
        return ((clipped + rounded) * (max(d.numel(), 1) * self.cast.format.max) ** -0.5).reshape(1)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
        x_step: Tensor | None,
        w_step: Tensor | None,
        variance: Tensor | None,
    ) -> Tensor:
        gemm, how = settings.recipe.output, settings.plans.output
        turn = Turn.of(gemm.rotate, x)
        needs, recipe = ctx.needs_input_grad, settings.recipe
        ctx.needs_d_x, ctx.needs_d_w = needs[0] or needs[4], needs[1] or needs[5]
        masks = ctx.needs_d_x and recipe.grad_input.rhs is not None
        reads = ctx.needs_d_w and recipe.grad_weight.rhs is not None
        coded = _input(x, turn, x_step, settings, masks, reads)
        lhs = operand(x, None, None, None, settings) if coded is None else coded.operand(how)
        rhs = _weight(weight, w_step, turn, how, settings)
        show(settings, "output", ("x", seen(settings, turn, x), lhs), ("w", seen(settings, turn, weight), rhs))
        y = how.choice.kernel.run(lhs, rhs, bias, settings.out_dtype, gemm.fast_accumulate)

        ctx.settings, ctx.hadamard, ctx.x_shape, ctx.x_dtype = settings, gemm.rotate, x.shape, x.dtype
        ctx.bias_dtype = bias.dtype if bias is not None and needs[2] else None
        ctx.variance = variance  # an attribute: backward writes it
        w_scale = rhs.scale if isinstance(rhs, QTensor) else None
        kept: tuple[Tensor | None, ...] = (None, None, None, None, None)
        if coded is not None and (masks or reads):
            kept = (coded.packed, coded.scale, coded.bits, coded.residual, coded.rows)
        original = x if ctx.needs_d_w and (not reads or coded is None) else None
        ctx.save_for_backward(weight, w_scale, turn.signs, original, *kept)
        return handed_out(y)

    @staticmethod
    @first_order_only("a Linear with a recipe", "Compute inside `with narrowgauge.suspended(model):`.")
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, w_scale, signs, original, *kept = ctx.saved_tensors
        needs, settings = ctx.needs_input_grad, ctx.settings
        recipe, plans = settings.recipe, settings.plans
        turn = Turn(ctx.hadamard, signs)
        width = ctx.x_shape[1] if turn.hadamard is None else rotated_length(ctx.x_shape[1], turn.hadamard)
        x, w = _reread(kept, recipe.output.lhs, width), _again(weight, w_scale, recipe.output.rhs, turn)
        grad_input = grad_weight = grad_bias = x_step = w_step = lhs = None

        if ctx.needs_d_x:
            gemm, how = recipe.grad_input, plans.grad_input
            draw = _draw("grad_input", gy, None, settings)
            lhs = operand(draw.rows, gemm.lhs, how.expand, None, settings)
            rhs = operand(weight, None, None, None, settings) if gemm.rhs is None or w is None else w.operand(how)
            show(settings, "grad_input", ("gy", draw.rows, lhs), ("w", weight, rhs))
            d_x = how.choice.kernel.run(lhs, turned(rhs), None, torch.float32, gemm.fast_accumulate)
            if draw.sample is not None:
                d_x = leverage_score.spread(d_x, draw.sample, len(gy), weigh=False)
            _note(ctx.variance, 0, draw, draw.squares)
            if gemm.rhs is not None and x is not None:
                x_step = x.step_gradient(d_x)
                d_x = x.gradient(d_x, turn, ctx.x_shape[1])
            grad_input = d_x.to(ctx.x_dtype)

        if ctx.needs_d_w:
            gemm, how = recipe.grad_weight, plans.grad_weight
            samples = recipe.samples().get("grad_weight") is not None
            other = original if original is not None or x is None or not samples else x.decoded()
            draw = _draw("grad_weight", gy, other, settings)
            index = None if draw.sample is None else draw.sample.rows
            if lhs is not None and index is None and _serves_both(recipe, plans, lhs):
                lhs = turned(lhs)
            else:
                lhs = operand(draw.rows.T, gemm.lhs, how.expand, None, settings)
            if gemm.rhs is None or x is None:
                rhs = operand(original if index is None else original[index], None, None, None, settings)
            else:
                rhs = x.operand(how, index)
            if settings.observer is not None:
                given = original if original is not None or x is None else x.decoded()
                show(settings, "grad_weight", ("gy", draw.rows, lhs), ("x", given, rhs))
            d_w = how.choice.kernel.run(lhs, turned(rhs), None, torch.float32, gemm.fast_accumulate)
            _note(ctx.variance, 1, draw, None if draw.squares is None else d_w.square().sum())
            if gemm.rhs is not None and w is not None:
                w_step = w.step_gradient(d_w)
                d_w = w.gradient(d_w, turn, weight.shape[1])
            grad_weight = d_w.to(weight.dtype)

        if ctx.bias_dtype is not None:
            grad_bias = gy.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        x_step, w_step = (
            _step_or_zero(step, learns, settings, gy.device)
            for step, learns in ((x_step, needs[4]), (w_step, needs[5]))
        )
        return grad_input, grad_weight, grad_bias, None, x_step, w_step, None


# --- the operands of the forward product ---------------------------------------------------------------------------------------


def _coded(
    x: Tensor, turn: Turn, cast: Cast, step: Tensor | None, packed: bool = False, bits: bool = False
) -> tuple[Coded, Tensor | None]:
    """x [outer, inner] -> the codes of x H, and x H itself if it was in memory. A learned step is used as it is.

    Where a kernel rotates, encodes and packs in one pass over x, it never is, and a scale from the spread is that of x itself: a
    rotation keeps the norm. The two differ by the rounding of sums.
    """
    by_norm = isinstance(cast.calibrate, ClippedRms) and cast.tile == (WHOLE, WHOLE)
    if turn.hadamard is not None and (step is not None or by_norm) and in_one_pass(x, turn.hadamard, cast.format):
        rotated = None
        scale = _scale_before(x, turn.hadamard, cast) if step is None else _guarded(step, x)
        found = rotate_and_encode(x, turn.hadamard, turn.signs, scale, cast.format, packed=packed, bits=bits)
    else:
        rotated = turn(x).to(torch.float32)
        learned = step is not None and 0 not in rotated.shape
        scale = _guarded(step, rotated) if learned else cast.scale(calibrated_amax(rotated, cast), cast.format)
        found = encode(rotated, scale, cast.format, packed=packed, bits=bits)
    return Coded(cast, found.codes, scale, found.bits, packed=found.packed), rotated


def _guarded(step: Tensor | None, x: Tensor) -> Tensor:
    """The step as a scale [1, 1]. 0 * sum: NaN and infinity in x show themselves through it, as they do through an amax."""
    assert step is not None
    return step.detach().reshape(1, 1) + x.sum(dtype=torch.float32) * 0.0


def _scale_before(x: Tensor, hadamard: Hadamard, cast: Cast) -> Tensor:
    """The scale [1, 1] of x H by its root mean square, which is that of x, and of the zeros that x is filled up with."""
    filled = (x.shape[1] / rotated_length(x.shape[1], hadamard)) ** 0.5
    return cast.scale(calibrated_amax(x.detach(), cast) * filled, cast.format)


def _weight(weight: Tensor, step: Tensor | None, turn: Turn, how: Plan, settings: Settings) -> QTensor | Tensor:
    """The weight of the forward product, from the cache where there is one."""
    cast = settings.recipe.output.rhs

    def build() -> QTensor | Tensor:
        if cast is None:
            return operand(turn(weight), None, None, None, settings)
        return _coded(weight, turn, cast, step)[0].operand(how)

    if settings.cache is None or turn.is_random:
        return build()
    return settings.cache.get("output", weight, settings, build)


def cast_weight(weight: Tensor, settings: Settings) -> None:
    """As `products.cast_weight`; the only cast that is kept is that of the forward product. Not for learned steps."""
    gemm = settings.recipe.output
    if serves_a_step(gemm.rhs, gemm.rotate):
        _weight(weight, None, Turn.of(gemm.rotate, weight), settings.plans.output, settings)


def _input(x: Tensor, turn: Turn, step: Tensor | None, settings: Settings, masks: bool, reads: bool) -> Coded | None:
    """x of the forward product, with what backward asks for; made once for layers that share it. None: x stays in 16 bits.

    masks, reads  whether a gradient asks for what was clipped (and for that of the step), and for the codes
    """
    offset = None
    cast = settings.recipe.output.lhs
    if cast is None:
        return None
    learned = masks and isinstance(cast.calibrate, LearnedStep)

    if isinstance(cast.calibrate, LearnedStep) and settings.records:
        # Whether or not there is a backward pass: reentrant checkpointing repeats a forward pass that had none.
        offset = torch.rand((), device=x.device, dtype=torch.float32)

    def build() -> Coded:
        coded, rotated = _coded(x, turn, cast, step, packed=reads or learned, bits=masks)
        if not learned:
            return coded
        assert isinstance(cast.calibrate, LearnedStep) and coded.codes is not None
        rows = _drawn_rows(len(x), cast.calibrate.residual_every, x.device, offset)
        some = turn(x[rows]) if rotated is None else rotated[rows]
        residual = _residual(some, coded.codes[rows], coded).to(torch.float16)
        return replace(coded, residual=residual, rows=rows)

    if settings.share is None or turn.is_random or not is_shareable(cast):
        return build()
    return settings.share.get(("straight-through", cast, turn.hadamard, masks, reads), build)


# --- from forward to backward --------------------------------------------------------------------------------------------------


def _residual(rotated: Tensor, codes: Tensor, coded: Coded) -> Tensor:
    """codes - x H / scale, zero where clipped."""
    ratio = rotated.to(torch.float32) / coded.scale
    return torch.where(ratio.abs() <= coded.cast.format.max, codes - ratio, 0.0)


def _reread(kept: list[Tensor | None], cast: Cast | None, width: int) -> Coded | None:
    """x of the forward product, from what was kept of it; None if nobody asks for its codes or what was clipped."""
    packed, scale, bits, residual, rows = kept
    if cast is None or scale is None:
        return None
    codes = None if packed is None else decode(packed, cast.format, width)  # None: a frozen weight
    return Coded(cast, codes, scale, bits, residual, rows)


def _again(weight: Tensor, scale: Tensor | None, cast: Cast | None, turn: Turn) -> Coded | None:
    """w of the forward product, made again from the weight."""
    if cast is None or scale is None:
        return None
    if turn.hadamard is not None and in_one_pass(weight, turn.hadamard, cast.format):
        rotated = None
        found = rotate_and_encode(weight, turn.hadamard, turn.signs, scale, cast.format, bits=True)
    else:
        rotated = turn(weight)
        found = encode(rotated, scale, cast.format, bits=True)
    coded = Coded(cast, found.codes, scale, found.bits)
    if not isinstance(cast.calibrate, LearnedStep):
        return coded
    return replace(coded, residual=_residual(turn(weight) if rotated is None else rotated, found.codes, coded))


def _drawn_rows(rows: int, every: int, device: torch.device, offset: Tensor | None = None) -> Tensor:
    """One row of each of ceil(rows / every) equal stretches, [n] int64: every row with the same probability.

    offset  uniform in [0, 1), float32; drawn here if it is not given
    """
    count = -(-rows // every)
    offset = torch.rand((), device=device, dtype=torch.float32) if offset is None else offset
    places = (torch.arange(count, device=device, dtype=torch.float64) + offset) * (rows / max(count, 1))
    return places.to(torch.int64).clamp(max=max(rows - 1, 0))


# --- backward ------------------------------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """The rows of the gradient that enter a product.

    rows      the gradient itself, or the sampled rows, weighed
    sample    which they are; None: all of them
    variance  what sampling adds, or would add, to the squared error of the product; None: the product never samples
    squares   the sum of the squared scores
    """

    rows: Tensor
    sample: leverage_score.Sample | None = None
    variance: Tensor | None = None
    squares: Tensor | None = None


def _draw(product: str, gy: Tensor, other: Tensor | None, settings: Settings) -> Draw:
    """The rows of gy [T, N] for a product. other: x [T, K] for grad_weight, whose rows count too."""
    sampler = settings.recipe.samples().get(product)
    if sampler is None or len(gy) == 0:
        return Draw(gy)
    budget = leverage_score.budget(len(gy), sampler.keep)
    scores = leverage_score.leverage_scores(gy, other)
    p = leverage_score.probabilities(scores, budget)
    variance, squares = leverage_score.sampling_variance(p, scores), scores.square().sum()
    if product not in settings.sampled:
        return Draw(gy, None, variance, squares)
    noise = torch.rand(len(gy) + 1, device=gy.device)
    sample = leverage_score.systematic(p, budget, noise)
    return Draw(leverage_score.weighted(gy.to(torch.float32), sample), sample, variance, squares)


def _note(readings: Tensor | None, place: int, draw: Draw, whole: Tensor | None) -> None:
    """Writes the relative variance that sampling adds to a product of squared norm `whole` into the layer's readings [2]."""
    if readings is None or draw.variance is None or whole is None:
        return
    relative = torch.where(draw.variance == 0, 0.0, draw.variance / whole).to(torch.float32)
    # A sum of squares beyond float32 is no reason to sample.
    relative = torch.where(whole.isfinite(), relative, UNREAD).clamp(max=UNREAD)
    here = torch.arange(2, device=readings.device) == place
    readings.copy_(torch.where(here, relative, readings))


def _serves_both(recipe: Recipe, plans: Plans, lhs: QTensor | Tensor) -> bool:
    """Whether the cast of gy for grad_input, turned, serves grad_weight too: one draw of the rounding for both."""
    same = recipe.grad_input.lhs == recipe.grad_weight.lhs and plans.grad_input.expand == plans.grad_weight.expand
    whole = isinstance(lhs, QTensor) and lhs.cast.tile == (WHOLE, WHOLE) and not lhs.is_packed
    return same and whole and recipe.grad_input.sample is None


def _step_or_zero(step: Tensor | None, learns: bool, settings: Settings, device: torch.device) -> Tensor | None:
    """The gradient of a step: zero in the cold start, and where a product in 16 bits leaves none."""
    if not learns:
        return None
    return torch.zeros(1, device=device) if step is None or settings.is_cold else step


# --- the cold start ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def steps_from_data(steps: LearnedSteps, x: Tensor, weight: Tensor, recipe: Recipe, writes: bool) -> dict[str, Tensor]:
    """Role -> the step of the cold start, 2 mean|x H| / sqrt(max), [1]; written into the parameters if `writes`.

    x [T, K], weight [N, K]. A tensor of zeros, or with a number that is not finite, leaves the step as it was.
    """
    found = {}
    for role, tensor, cast in (("x", x, recipe.output.lhs), ("w", weight, recipe.output.rhs)):
        if role not in steps.settings or cast is None or tensor.numel() == 0:
            continue
        amax = calibrated_amax(Turn.of(recipe.output.rotate, tensor)(tensor).to(torch.float32), cast).reshape(1)
        step = steps.get(role)
        assert step is not None
        there = amax.isfinite() & (amax > 0)
        found[role] = steps.put(role, torch.where(there, amax / cast.format.max, step), writes)
        if writes:
            steps.saw(role, there)
    return found
