"""The C++ kernel of the CPU (ops/cpp/attention.cpp) with the signatures of the definition."""

from __future__ import annotations

from ctypes import POINTER, Array, byref, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import in_memory
from narrowgauge.ops.cpp import Library

if TYPE_CHECKING:
    from narrowgauge.ops.dropout import Dropout

BLOCK = 64  # of queries and of keys, as in attention_tiles.h
_P, _L, _I, _F, _SHAPE = c_void_p, c_int64, c_int32, c_float, POINTER(c_int64)
_OPERANDS = (_SHAPE, _P, _P, _P, _P, _P, *(c_uint32,) * 3, _F, _F)
LIBRARY = Library(
    ("attention.cpp", "attention_tiles.h", "attention_mask.h", "attention_forward.h", "attention_backward.h"),
    "the kernel of attention in 16 bits",
    {
        "attention_supported": (_P,),
        "attention_mask": (_P, _I, _SHAPE, _P, _P),
        "attention_forward": (*_OPERANDS, _P, _P),
        "attention_backward": (*_OPERANDS, *(_P,) * 8),
        "attention_add_heads": (_SHAPE, _P, _I, _F, _P),
        "attention_exp2": (_P, _P),
    },
    instead="leave it out: torch's own kernel runs",
)  # fmt: skip


def has_instructions() -> bool:
    """Return True if this processor has AVX512-BF16, as the library finds, or torch before it is built."""
    if LIBRARY.is_unbuilt:
        return torch.cpu._is_avx512_bf16_supported()
    return _library_finds_instructions()


@cache
def _library_finds_instructions() -> bool:
    found = c_int32()
    # Not by `LIBRARY.call`, which calls nothing in a dry run: the result is kept.
    LIBRARY.loaded.narrowgauge_attention_supported(0, 1, byref(found))
    return bool(found.value)


class MaskTiles(NamedTuple):
    """A mask as the kernel reads it (attention_mask.h).

    kind     0: none, 1: bits, 2: numbers that are added
    tiles    [batch, heads, query blocks, key blocks, 64] int64, or [..., 64, 64] float32
    states   [batch, heads, query blocks, key blocks] uint8: nothing, everything, or some of it is
             attended to
    strides  of batch, head and query block in tiles, 0 where the mask is broadcast
    """

    kind: int
    tiles: Tensor | None
    states: Tensor | None
    strides: tuple[int, int, int]


NO_MASK = MaskTiles(0, None, None, (0, 0, 0))
_KINDS = {torch.bool: 0, torch.bfloat16: 1, torch.float32: 2}


