"""The operands of a Linear with backward="straight-through": backward multiplies by the very codes of the forward pass.

    T tokens, K in_features, N out_features; H the rotation of `output`, K filled up to whole blocks; q whole numbers, s steps

    forward      q_x = round(clip(x H / s_x)), q_w = round(clip(w H / s_w)),  clip to -max ... max
                 y = s_x s_w q_x @ q_w.T + bias                                                 [T, N]
    backward     d_x = s_w gy @ q_w,  d_w = s_x gy.T @ q_x          gradients of the decoded operands
                 grad_input  = (d_x where x H was not clipped) H                                [T, K]
                 grad_weight = (d_w where w H was not clipped) H                                [N, K]
                 grad_step   = sum d * (q - x H / s where not clipped, else q) / sqrt(numel max)    of x, and so of w

Equations 2 to 4 and appendix A.3 of "Training Transformers with 4-bit Integers" (arXiv 2306.11987), the mask in the rotated
basis, where the clipping happened. gy is cast as the recipe says. Its rows may be sampled (see `leverage_score`): outer ones in
grad_input, contracted ones in grad_weight; they are weighted before they are cast. A product whose rhs is None takes the original
instead of the codes, in 16 bits, with no mask and no gradient of a step.

Kept for backward: q_x, two codes to a byte, and one bit per element that says what was not clipped: 0.625 bytes per element; 2 /
residual_every more for a learned step. Layers that read the same x keep the same tensors (`caches`). q_w is made again from the
weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.nn import leverage_score
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.nn.operands import Operand, Rotation, Saved, transposed
from narrowgauge.nn.plan import OperandRequest
from narrowgauge.ops.hadamard import Codes, decode, encode, rotated_length, unpack_bits, unrotate
from narrowgauge.ops.hadamard.encoding import in_one_pass, rotate_and_encode
from narrowgauge.ops.mm import high_precision
from narrowgauge.ops.quantize import calibrated_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, Hadamard, LearnedStep, Recipe
from narrowgauge.scaling import WHOLE


@dataclass(frozen=True)
class Coded:
    """An operand of the forward product, as backward needs it.

    codes     [outer, K] int8; None where nobody asks
    scale     [1, 1] float32
    bits      uint8 [outer, ceil(K / 8)], what was not clipped (see `ops.hadamard`); None where nobody asks
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

    def operand(self, expand: torch.dtype | None, rows: Tensor | None = None) -> QTensor:
        """The codes, or some rows of them, one to a byte, or as values of dtype `expand`."""
        assert self.codes is not None
        codes = self.codes if rows is None else self.codes[rows]
        data = codes if expand is None else codes.to(expand)
        return QTensor(data=data, scale=self.scale, cast=self.cast, inner=codes.shape[1])

    def gradient(self, d: Tensor, rotation: Rotation, inner: int) -> Tensor:
        """d, the gradient of the decoded operand, where it was not clipped, turned back: [outer, inner] float32."""
        assert self.bits is not None
        return unrotate(d, rotation.hadamard, inner, rotation.signs, self.bits)

    def step_gradient(self, d: Tensor) -> Tensor | None:
        """LSQ's gradient of the step, [1]: sum d * delta / sqrt(numel max). Rounding errors of some rows stand for all."""
        if self.residual is None or self.bits is None or self.codes is None:
            return None
        clipped = torch.where(unpack_bits(self.bits, d.shape[1]), 0.0, d * self.codes).sum()
        some = d if self.rows is None else d[self.rows]
        share = 1.0 if self.rows is None else max(len(self.rows), 1) / max(len(d), 1)
        rounded = (some * self.residual.to(torch.float32)).sum() / share
        return ((clipped + rounded) * (max(d.numel(), 1) * self.cast.format.max) ** -0.5).reshape(1)


