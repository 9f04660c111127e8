"""Rotary position embedding of queries and keys, and its gradient, each in one kernel.

Separate operations would launch a dozen kernels.

    forward     y = x cos + turn(x) sin             turn(x1, x2) = (-x2, x1), the halves of a head
    gradient    x = y cos + turn'(y sin)            turn'(y1, y2) = (y2, -y1)

Contract of `run(q, k, cos, sin, dtypes, inverse)`

    q, k       [batch, heads, tokens, head], any number of heads each; float32, bfloat16 or float16,
               any strides
    cos, sin   [batch or 1, tokens, head]
    dtypes     dtypes of the two results: forward, torch's promotion of x and cos, or on a CPU a
               narrower one; gradient, the dtypes of q and k
    inverse    True computes the gradient: q and k are then the gradients of the results
    ->         two tensors in the layout of q and of k; on a CPU, gradients [batch, tokens, heads,
               head] in memory

Each product is rounded to the dtype of the result before the sum, as PyTorch rounds between
operations, so results are bit-identical to the reference. (On a CPU, forward, it is rounded to the
promotion of x and cos.) A kernel reads and writes q and k once; separate operations move five times
as many bytes.

Source: arXiv 2104.09864, with the order of halves of Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.ops.registry import Device, Kernel, Refusal, Registry, device_of
from narrowgauge.ops.rotary import cpp
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.ops.triton.launch import Kernels, launch

LONGEST_HEAD = 512
# Elements of each half at a time: 16 per thread take 48 registers, 32 spilled on sm_89. Not
# measured on a GPU.
ELEMENTS, WARPS = 1024, 4
triton_kernel = Kernels("narrowgauge.ops.rotary.triton_kernel")

Pair = tuple[Tensor, Tensor]
Dtypes = tuple[torch.dtype, torch.dtype]


class Strided(NamedTuple):
    """A tensor with its strides in elements.

    data   [batch, heads, tokens, 2 HALF], or angles [batch, tokens, 2 HALF], whose stride `head` is
           0
    """

    data: Any
    batch: Any
    head: Any
    token: Any


@dataclass(frozen=True)
class RotarySpec:
    """Properties of a call that decide which kernel is chosen.

    dtypes    dtypes of q, k, cos and sin
    head      length of a head
    is_empty  True if q or k has no elements
    """

    device: Device
    dtypes: tuple[torch.dtype, ...]
    head: int
    is_empty: bool = False

    @classmethod
    def of(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> RotarySpec:
        given = q, k, cos, sin
        dtypes = tuple(each.dtype for each in given)
        return cls(
            device_of(*given), dtypes, q.shape[-1], is_empty=q.numel() == 0 or k.numel() == 0
        )


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtypes: Dtypes, inverse: bool
) -> Pair:
    """Definition in plain torch; see the module."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor, dtype: torch.dtype) -> Tensor:
        if inverse:
            first, second = (x * sin).to(dtype).chunk(2, dim=-1)
            return (x * cos).to(dtype) + torch.cat((second, -first), dim=-1)
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(dtype)

    return turned(q, dtypes[0]), turned(k, dtypes[1])


def refuse(spec: RotarySpec) -> Refusal | None:
    """Return the reason why the kernel does not compute this, or None."""
    if (refusal := refuse_tensors(spec.device, spec.dtypes, spec.is_empty)) is not None:
        return refusal
    if spec.head % 2 or spec.head > LONGEST_HEAD:
        return Refusal("shape", f"turns heads of even length up to {LONGEST_HEAD}, not {spec.head}")
    return None


def run_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtypes: Dtypes, inverse: bool
) -> Pair:
    """Launch the Triton kernel; see the module."""
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    results = torch.empty_like(q, dtype=dtypes[0]), torch.empty_like(k, dtype=dtypes[1])
    batch, heads, tokens, head = q.shape
    # Triton's ranges are powers of two; the kernel masks the rest of a head.
    width = max(1 << (head // 2 - 1).bit_length(), 16)
    inputs, outputs = (
        tuple(Strided(x, *x.stride()[:3]) for x in pair) for pair in ((q, k), results)
    )
    # A stride of 0 broadcasts angles that all examples share.
    angles = tuple(
        Strided(x, 0 if x.shape[0] == 1 else x.stride(0), 0, x.stride(1)) for x in (cos, sin)
    )
    launch(
        triton_kernel.rotary, batch * tokens, inputs, outputs, angles, (heads, k.shape[1]), tokens, HALF=head // 2, INVERSE=inverse,
        HEADS=max(ELEMENTS // width, 1), WIDTH=width, warps=WARPS,
    )  # fmt: skip
    return results


SMALL, LARGE = (2, 9, 5, 2), (2, 2048, 16, 4)  # batch, tokens, heads of q, heads of k


def _compare(
    run: Callable[..., Pair], kind: tuple[tuple[torch.dtype, ...], int], device: torch.device,
    sizes: tuple[int, int, int, int] = SMALL,
) -> Iterator[OutputComparison]:  # fmt: skip
    """Compare values and gradients of a sample bit by bit, in both layouts of a head."""
    for transposed in (True, False):
        q, k, cos, sin = _sample(*kind, transposed, sizes)
        results = (torch.promote_types(q.dtype, cos.dtype), torch.promote_types(k.dtype, cos.dtype))
        for inverse in (False, True):
            wanted = (q.dtype, k.dtype) if inverse else results
            first, second = (q.to(results[0]), k.to(results[1])) if inverse else (q, k)
            truth = reference(first, second, cos, sin, wanted, inverse)
            found = run(*(x.to(device) for x in (first, second, cos, sin)), wanted, inverse)
            for name, got, x in zip(("q", "k"), found, truth, strict=True):
                yield OutputComparison(f"gradient of {name}" if inverse else name, got, x)


def _sample(
    dtypes: tuple[torch.dtype, ...],
    head: int,
    transposed: bool,
    sizes: tuple[int, int, int, int] = SMALL,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(20261121)
    batch, tokens, *both = sizes
    shapes = [
        (batch, tokens, heads, head) if transposed else (batch, heads, tokens, head)
        for heads in both
    ]
    q, k = (torch.randn(shape, generator=generator) * 3 for shape in shapes)
    # Different angles in the two halves, which Llama does not have.
    angles = 6 * torch.rand(1, tokens, head, generator=generator)
    given = (q.transpose(1, 2), k.transpose(1, 2)) if transposed else (q, k)
    return [
        x.to(dtype) for x, dtype in zip((*given, angles.cos(), angles.sin()), dtypes, strict=True)
    ]


_EXAMPLES = [
    RotarySpec(Device("cpu"), (of_q_and_k,) * 2 + (of_angles,) * 2, head)
    for of_q_and_k in (torch.float16, torch.bfloat16)
    for of_angles in (of_q_and_k, torch.float32)
    for head in (8, 80)  # a power of two, and another length
]
CHECK: KernelCheck[RotarySpec] = KernelCheck(
    lambda spec: (spec.dtypes, spec.head),
    _compare,
    lambda: _EXAMPLES,
    large=partial(_compare, sizes=LARGE),
)
KERNELS: Registry[RotarySpec] = Registry("rotary")
KERNELS.register(Kernel("triton", refuse, run_triton, check=lambda: CHECK))
KERNELS.register(Kernel("native-cpp", cpp.refuse, cpp.run, on="cpu", check=lambda: CHECK))
KERNELS.register(Kernel("reference", lambda spec: None, reference, by_torch=True))
