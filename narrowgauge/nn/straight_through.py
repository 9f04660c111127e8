"""Operands for backward="straight-through": the backward GEMMs read the codes of the forward GEMM.

    T tokens, K in_features padded to whole blocks of H, N out_features; H the rotation of `output`
    q integer codes, s step sizes, max the largest code

    forward      q_x = round(clip(x H / s_x)), q_w = round(clip(w H / s_w)), clip to -max ... max
                 y = s_x s_w q_x @ q_w.T + bias                                            [T, N]
    backward     d_x = s_w gy @ q_w, d_w = s_x gy.T @ q_x       gradients of dequantized operands
                 grad_input  = (d_x where x H was not clipped, else 0) H                   [T, K]
                 grad_weight = (d_w where w H was not clipped, else 0) H                   [N, K]
                 grad_step   = sum d * (q - x H / s where not clipped, else q) / sqrt(numel max)
                               for x; likewise for w

Source: equations 2 to 4 and appendix A.3 of "Training Transformers with 4-bit Integers" (arXiv
2306.11987). The mask applies in the rotated basis, where the clipping happened.

The recipe casts gy. Before that cast it may sample rows of gy (`leverage_score`), as `int4-hq-lss`
does: it keeps half of the rows, casts them stochastically to two INT4 digits with a scale per row,
and reads all rows where the predicted variance exceeds 0.02 (`recipes`). Sampled are outer rows in
grad_input, contracted rows in grad_weight, where the same rows of q_x are read. A kept row is
divided by its probability, in float32; all other rows are dropped. The first step reads all rows.

A GEMM whose rhs is None reads the original instead of the codes, in 16 bits, without a
mask and without a gradient of the step.

Memory for backward: q_x packed two to a byte and one mask bit per element, 0.625 bytes per element,
plus 2 / residual_every bytes for a learned step. q_w is recomputed from the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import wrapper
from narrowgauge.nn import leverage_score
from narrowgauge.nn.keep_policy import forward_codes
from narrowgauge.nn.noise import tied
from narrowgauge.nn.operands import Operand
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.hadamard import rotated_length
from narrowgauge.ops.hadamard.definition import rounding_errors
from narrowgauge.ops.hadamard.encoding import rotate_and_encode
from narrowgauge.ops.mm import high_precision
from narrowgauge.ops.quantize import calibrated_amax, row_squares, spread
from narrowgauge.ops.random import uniform
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, Hadamard, LearnedStep
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.nn.keep_policy import Recompute, Saved
    from narrowgauge.nn.learned_step import LearnedSteps
    from narrowgauge.nn.plan import LinearPlan
    from narrowgauge.ops.hadamard import Functions


@dataclass(frozen=True)
class Coded:
    """Codes of an operand of the forward GEMM, as backward needs them.

    cast      the cast
    codes     [outer, K] int8; None if no GEMM reads them
    scale     [1, 1] float32
    bits      uint8 [outer, ceil(K / 8)], 1 for elements that were not clipped, lowest bit first;
              None if unused
    residual  [n, K] codes - x H / scale for the n `rows`, zero where clipped
    rows      [n] int64 rows of `residual`; None: all rows
    packed    the codes two to a byte, as saved for backward
    """

    cast: Cast
    codes: Tensor | None
    scale: Tensor
    bits: Tensor | None = None
    residual: Tensor | None = None
    rows: Tensor | None = None
    packed: Tensor | None = None

    def operand(self, expand: torch.dtype | None, rows: Tensor | None = None) -> QTensor:
        """The codes as a GEMM operand: int8, or values of dtype `expand`. rows: some rows only."""
        assert self.codes is not None
        codes = self.codes if rows is None else self.codes[rows]
        data = codes if expand is None else codes.to(expand)
        return QTensor.of_parts(data, self.scale, self.cast, codes.shape[1])

    def rounding(self, rotated: Tensor, rows: Tensor | None = None) -> Tensor:
        """codes - x H / scale, zero where clipped.

        rotated  x H, for all rows or for `rows`
        """
        assert self.codes is not None
        codes = self.codes if rows is None else self.codes[rows]
        return rounding_errors(codes, rotated, self.scale, self.cast.format)

    def step_gradient(self, d: Tensor, kernel: Functions) -> Tensor | None:
        """LSQ's gradient of the step, [1]: sum d * delta / sqrt(numel max).

        d  [outer, K], gradient of the dequantized operand

        The rounding errors of the sampled rows are scaled up to all rows.
        """
        if self.residual is None or self.bits is None or self.codes is None:
            return None
        # A clipped element contributes d * q exactly, for every row. Only
        # the rounding errors are sampled.
        whole = self.residual if self.rows is None else None
        clipped, rounded = kernel.step_sums(d, self.codes, self.bits, whole)
        if self.rows is not None:
            # The residual is float16: 11 bits of rounding errors that are at most 1/2.
            share = max(len(self.rows), 1) / max(len(d), 1)
            rounded = (d[self.rows] * self.residual.to(torch.float32)).sum() / share
        return ((clipped + rounded) * (max(d.numel(), 1) * self.cast.format.max) ** -0.5).reshape(1)


class CodedOperand(Operand):
    """x or w. `cols` are the transposed codes of `rows`, or the original for a 16-bit GEMM.

    rotation  the rotation of `output`, which is the basis of the codes
    coded     (backward) codes and mask, if a gradient needs them
    inner     K before the rotation's padding
    """

    rows_matter = True  # backward needs their scale and mask
    rotation = Rotation()
    coded: Coded | None = None
    inner = 0

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        rows = self.sampled = beside.sampled if self.plan.role == "x" else None
        if self.plan.cols is None or self.coded is None:
            return high_precision(
                self.tensor if rows is None else self.tensor[rows], self.context.out_dtype
            ).T
        return self.coded.operand(self.plan.cols_expand, rows).transposed()

    def original(self) -> Tensor:
        """The tensor, or the dequantized codes if only codes are saved.

        An observer saves x too. The dequantized x is returned then, so that
        rows are sampled as without it.
        """
        shown = self.tensor is not None and not (
            self.context.keep.observer_needs_x and self.plan.role == "x"
        )
        if shown or self.coded is None or self.coded.codes is None:
            return self.tensor
        return self.coded.codes * self.coded.scale

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        if cols is None:
            return rotation(self.tensor)
        has_codes = isinstance(cols, QTensor) and self.tensor is not None
        seen = self.rotation(self.tensor) if has_codes else self.original()
        return seen if self.sampled is None else seen[self.sampled]

    def restore(
        self,
        saved: Saved,
        shape: tuple[int, int],
        after: Tensor,
        recompute: Recompute | None = None,
    ) -> Operand:
        self.after = after
        signs, self.tensor, scale, *kept = saved  # type: ignore[assignment]
        kernel = self.context.plan.hadamard
        self.rotation = Rotation(self.plan.rows_rotate, signs, kernel=kernel)
        self.inner = shape[1]
        if self.plan.rows is not None and scale is not None:
            self.coded = self._restored(self.plan.rows, scale, *kept)
        return self

    def _restored(self, cast: Cast, scale: Tensor, *kept: Tensor | None) -> Coded:
        """Rebuild the codes from the tensors that `saved` lists after the scale."""
        packed, bits, residual, rows = kept
        codes = None  # w is frozen
        if packed is not None:
            codes = self._kernel.decode(
                packed, cast.format, rotated_length(self.inner, self.plan.rows_rotate)
            )
        return Coded(cast, codes, scale, bits, residual, rows)

    def gradient(self, d: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mask the clipped elements of d and rotate back.

        ->  ([outer, inner] float32, gradient of the step or None)
        """
        plan, coded, hadamard = self.context.plan, self.coded, self.rotation.hadamard
        other = plan.w.cols if self.plan.role == "x" else plan.x.cols  # the GEMM's other operand
        if other is None:  # it read the 16-bit original: d is the gradient of t, in t's basis
            return d, None
        bits, step = (
            (None, None) if coded is None else (coded.bits, coded.step_gradient(d, self._kernel))
        )
        if hadamard is None and bits is None:
            return d, step
        # A block of 1 is the identity: only the mask applies.
        block = 1 if hadamard is None else hadamard.block
        return self._kernel.unrotate(d, block, self.inner, self.rotation.signs, bits), step

    @property
    def _kernel(self) -> Functions:
        kernel = self.context.plan.hadamard
        assert kernel is not None  # every straight-through recipe has one
        return kernel

    def _code(
        self, cast: Cast, step: Tensor | None, scale: Tensor | None = None, *, packed: bool = False, bits: bool = False,
        residual: bool = False,
    ) -> tuple[Coded, Tensor | None]:  # fmt: skip
        """Quantize x H for the tensor x [outer, inner]; return the codes, and x H if it was made.

        step      a learned step, used as the scale
        scale     a known scale; without step and scale, the cast's calibration sets it
        packed    also return codes two to a byte
        bits      also return the mask of elements that were not clipped
        residual  also return the rounding errors of all rows

        A kernel may rotate, encode and pack in one pass over x, so that x H
        never exists. A scale from the root mean square is then computed of x: a
        rotation preserves the norm, up to the rounding of sums.
        """
        x, rotation = self.tensor, self.rotation
        hadamard, is_known = rotation.hadamard, scale is not None or step is not None
        if (
            hadamard is not None
            and (is_known or is_by_norm(cast))
            and self.plan.rotates_in_cast(x, cast)
        ):
            rotated = None
            if scale is None and step is None:
                # The root mean square of x H includes the zeros that pad the contracted axis.
                filled = (x.shape[1] / rotated_length(x.shape[1], hadamard)) ** 0.5
                scale = cast.scale(calibrated_amax(x.detach(), cast) * filled, cast.format)
            elif scale is None:
                scale = _guarded(step, x)
            codes, packed_codes, inside = rotate_and_encode(
                x, hadamard, rotation.signs, scale, cast.format, packed=packed, bits=bits
            )
        elif hadamard is not None and is_known and x.numel() > 0:
            # A scale from the root mean square is not known here: it is computed of x H below, and
            # of x it would differ in its last bits. The guard may read x: a NaN or an infinity of x
            # makes a NaN of its block of x H.
            rotated, scale = None, _guarded(step, x) if scale is None else scale
            codes, packed_codes, inside, errors = self._kernel.rotate_encode(
                x, hadamard.block, rotation.signs, scale, cast.format, packed, bits, residual
            )
            return Coded(cast, codes, scale, inside, errors, packed=packed_codes), None
        else:
            rotated = rotation(x).to(torch.float32)
            if scale is None:
                learned = step is not None and 0 not in rotated.shape
                scale = (
                    _guarded(step, rotated)
                    if learned
                    else cast.scale(calibrated_amax(rotated, cast), cast.format)
                )
            codes, packed_codes, inside = self._kernel.encode(
                rotated, scale, cast.format, packed, bits
            )
        return Coded(cast, codes, scale, inside, packed=packed_codes), rotated