class CodedOperand(Operand):
    """x or w: `cols` are the codes of `rows`, transposed, or the original where that product takes it in 16 bits."""

    rotation = Rotation()  # of `output`
    coded: Coded | None = None  # in backward, if somebody asks for the codes or for what was clipped
    inner = 0  # K, before the rotation fills it up

    def read(self) -> None:
        """Its state is a learned step, not a window."""

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        rows = beside.sampled if self.plan.role == "x" else None
        if self.plan.cols is None or self.coded is None:
            return high_precision(self.tensor if rows is None else self.tensor[rows], self.request.context.out_dtype).T
        return self.coded.operand(self.plan.cols_expand, rows).transposed()

    def original(self) -> Tensor:
        """The tensor, or what its codes decode to where only they were kept."""
        return self.tensor if self.tensor is not None or self.coded is None else self.coded.decoded()

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        return rotation(self.tensor) if cols is None else self.original()

    def gradient(self, d: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the operand was not clipped, turned back; and the gradient of the step."""
        if self._other is None or self.coded is None:
            return d, None
        step = self.coded.step_gradient(d)
        return self.coded.gradient(d, self.rotation, self.inner), step

    @staticmethod
    def step_gradients(
        found: tuple[Tensor | None, Tensor | None], learns: tuple[bool, bool], is_cold: bool, device: torch.device
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the two steps: zero in the cold start, and where a product in 16 bits leaves none."""
        return tuple(
            None if not learned else torch.zeros(1, device=device) if step is None or is_cold else step
            for step, learned in zip(found, learns, strict=True)
        )

    @property
    def _other(self) -> Cast | None:
        """The cast by which the product whose result is its gradient reads the other operand: None for the original in 16 bits."""
        plan = self.request.context.plan
        return plan.w.cols if self.plan.role == "x" else plan.x.cols


class CodedInput(CodedOperand):
    """x [T, K]."""

    @staticmethod
    def _asks(request: OperandRequest) -> tuple[bool, bool]:
        """Whether a gradient asks for what was clipped (and for that of the step), and for the codes."""
        plan, needs = request.context.plan, request.needs
        return needs[0] and plan.w.cols is not None, needs[1] and plan.x.cols is not None

    @classmethod
    def share_key(cls, request: OperandRequest) -> tuple[Any, ...] | None:
        plan = request.plan
        if plan.rows is None or not plan.shares_rows:
            return None
        return "straight-through", plan.rows, plan.rows_rotate, cls._asks(request)

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        self.rotation, cast = rotation, self.plan.rows
        if cast is None:
            return high_precision(self.tensor, self.request.context.out_dtype)
        offset = None
        if isinstance(cast.calibrate, LearnedStep) and self.request.context.records:
            # Whether or not there is a backward pass: reentrant checkpointing repeats a forward pass that had none.
            offset = torch.rand((), device=self.tensor.device, dtype=torch.float32)
        if self.casts.codes is None:
            self.casts.codes = self._code(cast, offset)
        made: QTensor = self.casts.codes.operand(self.plan.rows_expand)
        return made

    def _code(self, cast: Cast, offset: Tensor | None) -> Coded:
        x, rotation = self.tensor, self.rotation
        masks, reads = self._asks(self.request)
        learned = masks and isinstance(cast.calibrate, LearnedStep)
        coded, rotated = _coded(x, rotation, cast, self.request.state, packed=reads or learned, bits=masks)
        if not learned:
            return coded
        assert isinstance(cast.calibrate, LearnedStep) and coded.codes is not None
        rows = _drawn_rows(len(x), cast.calibrate.residual_every, x.device, offset)
        some = rotation(x[rows]) if rotated is None else rotated[rows]
        residual = _residual(some, coded.codes[rows], coded).to(torch.float16)
        return replace(coded, residual=residual, rows=rows)

    def saved(self) -> Saved:
        """(x, signs, codes two to a byte, scale, bits, residual, rows), each if backward asks for it."""
        coded, (masks, reads) = self.casts.codes, self._asks(self.request)
        kept: Saved = (None, None, None, None, None)
        if coded is not None and (masks or reads):
            kept = (coded.packed, coded.scale, coded.bits, coded.residual, coded.rows)
        original = self.tensor if self.request.needs[1] and (not reads or coded is None) else None
        return original, self.rotation.signs, *kept

    @classmethod
    def restored(cls, request: OperandRequest, saved: Saved, shape: tuple[int, int]) -> Operand:
        original, signs, packed, scale, bits, residual, rows = saved
        plan = request.plan
        operand = cls(original, request)  # type: ignore[arg-type]
        operand.rotation, operand.inner = Rotation(plan.rows_rotate, signs), shape[1]
        if plan.rows is not None and scale is not None:
            width = rotated_length(shape[1], plan.rows_rotate)
            codes = None if packed is None else decode(packed, plan.rows.format, width)  # None: a frozen weight
            operand.coded = Coded(plan.rows, codes, scale, bits, residual, rows)
        return operand


class CodedWeight(CodedOperand):
    """w [N, K]. Its codes are made again in backward."""

    scale: Tensor | None = None

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        self.rotation, cast, made = rotation, self.plan.rows, self.casts.rows
        if made is None and cast is None:
            made = high_precision(rotation(self.tensor), self.request.context.out_dtype)
        elif made is None:
            assert cast is not None
            made = _coded(self.tensor, rotation, cast, self.request.state)[0].operand(self.plan.rows_expand)
        if not rotation.is_random:
            self.casts.rows = made
        self.scale = made.scale if isinstance(made, QTensor) else None
        assert made is not None
        return made

    def saved(self) -> Saved:
        """(scale, w, signs)."""
        return self.scale, self.tensor, self.rotation.signs

    @classmethod
    def restored(cls, request: OperandRequest, saved: Saved, shape: tuple[int, int]) -> Operand:
        scale, weight, signs = saved
        assert weight is not None
        operand, cast = cls(weight, request), request.plan.rows
        rotation = operand.rotation = Rotation(request.plan.rows_rotate, signs)
        operand.inner = shape[1]
        if cast is None or scale is None:
            return operand
        found, rotated = _encoded(weight, rotation, scale, cast, bits=True)
        operand.coded = Coded(cast, found.codes, scale, found.bits)
        if isinstance(cast.calibrate, LearnedStep):
            rotated = rotation(weight) if rotated is None else rotated
            operand.coded = replace(operand.coded, residual=_residual(rotated, found.codes, operand.coded))
        return operand


@dataclass(frozen=True)
class Draw:
    """The rows of the gradient that enter a product.

    rows      the gradient itself, or the sampled rows, weighted
    sample    which they are; None: all of them
    variance  what sampling adds, or would add, to the squared error of the product; None: the product never samples
    squares   the sum of the squared scores
    """

    rows: Tensor
    sample: leverage_score.Sample | None = None
    variance: Tensor | None = None
    squares: Tensor | None = None


class CodedGradient(Operand):
    """gy [T, N], of which each product may read a sample of the rows. Its state is where the sampler's readings are written."""

    drawn: Draw

    def read(self) -> None:
        """It has no window."""

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        self.drawn = self._draw("grad_input", None)
        made = self.cast(self.drawn.rows, self.plan.rows, self.plan.rows_expand)
        if self.plan.transposes:
            self.casts.rows = made
        return made

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        sampler = self.request.context.plan.recipe.grad_weight.sample
        self.drawn = self._draw("grad_weight", None if sampler is None else beside.original())
        self.sampled = None if self.drawn.sample is None else self.drawn.sample.rows
        if self.casts.rows is not None and self.sampled is None:
            return transposed(self.casts.rows)
        return self.cast(self.drawn.rows.T, self.plan.cols, self.plan.cols_expand)

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        return self.drawn.rows

    def _draw(self, product: str, other: Tensor | None) -> Draw:
        """other: x [T, K] for grad_weight, whose rows count too."""
        gy, context = self.tensor, self.request.context
        sampler = getattr(context.plan.recipe, product).sample
        if sampler is None or len(gy) == 0:
            return Draw(gy)
        budget = leverage_score.budget(len(gy), sampler.keep)
        scores = leverage_score.leverage_scores(gy, other)
        p = leverage_score.probabilities(scores, budget)
        variance, squares = leverage_score.sampling_variance(p, scores), scores.square().sum()
        if product not in context.sampled:
            return Draw(gy, None, variance, squares)
        noise = torch.rand(len(gy) + 1, device=gy.device)
        sample = leverage_score.systematic(p, budget, noise)
        return Draw(leverage_score.importance_weighted(gy.to(torch.float32), sample), sample, variance, squares)

    def finished(self, product: str, d: Tensor) -> Tensor:
        """Rows that were not drawn are zero in grad_input. Notes what sampling added, or would have."""
        drawn, whole = self.drawn, self.drawn.squares
        if product == "grad_input":
            if drawn.sample is not None:
                d = leverage_score.scatter_rows(d, drawn.sample, len(self.tensor), weigh=False)
        elif whole is not None:
            whole = d.square().sum()
        if self.request.state is not None and drawn.variance is not None and whole is not None:
            leverage_score.note(self.request.state, 0 if product == "grad_input" else 1, drawn.variance, whole)
        return d


KINDS: dict[str, type[Operand]] = {"x": CodedInput, "w": CodedWeight, "gy": CodedGradient}


# --- codes -----------------------------------------------------------------------------------------------------------------------


def _coded(
    x: Tensor, rotation: Rotation, cast: Cast, step: Tensor | None, packed: bool = False, bits: bool = False
) -> tuple[Coded, Tensor | None]:
    """x [outer, inner] -> the codes of x H, and x H itself if it was in memory. A learned step is used as it is.

    Where a kernel rotates, encodes and packs in one pass over x, it never is, and a scale from the spread is that of x itself: a
    rotation keeps the norm. The two differ by the rounding of sums.
    """
    by_norm = isinstance(cast.calibrate, ClippedRms) and cast.tile == (WHOLE, WHOLE)
    hadamard = rotation.hadamard
    if hadamard is not None and (step is not None or by_norm) and in_one_pass(x, hadamard, cast.format):
        rotated = None
        scale = _scale_before(x, hadamard, cast) if step is None else _guarded(step, x)
        found = rotate_and_encode(x, hadamard, rotation.signs, scale, cast.format, packed=packed, bits=bits)
    else:
        rotated = rotation(x).to(torch.float32)
        learned = step is not None and 0 not in rotated.shape
        scale = _guarded(step, rotated) if learned else cast.scale(calibrated_amax(rotated, cast), cast.format)
        found = encode(rotated, scale, cast.format, packed=packed, bits=bits)
    return Coded(cast, found.codes, scale, found.bits, packed=found.packed), rotated


def _encoded(x: Tensor, rotation: Rotation, scale: Tensor, cast: Cast, bits: bool) -> tuple[Codes, Tensor | None]:
    """The codes of x H by a scale that is known, and x H itself if it was in memory."""
    hadamard = rotation.hadamard
    if hadamard is not None and in_one_pass(x, hadamard, cast.format):
        return rotate_and_encode(x, hadamard, rotation.signs, scale, cast.format, bits=bits), None
    rotated = rotation(x)
    return encode(rotated, scale, cast.format, bits=bits), rotated


def _guarded(step: Tensor | None, x: Tensor) -> Tensor:
    """The step as a scale [1, 1]. 0 * sum: NaN and infinity in x show themselves through it, as they do through an amax."""
    assert step is not None
    return step.detach().reshape(1, 1) + x.sum(dtype=torch.float32) * 0.0


def _scale_before(x: Tensor, hadamard: Hadamard, cast: Cast) -> Tensor:
    """The scale [1, 1] of x H by its root mean square, which is that of x, and of the zeros that x is filled up with."""
    filled = (x.shape[1] / rotated_length(x.shape[1], hadamard)) ** 0.5
    return cast.scale(calibrated_amax(x.detach(), cast) * filled, cast.format)


def _residual(rotated: Tensor, codes: Tensor, coded: Coded) -> Tensor:
    """codes - x H / scale, zero where clipped."""
    ratio = rotated.to(torch.float32) / coded.scale
    return torch.where(ratio.abs() <= coded.cast.format.max, codes - ratio, 0.0)


def _drawn_rows(rows: int, every: int, device: torch.device, offset: Tensor | None = None) -> Tensor:
    """One row of each of ceil(rows / every) equal stretches, [n] int64: every row with the same probability.

    offset  uniform in [0, 1), float32; drawn here if it is not given
    """
    count = -(-rows // every)
    offset = torch.rand((), device=device, dtype=torch.float32) if offset is None else offset
    places = (torch.arange(count, device=device, dtype=torch.float64) + offset) * (rows / max(count, 1))
    return places.to(torch.int64).clamp(max=max(rows - 1, 0))


# --- steps -----------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def steps_from_data(steps: LearnedSteps, x: Tensor, weight: Tensor, recipe: Recipe, writes: bool) -> dict[str, Tensor]:
    """Role -> the step of the cold start, 2 mean|x H| / sqrt(max), [1]; written into the parameters if `writes`.

    x [T, K], weight [N, K]. A tensor of zeros, or with a number that is not finite, leaves the step as it was.
    """
    found = {}
    for role, tensor, cast in (("x", x, recipe.output.lhs), ("w", weight, recipe.output.rhs)):
        if role not in steps.settings or cast is None or tensor.numel() == 0:
            continue
        amax = calibrated_amax(Rotation.draw(recipe.output.rotate, tensor)(tensor).to(torch.float32), cast).reshape(1)
        step = steps.get(role)
        assert step is not None
        there = amax.isfinite() & (amax > 0)
        found[role] = steps.put(role, torch.where(there, amax / cast.format.max, step), writes)
        if writes:
            steps.saw(role, there)
    return found
