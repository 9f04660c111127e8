"""A tensor as its two products read it: the noun of a Linear.

    x  [T, K]     rows in output        cols in grad_weight
    w  [N, K]     rows in output        cols in grad_input
    gy [T, N]     rows in grad_input    cols in grad_weight

`rows` is t [outer, inner] cast along its last axis, `cols` is t.T cast along its own last axis. Each is made when it is asked for,
once, and lies in `Casts`, which a cache may keep or layers may share. Before that the tensor is rotated along the contracted axis, if
the product says so. Everything works on plain tensors, so that torch.compile traces through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from narrowgauge.nn.plan import PRODUCTS, LinearContext, OperandRequest
from narrowgauge.ops.mm import high_precision
from narrowgauge.ops.quantize import dequantize, quantize, tile_amax
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Hadamard, Window
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key

Saved = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Rotation:
    """The rotation of one product: both operands pass through it before they are cast."""

    hadamard: Hadamard | None = None
    signs: Tensor | None = None
    is_random: bool = False

    @classmethod
    def draw(cls, hadamard: Hadamard | None, operand: Tensor) -> Rotation:
        """Along the last axis of `operand`, with new signs where they are random."""
        if hadamard is None:
            return NONE
        from narrowgauge.ops.hadamard import draw_signs

        return cls(hadamard, draw_signs(hadamard, operand.shape[1], operand.device), hadamard.signs == "random")

    def __call__(self, operand: Tensor) -> Tensor:
        if self.hadamard is None:
            return operand
        from narrowgauge.ops.hadamard import rotate

        return rotate(operand, self.hadamard, self.signs)


NONE = Rotation()


@dataclass(eq=False)
class Casts:
    """What was made of a tensor so far.

    rows, cols  see the module
    amax        [1, 1], by which its window had it cast; None without a window
    codes       of a straight-through operand, with what backward keeps of them (straight_through.Coded)
    """

    rows: QTensor | Tensor | None = None
    cols: QTensor | Tensor | None = None
    amax: Tensor | None = None
    codes: Any = None

    @property
    def is_empty(self) -> bool:
        return self.rows is None and self.cols is None


class Operand:
    """A tensor t [outer, inner] for the length of one call; see the module."""

    sampled: Tensor | None = None  # the rows that a sampler took of it, [n] int64

    def __init__(self, tensor: Tensor, request: OperandRequest, casts: Casts | None = None) -> None:
        self.tensor, self.request, self.plan = tensor, request, request.plan
        self.casts = Casts() if casts is None else casts

    # --- casts -------------------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Makes both casts at once, or one and the amax of the window, where a kernel reads t once for them; else the amax alone."""
        plan, casts, state = self.plan, self.casts, self.request.state
        plain = plan.rows_expand is None and plan.rows_rotate is None
        if casts.rows is None and plan.rows is not None and plain and self.tensor.numel():
            delayed, both = isinstance(plan.rows.calibrate, Window), plan.pairs and self._keeps_cols()
            if delayed == (state is not None) and (delayed or both) and plan.reads_once(self.tensor, delayed, both):
                casts.rows, casts.cols, casts.amax = self._pair(plan.rows, both)
                return
        if state is not None and casts.amax is None and self.tensor.numel():
            amax = tile_amax(self.tensor.detach(), (WHOLE, WHOLE))
            casts.amax = update_amax(state, amax, records=self.request.context.records)

    def _pair(self, cast: Cast, both: bool) -> tuple[QTensor, QTensor | None, Tensor | None]:
        from narrowgauge.ops.quantize.pair import quantize_pair

        x, noise = self.tensor, (None, None)
        if cast.rounding == "stochastic":
            noise = tuple(_noise(tuple(each.shape), x.device) for each in (x, x.T))  # type: ignore[assignment]
        records = self.request.context.records
        return quantize_pair(x, cast, amax_state=self.request.state, records=records, cols=both, noise=noise)

    def _keeps_cols(self) -> bool:
        """Whether what is made of t.T now will still be there when it is read."""
        needs, context = self.request.needs, self.request.context
        if self.plan.role == "gy":
            return needs[0] and needs[1]
        stochastic = self.plan.rows is not None and self.plan.rows.rounding == "stochastic"
        if self.plan.role == "w":  # a cache keeps it; what draws random numbers must draw them at every forward pass
            return needs[0] and context.cache is not None and not stochastic and not self.tensor.is_inference()
        # Noise is drawn alike with a backward pass and without: checkpointing repeats a forward pass that had none.
        return self.keeps_codes(self.request) and (context.grads or stochastic)

    def rows(self, rotation: Rotation) -> QTensor | Tensor:
        """The operand of the product that reads t as it is."""
        made = self._rows(rotation)
        if self.request.context.observer is not None:
            self._show(PRODUCTS[self.plan.role][0], self._seen(rotation), made)
        return made

    def cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        """The operand of the product that reads t.T. beside: the other operand of that product."""
        made = self._cols(rotation, beside)
        if self.request.context.observer is not None:
            self._show(PRODUCTS[self.plan.role][1], self._seen(rotation, made), made)
        return made

    def original(self) -> Tensor:
        """t, or what its codes decode to where only they were kept."""
        return self.tensor

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        """What an observer is shown beside an operand: t in the basis in which it was cast."""
        if cols is None:
            return rotation(self.tensor)
        if self.plan.role == "x" and isinstance(cols, QTensor) and self.keeps_codes(self.request):
            return dequantize(cols).T
        return rotation(self.tensor.T).T

    def _show(self, gemm: str, original: Tensor, made: QTensor | Tensor) -> None:
        """The one place where operands are observed, each as it enters its product."""
        assert self.request.context.observer is not None
        self.request.context.observer(gemm, self.plan.role, original, made)

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        casts, plan = self.casts, self.plan
        if casts.rows is None:
            made = self.cast(rotation(self.tensor), plan.rows, plan.rows_expand)
            if not rotation.is_random:
                casts.rows = made
            return made
        if plan.role == "w" and plan.rows is not None and plan.rows.rounding == "stochastic":
            # Draws what casting drew: activation checkpointing repeats a forward that cast with one that finds the cast here.
            _noise(tuple(rotation(self.tensor).shape), self.tensor.device)
        return casts.rows

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        casts, plan = self.casts, self.plan
        if casts.cols is not None:
            made, expand = casts.cols, plan.cols_expand
            is_codes = expand is not None and isinstance(made, QTensor) and not made.is_expanded
            return made.expanded(expand) if is_codes else made  # type: ignore[union-attr, arg-type]
        if plan.transposes and casts.rows is not None:
            made = transposed(casts.rows)
            if plan.role == "w" and plan.cols_expand is None:
                made = _row_major(made)
        else:
            made = self.cast(rotation(self.tensor.T), plan.cols, plan.cols_expand)
        if not rotation.is_random:
            casts.cols = made
        return made

    def cast(self, x: Tensor, cast: Cast | None, expand: torch.dtype | None) -> QTensor | Tensor:
        """x [outer, inner] as it enters a product: 16 bits, or quantized by its own amax or its window's."""
        if cast is None:
            return high_precision(x, self.request.context.out_dtype)
        noise = _noise(tuple(x.shape), x.device) if cast.rounding == "stochastic" else None
        amax = self.casts.amax if isinstance(cast.calibrate, Window) else None
        if torch.compiler.is_compiling():
            return quantize(x, cast, amax=amax, noise=noise, expand=expand)
        return self.plan.quantize(x, cast, amax, noise, expand)

    # --- from forward to backward ------------------------------------------------------------------------------------------------

    @staticmethod
    def keeps_codes(request: OperandRequest) -> bool:
        """(x) whether the codes of x.T are kept for backward instead of x."""
        return request.needs[1] and request.context.plan.recipe.save == "quantized"

    @classmethod
    def share_key(cls, request: OperandRequest) -> tuple[Any, ...] | None:
        """(x) what layers whose casts of the same tensor are equal have in common; None: nobody else's are."""
        plan, context = request.plan, request.context
        codes = cls.keeps_codes(request)
        if plan.rows is None or not plan.shares_rows or (codes and not plan.shares_cols):
            return None
        kept = (plan.cols, plan.cols_rotate, plan.transposes) if codes else None
        return plan.rows, plan.rows_rotate, plan.rows_expand, context.out_dtype, context.grads, kept

    def saved(self) -> Saved:
        """What backward needs of it: (amax, t), or of x (amax, codes, scale, global scale). Of w the second is always w."""
        needed = self.plan.role == "w" or self.request.needs[1]
        if self.plan.role == "x" and self.keeps_codes(self.request):
            codes = self._kept_codes()
            return self.casts.amax, codes.data, codes.scale, codes.global_scale
        return self.casts.amax, self.tensor if needed else None

    def _kept_codes(self) -> QTensor:
        """x.T quantized for grad_weight: from the codes of x where they serve, else cast anew."""
        casts, plan = self.casts, self.plan
        rows = casts.rows
        if casts.cols is None and plan.transposes and isinstance(rows, QTensor):
            # Encoding and decoding on a CPU takes longer than the product: there decoded values are kept.
            keeps_values = rows.is_expanded and rows.device.type == "cpu"
            casts.cols = (rows if keeps_values else rows.compact()).transposed()
        elif casts.cols is None:
            rotation = Rotation.draw(plan.cols_rotate, self.tensor.T)
            casts.cols = self.cast(rotation(self.tensor.T), plan.cols, None)
        assert isinstance(casts.cols, QTensor)
        return casts.cols

    @classmethod
    def restored(cls, request: OperandRequest, saved: Saved, shape: tuple[int, int]) -> Operand:
        """The operand in backward. shape: of t."""
        amax, tensor, *codes = saved
        casts = Casts(amax=amax)
        if codes:
            scale, global_scale = codes
            assert tensor is not None and scale is not None and request.plan.cols is not None
            rotate = request.plan.cols_rotate
            inner = shape[0] if rotate is None else -(-shape[0] // rotate.block) * rotate.block
            casts.cols = QTensor(
                data=tensor, scale=scale, cast=request.plan.cols, inner=inner, global_scale=global_scale, checked=True
            )
        assert tensor is not None or not request.needs[1]
        cache = request.context.cache
        if request.plan.role == "w" and cache is not None and tensor is not None:
            found = cache.lookup(tensor, request)
            if found is not None:
                if found.casts.is_empty:
                    found.casts.amax = amax
                return found
        return cls(tensor, request, casts)  # type: ignore[arg-type]

    # --- after a product ---------------------------------------------------------------------------------------------------------

    def finished(self, product: str, d: Tensor) -> Tensor:
        """(gy) the result of a product that read it, of all rows."""
        return d

    def gradient(self, d: Tensor) -> tuple[Tensor, Tensor | None]:
        """(x, w) the gradient of t and that of its learned step, from d, that of the decoded operand."""
        return d, None


class CastSource(Protocol):
    """Who may have the casts of a tensor. Another one (gathered codes, a message's, a stored export's) is one more in `sources`."""

    def lookup(self, tensor: Tensor, request: OperandRequest) -> Operand | None:
        """The tensor as an Operand with the casts that there are, or that will be kept here; None: nothing is known of it."""


KINDS: dict[str, type[Operand]] = {"x": Operand, "w": Operand, "gy": Operand}


def find(role: str, tensor: Tensor, context: LinearContext, needs: tuple[bool, bool], state: Tensor | None) -> Operand:
    """The tensor as an Operand, from the first source that knows it, or cast now."""
    request = OperandRequest(getattr(context.plan, role), context, needs, state)
    for source in context.sources:
        if (found := source.lookup(tensor, request)) is not None:
            break
    else:
        found = request.plan.kind(tensor, request)
    found.read()
    return found


def transposed(operand: QTensor | Tensor) -> QTensor | Tensor:
    return operand.transposed() if isinstance(operand, QTensor) else operand.T


def _row_major(operand: QTensor | Tensor) -> QTensor | Tensor:
    """Contiguous codes: native GEMMs would otherwise turn the weight at every micro-batch."""
    return (
        replace(operand, data=operand.data.contiguous(), checked=True)
        if isinstance(operand, QTensor)
        else operand.contiguous()
    )


def _noise(shape: tuple[int, ...], device: torch.device) -> Tensor | Key:
    from narrowgauge.ops.random import draw  # where casts round stochastically alone

    return draw(shape, device)