class StraightThroughInput(CodedOperand):
    """x [T, K]."""

    @property
    def _asks(self) -> tuple[bool, bool]:
        """(mask is needed, codes are needed). A learned step has a gradient if the mask is."""
        plan = self.context.plan
        return forward_codes(self.needs, plan.x.cols is not None, plan.w.cols is not None)

    def share_key(self) -> tuple[Any, ...] | None:
        plan = self.plan
        if plan.rows is None or not plan.shares_rows:
            return None
        return "straight-through", plan.rows, plan.rows_rotate, self._asks

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        self.rotation, cast = rotation, self.plan.rows
        if cast is None:
            return high_precision(rotation(self.tensor), self.context.out_dtype)
        offset = None
        if isinstance(cast.calibrate, LearnedStep) and self.context.records:
            # Draw whether or not autograd records: the first pass of reentrant checkpointing runs
            # without gradients, and its repetition must draw the same numbers.
            offset = self._offset(self.tensor)
        if self.casts.codes is None:
            self.casts.codes = self._input_codes(cast, offset)
        made: QTensor = self.casts.codes.operand(self.plan.rows_expand)
        return made

    def _input_codes(self, cast: Cast, offset: Tensor | None) -> Coded:
        x, (masks, reads) = self.tensor, self._asks
        if not masks or not isinstance(cast.calibrate, LearnedStep):
            return self._code(cast, self.state, packed=reads, bits=masks)[0]
        offset = self._offset(x) if offset is None else offset
        # Under torch.compile the draw must enter forward's result, or
        # backward draws it a second time.
        step = None if self.state is None else tied(self.state, offset)
        coded, rotated = self._code(cast, step, packed=True, bits=True)
        rows = _drawn_rows(len(x), cast.calibrate.residual_every, offset)
        some = self.rotation(x[rows]) if rotated is None else rotated[rows]
        # Rounding errors are at most 1/2, so float16 holds them to 11 bits in 2 bytes.
        return replace(coded, residual=coded.rounding(some, rows).to(torch.float16), rows=rows)

    def _offset(self, x: Tensor) -> Tensor:
        return uniform((), x.device, self.context.ranks.stream, "x", "residual")

    def saved(self) -> Saved:
        """(signs, x, scale, packed codes, mask bits, residual, rows); None for unneeded entries."""
        coded, (masks, reads) = self.casts.codes, self._asks
        kept: Saved = (None, None, None, None, None)
        if coded is not None and (masks or reads):
            kept = (coded.scale, coded.packed, coded.bits, coded.residual, coded.rows)
        keeps_x = self.needs[1] and (
            not reads or coded is None or self.context.keep.observer_needs_x
        )
        return self.rotation.signs, self.tensor if keeps_x else None, *kept


