"""Fused rotary embedding and attention in transformers' attention modules.

`apply_rotary_pos_emb` is a global name in the `forward` of such a module. The fused module runs a
copy of `forward` in which that name is bound to `FusedAttention.embed`, and the name by which it
looks up its attention to a `Lookup` (attention.py). The class, its source module and other models
are unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import in_memory, type_of
from narrowgauge.fuse import attention
from narrowgauge.fuse.attention import Lookup
from narrowgauge.fuse.forward import FusedForward, Fusion
from narrowgauge.nn import transforms
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.ops import rotary
from narrowgauge.ops.registry import device_facts

if TYPE_CHECKING:
    from narrowgauge.ops.attention16 import Attention16Spec, AttentionFunctions

NAME = "apply_rotary_pos_emb"


def function_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the `apply_rotary_pos_emb` that the module's class calls in `forward`, or None."""
    own: Any = type(module).forward
    if not isinstance(own, types.FunctionType) or NAME not in own.__code__.co_names:
        return None
    found = own.__globals__.get(NAME)
    return found if callable(found) else None


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.run, ctx.dtypes = run, (q.dtype, k.dtype)
        ctx.save_for_backward(cos, sin)
        dtypes = _result_dtypes(q, k, cos)
        found: tuple[Tensor, Tensor] = run(q, k, cos, sin, dtypes, False)
        return found

    @staticmethod
    @no_double_backward(
        "a fused rotary embedding", "Convert the model to None, and again without fuse."
    )
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # The gradient of a rotation is the inverse rotation.
        return (
            None,
            *ctx.run(in_memory(grad_q), in_memory(grad_k), cos, sin, ctx.dtypes, True),
            None,
            None,
        )


def _result_dtypes(q: Tensor, k: Tensor, cos: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of PyTorch's own q * cos; under autocast on a CPU those of q and k.

    There the angles have the dtype of a float32 residual stream, and attention rounds the result to
    the dtype that q and k have already: the same bits.
    """
    if type_of(q.device) == "cpu" and torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        if q.dtype == k.dtype == narrow:
            return narrow, narrow
    return torch.promote_types(q.dtype, cos.dtype), torch.promote_types(k.dtype, cos.dtype)


@dataclass(eq=False)
class FusedAttention(FusedForward):
    """Fused forward of an attention: `embed` replaces the rotary embedding `function`.

    function  None: its rotary embedding stays, or it has none
    attends   True if a kernel of `ops.attention16` computes its attention where it can
    """

    function: Callable[..., Any] | None
    attends: bool = False
    _call: Callable[..., Any] | None = field(default=None, init=False, repr=False)

    def __call__(self, *given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.module_forward(*given, **options)
        if self._call is None:
            own: Any = type(self.module).forward
            globals = dict(own.__globals__)
            if self.function is not None:
                globals[NAME] = self.embed
            if self.attends:
                lookup = Lookup(globals[attention.NAME], self.attention_kernel)
                globals[attention.NAME] = lookup
            # A snapshot of the globals: later changes to that file's global names are not seen.
            self._call = types.FunctionType(
                own.__code__, globals, own.__name__, own.__defaults__, own.__closure__
            )
            self._call.__kwdefaults__ = own.__kwdefaults__
        return self._call(self.module, *given, **options)

    def attention_kernel(self, spec: Attention16Spec) -> AttentionFunctions | None:
        """Return `attention.kernel_of`, cached; `save` has no influence on it."""
        key = "attention16", spec
        if key not in self._kernels:
            self._kernels[key] = attention.kernel_of(spec)  # type: ignore[assignment]
        return self._kernels[key]  # type: ignore[return-value]

    def has_kernel(self, given: Mapping[str, Any]) -> bool:
        """Return True if a kernel computes such a call where its tensors have memory.

        given  arguments of scaled_dot_product_attention, by name
        """
        return self.attends and self.attention_kernel(attention.spec_in_memory(given)) is not None

    def embed(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any
    ) -> Any:
        """Rotate queries and keys, with the signature of `function`.

        Falls back to `function` for unusual shapes or arguments, and if cos or sin require
        gradients.
        """
        assert self.function is not None
        if torch.compiler.is_compiling() or transforms.is_active(q, k, cos, sin):
            return self.function(q, k, cos, sin, *more, **options)
        # The kernel takes q and k [B, heads, T, D] and cos, sin [1 or B, T, D].
        usual = (
            q.ndim == k.ndim == 4
            and len(q) == len(k)
            and q.shape[2:] == k.shape[2:] == cos.shape[1:]
        )
        usual = (
            usual
            and cos.shape == sin.shape
            and cos.shape[0] in (1, len(q))
            and cos.dtype == sin.dtype
        )
        # The kernel has no gradient for cos and sin.
        if more or options or not usual or cos.requires_grad or sin.requires_grad:
            return self.function(q, k, cos, sin, *more, **options)
        kernel = self.kernel(rotary.KERNELS, rotary.RotarySpec.of(q, k, cos, sin))
        return (
            self.function(q, k, cos, sin)
            if kernel is None
            else _RotaryFunction.apply(kernel.run, q, k, cos, sin)
        )

    def fusion(self, name: str, readers: tuple[str, ...]) -> Fusion:
        """Return the report, for `head_dim` (or 64) and the dtype of the module's weights."""
        like = next(self.module.parameters())
        device = device_facts(like.device.type, like.device.index)
        spec = rotary.RotarySpec(
            device, (like.dtype,) * 4, int(getattr(self.module, "head_dim", 64))
        )
        backend = self.describe_backend(rotary.KERNELS, spec)
        return Fusion(name=name, readers=readers, function="rotary", backend=backend)

    def attention_fusion(self, name: str) -> Fusion:
        """Return the report about the attention."""
        backend = attention.describe(self.module)
        return Fusion(name=name, readers=(), function="attention", backend=backend)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the copied function, which cannot be pickled."""
        return super().__getstate__() | {"_call": None}
