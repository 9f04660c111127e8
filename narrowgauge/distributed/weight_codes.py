"""Encode a rank's rows of a weight for the all-gather, and build casts from gathered bytes.

    encode  rows of w [count, K] -> uint8 [count, width], row-major in w for both casts
    fill    uint8 [N, width] of all rows -> the casts that a GEMM reads, rebuilt at each call

8-bit formats take a byte per element; 4-bit formats store two codes per byte along K.
Straight-through recipes add one bit per element that marks unclipped elements, since backward needs
it and the code does not show it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.distributed.weight_scales import LocalRows, RootMeanSquare, Statistic, TileAmaxes
from narrowgauge.nn.rotation import Rotation
from narrowgauge.nn.straight_through import Coded, is_by_norm, scale_of_spread
from narrowgauge.ops.hadamard import decode, encode, rotated_length
from narrowgauge.ops.hadamard.encoding import rotate_and_encode, rotation_is_fused
from narrowgauge.ops.quantize import definition, quantize
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.nn.operands import Casts, Operand
    from narrowgauge.nn.plan import OperandPlan
    from narrowgauge.recipe import Cast, Recipe


def coder_of(
    recipe: Recipe,
    plan: OperandPlan,
    shard: LocalRows,
    columns: int,
    amax_state: Callable[[], Tensor | None],
) -> QuantizedCoder | StraightThroughCoder:
    """Return the coder of a weight.

    recipe      of the layer
    plan        its weight's OperandPlan
    shard       this rank's rows
    columns     K
    amax_state  returns the amax state of the weight under delayed scaling, else None
    """
    if recipe.backward == "straight-through":
        return StraightThroughCoder(plan, shard, columns)
    return QuantizedCoder(plan, shard, columns, amax_state)


class QuantizedCoder:
    """Coder of recipes that quantize w and w.T separately, each from the master weight."""

    def __init__(
        self,
        plan: OperandPlan,
        shard: LocalRows,
        columns: int,
        amax_state: Callable[[], Tensor | None],
    ) -> None:
        self.plan, self.columns, self.amax_state = plan, columns, amax_state
        rows, cols = plan.rows, plan.cols
        assert rows is not None and cols is not None
        # One set of codes serves both GEMMs only if w.T is quantized exactly as w is.
        self.has_two_sets = rows != cols or not rows.is_symmetric or plan.rows_rotate is not None
        self.rotated_columns = rotated_length(columns, plan.rows_rotate)
        self.width = max(
            packed_length(rows, self.rotated_columns),
            packed_length(cols, columns) if self.has_two_sets else 0,
        )
        self.amaxes = {"rows": TileAmaxes(shard, rows, rows.tile, partial(_rotated, plan))}
        if self.has_two_sets:
            self.amaxes["cols"] = TileAmaxes(shard, cols, (cols.tile[1], cols.tile[0]), Rotation())

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return tuple(self.amaxes.values())

    def encode(self, shard: Tensor, orientation: str, use_history: bool) -> Tensor:
        """Quantize this rank's rows to uint8 [count, width], row-major in w.

        orientation  "rows": the cast of w; "cols": the cast of w.T
        use_history  scale by the amax history, if scaling is delayed
        """
        found = self.amaxes[orientation]
        x, amax = found.padded_to_tiles(shard), found.local_amaxes()
        if self.plan.is_delayed:
            amax = self._amax(use_history)
        elif found.cast.scale.two_level and found.tile[0] != WHOLE:
            # Two-level scaling derives its tensor-wide scale from the largest tile. Append that
            # amax above rows of zeros, so that a rank's own rows give the same tensor-wide scale.
            assert found.amax is not None
            length = -(-x.shape[0] // found.tile[0]) * found.tile[0]
            x = torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[0] + found.tile[0]))
            amax = torch.cat((amax, found.amax.amax().expand(1, amax.shape[1])))
        if orientation == "rows":
            codes = quantize(x, found.cast, amax=amax).one_to_a_byte()
        else:
            # Stored row-major in w although w.T is quantized: FSDP shards rows of w.
            codes = quantize(x.T, found.cast, amax=amax.T).one_to_a_byte().T
        # Drop the rows of zeros that aligned the shard with the tiles.
        codes = codes[found.rows_before : found.rows_before + len(shard)].contiguous()
        return found.cast.format.pack(codes)

    def _amax(self, use_history: bool) -> Tensor:
        """Return the amax for delayed scaling, [1, 1].

        It comes from the amax history if `use_history`, else from the weight itself (evaluation).
        """
        own, state = self.amaxes["rows"].amax, self.amax_state()
        assert own is not None and state is not None
        return update_amax(state, own, records=False) if use_history else own

    def fill(self, casts: Casts, operand: Operand, data: Tensor) -> None:
        plan, orientation = (
            operand.plan,
            "cols" if operand.is_restored and self.has_two_sets else "rows",
        )
        found = self.amaxes[orientation]
        amax, cast = found.amax, found.cast
        assert amax is not None
        if plan.is_delayed and not operand.is_restored:
            state, use_history = operand.state, operand.context.records
            casts.amax = (
                update_amax(state, amax, records=True)
                if state is not None and use_history
                else amax
            )
        if plan.is_delayed and casts.amax is not None:
            amax = casts.amax
        if not operand.is_restored:
            casts.rows = self._tensor(cast, data, self.rotated_columns, amax, plan.rows_expand)
            return
        length = self.columns
        codes = cast.format.unpack(data[:, : packed_length(cast, length)].contiguous(), length)
        # Transpose after the gather, since the bytes arrived row-major in w.
        transposed = cast.format.pack(codes.T.contiguous())
        casts.cols = self._tensor(
            cast, transposed, data.shape[0], amax.T.contiguous(), plan.cols_expand
        )

    def _tensor(
        self, cast: Cast, data: Tensor, inner: int, amax: Tensor, expand: torch.dtype | None
    ) -> QTensor:
        # Every rank derives the scales from the exchanged amaxes: they are not part of the message.
        scale, shared = definition.scales(amax, cast)
        data = data[:, : packed_length(cast, inner)]
        if cast.format.codes_per_byte == 1:
            data = data.contiguous().view(cast.format.storage)
        found = QTensor(data=data, scale=scale, cast=cast, inner=inner, global_scale=shared)
        return found if expand is None else found.expanded(expand)


class StraightThroughCoder:
    """Coder of straight-through recipes: the output GEMM's codes, and one bit per unclipped element."""

    has_two_sets = False

    def __init__(self, plan: OperandPlan, shard: LocalRows, columns: int) -> None:
        self.plan, self.columns = plan, columns
        assert plan.rows is not None
        self.cast = plan.rows
        self.inner = rotated_length(columns, plan.rows_rotate)
        self.packed = packed_length(self.cast, self.inner)
        self.width = self.packed + -(-self.inner // 8)
        self.statistic: RootMeanSquare | TileAmaxes = TileAmaxes(
            shard, self.cast, (WHOLE, WHOLE), partial(_rotated, plan)
        )
        if is_by_norm(self.cast):
            self.statistic = RootMeanSquare(shard)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self.statistic,)

    def _scale(self) -> Tensor:
        found = self.statistic
        if isinstance(found, RootMeanSquare):
            assert found.rms is not None
            return scale_of_spread(self.cast, found.rms, self.columns, self.plan.rows_rotate)
        assert found.amax is not None
        return self.cast.scale(found.amax, self.cast.format)

    def encode(self, shard: Tensor, orientation: str, use_history: bool) -> Tensor:
        hadamard, format, scale = self.plan.rows_rotate, self.cast.format, self._scale()
        if hadamard is not None and rotation_is_fused(shard, hadamard, format):
            signs = Rotation.draw(hadamard, shard).signs
            found = rotate_and_encode(shard, hadamard, signs, scale, format, packed=True, bits=True)
        else:
            found = encode(
                _rotated(self.plan, shard).to(torch.float32), scale, format, packed=True, bits=True
            )
        # Codes and bits of one row are adjacent, so each row of the message is self-contained.
        assert found.packed is not None and found.bits is not None
        return torch.cat((found.packed, found.bits), dim=1)

    def fill(self, casts: Casts, operand: Operand, data: Tensor) -> None:
        codes = decode(data[:, : self.packed].contiguous(), self.cast.format, self.inner)
        coded = casts.codes = Coded(
            self.cast, codes, self._scale(), data[:, self.packed :].contiguous()
        )
        if not operand.is_restored:
            casts.rows = coded.operand(operand.plan.rows_expand)


def packed_length(cast: Cast, length: int) -> int:
    """Return the bytes of `length` codes."""
    return -(-length // cast.format.codes_per_byte)


def _rotated(plan: OperandPlan, x: Tensor) -> Tensor:
    """Return x in the basis in which the output GEMM quantizes it (rotated if the recipe rotates)."""
    return Rotation.draw(plan.rows_rotate, x)(x)
