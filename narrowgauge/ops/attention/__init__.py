"""Attention whose two products multiply E4M3 numbers, without gradients.

    S = scale * (Q @ K.T) + mask        Q, K in E4M3
    P = exp(S - row maximum)            float32
    y = (P @ V) / sum of P              P, V in E4M3; the sum is of P before its cast

Q, K and V have a float32 scale for each head and block of BLOCK tokens. P is at most 1 and needs no
amax: it is multiplied by LARGEST, a power of two, which uses 17 of E4M3's 18 binades.

Keys come in blocks, as in FlashAttention-2. A block may raise the running row maximum. The sums of
earlier blocks are then multiplied by exp(old - new). So the largest tensor in memory is
[queries, BLOCK] and not [queries, keys]. FlashAttention-3 (arXiv 2407.08608, section 3.3) scales
blocks and keeps the softmax in float32 likewise.

Contract of `run(q, k, v, mask, is_causal, scale)`

    q          [batch, heads, queries, width]; float32, bfloat16 or float16
    k, v       [batch, key heads, keys, width or value width]; heads of queries in groups share one
               head of keys
    mask       [batch or 1, heads or 1, queries, keys]: bool, True attends, or numbers that are
               added to the scores; None
    is_causal  query i attends to keys 0 to i
    scale      of the scores
    ->         y [batch, heads, queries, value width] in the dtype of q. A query that attends to
               nothing gets zeros

Kernels agree with the definition up to the order of sums, the last bits of exp, and the precision
of the tensor cores' sums (about 14 bits on Hopper, over at most 256 products). Such a difference
may move a P to its neighbour in E4M3. `_compare` bounds the sum of all differences at a quarter of
the noise that E4M3 itself adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.formats import E4M3
from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.registry import (
    Device,
    Kernel,
    Refusal,
    Registry,
    device_facts,
    device_of,
)
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison
from narrowgauge.ops.triton import FP8_CONVERSIONS, refuse_tensors, stages
from narrowgauge.ops.triton.cast_constants import constants_of
from narrowgauge.ops.triton.launch import Kernels, launch
from narrowgauge.recipe import WHOLE, Cast

BLOCK = 128  # tokens of a scale, and keys of a step: FlashAttention-3's for heads of 128
LARGEST = 256.0  # of P in E4M3, the largest power of two below 448: scaling by it rounds nothing
LONGEST_HEAD = 256  # of the kernel
# 128 rows spill registers on compute capability 8.9, and with a mask on 9.0; so do 64 in four warps.
ROWS, WARPS, STAGES = 64, 8, 2
CAST = Cast(format=E4M3, tile=(1, WHOLE))  # of a row that holds a block of a head
triton_kernel = Kernels("narrowgauge.ops.attention.triton_kernel")
Masked = Literal["", "bool", "added"]


@dataclass(frozen=True)
class AttentionSpec:
    """Properties of a call that decide which kernel is chosen.

    dtypes       dtypes of q, k and v
    width        length of a head of q and k
    value_width  length of a head of v
    masked       kind of the mask, "" for none
    is_empty     True if q or k has no elements
    """

    device: Device
    dtypes: tuple[torch.dtype, ...]
    width: int
    value_width: int
    masked: Masked = ""
    is_causal: bool = False
    is_empty: bool = False

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
    ) -> AttentionSpec:
        kind: Masked = _kind(mask)
        return cls(
            device_of(q, k, v, mask), (q.dtype, k.dtype, v.dtype), q.shape[-1], v.shape[-1], kind,
            is_causal, is_empty=not (q.numel() and k.numel() and v.numel()),
        )  # fmt: skip


def _kind(mask: Tensor | None) -> Masked:
    if mask is None:
        return ""
    return "bool" if mask.dtype == torch.bool else "added"


def definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Definition in plain torch, y in float32; see the module.

    Memory: float32 copies of the operands and [batch, heads, queries, BLOCK] scores.
    """
    batch, heads, queries, _ = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    if not (q.numel() and k.numel()):
        return q.new_zeros(batch, heads, queries, v.shape[-1], dtype=torch.float32)
    (q, q_scale), (k, k_scale), (v, v_scale) = map(block_cast, (q, k, v))
    # Of each token of q [B, H, queries, 1], and of each block of keys [B, key heads, blocks, 1, 1].
    q_scale = q_scale.repeat_interleave(BLOCK, 2)[:, :, :queries, None]
    k_scale, v_scale = k_scale[..., None, None], v_scale[..., None, None]
    # G heads of queries share a head of keys: [B, key heads, G, queries, ...]. Nothing is copied.
    shape = (batch, key_heads, heads // key_heads)
    q, q_scale = (each.reshape(*shape, *each.shape[2:]) for each in (q, q_scale))
    largest = q.new_full((*shape, queries, 1), -math.inf)
    total = torch.zeros_like(largest)
    y = q.new_zeros(*shape, queries, v.shape[-1])
    for begin in range(0, keys, BLOCK):
        end = min(begin + BLOCK, keys)
        first = begin if is_causal else 0  # earlier queries attend to none of these keys
        if first >= queries:
            break
        rows = slice(first, queries)
        # [B, key heads, 1, keys of the block, ...]
        block = k[:, :, None, begin:end]
        block_scale = k_scale[:, :, begin // BLOCK, None]
        scores = q[..., rows, :] @ block.transpose(-2, -1)
        scores = scores * (q_scale[..., rows, :] * block_scale * scale)
        scores = _masked(scores, mask, is_causal, shape, (first, queries), (begin, end))
        before = largest[..., rows, :]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        shift = now.masked_fill(now == -math.inf, 0.0)  # no key so far: exp(-inf) and not NaN
        p, kept = torch.exp(scores - shift), torch.exp(before - shift)
        codes = E4M3.round(p * LARGEST)
        product = codes @ v[:, :, None, begin:end]
        product = product * (v_scale[:, :, begin // BLOCK, None] / LARGEST)
        y[..., rows, :] = y[..., rows, :] * kept + product
        total[..., rows, :] = total[..., rows, :] * kept + p.sum(-1, keepdim=True)
        largest[..., rows, :] = now
    y = torch.where(total == 0, 0.0, y / total)
    return y.reshape(batch, heads, queries, v.shape[-1])


def block_cast(x: Tensor, expand: torch.dtype | None = torch.float32) -> tuple[Tensor, Tensor]:
    """Cast x [B, H, T, d] to E4M3, with a scale for each head and BLOCK tokens.

    expand  dtype of decoded values; None: codes
    ->      values or codes [B, H, T, d], and float32 scales [B, H, ceil(T / BLOCK)]
    """
    batch, heads, tokens, width = x.shape
    block = min(BLOCK, tokens)
    # Zeros fill the last block of each head, so that no scale spans two heads. They raise no amax.
    missing = -tokens % block
    rows = F.pad(x, (0, 0, 0, missing)) if missing else x
    found = quantize(rows.reshape(-1, block * width), CAST, expand=expand)
    values = found.data.view(batch, heads, -1, width)[:, :, :tokens]
    return values, found.scale.view(batch, heads, -1)


def _masked(
    scores: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    shape: tuple[int, int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> Tensor:
    """Scores [B, key heads, G, rows, columns] of a block, with -inf where nothing is attended to."""
    (first, last), (begin, end) = rows, columns
    if is_causal:
        index = torch.arange(max(last, end), device=scores.device)
        hidden = index[first:last, None] < index[None, begin:end]
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is None:
        return scores
    part = mask[..., first:last, begin:end]
    per_head = part.shape[1] > 1
    part = part.unflatten(1, shape[1:]) if per_head else part.unsqueeze(1)
    if part.dtype == torch.bool:
        return scores.masked_fill(~part, -math.inf)
    return scores + part


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    return definition(q, k, v, mask, is_causal, scale).to(q.dtype)


@dataclass(frozen=True)
class Tiles:
    """Compile-time constants of the kernel.

    rows          queries of a program, at most BLOCK, so that one scale serves all
    block         keys of a step
    width         power of two that holds a head; value_width, a head of values
    largest       factor of P
    """

    rows: int
    block: int
    width: int
    value_width: int
    largest: float
    is_causal: bool
    masked: Masked


class MaskStrides(NamedTuple):
    """A mask with its strides in elements, 0 where it is broadcast."""

    data: Any
    batch: Any
    head: Any
    row: Any
    column: Any


def refuse(spec: AttentionSpec) -> Refusal | None:
    """Return the reason why the kernel does not compute this, or None."""
    if (refusal := refuse_tensors(spec.device, spec.dtypes, spec.is_empty)) is not None:
        return refusal
    if spec.device.capability < FP8_CONVERSIONS:
        return Refusal("capability", "multiplies in E4M3, which needs compute capability 8.9")
    # Longer heads of values spill registers, but not where sums stay out of them (10.x).
    of_values = LONGEST_HEAD if spec.device.capability[0] == 10 else LONGEST_HEAD // 2
    if spec.width > LONGEST_HEAD or spec.value_width > of_values:
        return Refusal(
            "shape",
            f"holds heads of up to {LONGEST_HEAD} and of values up to {of_values}, not {spec.width} and {spec.value_width}",
        )
    return None


def run_triton(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float,
    decoded: bool = False,
) -> Tensor:  # fmt: skip
    """Cast the operands and launch the Triton kernel; see the module.

    decoded  True multiplies decoded values in float32, for Triton's interpreter
    """
    expand = torch.float32 if decoded else None
    (x, x_scale), (y, y_scale), (z, z_scale) = (block_cast(each, expand) for each in (q, k, v))
    # Tensor cores of compute capability 9.0 read E4M3 operands along the contracted axis alone.
    values = z.mT.contiguous()
    batch, heads, queries, width = q.shape
    key_heads, keys, value_width = k.shape[1], k.shape[2], v.shape[-1]
    out = torch.empty(batch, heads, queries, value_width, dtype=q.dtype, device=q.device)
    strides = None
    if mask is not None:
        wide = mask.expand(batch, heads, queries, keys)
        # Triton has no pointers to bool.
        wide = wide.view(torch.uint8) if wide.dtype == torch.bool else wide
        strides = MaskStrides(wide, *wide.stride())
    tiles = Tiles(
        rows=ROWS, block=BLOCK, width=_power(width), value_width=_power(value_width),
        largest=LARGEST, is_causal=is_causal, masked=_kind(mask),
    )  # fmt: skip
    capability = device_facts(q.device.type, q.device.index).capability
    launch(
        triton_kernel.fp8_attention, batch * heads * -(-queries // tiles.rows),
        (x.contiguous(), x_scale), (y.contiguous(), y_scale), (values, z_scale), strides, out,
        (heads, key_heads), (queries, keys), (width, value_width), scale,
        C=constants_of(CAST, capability, decoded), A=tiles, warps=WARPS, num_stages=stages(STAGES, capability),
    )  # fmt: skip
    return out


def _power(width: int) -> int:
    """Triton's ranges are powers of two, and its products have at least 32 E4M3 numbers."""
    return max(1 << (width - 1).bit_length(), 32)


# batch, heads, key heads, tokens: two blocks of keys, of which the second is ragged.
SMALL, LARGE = (1, 4, 2, 200), (2, 32, 8, 2048)
# Root mean square of all differences, and the largest one, as shares of that of y. E4M3 itself adds
# 0.056 (25 dB). A part of the keys that is left out, or a maximum that is not carried on, adds more.
NOISE, WORST = 0.014, 0.12


def _compare(
    run: Callable[..., Tensor], kind: tuple[Any, ...], device: torch.device,
    sizes: tuple[int, int, int, int] = SMALL,
) -> Iterator[OutputComparison]:  # fmt: skip
    """Compare the results for a sample, and their noise, with the definition's."""
    dtypes, width, value_width, masked, is_causal = kind
    q, k, v, mask = _sample(dtypes, width, value_width, masked, sizes)
    scale = 1 / math.sqrt(q.shape[-1])
    truth = reference(q, k, v, mask, is_causal, scale).double()
    moved = (None if each is None else each.to(device) for each in (q, k, v, mask))
    found = run(*moved, is_causal, scale)
    size = truth.square().mean().sqrt()
    yield OutputComparison("y", found, truth, WORST * size)
    noise = (found.detach().cpu().double() - truth).square().mean().sqrt()
    yield OutputComparison("noise", noise / size, torch.zeros_like(size), NOISE)


def _sample(
    dtypes: tuple[torch.dtype, ...], width: int, value_width: int, masked: Masked,
    sizes: tuple[int, int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    generator = torch.Generator().manual_seed(20261128)
    batch, heads, key_heads, tokens = sizes
    shapes = (heads, width), (key_heads, width), (key_heads, value_width)
    q, k, v = (
        torch.randn(batch, count, tokens, each, generator=generator).to(dtype)
        for (count, each), dtype in zip(shapes, dtypes, strict=True)
    )
    # Scores of later keys are larger, so that the running maximum moves; some queries see nothing.
    k = k * torch.linspace(0.5, 2.0, tokens, dtype=k.dtype)[:, None]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask: Tensor | None = None
    if masked == "bool":
        mask = ((distance >= 0) & (distance < 150))[None, None].clone()
        mask[..., 3:5, :] = False
    elif masked == "added":
        mask = torch.randn(batch, 1, tokens, tokens, generator=generator)
    return q, k, v, mask


# dtype, width, value width, mask, is_causal
_KINDS: list[tuple[torch.dtype, int, int, Masked, bool]] = [
    (torch.bfloat16, 64, 64, "", True),
    (torch.float16, 128, 128, "bool", False),
    (torch.float32, 80, 40, "added", False),
    (torch.bfloat16, 192, 128, "", False),
]
_EXAMPLES = [
    AttentionSpec(Device("cpu"), (dtype,) * 3, width, value_width, masked, is_causal)
    for dtype, width, value_width, masked, is_causal in _KINDS
]
CHECK: KernelCheck[AttentionSpec] = KernelCheck(
    lambda spec: (spec.dtypes, spec.width, spec.value_width, spec.masked, spec.is_causal),
    _compare,
    lambda: _EXAMPLES,
    large=partial(_compare, sizes=LARGE),
)
KERNELS: Registry[AttentionSpec] = Registry("attention")
KERNELS.register(Kernel("triton", refuse, run_triton, check=lambda: CHECK))
KERNELS.register(Kernel("reference", lambda spec: None, reference, by_torch=True))
