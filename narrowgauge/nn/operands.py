"""Operand: a tensor t [outer, inner] with the quantized copies that its two GEMMs read.

    rows   t cast along its last axis; the operand of the GEMM that reads t
    cols   t.T cast along its last axis; the operand of the GEMM that reads t.T

`plan.PRODUCTS` lists the GEMMs. With T tokens, x.cols is [K, T] and gy.cols [N, T], both tiled
along T; w.cols is [K, N], tiled along N. A kernel of FP8, INT8 or FP4 units reads codes, two to a
byte in 4 bits, and float32 scales, which ops/mm/cublas.py turns into the units' layout. A GEMM that
is emulated reads decoded elements (`OperandPlan.rows_expand`, `cols_expand`) and the same scales. If
the plan `transposes`, cols is rows.T: a view, or a row-major copy of codes of w.

Each copy is made on first use and stored in `Casts`, which a cache
may hold and layers may share. If the recipe rotates, t is rotated along the contracted axis before
the cast. The code uses plain tensors only, so torch.compile can trace it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import PIECE, in_memory, is_compiling, type_of
from narrowgauge.nn.keep_policy import SavedInput
from narrowgauge.nn.plan import PRODUCTS, OperandPlan
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.mm import high_precision
from narrowgauge.ops.quantize import dequantize
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.qtensor import QTensor, SwizzledQTensor
from narrowgauge.recipe import Cast, CurrentScaling, DelayedScaling
from narrowgauge.scaling import WHOLE, from_exponents, to_exponents

if TYPE_CHECKING:
    from narrowgauge.nn.keep_policy import Recompute, RecomputeSource, Saved
    from narrowgauge.nn.linear_context import LinearContext
    from narrowgauge.ops.random import Key


@dataclass(eq=False)
class Casts:
    """Quantized copies of one operand, and the state needed to reproduce them.

    rows, cols  quantized t and quantized t.T; None until first use
    amax        [1, 1] float32: the amax that set the scale under delayed scaling, else None
    amax_state  the amax state that recorded this tensor
    noise_keys  (w) "rows", "cols" -> key of the cast's noise in this optimizer step, see noise.py
    saved       (x) tensors saved for backward in place of cols; shared by all layers that read x
    codes       (straight-through) codes of the forward GEMM (straight_through.Coded)
    source      (x) tensors from which backward recomputes cols; None: cols are saved
    """

    rows: QTensor | Tensor | None = None
    cols: QTensor | Tensor | None = None
    amax: Tensor | None = None
    amax_state: Tensor | None = None
    noise_keys: dict[str, Any] = field(default_factory=dict)
    saved: Saved | None = None
    codes: Any = None
    source: RecomputeSource | None = None

    @property
    def is_empty(self) -> bool:
        return self.rows is None and self.cols is None

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all tensors that hold memory."""
        for each in (self.rows, self.cols):
            parts = (
                (each.memory, _scales(each), each.global_scale)
                if isinstance(each, QTensor)
                else (each,)
            )
            yield from (part for part in parts if part is not None)
        if self.amax is not None:
            yield self.amax


