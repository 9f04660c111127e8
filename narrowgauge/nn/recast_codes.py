"""Operands for backward="recast-codes", whose backward pass casts the decoded forward operands again.

    forward      q_x = cast(x), q_w = cast(w)               y = q_x @ q_w.T + bias
    backward     grad_input  = cast(gy) @ cast(decode(q_w).T).T      both rotated along N
                 grad_weight = cast(gy.T) @ cast(decode(q_x).T).T    both rotated along T

Source: "Quartet II" (arXiv 2601.22813). It keeps x and w of the forward pass in NVFP4. Its backward
pass decodes, transposes, rotates and casts them again.

Why: x [T, K] costs backward its codes and scales, 4.5 bits per element in 1x16 tiles and not 16. The
gradients are those of the quantized layer, straight through the rounding: elements that the forward
cast clipped get theirs too. A cast of x itself lies nearer to the gradient in 16 bits, since it has
one rounding less (`benchmarks.closed frontier gradients` has both); backward="recast" is that.

If `output` rotates x, its decoded values are rotated back. The weight is in memory anyway: its codes
are taken from the cache of the step, or cast again in backward, which is exact.

Left out: gathered codes of a weight under FSDP, since a rotation along N needs all rows; and casts of
`output` that differ from pass to pass, which `Recipe` refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.nn.operands import Operand
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.hadamard import rotated_length
from narrowgauge.ops.quantize import dequantize
from narrowgauge.qtensor import QTensor

if TYPE_CHECKING:
    from narrowgauge.nn.keep_policy import Recompute, Saved


class DecodedOperand(Operand):
    """An operand whose cols are cast from its decoded rows."""

    def _cols(self, rotation: Rotation, beside: Operand) -> QTensor | Tensor:
        # The base class casts the transpose of `tensor`. It caches no result: a rotation of backward
        # is random, or the cache finds another address than the weight's.
        original, self.tensor = self.tensor, self._decoded()
        try:
            return super()._cols(rotation, beside)
        finally:
            self.tensor = original

    def _seen(self, rotation: Rotation, cols: QTensor | Tensor | None = None) -> Tensor:
        # Observers compare codes with the tensor that was cast.
        return super()._seen(rotation) if cols is None else rotation(self._decoded().T).T

    def _forward_rows(self) -> QTensor:
        """The codes that `output` read."""
        raise NotImplementedError

    def _inner(self) -> int:
        """Length of the contracted axis of `output`, without padding."""
        return int(self.tensor.shape[1])

    def _decoded(self) -> Tensor:
        """The decoded rows, rotated back: [outer, inner] float32."""
        values, hadamard = dequantize(self._forward_rows()), self.plan.rows_rotate
        if hadamard is None:
            return values
        kernel = self.context.plan.hadamard
        assert kernel is not None  # a recipe that rotates has one
        signs = Rotation.draw(hadamard, values).signs
        return kernel.unrotate(values, hadamard.block, self._inner(), signs, None)


class DecodedInput(DecodedOperand):
    """x [T, K]. Backward has its codes and not x."""

    codes: QTensor
    inner: int

    @property
    def rows_matter(self) -> bool:
        return self.needs[1] or super().rows_matter

    @property
    def is_recomputable(self) -> bool:
        return False  # no fused producer need save anything: the codes are saved

    @property
    def recompute(self) -> Recompute | None:
        return None

    def saved(self) -> Saved:
        """(amax, packed codes, scale, global scale); scales of e4m3 take one byte."""
        casts = self.casts
        if not self.needs[1]:
            return casts.amax, None
        if casts.saved is None:
            assert isinstance(casts.rows, QTensor)  # `Recipe` requires a cast that is made once
            codes = casts.rows.compact()
            is_e4m3 = codes.cast.scale.two_level
            scale = codes.scale.to(torch.float8_e4m3fn) if is_e4m3 else codes.scale
            casts.saved = codes.data, scale, codes.global_scale
        return casts.amax, *casts.saved

    def restore(
        self,
        saved: Saved,
        shape: tuple[int, int],
        after: Tensor,
        recompute: Recompute | None = None,
    ) -> Operand:
        self.after, self.inner, self.is_restored = after, shape[1], True
        if len(saved) > 2:
            _, data, scale, global_scale = saved
            assert data is not None and scale is not None and self.plan.rows is not None
            self.codes = QTensor(
                data=data,
                scale=scale.to(torch.float32),
                cast=self.plan.rows,
                inner=rotated_length(shape[1], self.plan.rows_rotate),
                global_scale=global_scale,
                checked=True,
            )
        return self

    def _forward_rows(self) -> QTensor:
        return self.codes

    def _inner(self) -> int:
        return self.inner


class DecodedWeight(DecodedOperand):
    """w [N, K]. Backward has w, and its codes if the cache of the step holds them."""

    def _decoded(self) -> Tensor:
        # Codes of a frozen weight were decoded in its place (`frozen.FrozenWeight.lookup`).
        return self.tensor if self.is_decoded else super()._decoded()

    def _forward_rows(self) -> QTensor:
        rows = self.casts.rows
        if isinstance(rows, QTensor):
            return rows
        plan = self.plan
        rotation = Rotation.draw(plan.rows_rotate, self.tensor, kernel=self.context.plan.hadamard)
        made = self._rotated_cast(self.tensor, rotation, plan.rows, plan.rows_expand, "rows")
        assert isinstance(made, QTensor)
        return made


KINDS: dict[str, type[Any]] = {"x": DecodedInput, "w": DecodedWeight, "gy": Operand}
