"""Detect errors that mean that another rank is gone.

torch raises dist.DistError for some failures. Others, such as broken gloo connections, are plain
RuntimeErrors that only their message identifies.
"""

from __future__ import annotations

import re

import torch.distributed as dist

# Messages of gloo and the store for a peer that is gone.
BROKEN = re.compile(r"gloo|[Cc]onnection (closed|reset|refused)|[Tt]imed out|Broken pipe")


def is_lost(error: Exception) -> bool:
    """Return True if a collective failed because another rank died or hangs."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None
    )