class StraightThroughWeight(CodedOperand):
    """w [N, K]. Its codes are recomputed in backward."""

    scale: Tensor | None = None

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        self.rotation, cast = rotation, self.plan.rows
        if (made := self.casts.rows) is None:
            if cast is None:
                made = high_precision(rotation(self.tensor), self.context.out_dtype)
            else:
                scale = self._scale_by_rows(cast) if self.context.ranks.sums_by_row else None
                made = self._code(cast, self.state, scale)[0].operand(self.plan.rows_expand)
            if not rotation.is_random:
                self.casts.rows = made
        self.scale = made.scale if isinstance(made, QTensor) else None
        return made

    def saved(self) -> Saved:
        """(signs, w, scale)."""
        return self.rotation.signs, self.tensor, self.scale

    def _scale_by_rows(self, cast: Cast) -> Tensor | None:
        if not is_by_norm(cast) or wrapper(self.tensor):
            return None
        # Sums of rows do not depend on how ranks share the rows, so the
        # scale is equal on all ranks.
        rms = spread(row_squares(self.tensor.detach()), self.tensor.shape[1])
        return scale_of_spread(cast, rms, self.tensor.shape[1], self.rotation.hadamard)

    def _restored(self, cast: Cast, scale: Tensor, *kept: Tensor | None) -> Coded:
        self.is_restored, source = True, self.context.sources.weight_cache
        if source is not None and source.is_gathered and (found := source.lookup(self)) is not None:
            given: Coded = found.codes
            return given
        learns = isinstance(cast.calibrate, LearnedStep)
        coded, rotated = self._code(cast, None, scale, bits=True, residual=learns)
        # A kernel that rotates and encodes by itself (Triton) returns no rounding errors, and x H is
        # recomputed for them.
        if not learns or coded.residual is not None:
            return coded
        return replace(
            coded,
            residual=coded.rounding(self.rotation(self.tensor) if rotated is None else rotated),
        )


