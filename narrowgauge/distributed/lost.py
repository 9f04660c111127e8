"""Detect errors that mean that another rank is gone.

torch raises dist.DistError for some failures. Others, such as broken gloo connections, are plain
RuntimeErrors that only their message identifies.
"""

from __future__ import annotations

import re

import torch.distributed as dist

# Messages of gloo's TCP transport (pair.cc, unbound_buffer.cc) and of the store for a peer that is
# gone. Paths of gloo's sources do not count: they begin errors of mismatched sizes too.
BROKEN = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Socket (unexpectedly )?closed|Pair is not connected|[Tt]imed out"
    r"|(Connect|Read|Write) timeout|Read error|writev|Broken pipe|connectFullMesh failed"
)


def is_lost(error: Exception) -> bool:
    """Return True if a collective failed because another rank died or hangs."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None
    )
