"""Attention in 16 bits with its gradients: softmax(scale * Q @ K.T + mask) @ V.

    S = scale * (Q @ K.T) + mask
    P = exp(S - row maximum)             float32; rounded to 16 bits before its product
    y = (P @ V) / sum of P               the sum is of P before its rounding
    lse = log(sum of exp(S))             saved for backward, which recomputes P = exp(S - lse)

    grad_v = P.T @ grad_y
    dS = P * (grad_y @ V.T - delta)      delta = sum of y * grad_y; dS is rounded to 16 bits
    grad_q = scale * dS @ K
    grad_k = scale * dS.T @ Q

All sums are float32. torch's flash attention on a CPU rounds at the same points, and its gradients
of K and V once more for each block. `ops.attention` is another operator: both products in E4M3.

Contract

    q          [batch, heads, queries, width], bfloat16 for the kernel; any strides
    k, v       [batch, key heads, keys, width or value width]; heads of queries in groups share one
               head of keys
    mask       [batch or 1, heads or 1, queries, keys]: bool, True attends, or numbers that are
               added to the scores; None
    is_causal  query i attends to keys 0 to i
    scale      of the scores, above 0
    dropout    of P, `ops.dropout`; None. The sum of P is of all weights; P @ V, P.T @ grad_y and
               grad_y @ V.T have zeros where a weight is dropped out, and 1 / (1 - rate) of the rest
    -> forward   y [batch, heads, queries, value width] in the dtype of q and
                 lse [batch, heads, queries] float32
    -> backward  grad_q, grad_k, grad_v in the dtype of q

y and the gradients lie in memory as [batch, tokens, heads, width], so the reshape for the next
Linear copies nothing. A query that attends to nothing gets y = 0, lse = -inf and no gradient, as in
torch. NaN and infinities propagate as in torch's plain products and softmax (its flash attention
turns some infinite scores into zeros), except from keys that are masked by a bool. A masked key must
still have finite values in v, since 0 * NaN is NaN.

`native-cpp` (ops/cpp/attention.cpp) is for CPUs with AVX512-BF16. It reads denormal bfloat16
numbers as zeros, as the instruction does. On AVX2 and on AVX512 without these instructions torch's
kernel runs. Cost: the products at about two thirds of the instruction's rate, and the memory of
Q and grad_y twice more for one head at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from narrowgauge.ops.attention16 import cpp, definition
from narrowgauge.ops.registry import Device, Kernel, Refusal, Registry, device_of

if TYPE_CHECKING:
    from narrowgauge.ops.dropout import Dropout

__all__ = [
    "KERNELS",
    "Attention16Spec",
    "AttentionFunctions",
    "attention",
    "attention_backward",
]

LANES, WIDEST = 16, 256  # of the kernel's heads: a multiple of LANES up to WIDEST


@dataclass(frozen=True)
class Attention16Spec:
    """Properties of a call that decide which kernel is chosen.

    dtypes       dtypes of q, k and v
    width        length of a head of q and k
    value_width  length of a head of v
    mask         "learned" is one that requires a gradient, "" is none
    is_empty     True if q, k or v has no elements
    """

    device: Device
    dtypes: tuple[torch.dtype, ...]
    width: int
    value_width: int
    mask: Literal["", "fixed", "learned"] = ""
    is_empty: bool = False

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attention16Spec:
        kind: Literal["", "fixed", "learned"] = ""
        if mask is not None:
            kind = "learned" if mask.requires_grad and torch.is_grad_enabled() else "fixed"
        return cls(
            device_of(q, k, v, mask), (q.dtype, k.dtype, v.dtype), q.shape[-1], v.shape[-1], kind,
            is_empty=not (q.numel() and k.numel() and v.numel()),
        )  # fmt: skip


class AttentionFunctions(NamedTuple):
    """The functions of a kernel. They check no arguments; the module docstring has their meaning.

    prepare  mask -> the mask as the other two read it, for one forward and its backward
    """

    prepare: Callable[[Tensor | None], Any]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def refuse(spec: Attention16Spec) -> Refusal | None:
    """Return the reason why the C++ kernel does not compute this, or None."""
    if any(dtype != torch.bfloat16 for dtype in spec.dtypes):
        named = " and ".join(sorted({str(each).removeprefix("torch.") for each in spec.dtypes}))
        return Refusal("dtype", f"for bfloat16, not {named}")
    if spec.mask == "learned":
        return Refusal("operands", "has no gradient of the mask")
    if spec.is_empty:
        return Refusal("shape", "an operand is empty")
    if any(each % LANES or each > WIDEST for each in (spec.width, spec.value_width)):
        widths = " and ".join(str(each) for each in sorted({spec.width, spec.value_width}))
        return Refusal("shape", f"heads of {widths} are no multiples of {LANES} up to {WIDEST}")
    if (refusal := cpp.LIBRARY.refuse(spec.device.type)) is not None:
        return refusal
    # bf16_gemm: ONEDNN_MAX_CPU_ISA holds the processor back as a whole, to compare instruction sets.
    if not (spec.device.bf16_gemm and cpp.has_instructions()):
        return Refusal("capability", "the processor has no AVX512-BF16")
    return None


_CPP = AttentionFunctions(cpp.mask_tiles, cpp.forward, cpp.backward)
_DEFINITION = AttentionFunctions(lambda mask: mask, definition.forward, definition.backward)
# `run` of a kernel returns its functions: one choice serves forward and backward.
KERNELS: Registry[Attention16Spec] = Registry("attention16")
KERNELS.register(Kernel("native-cpp", refuse, lambda: _CPP, on="cpu"))
KERNELS.register(Kernel("reference", lambda spec: None, lambda: _DEFINITION, by_torch=True))


def _functions(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str | None
) -> AttentionFunctions:
    found: AttentionFunctions = KERNELS.choose(
        Attention16Spec.of(q, k, v, mask), backend
    ).kernel.run()
    return found


@torch.no_grad()
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
    dropout: Dropout | None = None, *, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and lse; see the module. `nn.attention16` has the function with gradients."""
    functions = _functions(q, k, v, mask, backend)
    return functions.forward(q, k, v, functions.prepare(mask), is_causal, scale, dropout)


@torch.no_grad()
def attention_backward(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, y: Tensor, lse: Tensor,
    is_causal: bool, scale: float, dropout: Dropout | None = None, *, backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, from y and lse of `attention`; see the module."""
    functions = _functions(q, k, v, mask, backend)
    prepared = functions.prepare(mask)
    return functions.backward(grad_y, q, k, v, prepared, y, lse, is_causal, scale, dropout)