class StraightThroughGradient(Operand):
    """gy [T, N]. Each GEMM may read a sample of its rows. `state` is where the sampler records.

    read_rows  gy, or its sampled and weighted rows, as the last GEMM reads them
    sample     the sample; None: all rows
    variance   squared error that sampling adds, or would add, to the GEMM; None: it never samples
    squares    sum of the squared scores
    norms      norms of the rows of gy, which the scores of both GEMMs contain
    """

    norms: Tensor | None = None

    read_rows: Tensor
    sample: leverage_score.Sample | None
    variance: Tensor | None
    squares: Tensor | None

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        self._draw("grad_input", None)
        made = self.cast(self.read_rows, self.plan.rows, self.plan.rows_expand, "rows")
        if self.plan.transposes:
            self.casts.rows = made
        return made

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        assert isinstance(beside, CodedOperand)
        sampler = self.context.plan.recipe.grad_weight.sample
        self._draw("grad_weight", None if sampler is None else beside.original())
        self.sampled = None if self.sample is None else self.sample.rows
        if self.sampled is None and isinstance(rows := self.casts.rows, QTensor):
            return rows.transposed()
        return self.cast(self.read_rows.T, self.plan.cols, self.plan.cols_expand, "cols")

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        return self.read_rows

    def _draw(self, product: str, other: Tensor | None) -> None:
        """Sample rows of gy for a GEMM.

        other  x [T, K] for grad_weight, whose rows enter the scores; None for grad_input
        """
        gy, sampler = self.tensor, getattr(self.context.plan.recipe, product).sample
        self.read_rows, self.sample, self.variance, self.squares = gy, None, None, None
        if sampler is None or len(gy) == 0:
            return
        budget = leverage_score.budget(len(gy), sampler.keep)
        if self.norms is None:
            self.norms = leverage_score.row_norms(gy)
        scores = leverage_score.leverage_scores(gy, other, self.norms)
        p = leverage_score.probabilities(scores, budget)
        # Computed without sampling too: the next step decides by this prediction.
        self.variance, self.squares = (
            leverage_score.sampling_variance(p, scores),
            scores.square().sum(),
        )
        if product in self.context.progress.sampled:
            noise = uniform((len(gy) + 1,), gy.device, self.context.ranks.stream, "gy", product)
            self.sample = leverage_score.systematic(p, budget, noise)
            # In float32, so that the weighted rows are rounded once, by their cast.
            self.read_rows = leverage_score.importance_weighted(gy.to(torch.float32), self.sample)

    def finished(self, product: str, d: Tensor) -> Tensor:
        """Scatter the sampled rows of grad_input among zeros; record the sampling variance."""
        whole = self.squares
        if product == "grad_input" and self.sample is not None:
            d = leverage_score.scatter_rows(d, self.sample, len(self.tensor))
        elif product == "grad_weight" and whole is not None:
            whole = d.square().sum()
        if self.state is not None and self.variance is not None and whole is not None:
            leverage_score.note(
                self.state, 0 if product == "grad_input" else 1, self.variance, whole
            )
        return d


