"""Rotary embedding inside an attention of transformers: its `forward`, with another function where it names one.

The function `apply_rotary_pos_emb` of the module's file is a global name of its `forward`. A copy of `forward` with that one name
bound to an `Embedding` is what the fused module runs; the class, the file and all other models stay as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.autograd_rules import no_double_backward
from narrowgauge.ops import rotary
from narrowgauge.ops.registry import Choice, device_facts

NAME = "apply_rotary_pos_emb"


def function_of(module: nn.Module) -> Callable[..., Any] | None:
    """What the module's class calls by that name in `forward`, or None."""
    own: Any = type(module).forward
    if not isinstance(own, types.FunctionType) or NAME not in own.__code__.co_names:
        return None
    found = own.__globals__.get(NAME)
    return found if callable(found) else None


def refuse(function: Callable[..., Any]) -> str | None:
    """Why this is another function than `ops.rotary`, found out by trying in float32 (exact), or None."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (3, 1))
    cos, sin = (torch.randn(2, 5, 8, generator=generator) for _ in range(2))
    words = f"its {NAME} computes something else"
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            found = function(q, k, cos, sin)
        except Exception:  # whatever it wants, it is not this
            return words
    expected = rotary.reference(q, k, cos, sin, (torch.float32, torch.float32), inverse=False)
    same = isinstance(found, tuple) and len(found) == 2 and all(map(torch.equal, found, expected))
    return None if same else words


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.run, ctx.dtypes = run, (q.dtype, k.dtype)
        ctx.save_for_backward(cos, sin)
        dtypes = (torch.promote_types(q.dtype, cos.dtype), torch.promote_types(k.dtype, cos.dtype))
        found: tuple[Tensor, Tensor] = run(q, k, cos, sin, dtypes, False)
        return found

    @staticmethod
    @no_double_backward("a fused rotary embedding", "Convert the model to None, and again without fuse.")
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (None, *ctx.run(of_q, of_k, cos, sin, ctx.dtypes, True), None, None)


@dataclass(eq=False)
class Embedding:
    """Stands in for `own`. backend: the kernel to take ("triton", "reference"); None: the first, or `own` where it is the reference."""

    own: Callable[..., Any]
    backend: str | None = None
    _choices: dict[rotary.Spec, Choice[rotary.Spec]] = field(default_factory=dict, repr=False)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        usual = q.ndim == k.ndim == 4 and cos.ndim == sin.ndim == 3 and cos.dtype == sin.dtype
        if more or options or not usual or torch.compiler.is_compiling() or cos.requires_grad or sin.requires_grad:
            return self.own(q, k, cos, sin, *more, **options)
        kernel = self._choice(rotary.Spec.of(q, k, cos, sin)).kernel
        if kernel.name == "reference" and self.backend is None:
            return self.own(q, k, cos, sin)
        return _Function.apply(kernel.run, q, k, cos, sin)

    def _choice(self, spec: rotary.Spec) -> Choice[rotary.Spec]:
        if spec not in self._choices:
            self._choices[spec] = rotary.KERNELS.choose(spec, self.backend)
        return self._choices[spec]

    def __getstate__(self) -> dict[str, Any]:
        """Without the choices: they belong to this process."""
        return self.__dict__ | {"_choices": {}}

    def backend_words(self, module: nn.Module) -> str:
        """Which kernel turns queries and keys on the module's device, and why no other."""
        like = next(module.parameters())
        spec = rotary.Spec(device_facts(like.device.type, like.device.index), (like.dtype,) * 4, self._head(module))
        found = rotary.KERNELS.choose(spec, self.backend)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.refusals)
        return found.kernel.name if found.kernel.name != "reference" else f"own code ({reasons})"

    @staticmethod
    def _head(module: nn.Module) -> int:
        return int(getattr(module, "head_dim", 64))


@dataclass(eq=False)
class OfAttention:
    """The forward of an attention, which turns queries and keys by `embedding`."""

    module: nn.Module
    embedding: Embedding
    _call: Callable[..., Any] | None = None

    def __call__(self, *given: Any, **options: Any) -> Any:
        own: Any = type(self.module).forward
        if torch.compiler.is_compiling():
            return own(self.module, *given, **options)
        if self._call is None:
            globals = {**own.__globals__, NAME: self.embedding}
            self._call = types.FunctionType(own.__code__, globals, own.__name__, own.__defaults__, own.__closure__)
            self._call.__kwdefaults__ = own.__kwdefaults__
        return self._call(self.module, *given, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Without the function, which no pickle takes."""
        return self.__dict__ | {"_call": None}
