"""Rows of a matrix in pieces, for definitions in plain torch on a GPU.

What a definition makes on its way (float32 copies, ratios, noise in int64) is as large as what it works on, several times over; a layer
of a narrow model whose hidden width is large would need more for that moment than bfloat16 for its whole step. In pieces of
PIECE float32 numbers it needs 16 MiB for each of them, and a launch is little beside reading that. Only work on rows apart is cut so,
which has the same bits; a CPU, which has caches to care for and memory enough, and compiled code, which fuses, take the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.addresses import PIECE, is_compiling, type_of


def cuts(x: Tensor, rows_together: int = 1) -> list[slice]:
    """Slices of x's rows, each of about PIECE numbers and, but for the last, of a multiple of `rows_together`; one where x stays whole."""
    rows, columns = x.shape
    if is_compiling() or type_of(x.device) != "cuda" or x.numel() <= PIECE:
        return [slice(0, rows)]
    size = max(PIECE // columns // rows_together, 1) * rows_together
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def by_rows(work: Callable[[Tensor], Tensor], x: Tensor, rows_together: int = 1) -> Tensor:
    """work(x), whose first axis is x's or a share of it, made piece by piece."""
    slices = cuts(x, rows_together)
    return work(x) if len(slices) == 1 else torch.cat([work(x[each]) for each in slices])