KINDS: dict[str, type[Operand]] = {
    "x": StraightThroughInput,
    "w": StraightThroughWeight,
    "gy": StraightThroughGradient,
}


def is_by_norm(cast: Cast) -> bool:
    """True if the scale of the cast comes from the root mean square of the whole tensor."""
    return isinstance(cast.calibrate, ClippedRms) and cast.tile == (WHOLE, WHOLE)


def scale_of_spread(cast: Cast, rms: Tensor, inner: int, hadamard: Hadamard | None) -> Tensor:
    """The scale [1, 1] of x H, from the root mean square of x [outer, inner], 0-d.

    The zeros that pad the contracted axis lower the root mean square of x H.
    """
    assert isinstance(cast.calibrate, ClippedRms)
    filled = (inner / max(rotated_length(inner, hadamard), 1)) ** 0.5
    return cast.scale((rms * (cast.calibrate.clip * filled)).reshape(1, 1), cast.format)


def _guarded(step: Tensor | None, x: Tensor) -> Tensor:
    """The step as a scale [1, 1], NaN if x has a NaN or an infinity."""
    assert step is not None
    # sum * 0 is NaN for such an x, which a learned step would otherwise
    # hide. An amax shows it itself.
    return step.detach().reshape(1, 1) + x.sum(dtype=torch.float32) * 0.0


def _drawn_rows(rows: int, every: int, offset: Tensor) -> Tensor:
    """One row from each of ceil(rows / every) equal intervals, [n] int64, each row equally likely.

    offset  [] float32, uniform in [0, 1)
    """
    count = -(-rows // every)
    places = (torch.arange(count, device=offset.device, dtype=torch.float64) + offset) * (
        rows / max(count, 1)
    )
    return places.to(torch.int64).clamp(max=max(rows - 1, 0))


@torch.no_grad()
def steps_from_data(
    steps: LearnedSteps, x: Tensor, weight: Tensor, plan: LinearPlan, writes: bool
) -> dict[str, Tensor]:
    """Role -> step of the cold start, the one with the least error of x H, [1].

    x       [T, K]
    weight  [N, K]
    writes  also store the steps in the parameters

    A tensor of zeros, or with a value that is not finite, leaves the step as it was.
    """
    found, output = {}, plan.recipe.output
    # The order of a sum follows the strides, and a weight that is stored transposed has others.
    for role, tensor, cast in (("x", x, output.lhs), ("w", weight.contiguous(), output.rhs)):
        if role not in steps.settings or cast is None or tensor.numel() == 0:
            continue
        rotation = Rotation.draw(output.rotate, tensor, kernel=plan.hadamard)
        amax = calibrated_amax(rotation(tensor).to(torch.float32), cast).reshape(1)
        step = steps.get(role)
        assert step is not None
        there = amax.isfinite() & (amax > 0)
        found[role] = steps.put(
            role, torch.where(there, amax / cast.format.max, step), there, writes
        )
    return found


def steps_in_use(
    steps: LearnedSteps, x: Tensor, weight: Tensor, plan: LinearPlan, writes: bool, is_cold: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The steps of x and of the weight, [1] each or None; arguments as in `steps_from_data`.

    is_cold  the cold start, in which they come from the data
    """
    fresh = steps_from_data(steps, x, weight, plan, writes) if is_cold else {}
    if writes:
        steps.note("x", x)
        fresh = {}  # the parameters hold them already
    return fresh.get("x", steps.get("x")), fresh.get("w", steps.get("w"))
