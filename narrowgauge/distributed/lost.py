"""Whether an error means that another rank is gone: torch has a class for some of them, and words alone for the others."""

from __future__ import annotations

import re

import torch.distributed as dist

BROKEN = re.compile(r"gloo|[Cc]onnection (closed|reset|refused)|[Tt]imed out|Broken pipe")


def is_lost(error: Exception) -> bool:
    """Whether a collective broke, because another rank is gone or hangs."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None
    )
