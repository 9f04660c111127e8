"""Fused norms and activations on a CPU: one kernel forward, one backward, and no cast.

    unfused  torch computes a norm in six passes, SwiGLU in two, and backward in twice as many
    fused    one pass; the layers that read y cast it, as they would without fusing

Under autocast a norm of a float32 residual stream writes y in autocast's dtype if only Linears read
it. They would round it to this dtype themselves: an ordinary Linear, and one of recipe bf16, reads
the same bits. A recipe with codes casts the rounded y, as it does in a model of 16 bits. Backward
then adds the gradients of its readers in that dtype.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import in_memory
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.ops.norm_act import BACKWARD, FORWARD, Kind, NormActSpec

if TYPE_CHECKING:
    from narrowgauge.fuse.forward import FusedForward
    from narrowgauge.ops.registry import Kernel


@dataclass(eq=False)
class ValueKernels:
    """Computes a function by a kernel that makes no casts.

    kind     the function
    private  only Linears read its result, so it may have autocast's dtype
    fused    the forward whose `kernel` chooses
    """

    kind: Kind
    private: bool
    fused: FusedForward
    _kinds: dict[Hashable, Kind] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return y of the tensors, or None if no kernel computes it."""
        kind = self._kind_here(tensors)
        kernel = self.kernel(NormActSpec.of(kind, tensors, ()))
        if kernel is None:
            return None
        y: Tensor = _ValueFunction.apply(kind, kernel, self.fused, *tensors)
        return y

    def kernel(self, spec: NormActSpec) -> Kernel[NormActSpec] | None:
        """Return a kernel that is not the definition, or None."""
        found = self.fused.kernel(FORWARD, spec)
        return None if found is None or found.by_torch else found

    def _kind_here(self, tensors: Sequence[Tensor]) -> Kind:
        if not (self.private and self.kind.is_norm and torch.is_autocast_enabled("cpu")):
            return self.kind
        out = torch.get_autocast_dtype("cpu")
        if tensors[0].dtype != torch.float32 or out != torch.bfloat16:
            return self.kind
        # Made once: a new Kind at every call would cost more than the lookup of its kernel.
        if out not in self._kinds:
            self._kinds[out] = replace(self.kind, out=out)
        return self._kinds[out]


class _ValueFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: Kind, kernel: Kernel[NormActSpec], fused: FusedForward, *tensors: Tensor
    ) -> Tensor:
        rows = [_rows(each) for each in tensors]
        outputs, statistics = kernel.run(kind, rows, None)
        ctx.kind, ctx.fused = kind, fused
        # As they came: autograd stores a tensor once that a Linear saves too.
        ctx.save_for_backward(*tensors, *statistics)
        y: Tensor = outputs.value.view(tensors[0].shape)
        return y

    @staticmethod
    @no_double_backward(
        "a fused norm or activation", "Compute inside `with narrowgauge.suspended(model):`."
    )
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mean, rate = ctx.saved_tensors
        tensors = [_rows(each) for each in saved]
        requests = [None] * (2 if ctx.kind.is_gated else 1)
        kernel = ctx.fused.kernel(BACKWARD, NormActSpec.of(ctx.kind, tensors, ()))
        run = (kernel or BACKWARD.kernels[-1]).run
        # Kernels read raw memory: resolve lazily negated views and zeros without storage first.
        gradients, of_parameters = run(
            ctx.kind, tensors, (mean, rate), _rows(in_memory(gy)), requests
        )
        shape = saved[0].shape
        return None, None, None, *(each.value.view(shape) for each in gradients), *of_parameters


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim < 3 else x.reshape(-1, x.shape[-1])