class Operand:
    """A tensor t [outer, inner] during one call; see the module docstring.

    tensor       t; None in backward if only codes were saved
    plan         casts and kernels of the role
    context      options of the call
    needs        (gradient of x is needed, gradient of w is needed)
    state        amax state, learned step, or readings of the row sampler; None without one
    casts        the quantized copies
    saves_codes  (x) codes of x.T are saved for backward, or recomputed there, instead of x
    sampled      [n] int64, the rows of t that the sampler selected; None: all rows
    is_restored  True in backward for an operand that `restore` rebuilt
    is_carrier   True if the tensor has no data: its codes were gathered or frozen
    is_decoded   (w) True in backward if the tensor holds decoded codes of a frozen weight
    after        (backward) the incoming gradient, which orders work of gathered codes after it
    pending_recompute  (backward) (Recompute, saved tensors) that recompute cols on first use
    waiting      noise of rows or cols that was drawn earlier than used (noise.py)
    drawn        noise of rows or cols, for an observer
    """

    sampled: Tensor | None = None
    is_restored = False
    is_carrier = False
    is_decoded = False
    after: Tensor | None = None
    pending_recompute: tuple[Recompute, Saved] | None = None
    drawn: dict[str, Any] | None = None

    def __init__(
        self,
        tensor: Tensor,
        plan: OperandPlan,
        context: LinearContext,
        needs: tuple[bool, bool],
        state: Tensor | None,
    ) -> None:
        self.tensor, self.plan, self.context, self.needs, self.state = (
            tensor,
            plan,
            context,
            needs,
            state,
        )
        self.casts = Casts()
        # (x) codes of x.T are saved for backward, unless backward recomputes them.
        self.saves_codes = needs[1] and context.keep.codes_of_x
        self.waiting: dict[str, Any] = {}

    def read(self) -> None:
        """Make all copies that one read of t can give: rows and cols, or one copy and the amax.

        Without such a kernel, delayed scaling only computes and records the amax.
        """
        plan, casts, cast = self.plan, self.casts, self.plan.rows
        state = self.state if plan.is_delayed else None
        if plan.pairs_turned and not is_compiling():
            self._read_turned()
        if (state is None and not plan.pairs) or self.tensor.numel() == 0:
            return
        if state is not None and self._was_seen_by_another(state):
            return
        if state is not None and plan.role == "w" and not self.context.records:
            # Evaluation uses the current amax of a weight, which may not be
            # the one that training recorded: averaged, merged, copied in. By
            # the history the relative error was 0.81 instead of 0.037.
            if casts.amax is None:
                casts.amax = plan.amax(self.tensor.detach())
            return
        if (
            casts.rows is None
            and cast is not None
            and plan.rows_expand is None
            and plan.rows_rotate is None
        ):
            delayed, both = (
                isinstance(cast.calibrate, DelayedScaling),
                plan.pairs and not self._turns_freely and self._casts_both(cast),
            )
            # Reading x once saves a read only if the kernel also returns the amax or the cols.
            x, run = self.tensor, None
            if delayed == (state is not None) and (delayed or both):
                run = plan.one_read(x, delayed, both, self.context.records)
            if run is not None:
                noise: tuple[Any, Any] = (None, None)
                if cast.draws:
                    noise = self._noise(x, "rows"), self._noise(x.T, "cols") if both else None
                casts.rows, casts.cols, casts.amax = run(x, state, noise)
                casts.amax_state = state
                return
        if state is None and casts.rows is None and self._remembers_amax:
            casts.rows, casts.amax = plan.with_amax(self.tensor)
        if state is not None and casts.amax is None:
            amax = plan.amax(self.tensor.detach())
            casts.amax = update_amax(state, amax, records=self.context.records)
            casts.amax_state = state

    def _read_turned(self) -> None:
        """Make rows, and cols under a rotation by fixed signs, from one read of t, if a kernel can."""
        plan, casts, cast, turned = self.plan, self.casts, self.plan.rows, self.tensor.T
        assert cast is not None
        if not casts.is_empty or self.tensor.numel() == 0 or not self._casts_both(cast):
            return
        rotation = Rotation.draw(plan.cols_rotate, turned)
        run = plan.casts_in_rotation(turned, cast, None, rotation.turn, beside=True)
        if run is None:
            return
        of_rows = self._noise(self.tensor, "rows") if cast.draws else None
        noise = self._noise(turned, "cols") if cast.draws else None, of_rows
        casts.cols, casts.rows = run(turned, cast, rotation.turn, noise, None, True)

    def _was_seen_by_another(self, state: Tensor) -> bool:
        """Return True if an equal amax history recorded this tensor; copy its state then."""
        seen = self.casts.amax_state
        if self.plan.role != "x" or seen is None or seen is state:
            return False
        if self.context.records:
            state.copy_(seen)
        return True

    @property
    def _remembers_amax(self) -> bool:
        """(w) True if backward recasts w, so that storing its amax saves a second read of w."""
        plan = self.plan
        is_whole = (
            plan.rows is not None
            and (plan.rows.is_per_tensor or (plan.rows.scale.two_level and not plan.rows.draws))
            and isinstance(plan.rows.calibrate, CurrentScaling)
        )
        recasts = self.context.keep.weight == "recast"
        return plan.role == "w" and plan.pairs and is_whole and self.needs[0] and recasts

    def _casts_both(self, cast: Cast) -> bool:
        """True if cols made now will still exist when a GEMM reads them."""
        is_recomputed, cache = self.casts.source is not None, self.context.sources.weight_cache
        is_stochastic = cast.draws != ""
        if not self.context.keep.casts_both(
            self.plan.role, self.needs, is_stochastic, is_recomputed
        ):
            return False
        # No version counter shows a write to an inference tensor, so no cache holds its cols.
        return self.plan.role != "w" or cache is None or not self.tensor.is_inference()

    def rows(self, rotation: Rotation) -> QTensor | Tensor:
        """The operand of the GEMM that reads t."""
        made = self._rows(rotation)
        if self.context.observation is not None:
            self._show("rows", self._shown(rotation, made), made)
        return made

    def cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        """The operand of the GEMM that reads t.T. beside: the other operand of that GEMM."""
        made = self._cols(rotation, beside)
        if self.context.observation is not None:
            self._show("cols", self._shown(rotation, made, made), made)
        return made

    def _show(self, which: str, original: Tensor, made: QTensor | Tensor) -> None:
        role = self.plan.role
        product = PRODUCTS[role][which == "cols"]
        if isinstance(made, QTensor) and made.cast.draws:
            from narrowgauge.nn.noise import show

            show(self, made, product, which)
        assert self.context.observation is not None
        self.context.observation.operand(product, role, original, made)

    def _shown(
        self, rotation: Rotation, made: QTensor | Tensor, cols: QTensor | Tensor | None = None
    ) -> Tensor:
        if self.is_carrier and isinstance(made, QTensor):
            return dequantize(made) if cols is None else dequantize(made).T
        return self._seen(rotation, cols)

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        """Return t in the basis of its cast, for an observer."""
        if cols is None:
            return rotation(self.tensor)
        if self.plan.role == "x" and isinstance(cols, QTensor) and self.saves_codes:
            return dequantize(cols).T
        return rotation(self.tensor.T).T

    def _rows(self, rotation: Rotation) -> QTensor | Tensor:
        casts, plan = self.casts, self.plan
        if casts.rows is None:
            made = self._rotated_cast(self.tensor, rotation, plan.rows, plan.rows_expand, "rows")
            if not rotation.is_random:
                casts.rows = made
            return made
        if plan.role == "w" and plan.rows is not None and plan.rows.draws:
            # Advance the generator as the cast did: activation checkpointing repeats a forward pass
            # that cast w, and finds the cast here.
            self._noise(rotation(self.tensor), "rows")
        return casts.rows

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        if self.pending_recompute is not None:
            (recompute, saved), self.pending_recompute = self.pending_recompute, None
            recompute.restore(self, saved)
        casts, plan = self.casts, self.plan
        if (made := casts.cols) is not None:
            if plan.cols_expand is not None and isinstance(made, QTensor) and not made.is_expanded:
                return made.expanded(plan.cols_expand)
            return made
        if plan.transposes and casts.rows is not None:
            made = casts.rows.T if isinstance(casts.rows, Tensor) else casts.rows.transposed()
            stores = plan.role == "w" and plan.cols_expand is None and not self._turns_freely
            if stores and isinstance(made, QTensor):
                # Store w.T row-major: native GEMMs would otherwise transpose
                # it at every micro-batch.
                made = replace(made, data=made.data.contiguous(), checked=True)
        else:
            made = self._rotated_cast(
                self.tensor.t(), rotation, plan.cols, plan.cols_expand, "cols"
            )
            # The weight was written since forward: later passes must not find this copy.
            if not self._may_share(casts):
                return made
        if not rotation.is_random:
            casts.cols = made
        return made

    @property
    def _turns_freely(self) -> bool:
        """True if the GEMMs read cols as a view of rows."""
        if not self.plan.turns_freely:
            return False
        from narrowgauge.ops.mm import cublas  # only for its GEMMs

        return cublas.turns_freely(self.tensor)

    def _may_share(self, casts: Casts) -> bool:
        """(w) True if later forward passes may read the copies that backward makes now."""
        cache = self.context.sources.weight_cache if self.plan.role == "w" else None
        return cache is None or cache.is_gathered or bool(cache.may_add(casts, self.tensor))

    def _rotated_cast(
        self,
        x: Tensor,
        rotation: Rotation,
        cast: Cast | None,
        expand: torch.dtype | None,
        which: str,
    ) -> QTensor | Tensor:
        if rotation.hadamard is not None and cast is not None and self.plan.fuses_turns:
            run = self.plan.casts_in_rotation(x, cast, expand, rotation.turn)
            if run is not None:
                noise = self._noise(x, which) if cast.draws else None
                return run(x, cast, rotation.turn, (noise, None), expand, False)[0]
        if rotation.hadamard is not None and cast is not None and x.numel() > PIECE:
            from narrowgauge.nn.rotated_pieces import cast_in_pieces, casts_apart

            if casts_apart(cast, x):
                noise = self._noise(x, which) if cast.draws else None
                return cast_in_pieces(x, cast, rotation, noise, self.plan, expand)
        return self.cast(x if rotation.hadamard is None else rotation(x), cast, expand, which)

    def cast(
        self, x: Tensor, cast: Cast | None, expand: torch.dtype | None, which: str
    ) -> QTensor | Tensor:
        """Quantize x [outer, inner], the input of rows or cols; 16-bit if cast is None.

        The scale comes from x's own amax, or from the amax history under delayed scaling.
        """
        if cast is None:
            return high_precision(x, self.context.out_dtype)
        noise = self._noise(x, which) if cast.draws else None
        # Under current scaling an amax is known if an earlier read returned
        # it, which saves one read here.
        amax = (
            self.casts.amax if isinstance(cast.calibrate, DelayedScaling | CurrentScaling) else None
        )
        if amax is not None and cast.scale.two_level:
            return self.plan.by_amax(x, cast, amax)
        return self.plan.quantize(x, cast, amax, noise, expand)

    def _noise(self, x: Tensor, which: str) -> Tensor | Key:
        from narrowgauge.nn.noise import noise_of  # only for stochastic casts

        return noise_of(self, x, which)

    @property
    def rows_matter(self) -> bool:
        """True if making rows has a side effect: random draws, or codes for backward.

        Selective checkpointing skips the output GEMM in recomputation, and makes rows only then.
        """
        plan = self.plan
        if plan.rows is not None and not plan.serves_a_step[0]:
            return True
        return plan.role == "x" and self.saves_codes and plan.transposes and self.casts.cols is None

    @property
    def is_recomputable(self) -> bool:
        """(x) True if a recomputed x gives the same cols: they use no random numbers."""
        plan = self.plan
        return (
            self.needs[1]
            and plan.kind is Operand
            and (plan.serves_a_step[1] or not self.saves_codes)
        )

    def share_key(self) -> tuple[Any, ...] | None:
        """(x) Equal for layers whose casts of the same tensor are equal; None: do not share."""
        plan, context, codes = self.plan, self.context, self.saves_codes
        history = context.sources.x_history_key
        if plan.rows is None or not plan.shares_rows or (codes and not plan.shares_cols):
            return None
        if plan.is_delayed and history is None:
            return None
        # Everything that rows, cols and the tensors saved for backward depend on.
        kept = (plan.cols, plan.cols_rotate, plan.transposes) if codes else None
        amax_record = (history, context.records) if plan.is_delayed else None
        return (
            plan.rows,
            plan.rows_rotate,
            plan.rows_expand,
            context.out_dtype,
            context.keep.grads,
            kept,
            amax_record,
        )

    def saved(self) -> Saved:
        """Tensors to save for backward.

            x, codes saved      (amax, codes, scale, global scale)
            x, recomputed       (amax, *inputs of the fused function)
            else                (amax, t); x is None if grad_weight is not needed
            w, compiled code    (amax, w, codes, scale, global scale) if cols are saved

        The second entry is always w for w.
        """
        if self.plan.role == "w":
            return self._saved_weight()
        casts = self.casts
        form = self.context.keep.of_input(self.needs[1], casts.source is not None)
        if form is SavedInput.NOTHING:
            return casts.amax, None
        if form is SavedInput.INPUT:
            return casts.amax, self.tensor
        if form is SavedInput.PRODUCER_INPUTS:
            assert casts.source is not None
            casts.source.recompute.readers += 1
            return casts.amax, *casts.source.tensors
        if casts.saved is None:
            casts.saved = self._saved_codes()
        return casts.amax, *casts.saved

    def _saved_weight(self) -> Saved:
        casts, keep, sources = self.casts, self.context.keep, self.context.sources
        cache = sources.weight_cache
        if cache is None and keep.weight == "step" and isinstance(cols := casts.cols, QTensor):
            return casts.amax, self.tensor, cols.data, _scales(cols), cols.global_scale
        # Autograd saves no Python objects, so the casts go to backward in the context.
        if cache is not None and keep.grads and not cache.is_gathered:
            sources.saved_for_w = cache.saved_for_backward(casts)
        return casts.amax, self.tensor

    def _saved_codes(self) -> Saved:
        """(codes, scale, global scale) of x.T; scales may be exponents, see `_saves_exponents`."""
        casts, plan = self.casts, self.plan
        if casts.cols is None and plan.transposes and isinstance(rows := casts.rows, QTensor):
            # A CPU that emulates the GEMM saves the decoded elements, before scales: encoding and
            # decoding takes longer there than the GEMM.
            keeps_values = rows.is_expanded and type_of(rows.device) == "cpu"
            casts.cols = (rows if keeps_values else rows.compact()).transposed()
        elif casts.cols is None:
            rotation = Rotation.draw(
                plan.cols_rotate, self.tensor.T, self.context.ranks.stream, "x"
            )
            casts.cols = self._rotated_cast(self.tensor.T, rotation, plan.cols, None, "cols")
        codes = casts.cols
        assert isinstance(codes, QTensor)
        scale = codes.scale if codes.units is None else codes.units
        if codes.units is None and _saves_exponents(codes.cast):
            scale = to_exponents(scale)
        return codes.data, scale, codes.global_scale

    @property
    def recompute(self) -> Recompute | None:
        """The object that recomputes this operand in backward; None if cols or x are saved."""
        return (
            self.casts.source.recompute if self.casts.source is not None and self.needs[1] else None
        )

    def restore(
        self,
        saved: Saved,
        shape: tuple[int, int],
        after: Tensor,
        recompute: Recompute | None = None,
    ) -> Operand:
        """Rebuild the operand in backward, as forward left it, and return it.

        saved  the tensors of `saved`
        shape  shape of t
        after  the incoming gradient
        recompute  recomputes the operand from `saved`; None: the tensors are its own
        """
        self.after = after
        if recompute is not None:
            self.pending_recompute = recompute, saved
            return self
        amax, tensor, *codes = saved
        plan, casts = self.plan, self.casts
        casts.amax = amax
        assert tensor is not None or not self.needs[1]
        if codes and plan.role == "w":
            data, scale, global_scale = codes
            assert data is not None and scale is not None and plan.cols is not None
            of = QTensor.of_parts if scale.ndim == 2 else SwizzledQTensor.of_units
            casts.cols = of(data, scale, plan.cols, shape[0], global_scale)
        elif codes:
            scale, global_scale = codes
            assert tensor is not None and scale is not None and plan.cols is not None
            if _saves_exponents(plan.cols) and scale.ndim == 2:
                scale = from_exponents(scale)
            # A rotation pads the contracted axis to whole blocks, and the
            # codes have the padded length.
            block = 1 if plan.cols_rotate is None else plan.cols_rotate.block
            inner = -(-shape[0] // block) * block
            of = QTensor.of_parts if scale.ndim == 2 else SwizzledQTensor.of_units
            casts.cols = of(tensor, scale, plan.cols, inner, global_scale)
            return self
        self.tensor, self.is_restored = tensor, True  # type: ignore[assignment]
        if plan.role == "w":
            self._restore_casts(amax)
        return self

    def _restore_casts(self, amax: Tensor | None) -> None:
        """(w) Take the casts that forward saved, or gathered codes of the weight."""
        sources = self.context.sources
        cache = sources.weight_cache
        is_gathered = cache is not None and cache.is_gathered
        found = cache.lookup(self) if is_gathered else sources.saved_for_w
        if found is None:
            return
        if not is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph():
            # The autograd graph holds the context, and the loss holds the
            # graph: free the codes now.
            sources.saved_for_w = None
        if cache is not None:
            self.casts = found
            if found.is_empty:
                found.amax = amax

    def lets_wait(self, w: Operand) -> bool:
        """(gy) True if grad_input may run after grad_weight; draws its random numbers now."""
        if self.plan.pairs or self.context.observation is not None or is_compiling():
            return False
        from narrowgauge.nn.noise import drawn_ahead  # only if gy needs two casts

        return drawn_ahead(self, w)

    def finished(self, product: str, d: Tensor) -> Tensor:
        """(gy) Post-process the result of a GEMM that read this gradient, to all rows."""
        return d

    def gradient(self, d: Tensor) -> tuple[Tensor, Tensor | None]:
        """(x, w) Convert d, the gradient of the dequantized operand.

        ->  (gradient of t, gradient of its learned step or None)
        """
        return d, None


def _scales(codes: QTensor) -> Tensor:
    """Return the scales as they are stored: float32, or flat bytes for tensor cores."""
    return codes.scale if codes.units is None else codes.units


def _saves_exponents(cast: Cast) -> bool:
    """True if power-of-two scales are saved as their exponents, one byte each.

    For tiles of 128 elements or more that would save at most 2.3 % of the codes' memory, for eight
    more launches on a GPU (60 us).
    """
    return cast.scale.power_of_two and WHOLE not in cast.tile and cast.tile[0] * cast.tile[1] < 128


KINDS: dict[str, type[Operand]] = {"x": Operand, "w": Operand, "gy": Operand}


def find(
    role: str,
    tensor: Tensor,
    context: LinearContext,
    needs: tuple[bool, bool],
    state: Tensor | None,
) -> Operand:
    """Build the Operand of a tensor, with casts from the first source that has them."""
    plan: OperandPlan = getattr(context.plan, role)
    if not is_compiling():
        tensor = in_memory(tensor)
    operand: Operand = plan.kind(tensor, plan, context, needs, state)
    for source in context.sources.by_role.get(role, ()):
        if (casts := source.lookup(operand)) is not None:
            operand.casts = casts
            break
    operand.read()
    return operand
