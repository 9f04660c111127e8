"""A tensor t [outer, inner] as its two products read it (plan.PRODUCTS): the noun of a Linear.

`rows` is t cast along its last axis, `cols` is t.T cast along its own last axis. Each is made when it is asked for, once, and lies in
`Casts`, which a cache may keep or layers may share. Before that the tensor is rotated along the contracted axis, if the product says so.
Everything works on plain tensors, so that torch.compile traces through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import PIECE, in_memory, is_compiling, type_of
from narrowgauge.nn.again import Again, Origin, Saved
from narrowgauge.nn.plan import PRODUCTS, LinearContext, OperandPlan
from narrowgauge.nn.rotation import NONE, Rotation
from narrowgauge.ops.mm import high_precision
from narrowgauge.ops.quantize import dequantize, tile_amax
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Current, Window
from narrowgauge.scaling import WHOLE, from_exponents, to_exponents

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key


@dataclass(eq=False)
class Casts:
    """What was made of a tensor so far.

    rows, cols  see the module
    amax        [1, 1], by which its window had it cast; None without a window
    state       of the window that saw it
    keys        (w) of the random numbers of its rows and cols, so that they can be cast again to the same bits
    kept        (of x) what backward keeps of cols, the same tensors for all layers that share them
    codes       of a straight-through operand, with what backward keeps of them (straight_through.Coded)
    origin      (x) what backward makes cols from again, instead of keeping them; None: they are kept
    """

    rows: QTensor | Tensor | None = None
    cols: QTensor | Tensor | None = None
    amax: Tensor | None = None
    state: Tensor | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    kept: Saved | None = None
    codes: Any = None
    origin: Origin | None = None

    @property
    def is_empty(self) -> bool:
        return self.rows is None and self.cols is None

    def tensors(self) -> Iterator[Tensor]:
        """All memory that they hold."""
        for each in (self.rows, self.cols):
            parts = (each.data, each.scale, each.global_scale) if isinstance(each, QTensor) else (each,)
            yield from (part for part in parts if part is not None)
        if self.amax is not None:
            yield self.amax


class Operand:
    """A tensor t [outer, inner] for the length of one call; see the module.

    needs    whether the gradients of x and of w are wanted
    state    the tensor's amax window, its learned step, or where a sampler writes its readings; None without one
    sampled  the rows that a sampler took of it, [n] int64
    is_restored   whether this is backward, made without a tensor
    is_carrier    whether the tensor has no numbers: its codes were gathered from other ranks
    after         in backward the gradient that it began with
    later         in backward what makes it again, if its cols are asked for
    waiting       noise of its rows or cols that was drawn ahead (noise.py)
    drawn         noise of its rows or cols, for an observer
    """

    sampled: Tensor | None = None
    is_restored = False
    is_carrier = False
    after: Tensor | None = None
    later: tuple[Again, Saved] | None = None
    drawn: dict[str, Any] | None = None

    def __init__(
        self, tensor: Tensor, plan: OperandPlan, context: LinearContext, needs: tuple[bool, bool], state: Tensor | None
    ) -> None:
        self.tensor, self.plan, self.context, self.needs, self.state = tensor, plan, context, needs, state
        self.casts = Casts()
        self.waiting: dict[str, Any] = {}

    def read(self) -> None:
        """Makes both casts at once, or one and the amax of the window, where a kernel reads t once for them; else the amax alone."""
        plan, casts, cast = self.plan, self.casts, self.plan.rows
        state = self.state if plan.is_delayed else None
        if (state is None and not plan.pairs) or self.tensor.numel() == 0:
            return
        if state is not None and self._was_seen_by_another(state):
            return
        if state is not None and plan.role == "w" and not self.context.records:
            # A weight may be another than the window saw: averaged, merged, copied in. Evaluation scales it by itself.
            if casts.amax is None:
                casts.amax = tile_amax(self.tensor.detach(), (WHOLE, WHOLE))
            return
        if casts.rows is None and cast is not None and plan.rows_expand is None and plan.rows_rotate is None:
            delayed, both = isinstance(cast.calibrate, Window), plan.pairs and self._keeps_cols(cast)
            x, run = self.tensor, None
            if delayed == (state is not None) and (delayed or both):
                run = plan.one_read(x, delayed, both, self.context.records)
            if run is not None:
                noise: tuple[Any, Any] = (None, None)
                if cast.rounding == "stochastic":
                    noise = self._noise(x, "rows"), self._noise(x.T, "cols") if both else None
                casts.rows, casts.cols, casts.amax = run(x, state, noise)
                casts.state = state
                return
        if state is None and casts.rows is None and self._remembers_amax:
            casts.rows, casts.amax = plan.with_amax(self.tensor)
        if state is not None and casts.amax is None:
            amax = tile_amax(self.tensor.detach(), (WHOLE, WHOLE))
            casts.amax = update_amax(state, amax, records=self.context.records)
            casts.state = state

    def _was_seen_by_another(self, state: Tensor) -> bool:
        """Whether a window with the same numbers saw this tensor; then this one has seen what that one has."""
        seen = self.casts.state
        if self.plan.role != "x" or seen is None or seen is state:
            return False
        if self.context.records:
            state.copy_(seen)
        return True

    @property
    def _remembers_amax(self) -> bool:
        """(w) whether backward, which casts it again, would read it once more for the amax that serves both its casts."""
        plan, cache = self.plan, self.context.cache
        is_whole = plan.rows is not None and plan.rows.is_per_tensor and isinstance(plan.rows.calibrate, Current)
        recasts = is_compiling() and not self.context.keeps_w if cache is None else cache.recasts
        return plan.role == "w" and plan.pairs and is_whole and self.needs[0] and recasts

    def _keeps_cols(self, cast: Cast) -> bool:
        """Whether what is made of t.T now will still be there when it is read."""
        needs, context, stochastic = self.needs, self.context, cast.rounding == "stochastic"
        if self.plan.role == "gy":
            return needs[0] and needs[1]
        if self.plan.role == "w":  # a cache keeps it; what draws random numbers must draw them at every forward pass
            if context.cache is None:
                return context.keeps_w and needs[0] and not stochastic
            return needs[0] and not context.cache.recasts and not stochastic and not self.tensor.is_inference()
        # Noise is drawn alike with a backward pass and without: checkpointing repeats a forward pass that had none.
        return self.keeps_codes and self.casts.origin is None and (context.grads or stochastic)

    def rows(self, rotation: Rotation) -> QTensor | Tensor:
        """The operand of the product that reads t as it is."""
        made = self._rows(rotation)
        if self.context.observer is not None:
            self._show("rows", self._shown(rotation, made), made)
        return made

    def cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        """The operand of the product that reads t.T. beside: the other operand of that product."""
        made = self._cols(rotation, beside)
        if self.context.observer is not None:
            self._show("cols", self._shown(rotation, made, made), made)
        return made

    def _show(self, which: str, original: Tensor, made: QTensor | Tensor) -> None:
        role = self.plan.role
        product = PRODUCTS[role][which == "cols"]
        if isinstance(made, QTensor) and made.cast.rounding == "stochastic":
            from narrowgauge.nn.noise import show

            show(self, made, product, which)
        self.context.observer(product, role, original, made)  # type: ignore[misc]

    def _shown(self, rotation: Rotation, made: QTensor | Tensor, cols: QTensor | Tensor | None = None) -> Tensor:
        if self.is_carrier and isinstance(made, QTensor):
            return dequantize(made) if cols is None else dequantize(made).T
        return self._seen(rotation, cols)

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        """What an observer is shown beside an operand: t in the basis in which it was cast."""
        if cols is None:
            return rotation(self.tensor)
        if self.plan.role == "x" and isinstance(cols, QTensor) and self.keeps_codes:
            return dequantize(cols).T
        return rotation(self.tensor.T).T

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        casts, plan = self.casts, self.plan
        if casts.rows is None:
            made = self._rotated_cast(self.tensor, rotation, plan.rows, plan.rows_expand, "rows")
            if not rotation.is_random:
                casts.rows = made
            return made
        if plan.role == "w" and plan.rows is not None and plan.rows.rounding == "stochastic":
            # Draws what casting drew: activation checkpointing repeats a forward that cast with one that finds the cast here.
            self._noise(rotation(self.tensor), "rows")
        return casts.rows

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        if self.later is not None:
            (again, saved), self.later = self.later, None
            again.restore(self, saved)
        casts, plan = self.casts, self.plan
        if (made := casts.cols) is not None:
            if plan.cols_expand is not None and isinstance(made, QTensor) and not made.is_expanded:
                return made.expanded(plan.cols_expand)
            return made
        if plan.transposes and casts.rows is not None:
            made = casts.rows.T if isinstance(casts.rows, Tensor) else casts.rows.transposed()
            if plan.role == "w" and plan.cols_expand is None and isinstance(made, QTensor):
                # Native GEMMs would otherwise turn the codes at every micro-batch.
                made = replace(made, data=made.data.contiguous(), checked=True)
        else:
            made = self._rotated_cast(self.tensor.t(), rotation, plan.cols, plan.cols_expand, "cols")
            if not self._may_share(casts):
                return made
        if not rotation.is_random:
            casts.cols = made
        return made

    def _may_share(self, casts: Casts) -> bool:
        """(w) whether forward passes to come may read what backward makes of the weight as it is now."""
        cache = self.context.cache if self.plan.role == "w" else None
        return cache is None or cache.is_gathered or bool(cache.may_add(casts, self.tensor))

    def _rotated_cast(
        self, x: Tensor, rotation: Rotation, cast: Cast | None, expand: torch.dtype | None, which: str
    ) -> QTensor | Tensor:
        if rotation is not NONE and cast is not None and x.numel() > PIECE:
            from narrowgauge.nn.rotated_pieces import cast_in_pieces, casts_apart

            if casts_apart(cast, x):
                noise = self._noise(x, which) if cast.rounding == "stochastic" else None
                return cast_in_pieces(x, cast, rotation, noise, self.plan, expand)
        return self.cast(x if rotation is NONE else rotation(x), cast, expand, which)

    def cast(self, x: Tensor, cast: Cast | None, expand: torch.dtype | None, which: str) -> QTensor | Tensor:
        """x [outer, inner], the rows or the cols, as it enters a product: 16 bits, or quantized by its own amax or its window's."""
        if cast is None:
            return high_precision(x, self.context.out_dtype)
        noise = self._noise(x, which) if cast.rounding == "stochastic" else None
        amax = self.casts.amax if isinstance(cast.calibrate, Window | Current) else None
        return self.plan.quantize(x, cast, amax, noise, expand)

    def _noise(self, x: Tensor, which: str) -> Tensor | Key:
        from narrowgauge.nn.noise import noise_of  # where casts round stochastically alone

        return noise_of(self, x, which)

    @property
    def rows_matter(self) -> bool:
        """Whether making them leaves more than the operand of a product: draws, or what backward keeps."""
        plan = self.plan
        if plan.rows is not None and not plan.serves_a_step[0]:
            return True
        return plan.role == "x" and self.keeps_codes and plan.transposes and self.casts.cols is None

    @property
    def keeps_codes(self) -> bool:
        """(x) whether the codes of x.T are kept for backward instead of x."""
        return self.needs[1] and self.context.plan.recipe.save == "quantized" and not self.context.keeps_x

    @property
    def can_be_made_again(self) -> bool:
        """(x) whether backward gets the same cols from x made again: those that are kept now draw no random numbers."""
        plan = self.plan
        return self.needs[1] and plan.kind is Operand and (plan.serves_a_step[1] or not self.keeps_codes)

    def share_key(self) -> tuple[Any, ...] | None:
        """(x) what layers whose casts of the same tensor are equal have in common; None: nobody else's are."""
        plan, context, codes = self.plan, self.context, self.keeps_codes
        if plan.rows is None or not plan.shares_rows or (codes and not plan.shares_cols):
            return None
        if plan.is_delayed and context.x_window is None:
            return None
        kept = (plan.cols, plan.cols_rotate, plan.transposes) if codes else None
        window = (context.x_window, context.records) if plan.is_delayed else None
        return plan.rows, plan.rows_rotate, plan.rows_expand, context.out_dtype, context.grads, kept, window

    def saved(self) -> Saved:
        """What backward needs of it: (amax, t), or of x (amax, codes, scale, global scale). Of w the second is always w.

        Of w in compiled code that keeps its cols their three parts come behind it.
        """
        casts, plan = self.casts, self.plan
        cache = self.context.cache if plan.role == "w" and self.context.grads else None
        if cache is not None and not cache.is_gathered:
            self.context.w_casts = cache.kept_for_backward(casts)
        if plan.role == "w" and self.context.keeps_w and isinstance(cols := casts.cols, QTensor) and is_compiling():
            return casts.amax, self.tensor, cols.data, cols.scale, cols.global_scale
        if casts.origin is not None and self.needs[1]:
            casts.origin.again.readers += 1
            return casts.amax, *casts.origin.tensors
        if plan.role != "x" or not self.keeps_codes:
            return casts.amax, self.tensor if plan.role == "w" or self.needs[1] else None
        if casts.kept is None:
            casts.kept = self._kept_codes()
        return casts.amax, *casts.kept

    def _kept_codes(self) -> Saved:
        """(codes, scale, global scale) of x.T; see `_keeps_exponents`."""
        casts, plan = self.casts, self.plan
        if casts.cols is None and plan.transposes and isinstance(rows := casts.rows, QTensor):
            # Encoding and decoding on a CPU takes longer than the product: there decoded values are kept.
            keeps_values = rows.is_expanded and type_of(rows.device) == "cpu"
            casts.cols = (rows if keeps_values else rows.compact()).transposed()
        elif casts.cols is None:
            rotation = Rotation.draw(plan.cols_rotate, self.tensor.T, self.context.stream, "x")
            casts.cols = self._rotated_cast(self.tensor.T, rotation, plan.cols, None, "cols")
        codes = casts.cols
        assert isinstance(codes, QTensor)
        scale = to_exponents(codes.scale) if _keeps_exponents(codes.cast) else codes.scale
        return codes.data, scale, codes.global_scale

    @property
    def again(self) -> Again | None:
        """How backward makes it again, where nothing of its own is kept."""
        return self.casts.origin.again if self.casts.origin is not None and self.needs[1] else None

    def restore(self, saved: Saved, shape: tuple[int, int], after: Tensor, again: Again | None = None) -> Operand:
        """Itself, in backward, made without a tensor, as forward left it. shape: of t."""
        self.after = after
        if again is not None:
            self.later = again, saved
            return self
        amax, tensor, *codes = saved
        plan, casts = self.plan, self.casts
        casts.amax = amax
        assert tensor is not None or not self.needs[1]
        if codes and plan.role == "w":
            data, scale, global_scale = codes
            assert data is not None and scale is not None and plan.cols is not None
            casts.cols = QTensor(
                data=data, scale=scale, cast=plan.cols, inner=shape[0], global_scale=global_scale, checked=True
            )
        elif codes:
            scale, global_scale = codes
            assert tensor is not None and scale is not None and plan.cols is not None
            if _keeps_exponents(plan.cols):
                scale = from_exponents(scale)
            block = 1 if plan.cols_rotate is None else plan.cols_rotate.block
            casts.cols = QTensor(
                data=tensor, scale=scale, cast=plan.cols, inner=-(-shape[0] // block) * block, global_scale=global_scale, checked=True,
            )  # fmt: skip
            return self
        self.tensor, self.is_restored = tensor, True  # type: ignore[assignment]
        cache = self.context.cache if plan.role == "w" else None
        found = self.context.w_casts if cache is None or not cache.is_gathered else cache.lookup(self)
        if plan.role == "w" and found is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            self.context.w_casts = None  # else the codes stay for as long as the loss does
        if cache is not None and found is not None:
            self.casts = found
            if found.is_empty:
                found.amax = amax
        return self

    def lets_wait(self, w: Operand) -> bool:
        """(gy) whether the gradient of the input is made behind that of the weight; its random numbers are then drawn now (noise.py)."""
        if self.plan.pairs or self.context.observer is not None or is_compiling():
            return False
        from narrowgauge.nn.noise import drawn_ahead  # where one cast of gy does not serve both products

        return drawn_ahead(self, w)

    def finished(self, product: str, d: Tensor) -> Tensor:
        """(gy) the result of a product that read it, of all rows."""
        return d

    def gradient(self, d: Tensor) -> tuple[Tensor, Tensor | None]:
        """(x, w) the gradient of t and that of its learned step, from d, that of the decoded operand."""
        return d, None


def _keeps_exponents(cast: Cast) -> bool:
    """Whether scales are kept as the exponents of powers of two, a byte each.

    Of a tile of 128 elements or more it would save at most 2.3 % of its codes, and cost eight launches on a GPU.
    """
    return cast.scale.power_of_two and WHOLE not in cast.tile and cast.tile[0] * cast.tile[1] < 128


KINDS: dict[str, type[Operand]] = {"x": Operand, "w": Operand, "gy": Operand}


def find(role: str, tensor: Tensor, context: LinearContext, needs: tuple[bool, bool], state: Tensor | None) -> Operand:
    """The tensor as an Operand, with casts from the first source that knows it."""
    plan: OperandPlan = getattr(context.plan, role)
    if not is_compiling():
        tensor = in_memory(tensor)
    operand: Operand = plan.kind(tensor, plan, context, needs, state)
    for source in context.sources.get(role, ()):
        if (casts := source.lookup(operand)) is not None:
            operand.casts = casts
            break
    operand.read()
    return operand
