"""Tensors as safetensors files: which types they hold, and what a tensor must be like to stand in one.

A checkpoint keeps its tensors in shards of at most SHARD_BYTES (a larger tensor is a shard of its own): what is held twice while
one is written or read.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHARD_BYTES = 2**29
# What safetensors 0.8 both writes and reads. It writes float8_e8m0fnu too, but fails to read it back.
DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool}
    | {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8}
)


def own(tensor: Tensor, taken: set[int]) -> Tensor:
    """Dense, on the CPU, and alone in a storage, which joins `taken`: safetensors refuses tensors that share one."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    place = dense.untyped_storage()
    is_alone = place.nbytes() == dense.numel() * dense.element_size() and place.data_ptr() not in taken
    alone = dense if is_alone else dense.clone()
    taken.add(alone.untyped_storage().data_ptr())
    return alone
