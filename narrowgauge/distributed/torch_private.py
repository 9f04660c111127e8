"""The class that gradient messages take from a private module of torch, with the release that it was checked on.

ReduceScatter   torch 2.13: base class of what `FSDPModule.set_custom_reduce_scatter`, which is public, takes; it has no public address
"""

from __future__ import annotations

from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

__all__ = ["ReduceScatter"]