def mask_tiles(mask: Tensor | None) -> MaskTiles:
    """Order a mask [batch or 1, heads or 1, queries, keys] by tiles.

    One pass over the mask. An axis that is broadcast in memory (stride 0) is read once: a mask of
    padded keys takes next to nothing.
    """
    if mask is None:
        return NO_MASK
    mask = mask.detach()
    mask = mask if mask.dtype in _KINDS else mask.float()
    for axis in (0, 1):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    batch, heads, queries, keys = mask.shape
    read = min(queries, BLOCK) if mask.stride(2) == 0 else queries
    blocks = (-(-read // BLOCK), -(-keys // BLOCK))
    states = torch.empty(batch, heads, *blocks, dtype=torch.uint8, device="cpu")
    is_bool = mask.dtype == torch.bool
    inner, dtype = ((BLOCK,), torch.int64) if is_bool else ((BLOCK, BLOCK), torch.float32)
    tiles = torch.empty(*states.shape, *inner, dtype=dtype, device="cpu")
    shape = _numbers(heads, read, keys, *mask.stride())
    rows = batch * heads * blocks[0]
    LIBRARY.call(
        "attention_mask", rows, rows * BLOCK * keys, mask, _KINDS[mask.dtype], shape, tiles, states
    )
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(states.shape[:2], states.stride()[:2], strict=True)
    )
    of_block = 0 if blocks[0] == 1 else blocks[1]
    return MaskTiles(1 if is_bool else 2, tiles, states, (strides[0], strides[1], of_block))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskTiles, is_causal: bool, scale: float,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = map(_readable, (q, k, v))
    batch, heads, queries, _ = q.shape
    y = _like_tokens(batch, heads, queries, v.shape[-1])
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device="cpu")
    shape = _shape(q, k, v, mask, is_causal, y)
    rows = batch * heads * -(-queries // BLOCK)
    LIBRARY.call(
        "attention_forward", rows, _work(q, k, v), shape, q, k, v, mask.tiles, mask.states,
        *_noise(dropout), scale, y, lse,
    )  # fmt: skip
    return y, lse


def backward(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: MaskTiles, y: Tensor, lse: Tensor,
    is_causal: bool, scale: float, dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_y, q, k, v, y = map(_readable, (grad_y.to(q.dtype), q, k, v, y))
    batch, heads, queries, width = q.shape
    key_heads, keys, value_width = k.shape[1], k.shape[2], v.shape[-1]
    grad_q = _like_tokens(batch, heads, queries, width)
    grad_k = _like_tokens(batch, key_heads, keys, width)
    grad_v = _like_tokens(batch, key_heads, keys, value_width)
    sums: list[Tensor | None] = [None, None]
    if is_shared := heads > key_heads:
        sums = [
            torch.empty(batch, heads, keys, each, dtype=torch.float32, device="cpu")
            for each in (width, value_width)
        ]
    shape = _shape(q, k, v, mask, is_causal, y, grad_y, grad_q, grad_k, grad_v)
    LIBRARY.call(
        "attention_backward", batch * heads, _work(q, k, v), shape, q, k, v, mask.tiles, mask.states,
        *_noise(dropout), scale, y, lse, grad_y, grad_q, grad_k, grad_v, *sums,
    )  # fmt: skip
    if is_shared:
        rows = batch * key_heads * keys
        for is_value, (out, each, factor) in enumerate(
            ((grad_k, sums[0], scale), (grad_v, sums[1], dropout.scale if dropout else 1.0))
        ):
            assert each is not None
            LIBRARY.call(
                "attention_add_heads", rows, each.numel(), shape, each, is_value, factor, out
            )
    return grad_q, grad_k, grad_v


def exp2(x: Tensor) -> Tensor:
    """2 ** x of float32 x [16 n], as the kernel computes it; for tests."""
    y = torch.empty_like(x)
    LIBRARY.call("attention_exp2", x.numel() // 16, x.numel(), x, y)
    return y


def _readable(x: Tensor) -> Tensor:
    """The tensor with its last axis contiguous; other strides may be any."""
    x = in_memory(x.detach())
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _like_tokens(batch: int, heads: int, tokens: int, width: int) -> Tensor:
    """Memory [batch, tokens, heads, width], as [batch, heads, tokens, width]."""
    size = batch, tokens, heads, width
    return torch.empty(size, dtype=torch.bfloat16, device="cpu").transpose(1, 2)


def _noise(dropout: Dropout | None) -> tuple[int, int, int, float]:
    """The struct Dropout of attention_forward.h."""
    return (0, 0, 0, 1.0) if dropout is None else (*dropout.words, dropout.threshold, dropout.scale)


def _work(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Elements of a cast that take as long: a thread is worth its start from some 40 us on."""
    return q.numel() * k.shape[2] // 64 + v.numel()


def _shape(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskTiles, is_causal: bool, y: Tensor, *grads: Tensor
) -> Array[c_int64]:
    """The struct Shape of attention_forward.h."""
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    strides = [stride for each in (q, k, v, y, *grads) for stride in each.stride()[:3]]
    strides += [0] * (24 - len(strides))
    return _numbers(*sizes, is_causal, mask.kind, *mask.strides, *strides)


def _numbers(*values: int) -> Array[c_int64]:
    return (c_int64 * len(values))(*values)
